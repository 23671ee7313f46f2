"""XLA's own estimate of a TPU program's time: the cycles that its compiler wrote beside each kernel.

A judge of plans that is not ours. It is in the module that a program runs, not in the one that XLA calls
back with. The body of a loop is written once and counts as often as the loop iterates. Not counted: copies to
and from the memory on the chip, which run beside kernels, collectives, and scalars.
"""

from __future__ import annotations

import re
from typing import Any

from passes.hlo import graph
from passes.hlo.cost import trip_count
from passes.hlo.graph import Computation, Instruction, Module

_CYCLES = re.compile(rb'"estimated_cycles":"?(\d+)')
# Where the compiler does not know it writes numbers near 2^63.
_MOST = 1 << 60


def kernel_cycles(instruction: Instruction) -> int | None:
    """What XLA wrote beside one kernel; None where it wrote nothing that means anything."""
    written = _CYCLES.search(instruction.proto.backend_config)
    cycles = None if written is None else int(written[1])
    return None if cycles is None or cycles > _MOST else cycles


def program_cycles(module: Any) -> int:
    """The cycles of all kernels of a program.

    Args:
        module: the parsed HloModuleProto that a program compiled for a TPU runs.
    """
    view = graph.read(module)
    return _computation(view, view.entry)


def _computation(module: Module, computation: Computation) -> int:
    return sum(_instruction(module, computation.by_id[i]) for i in computation.order)


def _instruction(module: Module, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in ("while", "call", "async-start", "conditional"):
        inner = [_computation(module, module.computations[c]) for c in instruction.called]
        if opcode == "conditional":
            return max(inner)
        return sum(inner) * (trip_count(module, instruction) if opcode == "while" else 1)
    return kernel_cycles(instruction) or 0
