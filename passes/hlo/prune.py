"""Drop what nothing reads, down to outputs of fusions, and operands that a fusion has twice, as XLA does.

A fusion left with one output stops being a tuple: its only get-tuple-element disappears. Fusions that name
their operands or outputs by number stay as they are: those that carry a collective on, on TPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from passes.hlo import proto
from passes.reach import reached

_OPERAND_NUMBERS = "xla.no_invariant_operands"


def drop_uncalled(module: Any, known: Mapping[int, Collection[int]]) -> None:
    """Remove computations that nothing calls, in place: those of runs and outputs that were dropped.

    Args:
        known: what computations call, for those of which that has been read.
    """

    def called(computation: Any) -> Collection[int]:
        return [i for x in computation.instructions for i in x.called_computation_ids]

    calls = {c.id: known[c.id] if c.id in known else called(c) for c in module.computations}
    needed = reached([module.entry_computation_id], calls.__getitem__)
    for n in reversed([n for n, c in enumerate(module.computations) if c.id not in needed]):
        del module.computations[n]
    sequences = module.schedule.sequences
    for n in reversed([n for n, s in enumerate(sequences) if s.key not in needed]):
        del sequences[n]


def can_merge_operands(instruction: Any) -> bool:
    """True for the fusions that are XLA's own, all of whose operands may be numbered anew."""
    return _is_own(instruction) and not _has_numbered_operands(instruction)


def _is_own(instruction: Any) -> bool:
    """True for the fusions that are XLA's own, whose outputs may be numbered anew."""
    is_custom = instruction.fusion_kind == "kCustom" or bool(instruction.output_operand_aliasing)
    return instruction.opcode == "fusion" and not is_custom


def merge_operands(fusion: Any, fused: Any) -> None:
    """Let a fusion that reads one value as several operands read it as one, in place."""
    first: dict[int, int] = {}
    numbers = [first.setdefault(operand, n) for n, operand in enumerate(fusion.operand_ids)]
    if len(first) == len(numbers):
        return
    parameters = {i.parameter_number: i.id for i in fused.instructions if i.opcode == "parameter"}
    read = {parameters[n]: parameters[same] for n, same in enumerate(numbers)}
    for instruction in fused.instructions:
        instruction.operand_ids[:] = [read.get(o, o) for o in instruction.operand_ids]
    fused.root_id = read.get(fused.root_id, fused.root_id)
    _drop_parameters(fusion, fused)


def prune(module: Any, scope: int, once: Collection[int]) -> set[int]:
    """Remove from a computation what nothing reads, in place: runs, views, outputs of XLA's own fusions.

    Readers come later in the message than what they read, so that one way back through it is enough: a fusion
    that loses an output may lose operands, and what made these may then be read by nothing.

    Args:
        scope: the computation's id.
        once: ids of instructions that stay, read or not; so do the parameters and the root.

    Returns:
        The ids of fusions' computations that something was removed from.
    """
    entry = next(c for c in module.computations if c.id == scope)
    users: dict[int, dict[int, Any]] = {i.id: {} for i in entry.instructions}
    for instruction in entry.instructions:
        for operand in instruction.operand_ids:
            users[operand][instruction.id] = instruction
    computations = {c.id: c for c in module.computations}
    stays = {entry.root_id, *once, *(i.id for i in entry.instructions if i.opcode == "parameter")}
    replaced: dict[int, int] = {}
    pruned: set[int] = set()
    for instruction in reversed(entry.instructions):
        operands = set(instruction.operand_ids)
        if instruction.id not in stays and not users[instruction.id]:
            replaced[instruction.id] = instruction.id
        elif _is_own(instruction):
            if instruction.id != entry.root_id and _prune(
                instruction, list(users[instruction.id].values()), computations, replaced
            ):
                pruned.update(instruction.called_computation_ids)
            operands -= set(instruction.operand_ids)
        else:
            continue
        for operand in operands:
            del users[operand][instruction.id]
    if replaced:
        rewire(module, entry, replaced)
    return pruned


