"""Write a plan into a scheduled module: clones of what is recomputed, and the plan's schedule.

The plan is of one computation, the entry or a loop's body.

A use reads the latest earlier run of what it needs. Views (get-tuple-element, bitcast, tuple) have no run of
their own: they are re-made before their first use for every version of their operands. What came back from
the host is a version like any other (`passes.hlo.pages`). A clone brings clones of all computations it
calls. Runs that nobody reads and outputs of fusions that nobody reads are dropped: XLA would do that after
us, and the prediction must describe what XLA allocates.

The arithmetic of every kernel is unchanged. What can still differ by a rounding on CPU: LLVM may contract a
multiply and an add differently when a kernel's buffers no longer overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.hlo import graph, proto
from passes.hlo.afterwards import as_xla_leaves_it
from passes.hlo.graph import VIEWS, Computation, Module
from passes.hlo.lift import LiftedModule
from passes.hlo.pages import CopyStyle, Moments, copy_done, copy_plain, copy_start, holders
from passes.hlo.prune import drop_uncalled, prune
from passes.ir import OpId, Page

_ID_BITS = 32


class Cloner:
    """Hands out ids and names that the module does not have, and clones computations."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.computations: list[Any] = []
        self._by_id = {c.id: c for c in module.computations}
        self._names: set[str] = set()
        self._schedules = {s.key: s.value for s in module.schedule.sequences}
        self._next_computation = max(self._by_id) + 1
        self._next_local: dict[int, int] = {}

    def name(self, old: str, mark: str = "remat") -> str:
        """A new name like `old`, with a mark that says what it is for."""
        if not self._names:
            self._names.update(c.name for c in self.module.computations)
            self._names.update(i.name for c in self.module.computations for i in c.instructions)
        stem = old.split(".remat")[0]
        n = 1
        while f"{stem}.{mark}{n}" in self._names:
            n += 1
        self._names.add(f"{stem}.{mark}{n}")
        return f"{stem}.{mark}{n}"

    def instruction_id(self, computation: Any) -> int:
        """A new instruction id of a computation."""
        if computation.id not in self._next_local:
            mask = (1 << _ID_BITS) - 1
            self._next_local[computation.id] = max(i.id & mask for i in computation.instructions) + 1
        local = self._next_local[computation.id]
        self._next_local[computation.id] = local + 1
        return int(computation.id) << _ID_BITS | local

    def callees(self, instruction: Any) -> None:
        """Give a cloned instruction computations of its own."""
        called = instruction.called_computation_ids
        called[:] = [self.computation(c) for c in called]

    def computation(self, old_id: int) -> int:
        """Clone a computation and what it calls; returns the new id."""
        old = self._by_id[old_id]
        new = proto.copy(old)
        new.id = self._next_computation
        self._next_computation += 1
        new.name = self.name(old.name)
        # XLA orders a computation by id: a clone in another order could be compiled to other roundings.
        ids = {i: new.id << _ID_BITS | n for n, i in enumerate(sorted(i.id for i in new.instructions), 1)}
        for instruction in new.instructions:
            instruction.id = ids[instruction.id]
            instruction.name = self.name(instruction.name)
            for field in (instruction.operand_ids, instruction.control_predecessor_ids):
                field[:] = [ids[i] for i in field]
            self.callees(instruction)
        new.root_id = ids[old.root_id]
        self._copy_schedule(old_id, new.id, ids)
        self._by_id[new.id] = new
        self.computations.append(new)
        return int(new.id)

    def _copy_schedule(self, old_id: int, new_id: int, ids: dict[int, int]) -> None:
        old = self._schedules.get(old_id)
        if old is not None:
            made = self.module.schedule.sequences.add(key=new_id)
            made.value.instruction_ids.extend(ids[i] for i in old.instruction_ids)


