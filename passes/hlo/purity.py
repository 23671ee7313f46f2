"""Which instructions may run twice.

The default is no. Yes only for opcodes on the list, custom calls without side effects that do not call back
into the host, and calls of computations made of nothing else; never what a user asked to keep
(`passes.saved`). Writing in place is evaluated by the lift.
"""

from __future__ import annotations

from passes.hlo.graph import Computation, Instruction, Module
from passes.hlo.inplace import _ELEMENTWISE
from passes.saved import SAVED

_PURE = _ELEMENTWISE | frozenset(
    {
        "parameter", "tuple", "get-tuple-element", "bitcast", "reshape", "transpose", "broadcast", "iota",
        "pad", "slice", "concatenate", "reverse", "dynamic-slice", "dynamic-update-slice", "gather",
        "scatter", "reduce", "reduce-window", "select-and-scatter", "map", "sort", "topk", "dot",
        "scaled-dot", "ragged-dot", "convolution", "cholesky", "triangular-solve", "fft",
        "rng-bit-generator", "batch-norm-inference", "batch-norm-training", "batch-norm-grad", "partition-id",
        "replica-id", "optimization-barrier", "opt-barrier", "get-dimension-size",
    }
)  # fmt: skip
_CALLERS = frozenset({"fusion", "call", "while", "conditional"})
_HOST = (
    "callback", "infeed", "outfeed", "send", "recv", "MoveToHost", "MoveToDevice",
    "annotate_device_placement",
)  # fmt: skip


class Purity:
    """Answers whether an instruction is pure; memoized by computation."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[int, bool] = {}

    def instruction(self, instruction: Instruction) -> bool:
        """True if a second run with the same operands gives the same and does nothing else."""
        if any(shape.memory_space != 0 for _, shape in instruction.shape.leaves()):
            return False
        if SAVED in instruction.proto.metadata.op_name and instruction.opcode != "parameter":
            return False
        if instruction.opcode == "custom-call":
            return self._custom_call(instruction)
        if instruction.opcode in _CALLERS:
            return all(self._computation(self._module.computations[c]) for c in instruction.called)
        return instruction.opcode in _PURE

    def _custom_call(self, instruction: Instruction) -> bool:
        proto = instruction.proto
        if proto.custom_call_has_side_effect or proto.output_operand_aliasing:
            return False
        return not any(word in proto.custom_call_target for word in _HOST)

    def _computation(self, computation: Computation) -> bool:
        known = self._known.get(computation.id)
        if known is None:
            known = all(self.instruction(i) for i in computation.by_id.values())
            self._known[computation.id] = known
        return known
