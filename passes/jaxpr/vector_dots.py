"""Products with vectors as XLA:GPU computes them: multiplied element by element, and summed.

    (n, k) by (k,)    a product of all elements, and a sum over k, fused with what makes and reads them
    (n, 1) by (1, m)  a product of all elements

So a layer with a single output (a value's head, a density, an energy) stores nothing for its backward pass
but what it read. Dimensions of one element count for none. Source: `DotStrengthReduction` and
`AlgebraicSimplifier` of openxla/xla.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import jax.numpy as jnp
from jax import Array, lax

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, is_placed
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn
from passes.jaxpr.inline import traced_for

_FEWEST_ELEMENTS = 10_000_000  # of both operands, from which on a library multiplies a matrix with a vector


def with_multiplied_vectors(jaxpr: Jaxpr, device: DeviceModel) -> Jaxpr:
    """An open jaxpr whose products with vectors are written as XLA computes them on a device; the same object
    if it has none, or if XLA has yet to partition it."""
    if device.partitioned or not BACKENDS[device.platform].multiplies_vectors:
        return jaxpr
    eqns = [made for eqn in jaxpr.eqns for made in (_multiplied(eqn) if _is_with_vector(eqn) else [eqn])]
    return jaxpr if eqns == jaxpr.eqns else compat.rebuild(jaxpr, eqns=eqns)


def _is_with_vector(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general" or len(compat.variables(eqn.invars)) < 2:
        return False
    if is_placed(eqn) or any(compat.varies_over_mesh(v.aval) for v in eqn.invars):
        return False
    if isinstance(eqn.params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return False
    if not all(jnp.issubdtype(array_of(v).dtype, jnp.floating) for v in (*eqn.invars, *eqn.outvars)):
        return False
    summed, lhs, rhs = _sizes(eqn)
    if summed == 1 or lhs == rhs == 1:
        return True
    return 1 in (lhs, rhs) and summed * (lhs + rhs) < _FEWEST_ELEMENTS


def _sizes(eqn: JaxprEqn) -> tuple[int, int, int]:
    """How many elements are summed, and are left of each operand, for one of the batch."""
    contracting, batch = eqn.params["dimension_numbers"]
    shapes = [array_of(v).shape for v in eqn.invars]
    left, right = (
        prod(shape[d] for d in _free(v, taken, same))
        for v, shape, taken, same in zip(eqn.invars, shapes, contracting, batch, strict=True)
    )
    return prod(shapes[0][d] for d in contracting[0]), left, right


def _multiplied(eqn: JaxprEqn) -> list[JaxprEqn]:
    contracting, batch = eqn.params["dimension_numbers"]
    result = array_of(eqn.outvars[0])
    free = [_free(v, taken, same) for v, taken, same in zip(eqn.invars, contracting, batch, strict=True)]
    # Both have the dimensions of the batch, those left of lhs and of rhs, and those that are summed.
    gaps = (0, len(free[1])), (len(free[0]), 0)
    rank = len(batch[0]) + len(free[0]) + len(free[1])

    def multiply(lhs: Array, rhs: Array) -> Array:
        spread = [
            _spread(operand, (same, [None] * before, left, [None] * after, taken))
            for operand, taken, same, left, (before, after) in zip(
                (lhs, rhs), contracting, batch, free, gaps, strict=True
            )
        ]
        one, other = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in spread)
        return jnp.sum(one * other, tuple(range(rank, one.ndim))).astype(result.dtype)

    return traced_for(eqn, multiply)


def _free(v: Atom, taken: Sequence[int], same: Sequence[int]) -> list[int]:
    """The dimensions that are neither summed nor of the batch."""
    return [d for d in range(len(array_of(v).shape)) if d not in (*taken, *same)]


def _spread(operand: Array, parts: Iterable[Sequence[int | None]]) -> Array:
    """An operand with its dimensions in another order, and with new ones of one element for None."""
    order = [d for part in parts for d in part]
    kept = [d for d in order if d is not None]
    moved = operand if kept == sorted(kept) else lax.transpose(operand, kept)
    return lax.reshape(moved, [1 if d is None else operand.shape[d] for d in order])
