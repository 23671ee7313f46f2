"""Products that XLA:GPU splits along their depth, where too few tiles of the result would fill the device.

A result of few elements and a long sum becomes `parts` products, each over a part of the sum, stored in the
precision of their sums, and a reduction of those. What is stored is then several times the result, and where
the reduction is fused into the one kernel that reads the result, the parts are all that is stored.

XLA chooses the number of parts by a cost with fitted weights (openxla/xla, 2026,
`xla/backends/gpu/transforms/splitk_rewriter.cc`); tests/test_jaxpr_lift.py compares with what it compiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod

from passes.cost import DeviceModel, SplitWeights, kernel_ns
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import JaxprEqn

_TILE = 128
_PARTS = tuple(2**n for n in range(12))
_FLOPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of matrices, as XLA looks at it: (batch, rows, depth) times (batch, depth, columns).

    Attributes:
        operand_bytes: of both operands.
        element_bytes, sum_bytes: of an element of the result, and of what it is summed up in.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    operand_bytes: int
    element_bytes: int
    sum_bytes: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Product:
        """The product that a `dot_general` equation stands for; several summed dimensions are one to XLA."""
        lhs, rhs = map(array_of, eqn.invars)
        out = array_of(eqn.outvars[0])
        (lhs_summed, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
        batch = prod(lhs.shape[d] for d in lhs_batch)
        depth = prod(lhs.shape[d] for d in lhs_summed)
        each = max(1, batch * depth)
        return cls(
            batch=batch,
            rows=lhs.size // each,
            columns=rhs.size // each,
            depth=depth,
            operand_bytes=lhs.size * lhs.dtype.itemsize + rhs.size * rhs.dtype.itemsize,
            element_bytes=out.dtype.itemsize,
            sum_bytes=max(4, out.dtype.itemsize),
        )

    def parts_bytes(self, parts: int) -> int:
        """Bytes of the partial results; of the result where there is one part."""
        each = self.sum_bytes if parts > 1 else self.element_bytes
        return parts * self.batch * self.rows * self.columns * each


def split_bytes(eqn: JaxprEqn, device: DeviceModel) -> int:
    """Bytes of the parts of a `dot_general`; 0 where XLA does not split it."""
    if device.split is None or eqn.primitive.name != "dot_general":
        return 0
    product = Product.of(eqn)
    if not product.parts_bytes(1) or array_of(eqn.invars[0]).dtype.kind in "iub":
        return 0
    parts = _cheapest_parts(product, device.split, device.cores)
    return product.parts_bytes(parts) if parts > 1 else 0


@functools.lru_cache(maxsize=1024)  # layers of a network repeat their products
def _cheapest_parts(product: Product, weights: SplitWeights, cores: int) -> int:
    """The number of parts that XLA takes."""
    return int(min(_PARTS, key=lambda n: _cost(product, n, weights, cores)))


def sum_ns(eqn: JaxprEqn, device: DeviceModel, n_readers: int = 0) -> int:
    """Estimated time to sum the parts of a `dot_general`; 0 where XLA does not split it.

    Args:
        n_readers: how many kernels read the parts and sum them as they do; 0 where one does that alone.
    """
    parts_bytes = split_bytes(eqn, device)
    if not parts_bytes:
        return 0
    result_bytes = Product.of(eqn).parts_bytes(1)
    if not n_readers:
        return kernel_ns(device, nbytes=parts_bytes + result_bytes)
    return round(1e9 * n_readers * (parts_bytes - result_bytes) / device.bytes_per_second)


def _cost(product: Product, parts: int, weights: SplitWeights, cores: int) -> float:
    """XLA's cost of a product in parts, of no unit."""
    rows, columns = min(product.rows, _TILE), min(product.columns, _TILE)
    tiles = parts * product.batch * -(-product.rows // _TILE) * -(-product.columns // _TILE)
    waves = max(1.0, tiles * rows * columns / (cores * _TILE * _TILE))
    computed = weights.flop * _FLOPS * rows * columns * -(-product.depth // parts) * waves
    moved = weights.byte * (product.operand_bytes + product.parts_bytes(parts))
    if parts == 1:
        return max(computed, moved)
    summed = product.parts_bytes(parts) + product.parts_bytes(1)
    return max(computed, moved) + weights.sum_launch + weights.sum_byte * summed
