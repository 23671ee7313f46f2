"""Sums of products that XLA:CPU's library would take for products of many small matrices.

    sum over j of x[b, i, j, d] * y[b, j, d]

The library computes a product in the kernel of the sum that alone reads it. Where each operand has the summed
dimension and one lacks another that is kept, it calls its matrix product: here for every b and d. With d last
their elements lie far apart, which takes 16 ns an element, not .8. Twice the sum of half of the products is
the same number, and no product of two operands.

Gradients of gradients are full of such sums. The product is mostly stored, since others read it; where it is
computed again for each reader, it is not. In what is planned alone: XLA sees the sums of a user's program
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
from jax import lax

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import CONTROL_FLOW, Kind, kind_of
from passes.jaxpr.softmax import DataflowGraph

_PRODUCTS = frozenset({"mul", "div"})


@compat.cached_by_jaxpr
def without_small_matrices(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, bodies of control flow included, with such sums of halves.

    Returns:
        The same object if it has none.
    """
    graph = DataflowGraph.of(jaxpr, [kind_of(eqn.primitive.name) for eqn in jaxpr.eqns])
    results = {*compat.variables(jaxpr.outvars)}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTROL_FLOW:
            eqn = _with_bodies(eqn)
        eqns += _of_halves(eqn) if _is_taken(eqn, graph, results) else [eqn]
    return jaxpr if eqns == jaxpr.eqns else compat.rebuild(jaxpr, eqns=eqns)


def _with_bodies(eqn: JaxprEqn) -> JaxprEqn:
    if all(without_small_matrices(body) is body for body in compat.inner_jaxprs(eqn)):
        return eqn
    return compat.with_inner_jaxprs(eqn, without_small_matrices)


def _is_taken(eqn: JaxprEqn, graph: DataflowGraph, results: Set[Var]) -> bool:
    """True for a sum over one dimension that the library would take for such products."""
    if eqn.primitive.name != "reduce_sum" or len(axes := eqn.params["axes"]) != 1:
        return False
    if dtype_name(eqn.invars[0]) != "float32" or not (operands := compat.variables(eqn.invars)):
        return False
    v, shape = operands[0], array_of(eqn.invars[0]).shape
    while (name := graph.primitive(v)) in ("neg", *_PRODUCTS):
        if v in results or len(graph.readers[v]) > 1:
            return False
        product = graph.eqns[graph.producer[v]]
        if name in _PRODUCTS:
            break
        (v,) = compat.variables(product.invars)
    else:
        return False
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    if len(product.invars) < 2 or not wide:
        return False
    lacking = [_constant_along(operand, shape, graph) for operand in product.invars]
    shared = {axes[0], wide[-1]}
    return wide[-1] != axes[0] and not any(shared & each for each in lacking) and any(lacking)


def _constant_along(v: Atom, shape: tuple[int, ...], graph: DataflowGraph) -> frozenset[int]:
    """The dimensions of more than one element of a shape along which an operand of that shape, or spread to
    it, is the same."""
    own = array_of(v).shape
    if not own:
        return frozenset(d for d, n in enumerate(shape) if n > 1)
    found = {d for d, (n, mine) in enumerate(zip(shape, own, strict=True)) if n > 1 == mine}
    i = compat.of_variable(graph.producer, v)
    if i is None:
        return frozenset(found)
    eqn = graph.eqns[i]
    if eqn.primitive.name == "broadcast_in_dim":
        (source, *_), places = eqn.invars, eqn.params["broadcast_dimensions"]
        sizes: Mapping[int, int] = dict(zip(places, array_of(source).shape, strict=True))
        return frozenset(found | {d for d, n in enumerate(own) if n > 1 == sizes.get(d, 1)})
    if graph.kinds[i] is Kind.FUSIBLE and all(array_of(u).shape in ((), own) for u in eqn.invars):
        inner = [_constant_along(u, shape, graph) for u in eqn.invars]
        return frozenset(found | frozenset.intersection(*inner)) if inner else frozenset(found)
    return frozenset(found)


def _of_halves(eqn: JaxprEqn) -> list[JaxprEqn]:
    (v,), (result,) = compat.variables(eqn.invars), eqn.outvars
    half, total = compat.fresh_var(v), compat.fresh_var(result)
    return [
        _scaled(v, 0.5, half, eqn),
        compat.replaced(eqn, invars=[half], outvars=[total]),
        _scaled(total, 2.0, result, eqn),
    ]


def _scaled(v: Var, factor: float, result: Var, like: JaxprEqn) -> JaxprEqn:
    scaled = compat.unary_eqn(lax.mul_p, v, result, like)
    return compat.replaced(scaled, invars=[v, compat.literal(np.float32(factor))])
