"""Take barriers, and tuples that are only taken apart, out of a scheduled module, as XLA does after us.

At this stage a barrier orders nothing any more: the schedule does. It still costs memory. XLA removes it
after us, but jaxlib 0.11 leaves the tuple behind it, and a kernel that reads its operand out of a tuple does
not take that operand's place; jaxlib 0.12 looks through the tuple. The same holds for the tuple that XLA
makes for a GPU around results that need a copy, such as constants: its table of pointers takes memory in 0.11
alone. Without barriers and such tuples both versions allocate the same, and no more than either would.
"""

from __future__ import annotations

from typing import Any

from passes.hlo.graph import BARRIERS
from passes.hlo.prune import can_merge_operands, merge_operands

_VIEWS = frozenset({"get-tuple-element", "tuple", "bitcast"})
_NO_KERNELS = _VIEWS | BARRIERS


def drop_barriers(module: Any) -> bool:
    """Remove barriers of a parsed module and elements of its tuples, in place, and the views they needed.

    Returns:
        True if there were any.
    """
    schedule = {s.key: s.value for s in module.schedule.sequences}
    computations = {c.id: c for c in module.computations}
    has_any = False
    for computation in module.computations:
        known = _resolved(computation)
        through = any(source != i for i, source in known.items())
        removed = _drop(computation, computations, known) if through else set()
        sequence = schedule.get(computation.id)
        if removed and sequence is not None:
            sequence.instruction_ids[:] = [i for i in sequence.instruction_ids if i not in removed]
        has_any = has_any or bool(removed)
    return has_any


def _drop(computation: Any, computations: dict[int, Any], known: dict[int, int]) -> set[int]:
    """Let every reader read what is behind the barriers; returns the ids of what is gone."""
    computation.root_id = known[computation.root_id]
    twins = _twins(computation, known)
    removed = {i for i, source in known.items() if source != i} - twins
    kept = [i for i in computation.instructions if i.id not in removed]
    for instruction in kept:
        if instruction.id in twins and not instruction.shape.tuple_shapes:
            instruction.opcode = "bitcast"
            instruction.operand_ids[:] = [known[instruction.id]]
            instruction.ClearField("tuple_index")
        instruction.operand_ids[:] = [known[o] if o in removed else o for o in instruction.operand_ids]
        if can_merge_operands(instruction):
            merge_operands(instruction, computations[instruction.called_computation_ids[0]])
    removed |= _unread_views(kept, computation.root_id)
    for n in reversed(range(len(computation.instructions))):
        if computation.instructions[n].id in removed:
            del computation.instructions[n]
    for instruction in computation.instructions:
        control = instruction.control_predecessor_ids
        control[:] = [c for c in control if c not in removed]
    return removed


def _resolved(computation: Any) -> dict[int, int]:
    """For every instruction the one that its readers can read instead; operands come first in the message."""
    by_id = {i.id: i for i in computation.instructions}
    known: dict[int, int] = {}
    for instruction in computation.instructions:
        known[instruction.id] = instruction.id
        if instruction.opcode in BARRIERS:
            known[instruction.id] = known[instruction.operand_ids[0]]
        elif instruction.opcode == "get-tuple-element":
            source = by_id[known[instruction.operand_ids[0]]]
            if source.opcode == "tuple":
                known[instruction.id] = known[source.operand_ids[instruction.tuple_index]]
    return known


def _twins(computation: Any, known: dict[int, int]) -> set[int]:
    """Views that stay, since a kernel that reads them reads what they are views of by itself, too.

    XLA makes no kernel that has one operand twice. Where it decides whether the result may be written over
    an operand it looks at one of the two only, and what the other still has to read is lost. In a fusion of
    its own XLA makes one operand of the two, and so do we. Others become bitcasts, which no pass looks
    through.
    """
    twins: set[int] = set()
    for instruction in computation.instructions:
        if instruction.opcode in _NO_KERNELS or can_merge_operands(instruction):
            continue
        operands = dict.fromkeys(instruction.operand_ids)
        read = {o for o in operands if known[o] == o}
        for operand in operands:
            if known[operand] in read and known[operand] != operand:
                twins.add(operand)
            read.add(known[operand])
    return twins


def _unread_views(instructions: list[Any], root: int) -> set[int]:
    """Views that nothing reads, and views that only those read; readers come later in the message."""
    read: set[int] = {root}
    unread: set[int] = set()
    for instruction in reversed(instructions):
        if instruction.opcode in _VIEWS and instruction.id not in read:
            unread.add(instruction.id)
        else:
            read.update(instruction.operand_ids)
    return unread
