"""What equations cost: 2 matrix flops per multiply-add of dots and convolutions; what kernels of others say.

A Pallas kernel may carry its maker's estimate; if it does not, the dots of its body count, once for every
point of its grid and iteration of a loop that is known. Attention as one primitive (cuDNN) tells by shapes.
All else that XLA sees from outside is as dear as its bytes. What a collective sends is told by its shapes,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from passes.cost import ASSUMED_ITERATIONS, EXPENSIVE_FLOPS, is_unaligned
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, size_of
from passes.jaxpr.compat import JaxprEqn
from passes.jaxpr.primitives import CONTROL_FLOW, Kind, is_expensive

# Of the forward pass two products of (queries, keys, head size), of the backward pass five.
_ATTENTION = {"dot_product_attention": 2, "dot_product_attention_bwd": 5, "dot_product_attention_fp8_bwd": 5}
_BNTH = 1
# How often a collective sends its operand (negative: its result) over the slowest link of a ring.
_SENT = {
    "psum": 2, "psum_invariant": 2, "pmax": 2, "pmin": 2, "ppermute": 1, "pbroadcast": 1, "all_to_all": 1,
    "ragged_all_to_all": 1, "reduce_scatter": 1, "all_gather": -1, "all_gather_invariant": -1,
    "all_gather_reduced": -1,
}  # fmt: skip


class MatrixWork(NamedTuple):
    """Of dots and convolutions.

    Attributes:
        flops: 2 per multiply-add.
        bits: width of the operands; of the largest, if there are several.
        unaligned_flops: in products whose rows are no whole words (`passes.cost.is_unaligned`).
    """

    flops: int = 0
    bits: int = 32
    unaligned_flops: int = 0

    def times(self, iterations: int) -> MatrixWork:
        """The same so often."""
        return MatrixWork(self.flops * iterations, self.bits, self.unaligned_flops * iterations)


def matrix_work(eqns: Sequence[JaxprEqn]) -> MatrixWork:
    """What some equations multiply."""
    each = [_eqn_work(eqn) for eqn in eqns]
    largest = max(each, key=lambda work: work.flops, default=MatrixWork())
    bits = largest.bits if largest.flops else 32
    return MatrixWork(sum(w.flops for w in each), bits, sum(w.unaligned_flops for w in each))


def iterations_of(eqn: JaxprEqn) -> int:
    """How often a body of control flow runs; of a `while` that nobody counts what is assumed.

    As `passes.hlo.cost.trip_count`.
    """
    if eqn.primitive.name != "while":
        return int(eqn.params.get("length") or 1)
    condition, _ = compat.open_jaxpr(eqn.params["cond_jaxpr"])
    atoms = [v for inner in condition.eqns for v in inner.invars]
    counts = [int(v.val) for v in atoms if isinstance(v, compat.Literal) and _is_count(v)]
    reads = {*compat.variables(atoms)} & {*condition.invars}
    return counts[0] if len(counts) == 1 == len(reads) else ASSUMED_ITERATIONS


def _is_count(v: compat.Literal) -> bool:
    return array_of(v).dtype.kind in "iu" and not array_of(v).shape and int(v.val) > 0


def vector_work(eqn: JaxprEqn, kind: Kind) -> int:
    """Elementwise flops of one equation; of a kernel only what its maker says of it."""
    if kind not in (Kind.FUSIBLE, Kind.REDUCTION):
        said = eqn.params.get("cost_estimate")
        return 0 if said is None else EXPENSIVE_FLOPS * int(said.transcendentals)
    return flops_per_element(eqn) * largest_size((*compat.variables(eqn.invars), *eqn.outvars))


def largest_size(values: Sequence[compat.Var]) -> int:
    """Elements of the largest; 0 of what has none, such as a token."""
    return max(map(size_of, values), default=0)


def flops_per_element(eqn: JaxprEqn) -> int:
    """Elementwise flops for each element of one equation."""
    if eqn.primitive.name == "polynomial":
        return 2 * (len(eqn.invars) - 2)  # a variable and its coefficients, by Horner's rule
    return EXPENSIVE_FLOPS if is_expensive(eqn.primitive.name) else 1


def said_bytes(eqn: JaxprEqn) -> int | None:
    """Bytes that a kernel's maker says it moves; None if nothing is said."""
    said = eqn.params.get("cost_estimate")
    return None if said is None else int(said.bytes_accessed)


def sent_bytes(eqn: JaxprEqn) -> int:
    """Bytes that each device sends in a collective; 0 for everything else."""
    times = _SENT.get(eqn.primitive.name, 0)
    return abs(times) * sum(compat.aval_nbytes(v.aval) for v in (eqn.invars if times > 0 else eqn.outvars))


def _eqn_work(eqn: JaxprEqn) -> MatrixWork:
    name = eqn.primitive.name
    if name == "dot_general":
        lhs, rhs, out = map(array_of, (*eqn.invars, *eqn.outvars))
        (contracting, _), _ = eqn.params["dimension_numbers"]
        flops = 2 * out.size * prod(lhs.shape[d] for d in contracting)
        rows = [(a.shape[-1], 8 * a.dtype.itemsize) for a in (lhs, rhs, out) if a.shape]
        unaligned = any(is_unaligned(row, bits) for row, bits in rows)
        return MatrixWork(flops, 8 * lhs.dtype.itemsize, flops if unaligned else 0)
    if name == "conv_general_dilated":
        lhs, rhs = map(array_of, eqn.invars)
        out_features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        depth = prod(rhs.shape) // max(out_features, 1)
        return MatrixWork(2 * array_of(eqn.outvars[0]).size * depth, 8 * lhs.dtype.itemsize)
    if name == "pallas_call":
        return _pallas_work(eqn)
    if name.startswith("dot_product_attention"):
        return _attention_work(eqn)
    return _of_inner(eqn, iterations_of(eqn) if name in CONTROL_FLOW else 1)


def _of_inner(eqn: JaxprEqn, iterations: int) -> MatrixWork:
    """What is inside an equation, `iterations` times."""
    each = (matrix_work(inner.eqns) for inner in compat.inner_jaxprs(eqn))
    return max(each, default=MatrixWork()).times(iterations)


def _pallas_work(eqn: JaxprEqn) -> MatrixWork:
    points = prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    inner = _of_inner(eqn, points)
    said = eqn.params["cost_estimate"]
    return MatrixWork(inner.flops if said is None else int(said.flops), inner.bits)


def _attention_work(eqn: JaxprEqn) -> MatrixWork:
    """Products of attention: queries (B, T, N, H) or (B, N, T, H), keys the same with S for T."""
    query, key = map(array_of, eqn.invars[:2])
    if len(query.shape) != 4 or len(key.shape) != 4:
        return MatrixWork()
    n_keys = key.shape[2 if eqn.params.get("layout") == _BNTH else 1]
    name = eqn.primitive.name.removesuffix("_wrapper")
    products = _ATTENTION.get(name, _ATTENTION["dot_product_attention"])
    return MatrixWork(2 * products * query.size * n_keys, 8 * query.dtype.itemsize)
