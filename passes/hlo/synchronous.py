"""Collectives that XLA:GPU makes synchronous again after its callback: those that nothing runs beside.

XLA's own pass (public source, `convert_async_collectives_to_sync.cc`) goes through the schedule: a collective
whose end comes before any kernel has run since its start becomes one instruction. The two tables of pointers
that the start had are gone, and what it reads dies with it.
"""

from __future__ import annotations

from typing import Any

from passes.backend import Backend
from passes.hlo import graph, proto
from passes.hlo.graph import Computation, Instruction, Module
from passes.hlo.prune import drop_uncalled

_COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
     "ragged-all-to-all", "reduce-scatter"}
)  # fmt: skip
# What XLA takes for nothing between a start and its end.
_NOTHING = frozenset({"bitcast", "constant", "get-tuple-element", "parameter"})


def with_synchronous(module: Module, backend: Backend) -> Module:
    """The module with such collectives as XLA makes them; the same object if there are none.

    Args:
        module: a view; its message is changed.
        backend: only some make collectives synchronous.
    """
    if not backend.awaits_at_once:
        return module
    callers = (c for c in module.computations.values() if not c.fused)
    found = {c.id: starts for c in callers if (starts := _in_vain(module, c))}
    if not found:
        return module
    messages = {c.id: c for c in module.proto.computations}
    sequences = {s.key: s.value for s in module.proto.schedule.sequences}
    for c, starts in found.items():
        for i in starts:
            _join(module.computations[c].by_id[i], messages[c], messages)
        order = [i for i in sequences[c].instruction_ids if i not in starts]
        sequences[c].instruction_ids[:] = order
    known = {c.id: c.called for c in module.computations.values() if c.id not in found}
    drop_uncalled(module.proto, known)
    return graph.read(module.proto, module, found)


def _join(start: Instruction, computation: Any, messages: dict[int, Any]) -> None:
    """Put the collective itself in the place of its end, and take its start out."""
    inner = messages[start.called[0]]
    root = next(i for i in inner.instructions if i.id == inner.root_id)
    numbers = {i.id: i.parameter_number for i in inner.instructions if i.opcode == "parameter"}
    end = next(i for i in computation.instructions if start.id in i.operand_ids)
    made = proto.copy(root)
    made.id, made.name = end.id, end.name
    made.operand_ids[:] = [start.operands[numbers[o]] for o in root.operand_ids]
    del made.control_predecessor_ids[:]
    end.CopyFrom(made)
    kept = [i for i in computation.instructions if i.id != start.id]
    for instruction in kept:
        control = [c for c in instruction.control_predecessor_ids if c != start.id]
        instruction.control_predecessor_ids[:] = control
    proto.put(computation.instructions, kept)


def _in_vain(module: Module, computation: Computation) -> list[int]:
    found: list[int] = []
    under_way: set[int] = set()
    for i in computation.order:
        instruction = computation.by_id[i]
        if _is_start(module, instruction):
            under_way.add(i)
        elif instruction.opcode == "async-done":
            found += under_way & set(instruction.operands)
            under_way -= set(instruction.operands)
        elif instruction.opcode not in _NOTHING:
            under_way.clear()
    return found


def _is_start(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode != "async-start":
        return False
    called = module.computations[instruction.called[0]]
    root = called.by_id[called.root]
    given = all(operand.opcode == "parameter" for operand in called.operands(root))
    return given and root.opcode in _COLLECTIVES
