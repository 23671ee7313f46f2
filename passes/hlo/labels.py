"""Which arrays of a scheduled module are the values that a user forced to the host (`passes.saved`).

XLA carries the mark of a value along in the names of the instructions that make it, also into fusions. A
value that is computed inside of what reads it has no array of its own, and nothing is there to be sent.
"""

from __future__ import annotations

from passes.hlo.dataflow import Dataflow
from passes.hlo.graph import Instruction
from passes.hlo.pages import pageable_values
from passes.saved import OFFLOADED

_THROUGH = frozenset({"bitcast", "reshape", "copy", "transpose", "convert"})


def forced_values(flow: Dataflow) -> frozenset[int]:
    """Values of the entry that bear the mark."""
    forced = set()
    for v in sorted(pageable_values(flow)):
        home = flow.values[v].home
        if home.computation == flow.module.entry.id and _is_marked(flow, flow.instruction(home), home.index):
            forced.add(v)
    return frozenset(forced)


def _is_marked(flow: Dataflow, instruction: Instruction, index: tuple[int, ...]) -> bool:
    """True if what makes an array, the root of a fusion for one, is marked."""
    if instruction.opcode != "fusion":
        return OFFLOADED in instruction.proto.metadata.op_name
    fused = flow.module.computations[instruction.called[0]]
    root = fused.result(index)
    while OFFLOADED not in root.proto.metadata.op_name and root.opcode in _THROUGH and root.operands:
        root = fused.by_id[root.operands[0]]
    return OFFLOADED in root.proto.metadata.op_name
