"""Work of equations that runs one element at a time, see `passes.scalar_work`."""

from __future__ import annotations

from math import prod

from jax import lax

from passes.jaxpr.avals import array_of, size_of
from passes.jaxpr.compat import JaxprEqn
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
    of_scattered_windows,
    of_sort,
    of_transform,
    of_windows,
)

# What XLA makes of each, by HLO's names.
_FUNCTIONS = {
    "acos": ("acos",), "asin": ("asin",), "atan2": ("atan2",), "cbrt": ("cbrt",), "cos": ("cosine",),
    "digamma": ("sine", "cosine"), "pow": ("power",), "rem": ("remainder",), "sin": ("sine",),
    "tan": ("tan",),
}  # fmt: skip
_FUNCTIONS_OF_COMPLEX = {"exp": OF_COMPLEX_EXPONENTIAL}
_MATRICES = {
    "cholesky": "cholesky", "eig": "eig", "eigh": "eigh", "geqrf": "qr", "householder_product": "qr",
    "lu": "lu", "qr": "qr", "svd": "svd", "triangular_solve": "solve",
}  # fmt: skip
_CALLS = {"qr": 2}  # of LAPACK: the factors, and what is made of them
_ONE_AFTER_THE_OTHER = {"cumlogsumexp": 2, "cummax": 0, "cummin": 0, "cumprod": 0, "cumsum": 0}
_CONVOLVED, _MOST_SPATIAL = frozenset({"float16", "float32"}), 3  # by a library
_BLOCK = 17  # elements that XLA reduces for each of those: windows of 16, and windows of these


def scalar_work(eqn: JaxprEqn) -> Work:
    """What an equation leaves to loops over single elements."""
    name, params = eqn.primitive.name, eqn.params
    if name in _FUNCTIONS or name in _FUNCTIONS_OF_COMPLEX:
        return _of_function(eqn)
    if name in _ONE_AFTER_THE_OTHER:
        return of_windows(size_of(eqn.outvars[0]), (_BLOCK,), functions=_ONE_AFTER_THE_OTHER[name])
    if name in _MATRICES:
        *batch, rows, columns = array_of(eqn.invars[-1 if name == "triangular_solve" else 0]).shape
        return of_matrices(_MATRICES[name], rows, columns, prod(batch) * _CALLS.get(name, 1))
    match name:
        case "conv_general_dilated":
            return _of_convolution(eqn)
        case "argmax" | "argmin":
            return of_reduction(size_of(eqn.invars[0]), 2)
        case "fft":
            elements = max(size_of(eqn.invars[0]), size_of(eqn.outvars[0]))
            return of_transform(elements, prod(params["fft_lengths"]), of_reals=int(params["fft_type"]) > 1)
        case "reduce_window" | "reduce_window_max" | "reduce_window_min" | "reduce_window_sum":
            window = tuple(params["window_dimensions"])
            return of_windows(size_of(eqn.outvars[0]), window, results=len(eqn.outvars))
        case "select_and_scatter_add":
            return of_scattered_windows(size_of(eqn.invars[0]), tuple(params["window_dimensions"]))
        case "sort":
            operand = array_of(eqn.invars[0])
            length = operand.shape[params["dimension"]]
            return of_sort(operand.size, length, of_floats=operand.dtype.kind not in "iub")
        case "top_k":
            return of_largest(size_of(eqn.invars[0]), params["k"])
    return NO_WORK


def _of_function(eqn: JaxprEqn) -> Work:
    name, result = eqn.primitive.name, array_of(eqn.outvars[0])
    known = _FUNCTIONS_OF_COMPLEX if result.dtype.kind == "c" else _FUNCTIONS
    if name not in known or result.dtype.kind in "iub":
        return NO_WORK
    return of_functions(known[name], result.size)


def library_numbers(rank: int) -> lax.ConvDimensionNumbers:
    """The form in which a library takes a convolution: (batch, .., features) with (.., features, results)."""
    arrays = 0, rank - 1, *range(1, rank - 1)
    return lax.ConvDimensionNumbers(arrays, (rank - 1, rank - 2, *range(rank - 2)), arrays)


def has_library(eqn: JaxprEqn) -> bool:
    """True for a convolution that a library of XLA:CPU takes, in the form of `library_numbers`."""
    lhs = array_of(eqn.invars[0])
    return 3 <= len(lhs.shape) <= _MOST_SPATIAL + 2 and lhs.dtype.name in _CONVOLVED


def looped_convolution(eqn: JaxprEqn) -> Work:
    """A convolution in another form, in XLA's own loops; groups of a batch are computed for all features."""
    output, kernel, numbers = (
        array_of(eqn.outvars[0]),
        array_of(eqn.invars[1]),
        eqn.params["dimension_numbers"],
    )
    _, in_feature, *spatial = numbers.rhs_spec
    outputs = output.size * eqn.params["batch_group_count"]
    window = prod(kernel.shape[d] for d in spatial)
    return of_looped_convolution(outputs, window, kernel.shape[in_feature])


def library_convolution(eqn: JaxprEqn) -> Work:
    """A convolution by a library. XLA:CPU makes one more spatial dimension of groups of the batch."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    kernel, output = array_of(eqn.invars[1]), array_of(eqn.outvars[0])
    out_feature, in_feature, *spatial = numbers.rhs_spec
    batches, groups = params["batch_group_count"], params["feature_group_count"]
    window = prod(kernel.shape[d] for d in spatial)
    if batches > 1 and batches == kernel.shape[out_feature]:
        return NO_WORK  # it multiplies all with all, and takes the diagonal
    return of_convolution(
        rank=len(spatial) + (batches > 1),
        positions=batches * output.size // max(1, output.shape[numbers.out_spec[1]]),
        window=batches * window,
        features=groups * kernel.shape[in_feature],
        groups=groups,
        dilated=batches > 1 or any(d > 1 for d in params["lhs_dilation"]),
    )


def _of_convolution(eqn: JaxprEqn) -> Work:
    rank = len(array_of(eqn.invars[0]).shape)
    is_taken = has_library(eqn) and eqn.params["dimension_numbers"] == library_numbers(rank)
    return library_convolution(eqn) if is_taken else looped_convolution(eqn)
