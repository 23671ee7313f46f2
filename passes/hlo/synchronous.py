"""Collectives that XLA:GPU makes synchronous again after its callback: those that nothing runs beside.

XLA's own pass (public source, `convert_async_collectives_to_sync.cc`) goes through the schedule: a collective
whose end comes before any kernel has run since its start becomes one instruction, and the two tables of
pointers that the start had are gone.
"""

from __future__ import annotations

from passes.hlo.graph import Computation, Instruction, Module

_COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
     "ragged-all-to-all", "reduce-scatter"}
)  # fmt: skip
# What XLA takes for nothing between a start and its end.
_NOTHING = frozenset({"bitcast", "constant", "get-tuple-element", "parameter"})


def started_in_vain(module: Module) -> frozenset[tuple[int, int]]:
    """The starts of collectives that XLA makes synchronous, by computation and instruction."""
    return frozenset(
        (c.id, i) for c in module.computations.values() if not c.fused for i in _in_vain(module, c)
    )


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
    called = (module.computations[c] for c in instruction.called)
    return any(c.by_id[c.root].opcode in _COLLECTIVES for c in called)
