"""Work that a compiler leaves to loops over single elements, with no vector instructions and no library.

XLA:CPU calls the C library's sine for one element after the other, compares values of a sort by calls, copies
the windows of a convolution in several groups one by one: 10 to 300 times what the same flops and bytes take
elsewhere. Work is counted by its kind, in units; `scalar_ns` of a `passes.cost.DeviceModel` has a time for
each. A device whose model has none does it at its peaks. Each kind was set by the row of
`benchmarks.cpu_model` that says what its unit takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2

Work = Mapping[str, float]
"""Units of each kind."""

NO_WORK: Work = {}

# As HLO calls them.
FUNCTIONS = frozenset({"acos", "asin", "atan2", "cbrt", "cosine", "power", "remainder", "sine", "tan"})
"""Elementwise functions of floats that are called for one element at a time; a unit is an element."""
OF_COMPLEX_EXPONENTIAL = ("sine", "cosine")
"""Those that the exponential of a complex number calls."""

_LARGE_SIDE = 256  # of a matrix, from which on LAPACK's time grows with the third power of it
_OUTPUTS_OF_SCATTER = 5  # that a window's place is found with: XLA reduces a window to values and places
_REDUCER_FACTOR = 30  # what a transcendental function in what reduces a window makes it dearer


def total(works: Iterable[Work]) -> Work:
    """The sum."""
    units: dict[str, float] = {}
    for work in works:
        for kind, count in work.items():
            units[kind] = units.get(kind, 0.0) + count
    return units


def of_functions(names: Iterable[str], elements: int) -> Work:
    """Of elementwise functions, by HLO's names; nothing for those that are vectorized."""
    return {name: elements for name in names if name in FUNCTIONS}


def of_sort(elements: int, length: int, *, of_floats: bool) -> Work:
    """Comparisons of a sort of rows of a length; of floats by their total order."""
    return {"comparison" if of_floats else "comparison of integers": elements * log2(max(2, length))}


def of_largest(elements: int, count: int) -> Work:
    """What is found of rows with some elements altogether, so many of each."""
    return {"largest": elements * log2(count + 1)}


def of_reduction(elements: int, operands: int) -> Work:
    """Of several operands together, as of values and their places; of one it is vectorized."""
    return {"reduction of pairs": elements} if operands > 1 else NO_WORK


def of_windows(outputs: int, window: tuple[int, ...], *, results: int = 1, functions: int = 0) -> Work:
    """What is reduced in windows.

    Args:
        outputs: elements of a result.
        window: its sizes.
        results: that are reduced together.
        functions: transcendental ones in what reduces two values.
    """
    sizes = [size for size in window if size > 1]
    elements = outputs * results * (1 + _REDUCER_FACTOR * functions)
    for size in sizes:
        elements *= size
    return {"window of a line" if len(sizes) == 1 else "window": elements}


def of_scattered_windows(sources: int, window: tuple[int, ...]) -> Work:
    """The gradient of a maximum in windows: its places are found first."""
    return of_windows(sources, window, results=_OUTPUTS_OF_SCATTER)


def of_matrices(operation: str, rows: int, columns: int, batch: int) -> Work:
    """What LAPACK makes of matrices; a unit is an element of one that is not large."""
    deeper = max(1.0, min(rows, columns) / _LARGE_SIDE)
    return {operation: batch * rows * columns * deeper}


def of_transform(elements: int, length: int, *, of_reals: bool) -> Work:
    """Of Fourier transforms of rows of a length; one from or to reals is half of it."""
    return {"butterfly": elements * log2(max(2, length)) / (2 if of_reals else 1)}


def of_looped_convolution(outputs: int, window: int, features: int) -> Work:
    """What XLA's own loops over a convolution's elements do, where no library takes it.

    Args:
        outputs: elements of the output.
        window: elements of the kernel's spatial dimensions.
        features: of the input, in one group.
    """
    return {"multiply-add": outputs * window * features}


def of_convolution(
    *, rank: int, positions: int, window: int, features: int, groups: int, dilated: bool
) -> Work:
    """What is copied of windows before a library multiplies them, where it is not made for them.

    Args:
        rank: the number of spatial dimensions.
        positions: of the output, in all of the batch.
        window: elements of the kernel's spatial dimensions.
        features: of the input, in all groups.
        dilated: whether zeros are put between elements of the input.
    """
    if rank > 2:
        if dilated:
            return {"patch of dilated volumes": positions * window * features}
        patches = positions * window
        return {
            "volume": positions * groups, "patch of volumes": patches * features,
            "row of volumes": patches * groups,
        }  # fmt: skip
    if groups == 1:
        return NO_WORK
    kind = "lines" if rank < 2 else "planes"
    return {
        f"group of {kind}": positions * groups,
        f"patch of {kind}": positions * window * features,
    }