class _Writer:
    """Emits the instructions of the lifted computation in plan order."""

    def __init__(self, lifted: LiftedModule) -> None:
        self.lifted = lifted
        self.old: Computation = lifted.scope
        self.module = proto.copy(lifted.module.proto)
        self.scope = next(c for c in self.module.computations if c.id == self.old.id)
        self.cloner = Cloner(self.module)
        self.protos = {i.id: i for i in self.scope.instructions}
        self.latest: dict[int, int] = {}
        self.views: dict[tuple[int, tuple[int, ...]], int] = {}
        # Value -> the instruction that brought it back, until its op is recomputed; who holds paged values.
        self.returned: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.written: dict[int, Any] = {}
        self.order: list[int] = []
        self.once = [
            i for op, i in zip(lifted.program.ops, lifted.instructions, strict=True) if not op.recomputable
        ]

    def leaf(self, i: int) -> None:
        """A parameter or a constant: as it is."""
        self.latest[i] = i
        self._put(self.protos[i])

    def run(self, i: int) -> None:
        """Run an op (again)."""
        operands = [self.resolve(o) for o in self.old.by_id[i].operands]
        new = self._instance(i, is_recompute=i in self.latest)
        new.operand_ids[:] = operands
        self.latest[i] = new.id
        if self.returned:
            for v in self.lifted.assigner.flow.trees[self.old.id, i].values():
                self.returned.pop(v, None)
        self._put(new)

    def added(self, instruction: Any, like: int, mark: str) -> Any:
        """Put an instruction that the original does not have, named and placed in the source like another."""
        old = self.protos[like]
        instruction.id = self.cloner.instruction_id(self.scope)
        instruction.name = self.cloner.name(old.name, mark)
        instruction.metadata.CopyFrom(old.metadata)
        self._put(instruction)
        return instruction

    def _instance(self, i: int, is_recompute: bool) -> Any:
        if not is_recompute:
            return self.protos[i]
        new = proto.copy(self.protos[i])
        new.id = self.cloner.instruction_id(self.scope)
        new.name = self.cloner.name(new.name)
        del new.control_predecessor_ids[:]
        self.cloner.callees(new)
        return new

    def _put(self, instruction: Any) -> None:
        control = [c for c in instruction.control_predecessor_ids if c in self.written]
        instruction.control_predecessor_ids[:] = control
        self.written[instruction.id] = instruction
        self.order.append(instruction.id)

    def resolve(self, i: int) -> int:
        """The instruction that now holds what instruction `i` of the original held."""
        if self.held.get(i) in self.returned:
            return self.returned[self.held[i]]
        if i in self.latest:
            return self.latest[i]
        instruction = self.old.by_id[i]
        assert instruction.opcode in VIEWS, f"{instruction.name} is read before it is run"
        key = (i, tuple(self.resolve(o) for o in instruction.operands))
        if key not in self.views:
            new = self._instance(i, is_recompute=i in self.written)
            new.operand_ids[:] = key[1]
            self.views[key] = new.id
            self._put(new)
        return self.views[key]

    def finish(self) -> Module:
        self.scope.root_id = self.resolve(self.old.root)
        proto.put(self.scope.instructions, [self.written[i] for i in self.order])
        for sequence in self.module.schedule.sequences:
            if sequence.key == self.scope.id:
                sequence.value.instruction_ids[:] = self.order
        scope = proto.copy(self.scope)
        place = next(n for n, c in enumerate(self.module.computations) if c.id == scope.id)
        after = list(map(proto.copy, self.module.computations[place + 1 :]))
        del self.module.computations[place:]
        self.module.computations.extend([*self.cloner.computations, scope, *after])
        before = self.lifted.module
        written = {scope.id, *prune(self.module, scope.id, self.once)}
        calls = {c.id: c.called for c in before.computations.values() if c.id not in written}
        drop_uncalled(self.module, calls)
        view, assigner = graph.read(self.module, before, written), self.lifted.assigner
        return as_xla_leaves_it(view, assigner.backend, old_rules=assigner.old_rules)


class _Pager:
    """Writes the copies of a plan's pages at their moments."""

    def __init__(self, writer: _Writer, pages: Sequence[Page], style: CopyStyle) -> None:
        self.writer = writer
        self.style = style
        self.values = writer.lifted.values
        self.at = holders(writer.lifted, {self.values[p.buffer] for p in pages})
        writer.held = {i: v for v, held in self.at.items() for i in held}
        self.moments = Moments.of(pages)
        # (buffer, run) -> what is on its way to the host, or there; page -> what is on its way back.
        self.host: dict[tuple[int, int | None], Any] = {}
        self.coming: dict[Page, Any] = {}

    def before(self, step: int) -> None:
        """What happens just before a step."""
        for page in self.moments.out_done.get(step, ()):
            self._arrived(page)
        for page in self.moments.in_start.get(step, ()):
            self.coming[page] = self._started(page, self.host[page.buffer, page.run].id, to_host=False)
        for page in self.moments.in_done.get(step, ()):
            done = self._finished(page, self.coming.pop(page))
            self.writer.returned[self.values[page.buffer]] = done.id

    def after(self, step: int) -> None:
        """What starts when a step has run: each copy is sent once, however often it comes back."""
        for page in self.moments.run.get(step, ()):
            if (page.buffer, page.run) not in self.host:
                source = self.writer.resolve(self._holder(page))
                self.host[page.buffer, page.run] = self._started(page, source, to_host=True)

    def _holder(self, page: Page) -> int:
        return self.at[self.values[page.buffer]][0]

    def _arrived(self, page: Page) -> None:
        key = page.buffer, page.run
        self.host[key] = self._finished(page, self.host[key])

    def _started(self, page: Page, source: int, *, to_host: bool) -> Any:
        make = copy_start if self.style == "asynchronous" else copy_plain
        shape = self.writer.protos[self._holder(page)].shape
        mark = "to_host" if to_host else "from_host"
        made = make(self.writer.written[source], shape, to_host=to_host)
        return self.writer.added(made, self._holder(page), mark)

    def _finished(self, page: Page, started: Any) -> Any:
        """The end of a copy; the same object if it has ended."""
        if started.opcode != "copy-start":
            return started
        return self.writer.added(copy_done(started), self._holder(page), "arrived")


def emit(
    lifted: LiftedModule,
    steps: Sequence[OpId],
    pages: Sequence[Page] = (),
    *,
    style: CopyStyle = "asynchronous",
) -> Module:
    """The module that runs `steps`.

    Args:
        lifted: from `passes.hlo.lift.lift`.
        steps: a plan's steps: every op of the program first in order, recomputes anywhere between.
        pages: a plan's pages; a page that brings a copy back again sends it no second time.
        style: how copies are written: as asynchronous copies between memories, or as plain copies on the
            device, which save nothing, for platforms that have no others.

    Returns:
        The view of a new message; the lifted one is unchanged.
    """
    writer = _Writer(lifted)
    for i in lifted.scope.order:
        if lifted.scope.by_id[i].opcode in ("parameter", "constant"):
            writer.leaf(i)
    pager = _Pager(writer, pages, style)
    for n, step in enumerate(steps):
        pager.before(n)
        writer.run(lifted.instructions[step])
        pager.after(n)
    return writer.finish()
