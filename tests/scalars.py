"""Numbers that a scheduled module computes on the way: counters of loops, and where slices begin.

Integers and truth values of a few operations; everything else is unknown, which is None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from passes.hlo.dataflow import Index
from passes.hlo.graph import Computation, Instruction, Module, Shape

_SAME = frozenset({"bitcast", "reshape", "copy", "convert", "broadcast"})
_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max, "minimum": min,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq,
    "NE": operator.ne,
}  # fmt: skip
_VIEWS = frozenset({"bitcast", "reshape"})


def literal(proto: Any) -> int | None:
    """The number of a constant scalar."""
    given = proto.literal
    for values in (given.s32s, given.s64s, given.u32s, given.u64s, given.preds):
        if len(values) == 1:
            return int(values[0])
    return None


def slice_of(shape: Shape, starts: Sequence[int], elements: int) -> tuple[int, int]:
    """A slice by its first element in memory and its number of elements."""
    stride, first = 1, 0
    for dim in shape.layout:
        first += starts[dim] * stride
        stride *= shape.dims[dim]
    return first, elements


class Scalars:
    """The scalars of one run of an instruction, within what it calls, too.

    Args:
        module, computation: where the instruction is.
        operands: the number of each operand, where known.
    """

    def __init__(self, module: Module, computation: Computation, operands: list[int | None]) -> None:
        self.module = module
        self.computation = computation
        self.operands = operands

    def result(self, instruction: Instruction, index: Index) -> int | None:
        """The number of a scalar part of the result."""
        shape = instruction.shape.at(index)
        if shape.count != 1:
            return None
        fused = self._fused(instruction)
        if fused is not None:
            return self._number(fused, self._root(fused, index), self.operands)
        return _computed(instruction, self.operands)

    def slice_written(self, instruction: Instruction, index: Index) -> tuple[int, tuple[int, int]] | None:
        """Which operand a part of the result is an update of, and the slice; None if it is none."""
        fused = self._fused(instruction)
        if fused is None:
            return self._written(instruction)
        at = self._root(fused, index)
        while at.opcode in _VIEWS:
            at = fused.by_id[at.operands[0]]
        return self._written(at, fused)

    def slices_read(self, instruction: Instruction, operand: int) -> list[tuple[int, int]]:
        """Slices that an instruction takes of one of its operands."""
        fused = self._fused(instruction)
        inside = fused or self.computation
        among = [instruction] if fused is None else list(fused.by_id.values())
        slices = []
        for at in among:
            if at.opcode == "dynamic-slice" and self._source(at, fused) == operand:
                starts = self._starts(at, 1, fused)
                if starts is not None:
                    slices.append(slice_of(inside.by_id[at.operands[0]].shape, starts, at.shape.count))
        return slices

    def _fused(self, instruction: Instruction) -> Computation | None:
        return self.module.computations[instruction.called[0]] if instruction.opcode == "fusion" else None

    def _root(self, fused: Computation, index: Index) -> Instruction:
        root = fused.by_id[fused.root]
        return fused.by_id[root.operands[index[0]]] if index and root.opcode == "tuple" else root

    def _written(
        self, at: Instruction, fused: Computation | None = None
    ) -> tuple[int, tuple[int, int]] | None:
        if at.opcode != "dynamic-update-slice":
            return None
        number, starts = self._source(at, fused), self._starts(at, 2, fused)
        if number is None or starts is None:
            return None
        update = (fused or self.computation).by_id[at.operands[1]].shape
        return number, slice_of(at.shape, starts, update.count)

    def _source(self, at: Instruction, fused: Computation | None) -> int | None:
        """Which operand an instruction's first operand is, or is a view of in a fusion."""
        if fused is None:
            return 0
        source = fused.by_id[at.operands[0]]
        while source.opcode in _VIEWS:
            source = fused.by_id[source.operands[0]]
        return source.number if source.opcode == "parameter" else None

    def _starts(self, at: Instruction, first: int, fused: Computation | None) -> list[int] | None:
        if fused is None:
            numbers = self.operands[first:]
        else:
            numbers = [self._number(fused, fused.by_id[o], self.operands) for o in at.operands[first:]]
        known = [n for n in numbers if n is not None]
        return known if len(known) == len(numbers) else None

    def _number(self, inside: Computation, at: Instruction, operands: list[int | None]) -> int | None:
        if at.opcode == "parameter":
            return operands[at.number]
        if at.opcode == "fusion":
            given = [self._number(inside, inside.by_id[o], operands) for o in at.operands]
            inner = self.module.computations[at.called[0]]
            return self._number(inner, inner.by_id[inner.root], given)
        if at.opcode not in _KNOWN:
            return None
        return _computed(at, [self._number(inside, inside.by_id[o], operands) for o in at.operands])


_KNOWN = frozenset({*_SAME, *_TWO, "constant", "compare", "select", "negate", "clamp"})


def _computed(instruction: Instruction, operands: list[int | None]) -> int | None:
    """The number that an instruction makes of numbers."""
    opcode = instruction.opcode
    if opcode == "constant":
        return literal(instruction.proto)
    if opcode not in _KNOWN:
        return None
    if opcode == "select" and operands[0] is not None:
        return operands[1] if operands[0] else operands[2]
    known = [n for n in operands if n is not None]
    if len(known) != len(operands) or not known:
        return None
    if opcode in _TWO:
        return _TWO[opcode](known[0], known[1])
    if opcode == "compare":
        return int(_COMPARE[instruction.proto.comparison_direction](known[0], known[1]))
    if opcode == "negate":
        return -known[0]
    if opcode == "clamp":
        return min(max(known[0], known[1]), known[2])
    return known[0] if opcode in _SAME else None
