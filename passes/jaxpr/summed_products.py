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
from passes.jaxpr.primitives import Kind, kind_of
from passes.jaxpr.rewrite import with_changed_bodies
from passes.jaxpr.softmax import DataflowGraph

_NAMES = frozenset({"mul", "div", "neg"})


@compat.cached_by_jaxpr
def without_small_matrices(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, bodies of control flow included, with such sums of halves.

    Returns:
        The same object if it has none.
    """
    graph = DataflowGraph.of(jaxpr, [kind_of(eqn.primitive.name) for eqn in jaxpr.eqns])
    results, lacking = {*compat.variables(jaxpr.outvars)}, _lacking(graph)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        is_taken = _is_taken(eqn, graph, results, lacking)
        eqns += _of_halves(eqn) if is_taken else [with_changed_bodies(eqn, without_small_matrices)]
    return jaxpr if eqns == jaxpr.eqns else compat.rebuild(jaxpr, eqns=eqns)


def _is_taken(
    eqn: JaxprEqn, graph: DataflowGraph, results: Set[Var], lacking: Mapping[Var, frozenset[int]]
) -> bool:
    """True for a sum over one dimension that the library would take for such products."""
    if eqn.primitive.name != "reduce_sum" or len(axes := eqn.params["axes"]) != 1:
        return False
    if dtype_name(eqn.invars[0]) != "float32" or not (operands := compat.variables(eqn.invars)):
        return False
    product = _product(operands[0], graph, results)
    shape = array_of(operands[0]).shape
    wide = [d for d, n in enumerate(shape) if n > 1]
    if product is None or not wide or wide[-1] == axes[0]:
        return False
    lacked = [_lacked(operand, shape, lacking) for operand in product.invars]
    shared = {axes[0], wide[-1]}
    return any(lacked) and not any(shared & each for each in lacked)


def _product(v: Var, graph: DataflowGraph, results: Set[Var]) -> JaxprEqn | None:
    """The product that is `v`, negated or not, if only the reader of that reads it."""
    while (name := graph.primitive(v)) in _NAMES and v not in results and len(graph.readers[v]) == 1:
        eqn = graph.eqns[graph.producer[v]]
        if name != "neg":
            return eqn
        (v,) = compat.variables(eqn.invars)
    return None


def _lacking(graph: DataflowGraph) -> dict[Var, frozenset[int]]:
    """The dimensions of more than one element along which a value is known to be the same."""
    found: dict[Var, frozenset[int]] = {}
    for eqn, kind in zip(graph.eqns, graph.kinds, strict=True):
        if kind is not Kind.FUSIBLE or not eqn.invars:
            continue
        result, shape = eqn.outvars[0], array_of(eqn.outvars[0]).shape
        if eqn.primitive.name == "broadcast_in_dim":
            source = array_of(eqn.invars[0]).shape
            sizes: Mapping[int, int] = dict(zip(eqn.params["broadcast_dimensions"], source, strict=True))
            found[result] = frozenset(d for d, n in enumerate(shape) if n > 1 == sizes.get(d, 1))
        elif all(array_of(v).shape in ((), shape) for v in eqn.invars):
            found[result] = frozenset.intersection(*(_lacked(v, shape, found) for v in eqn.invars))
    return found


def _lacked(v: Atom, shape: tuple[int, ...], lacking: Mapping[Var, frozenset[int]]) -> frozenset[int]:
    """The same for an operand of a shape, or spread to it."""
    own = array_of(v).shape or (1,) * len(shape)
    spread = frozenset(d for d, (n, mine) in enumerate(zip(shape, own, strict=True)) if n > 1 == mine)
    return spread | (compat.of_variable(lacking, v) or frozenset())


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
