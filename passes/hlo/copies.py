"""Take copies that nothing needs out of a scheduled module. XLA:TPU does so after its callback.

XLA makes a copy where a value is read after something else has its place: a constant with which a loop
begins, a result that two loops carry on, a donated weight beside its update. XLA:CPU does so before it knows
the order of what does not depend on each other: in a GPT that runs layers again all weights were copied. Once
a value waits on the host, or is made again, it is read from another place, and its copy is one of what
nothing overwrites. The two are merged then: the value has its one place until the copy would have been read
for the last time.

Only copies are taken out whose place is theirs alone. What a loop carries is not: XLA drops some of these
copies, too, and makes others, and each has the place that the copy would have.
"""

from __future__ import annotations

from passes.backend import Backend
from passes.hlo import graph
from passes.hlo.dataflow import analyse
from passes.hlo.graph import Computation, Instruction, Module
from passes.hlo.inplace import Sharing
from passes.hlo.liverange import Clock, live_ranges
from passes.hlo.prune import rewire


def has_copies(module: Module) -> bool:
    """True if there may be copies that nothing needs."""
    return any(_plain(c) for c in module.computations.values() if not c.fused)


def without_copies(module: Module, backend: Backend, *, old_rules: bool = False) -> Module:
    """The module without the copies that nothing needs; the same object if there are none.

    Args:
        module: a view; its message is changed.
        backend: decides what may be written over what.
        old_rules: see `passes.hlo.assign.Assigner`.
    """
    while dropped := _dropped(module, backend, old_rules):
        messages = {c.id: c for c in module.proto.computations}
        for computation, sources in dropped.items():
            rewire(module.proto, messages[computation], sources)
        module = graph.read(module.proto, module, dropped)
    return module


def _dropped(module: Module, backend: Backend, old_rules: bool) -> dict[int, dict[int, int]]:
    """Computation -> copy -> what is read instead. Of a copy of a copy only one at a time is seen."""
    candidates = {c.id: found for c in module.computations.values() if not c.fused and (found := _plain(c))}
    dropped: dict[int, dict[int, int]] = {}
    if not candidates:
        return dropped
    merger = _Merger(module, backend, old_rules)
    for c in merger.flow.reachable:
        for copy in candidates.get(c, ()):
            if copy.operands[0] not in dropped.get(c, ()) and merger.is_needless(c, copy):
                dropped.setdefault(c, {})[copy.id] = copy.operands[0]
    return dropped


def _plain(computation: Computation) -> list[Instruction]:
    """Copies with their source's layout, in the same memory."""
    copies = [i for i in computation.by_id.values() if i.opcode == "copy" and not i.shape.is_tuple]
    return [i for i in copies if computation.by_id[i.operands[0]].proto.shape == i.proto.shape]


class _Merger:
    """Says of copies whether they can have their source's place."""

    def __init__(self, module: Module, backend: Backend, old_rules: bool) -> None:
        self.flow = analyse(module)
        self.ranges = live_ranges(self.flow, Clock(self.flow), old_rules=old_rules)
        self.sharing = Sharing(module, backend)
        self.results = set(self.flow.trees[module.entry.id, module.entry.root].values())

    def is_needless(self, computation: int, copy: Instruction) -> bool:
        """True if nothing else has the copy's place, and its source's stays as it is while it is read."""
        flow, ranges = self.flow, self.ranges
        made, source = (flow.trees[computation, i][()] for i in (copy.id, copy.operands[0]))
        if made in self.results or len(flow.classes[flow.class_of[made]]) > 1:
            return False
        begin, end = ranges[source].start, ranges[made].end
        others = [w for w in flow.classes[flow.class_of[source]] if w != source]
        later = [w for w in others if begin <= ranges[w].start <= end]
        return all(ranges[w].start == end and self._may_take_over(w, made) for w in later)

    def _may_take_over(self, written: int, made: int) -> bool:
        """True if a value may be written over a copy by the instruction that reads that last."""
        flow = self.flow
        home = flow.values[written].home
        computation, instruction = flow.module.computations[home.computation], flow.instruction(home)
        reads = [u for u in flow.values[made].uses if flow.instruction(u) is instruction]
        operands = [(computation.by_id[instruction.operands[u.operand]], u.index) for u in reads]
        return bool(operands) and all(
            self.sharing.may_share(computation, operand, index, instruction, home.index)
            for operand, index in operands
        )
