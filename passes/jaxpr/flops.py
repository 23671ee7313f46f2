"""Matrix work of equations: 2 flops per multiply-add of dots and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from passes.jaxpr import compat


def matrix_work(eqns: Sequence[Any]) -> tuple[int, int]:
    """Matrix flops of some equations, and the operand width in bits of the largest of them."""
    total, largest, bits = 0, 0, 32
    for eqn in eqns:
        flops, width = _eqn_work(eqn)
        total += flops
        if flops > largest:
            largest, bits = flops, width
    return total, bits


def _eqn_work(eqn: Any) -> tuple[int, int]:
    name = eqn.primitive.name
    if name == "dot_general":
        lhs = eqn.invars[0].aval
        (contracting, _), _ = eqn.params["dimension_numbers"]
        depth = prod(lhs.shape[d] for d in contracting)
        return 2 * prod(eqn.outvars[0].aval.shape) * depth, 8 * lhs.dtype.itemsize
    if name == "conv_general_dilated":
        lhs, rhs = (v.aval for v in eqn.invars)
        out_features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        depth = prod(rhs.shape) // max(out_features, 1)
        return 2 * prod(eqn.outvars[0].aval.shape) * depth, 8 * lhs.dtype.itemsize
    if name in ("scan", "while", "cond"):
        work = [matrix_work(inner.eqns) for inner in compat.inner_jaxprs(eqn)]
        flops, bits = max(work, default=(0, 32))
        return flops * int(eqn.params.get("length") or 1), bits
    return 0, 32
