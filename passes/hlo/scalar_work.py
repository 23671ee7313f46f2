"""Work of HLO instructions that runs one element at a time, see `passes.scalar_work`."""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from passes.cost import DeviceModel, scalar_work_ns
from passes.hlo.graph import Computation, Instruction, Module, Shape
from passes.scalar_work import (
    NO_WORK,
    OF_COMPLEX_EXPONENTIAL,
    Work,
    of_convolution,
    of_functions,
    of_largest,
    of_looped_convolution,
    of_matrices,
    of_reduction,
    of_sort,
    of_transform,
    of_windows,
    total,
)

TRANSCENDENTAL = frozenset(
    {"acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "cosine", "cosh", "erf", "exponential",
     "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "sine", "sinh", "tan", "tanh"}
)  # fmt: skip
"""Opcodes of elementwise functions that take many instructions."""

_FLOATS, _COMPLEX = frozenset({10, 11, 12, 16}), frozenset({15, 18})  # XLA's PrimitiveType numbers
_CONVOLVED = frozenset({10, 11})  # by a library
_LAPACK = {
    "syevd": "eigh", "heevd": "eigh", "gesdd": "svd", "gesvd": "svd", "geev": "eig", "geqrf": "qr",
    "orgqr": "qr", "ungqr": "qr", "getrf": "lu", "potrf": "cholesky", "trsm": "solve",
}  # fmt: skip

# A module is looked at several times; what is fused stays as it is.
_FUSED_WORK: WeakKeyDictionary[Computation, Work] = WeakKeyDictionary()


def scalar_ns(
    module: Module, computation: Computation, instruction: Instruction, device: DeviceModel
) -> float:
    """Estimated time of what a kernel leaves to loops over single elements."""
    return scalar_work_ns(device, _work(module, computation, instruction)) if device.scalar_ns else 0.0


def _work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    if instruction.opcode != "fusion":
        return _own_work(module, computation, instruction)
    fused = module.computations[instruction.called[0]]
    if fused not in _FUSED_WORK:
        _FUSED_WORK[fused] = total(_work(module, fused, i) for i in fused.by_id.values())
    return _FUSED_WORK[fused]


def _own_work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Of an instruction that is no fusion."""
    operands = [computation.by_id[o].shape for o in instruction.operands]
    match instruction.opcode:
        case "convolution":
            return _of_convolution(instruction, *operands[:2])
        case "custom-call":
            return _of_call(instruction, operands)
        case "fft":
            real = instruction.proto.fft_type > 1  # RFFT, IRFFT
            elements = max(operands[0].count, instruction.shape.count)
            return of_transform(elements, prod(instruction.proto.fft_length), of_reals=real)
        case "reduce-window":
            return _of_windows(module, instruction)
        case "reduce":
            return of_reduction(operands[0].count, len(operands) // 2)
        case "sort":
            length = operands[0].dims[instruction.proto.dimensions[0]]
            return of_sort(operands[0].count, length, of_floats=operands[0].element in _FLOATS)
    return _of_function(instruction)


def _of_function(instruction: Instruction) -> Work:
    shape = instruction.shape
    if shape.element in _COMPLEX and instruction.opcode == "exponential":
        return of_functions(OF_COMPLEX_EXPONENTIAL, shape.count)
    return of_functions([instruction.opcode], shape.count) if shape.element in _FLOATS else NO_WORK


def _of_windows(module: Module, instruction: Instruction) -> Work:
    sizes = tuple(d.size for d in instruction.proto.window.dimensions)
    results = [leaf for _, leaf in instruction.shape.leaves() if not leaf.is_tuple]
    reducer = module.computations[instruction.called[0]].by_id.values()
    functions = sum(i.opcode in TRANSCENDENTAL for i in reducer)
    return of_windows(results[0].count, sizes, results=len(results), functions=functions)


def _of_call(instruction: Instruction, operands: list[Shape]) -> Work:
    target = instruction.proto.custom_call_target
    if target == "TopK":
        return of_largest(operands[0].count, instruction.shape.at((0,)).dims[-1])
    operation = next((name for part, name in _LAPACK.items() if part in target), None)
    if operation is None or not target.startswith("lapack_"):
        return NO_WORK
    *batch, rows, columns = operands[-1 if operation == "solve" else 0].dims
    return of_matrices(operation, rows, columns, prod(batch))


def _of_convolution(instruction: Instruction, taken: Shape, kernel: Shape) -> Work:
    proto, output = instruction.proto, instruction.shape
    numbers = proto.convolution_dimension_numbers
    window = prod(kernel.dims[d] for d in numbers.kernel_spatial_dimensions)
    if not _is_for_library(numbers, taken):
        return of_looped_convolution(
            output.count, window, kernel.dims[numbers.kernel_input_feature_dimension]
        )
    return of_convolution(
        rank=len(numbers.output_spatial_dimensions),
        positions=output.count // max(1, output.dims[numbers.output_feature_dimension]),
        window=window,
        features=taken.dims[numbers.input_feature_dimension],
        groups=max(1, proto.feature_group_count),
        dilated=any(d.base_dilation > 1 for d in proto.window.dimensions),
    )


def _is_for_library(numbers: Any, taken: Shape) -> bool:
    """True for (batch, .., features) and (.., features, results) of types that a library multiplies."""
    rank = len(taken.dims)
    arrays, kernel = [0, rank - 1, *range(1, rank - 1)], [rank - 1, rank - 2, *range(rank - 2)]
    said = (
        [numbers.input_batch_dimension, numbers.input_feature_dimension, *numbers.input_spatial_dimensions],
        [numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension,
         *numbers.kernel_spatial_dimensions],
        [numbers.output_batch_dimension, numbers.output_feature_dimension,
         *numbers.output_spatial_dimensions],
    )  # fmt: skip
    return taken.element in _CONVOLVED and rank <= 5 and said == (arrays, kernel, arrays)