def _prune(fusion: Any, users: list[Any], computations: dict[int, Any], replaced: dict[int, int]) -> bool:
    """Remove the outputs of a fusion that have no users; True if there are any."""
    parts = len(fusion.shape.tuple_shapes)
    if not parts or any(u.opcode != "get-tuple-element" for u in users):
        return False
    used = sorted({u.tuple_index for u in users})
    if not used or len(used) == parts:
        return False
    fused = computations[fusion.called_computation_ids[0]]
    roots = next(i for i in fused.instructions if i.id == fused.root_id)
    if roots.opcode != "tuple":
        return False
    keep = [roots.operand_ids[n] for n in used]
    shapes = [proto.copy(fusion.shape.tuple_shapes[n]) for n in used]
    if len(used) == 1:
        fused.root_id = keep[0]
        fusion.shape.CopyFrom(shapes[0])
        replaced.update({u.id: fusion.id for u in users})
    else:
        roots.operand_ids[:] = keep
        for shape in (fusion.shape, roots.shape):
            proto.put(shape.tuple_shapes, shapes)
        for user in users:
            user.tuple_index = used.index(user.tuple_index)
    fused.program_shape.result.CopyFrom(fusion.shape)
    _sweep(fused)
    if not _has_numbered_operands(fusion):
        _drop_parameters(fusion, fused)
    return True


def _has_numbered_operands(fusion: Any) -> bool:
    return any(entry.key == _OPERAND_NUMBERS for entry in fusion.frontend_attributes.map)


def _sweep(fused: Any) -> None:
    """Remove instructions of a fused computation that its root does not need; parameters stay."""
    by_id = {i.id: i for i in fused.instructions}
    needed = reached([fused.root_id], lambda i: by_id[i].operand_ids)
    kept = [i for i in fused.instructions if i.id in needed or i.opcode == "parameter"]
    for instruction in kept:
        control = instruction.control_predecessor_ids
        control[:] = [c for c in control if c in needed]
    proto.put(fused.instructions, kept)


def _drop_parameters(fusion: Any, fused: Any) -> None:
    """Remove parameters that nothing reads any more, and the fusion's operands with them."""
    read = {o for i in fused.instructions for o in i.operand_ids} | {fused.root_id}
    parameters = sorted(
        (i for i in fused.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number
    )
    keep = [n for n, i in enumerate(parameters) if i.id in read]
    if len(keep) == len(parameters):
        return
    for new, old in enumerate(keep):
        parameters[old].parameter_number = new
    kept = [i for i in fused.instructions if i.opcode != "parameter" or i.id in read]
    kept.sort(key=lambda i: i.opcode != "parameter")  # a merged one may be read earlier than it stood
    proto.put(fused.instructions, kept)
    fusion.operand_ids[:] = [fusion.operand_ids[n] for n in keep]
    shape = fused.program_shape
    shape.parameter_names[:] = [shape.parameter_names[n] for n in keep] if shape.parameter_names else []
    proto.put(shape.parameters, [shape.parameters[n] for n in keep])


def rewire(module: Any, entry: Any, replaced: Mapping[int, int]) -> None:
    """Take out what is dead or replaced; users of removed views of a fusion read the fusion itself."""
    kept = [i for i in entry.instructions if i.id not in replaced]
    for instruction in kept:
        control = instruction.control_predecessor_ids
        control[:] = [c for c in control if c not in replaced]
        instruction.operand_ids[:] = [replaced.get(o, o) for o in instruction.operand_ids]
    proto.put(entry.instructions, kept)
    entry.root_id = replaced.get(entry.root_id, entry.root_id)
    for sequence in module.schedule.sequences:
        if sequence.key == entry.id:
            sequence.value.instruction_ids[:] = [
                i for i in sequence.value.instruction_ids if i not in replaced
            ]
