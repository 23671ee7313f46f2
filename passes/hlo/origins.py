"""Which instruction a value is about, where the one that holds it says nothing.

What a loop stacks, slice by slice, lies in one storage for the whole loop: it is about the operation whose
results are stacked, and that is found behind the update of the slice. What a loop carries is about the loop.
"""

from __future__ import annotations

from passes.hlo.assign import Assigner
from passes.hlo.dataflow import Index
from passes.hlo.graph import Computation, Instruction

_UPDATE = "dynamic-update-slice"
# They hand on what is in their first operand, in another form.
_FORMS = frozenset({"bitcast", "reshape", "copy", "convert", "transpose", "broadcast"})
_CARRIED = frozenset({"parameter", "while", "copy", "fusion", _UPDATE})
_MOST_STEPS = 64


class Origins:
    """For every value of a module the instruction that it is about."""

    def __init__(self, assigner: Assigner) -> None:
        self.flow = assigner.flow
        self.module = assigner.module
        self.fusions = {
            i.called[0]: (c, i)
            for c in self.module.computations.values()
            for i in c.by_id.values()
            if i.opcode == "fusion" and i.called
        }
        self.stacked: dict[int, Instruction | None] = {}

    def of(self, v: int) -> Instruction:
        """The instruction that a value is about: mostly the one that defines it."""
        home = self.flow.values[v].home
        made = self.flow.instruction(home)
        group = self.flow.class_of[v]
        if made.opcode in _CARRIED and len(self.flow.classes[group]) > 1:
            if group not in self.stacked:
                self.stacked[group] = self._stacked(group)
            origin = self.stacked[group]
            if origin is not None:
                return origin
        if made.proto.metadata.op_name or home.computation not in self.flow.callers:
            return made
        computation, caller = self.flow.callers[home.computation]
        return self.module.computations[computation].by_id[caller]

    def _stacked(self, group: int) -> Instruction | None:
        """What is written into a storage slice by slice; None if nothing is."""
        for v in self.flow.classes[group]:
            home = self.flow.values[v].home
            computation = self.module.computations[home.computation]
            written = self._update(computation, computation.by_id[home.instruction], home.index)
            if written is not None:
                where, update = written
                return self._behind(where, where.by_id[update.operands[1]])
        return None

    def _update(
        self, computation: Computation, made: Instruction, index: Index
    ) -> tuple[Computation, Instruction] | None:
        """The update of a slice that `made` is, or that a fusion holds at its result."""
        if made.opcode == "fusion":
            computation = self.module.computations[made.called[0]]
            made = computation.result(index)
            while made.opcode in _FORMS and made.operands:
                made = computation.by_id[made.operands[0]]
        return (computation, made) if made.opcode == _UPDATE else None

    def _behind(self, computation: Computation, at: Instruction) -> Instruction | None:
        """The operation that made `at`, seen through other forms of it and out of fusions."""
        for _ in range(_MOST_STEPS):
            if (at.opcode in _FORMS and at.operands) or (at.opcode == "get-tuple-element" and at.operands):
                at = computation.by_id[at.operands[0]]
            elif at.opcode == "parameter" and computation.id in self.fusions:
                number = at.number
                computation, caller = self.fusions[computation.id]
                at = computation.by_id[caller.operands[number]]
            elif at.opcode == "parameter" and computation.id in self.flow.callers:
                outer, caller_id = self.flow.callers[computation.id]
                caller = self.module.computations[outer].by_id[caller_id]
                if caller.opcode != "async-start":
                    return None
                number, computation = at.number, self.module.computations[outer]
                at = computation.by_id[caller.operands[number]]
            else:
                return at if at.proto.metadata.op_name else None
        return None
