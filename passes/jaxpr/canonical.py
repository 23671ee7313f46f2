"""Products and convolutions in the form in which XLA:CPU computes them, with the copies that this takes.

    bqhd,bkhd->bhqk     reads q as (b, h, q, d) and k as (b, h, d, k): two copies in other orders
    NCHW                is computed as NHWC, with a kernel in HWIO, and copied back
    groups of a batch   with a feature each are computed for all features; a mask leaves each its own
    bfloat16, float16   are multiplied in float32 where the library does not take them: operands are converted
    float8_*            are multiplied in float32, or for a result of bfloat16 as that

Written down they can be planned: kept, or made again before each reader. Source: `DotDecomposer`,
`TransposeFolding`, `ConvCanonicalization` and `ConvolutionGroupConverter` of openxla/xla.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from passes.cost import DeviceModel, scalar_work_ns
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name, is_bitcast
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import matrix_work
from passes.jaxpr.inline import traced_for
from passes.jaxpr.rewrite import convert_eqn, reshape_eqn, with_operands_in
from passes.jaxpr.scalar_work import has_library, library_convolution, library_numbers, looped_convolution
from passes.jaxpr.simplify import says_types

_HALVES = frozenset({"bfloat16", "float16"})
# As what products of float8 are computed, if that is their result's type.
_WIDER = _HALVES | {"float32", "float64"}


def with_canonical_products(jaxpr: Jaxpr, device: DeviceModel | None = None) -> Jaxpr:
    """An open jaxpr with its products and convolutions in that form.

    Args:
        device: in a body of control flow (`in_body`) XLA leaves a convolution in the form that it comes in,
            and computes it by its own loops where that is no library's: it gets the form that costs less.

    Returns:
        The same object if they are in it.
    """
    reads = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
    body_of = device if device is not None and device.in_body else None
    writer = _Writer(Counter(compat.variables(reads)), body_of)
    for eqn in jaxpr.eqns:
        writer.write(eqn)
    eqns = [inner for eqn in writer.eqns for inner in _as_multiplied(eqn)]
    if eqns == jaxpr.eqns:
        return jaxpr
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns))


class _Writer:
    """The equations written so far."""

    def __init__(self, n_reads: Mapping[Var, int], body_of: DeviceModel | None) -> None:
        self.eqns: list[JaxprEqn] = []
        self._body_of = body_of
        self._n_reads = n_reads
        # What a transposed variable was before, and the place of the equation that multiplies two matrices.
        self._transposed: dict[Var, tuple[Var, Sequence[int]]] = {}
        self._products: dict[Var, int] = {}

    def write(self, eqn: JaxprEqn) -> None:
        """Write an equation, and what its form takes."""
        name, operands = eqn.primitive.name, compat.variables(eqn.invars)
        if name == "transpose" and operands:
            (v,), (result,) = operands, eqn.outvars
            if v in self._products and self._n_reads[v] == 1:
                self._swap(self._products.pop(v), result)
                return
            self._transposed[result] = v, eqn.params["permutation"]
        if name == "dot_general" and len(operands) == 2 and _is_product(eqn):
            self._product(eqn)
        elif name == "conv_general_dilated" and len(operands) == 2:
            self._convolution(eqn)
        else:
            self.eqns.append(eqn)

    def _product(self, eqn: JaxprEqn) -> None:
        result: Var = eqn.outvars[0]
        operands, dims, sizes = zip(*(self._operand(eqn, side) for side in range(2)), strict=True)
        if operands == tuple(eqn.invars):
            self._multiply(eqn)
            return
        leading = tuple(range(len(eqn.params["dimension_numbers"][1][0])))
        shape = *operands[0].aval.shape[: len(leading)], *sizes[0], *sizes[1]
        made = result if shape == array_of(result).shape else compat.shaped_var(result, shape)
        numbers = ((dims[0],), (dims[1],)), (leading, leading)
        self._multiply(_changed(eqn, operands, made, dimension_numbers=numbers))
        if made is not result:
            self._reshape(made, array_of(result).shape, eqn, result)

    def _operand(self, eqn: JaxprEqn, side: int) -> tuple[Var, int, tuple[int, ...]]:
        """An operand of a product as (batch, rows, summed) or (batch, summed, columns), the last two in any
        order where nothing has to be joined; its summed dimension, and how many rows or columns it has."""
        (all_summed, all_batch) = eqn.params["dimension_numbers"]
        v, batch = compat.variables(eqn.invars)[side], all_batch[side]
        summed = [pair[side] for pair in sorted(zip(*all_summed, strict=True))]
        shape = array_of(v).shape
        free = [d for d in range(len(shape)) if d not in batch and d not in summed]
        if len(free) <= 1 == len(summed) and all(d == k for k, d in enumerate(batch)):
            source, permutation = self._transposed.get(v, (v, range(len(shape))))
            is_before = all(permutation[d] == d for d in batch)
            v, dim = (source, permutation[summed[0]]) if is_before else (v, summed[0])
            return v, dim, tuple(shape[d] for d in free)
        order = (*batch, *summed, *free) if side else (*batch, *free, *summed)
        columns = (prod(shape[d] for d in free),) if free else ()
        depth = (prod(shape[d] for d in summed),)
        moved = self._transpose(v, order, eqn)
        sizes = *(shape[d] for d in batch), *((*depth, *columns) if side else (*columns, *depth))
        return self._reshape(moved, sizes, eqn), len(batch) + (0 if side else len(columns)), columns

    def _multiply(self, eqn: JaxprEqn) -> None:
        if len(array_of(eqn.outvars[0]).shape) == 2 and not eqn.params["dimension_numbers"][1][0]:
            self._products[eqn.outvars[0]] = len(self.eqns)
        self.eqns.append(eqn)

    def _swap(self, k: int, result: Var) -> None:
        """Two matrices' product, transposed, is that of the second and the first."""
        eqn = self.eqns[k]
        (summed, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
        self.eqns[k] = _changed(
            eqn, eqn.invars[::-1], result,
            dimension_numbers=(summed[::-1], batch),
            precision=precision[::-1] if isinstance(precision, tuple) else precision,
        )  # fmt: skip

    def _convolution(self, eqn: JaxprEqn) -> None:
        """Of operands (batch, .., features) and (.., features, results)."""
        lhs, rhs = compat.variables(eqn.invars)
        rank, old = len(array_of(lhs).shape), eqn.params["dimension_numbers"]
        if 1 != eqn.params["batch_group_count"] == array_of(eqn.outvars[0]).shape[old.out_spec[1]]:
            for inner in _without_groups(eqn):
                self.write(inner)
            return
        library = library_numbers(rank)
        is_library, new = old == library, library
        if self._is_cheaper_in_loops(eqn):
            new = library._replace(rhs_spec=(rank - 2, rank - 1, *range(rank - 2))) if is_library else old
        if not has_library(eqn) or old == new:
            self.eqns.append(eqn)
            return
        operands = [
            self._transpose(lhs, _order(old.lhs_spec, new.lhs_spec), eqn),
            self._transpose(rhs, _order(old.rhs_spec, new.rhs_spec), eqn),
        ]
        result: Var = eqn.outvars[0]
        sizes = [array_of(result).shape[d] for d in _order(old.out_spec, new.out_spec)]
        made = result if old.out_spec == new.out_spec else compat.shaped_var(result, sizes)
        self.eqns.append(_changed(eqn, operands, made, dimension_numbers=new))
        if made is not result:
            self._transpose(made, _order(new.out_spec, old.out_spec), eqn, result)

    def _is_cheaper_in_loops(self, eqn: JaxprEqn) -> bool:
        """True in a body where few features are multiplied with few: a depthwise convolution takes a library
        3 to 59 times as long."""
        if self._body_of is None:
            return False
        ways = library_convolution(eqn), looped_convolution(eqn)
        library_ns, looped_ns = (scalar_work_ns(self._body_of, work) for work in ways)
        flops, bits, _ = matrix_work([eqn])
        return looped_ns < library_ns + 1e9 * flops / self._body_of.matrix_flops(bits)

    def _transpose(
        self, v: Var, permutation: Sequence[int], like: JaxprEqn, result: Var | None = None
    ) -> Var:
        shape = array_of(v).shape
        sizes = [shape[d] for d in permutation]
        if is_bitcast(shape, permutation):
            return self._reshape(v, sizes, like, result)
        made = result or compat.shaped_var(v, sizes)
        self.eqns.append(compat.unary_eqn(lax.transpose_p, v, made, like, permutation=tuple(permutation)))
        return made

    def _reshape(self, v: Var, sizes: Sequence[int], like: JaxprEqn, result: Var | None = None) -> Var:
        if result is None and tuple(sizes) == array_of(v).shape:
            return v
        made = result or compat.shaped_var(v, sizes)
        self.eqns.append(reshape_eqn(v, made, like))
        return made


def _changed(eqn: JaxprEqn, operands: Sequence[Atom], result: Var, **params: object) -> JaxprEqn:
    changed: JaxprEqn = eqn.replace(invars=list(operands), outvars=[result], params={**eqn.params, **params})
    return changed


def _is_product(eqn: JaxprEqn) -> bool:
    """True for a product that is one: XLA multiplies elements, and adds them, where nothing is summed, or
    all that is not the batch."""
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    ranks = [len(array_of(v).shape) for v in eqn.invars]
    return 0 < len(summed) < max(ranks) - len(batch) and eqn.params["out_sharding"] is None


def _as_multiplied(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation, or a product in the type in which XLA:CPU computes it, its operands and its result
    converted."""
    if eqn.primitive.name != "dot_general" or (dtype := _multiplied_in(eqn)) is None:
        return [eqn]
    result = eqn.outvars[0]
    conversions, product = with_operands_in(eqn, dtype)
    made = result if array_of(result).dtype == dtype else compat.fresh_var(result, dtype=dtype)
    after = [] if made is result else [convert_eqn(made, result, eqn)]
    return [*conversions, _changed(product, product.invars, made, preferred_element_type=dtype), *after]


def _multiplied_in(product: JaxprEqn) -> np.dtype | None:
    """The type to which XLA:CPU converts operands of few bits; None for a product that it leaves as it is.

    Halves are multiplied in float32, but for matrices of bfloat16, the first with what is summed last, which
    its library takes; float8 as its result is.
    """
    if len(compat.variables(product.invars)) < 2 or says_types(product) or not _is_product(product):
        return None
    given = {dtype_name(v) for v in product.invars}
    if all(name.startswith("float8") for name in given):
        named, known = dtype_name(product.outvars[0]), _WIDER
    else:
        named, known = given.pop() if len(given) == 1 else "", _HALVES
    if named not in known:
        return None
    lhs, rhs = map(array_of, product.invars)
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    are_matrices = len(batch) + len(summed) < min(len(lhs.shape), len(rhs.shape))
    is_taken = named == "bfloat16" and are_matrices and len(lhs.shape) - 1 in summed
    dtype = jnp.dtype(named if is_taken or named not in _HALVES else "float32")
    return None if all(array_of(v).dtype == dtype for v in product.invars) else dtype


def _order(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Which dimension of an array by its old places comes at each of its new ones."""
    at = dict(zip(new, old, strict=True))
    return [at[d] for d in range(len(new))]


def _without_groups(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A convolution of groups of a batch, one for each feature, as one of all of it, a mask and a sum."""
    n_groups, spec = eqn.params["batch_group_count"], eqn.params["dimension_numbers"].out_spec
    sizes = array_of(eqn.outvars[0]).shape

    def dense(lhs: Array, rhs: Array) -> Array:
        whole = lax.conv_general_dilated_p.bind(lhs, rhs, **{**eqn.params, "batch_group_count": 1})
        batch, feature = spec[0], spec[1] + (spec[1] > spec[0])
        split = *sizes[:batch], n_groups, *sizes[batch:]
        group = lax.broadcasted_iota(jnp.int32, split, batch)
        own = group == lax.broadcasted_iota(jnp.int32, split, feature)
        return jnp.sum(jnp.where(own, lax.reshape(whole, split), 0), batch, dtype=whole.dtype)

    return traced_for(eqn, dense)
