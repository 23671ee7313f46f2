"""Loops whose bodies read what is made before them, and may make it themselves.

    r = f(x)                             while c:
    while c:                    ->           c, x = barrier(c, x)
        c = g(c, r)                          c = g(c, f(x))

`jax.linearize` makes such programs: a solver's loop reads the residuals of all layers in each of its
iterations, and they are alive through all of them. What is made in the body is gone between its uses there,
and the body is planned as any other (`passes.jaxpr.bodies`). The price is a run of `f` in every iteration. A
barrier with what the loop carries keeps XLA from taking `f` out of the body again.

A loop is a cut problem as an iteration of a pair of scans is one (`passes.jaxpr.scans.cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax.numpy as jnp

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import LOOPS
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import bodies_of, body_consts, carried_inputs, leading_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A `while` or `scan` that is in no pair.

    Attributes:
        place: its place among the program's equations.
        eqn: the loop.
        made: what its body reads whole and nothing else reads, from what is alive through the loop anyway:
            an open jaxpr.
        tie: place of the carried value, among the body's inputs, that what is made in the body waits for.
    """

    place: int
    eqn: JaxprEqn
    made: Jaxpr
    tie: int


def find_loops(jaxpr: Jaxpr, elsewhere: Collection[int]) -> list[Loop]:
    """The loops of an open jaxpr, calls inlined, that read what equations before them make for them alone.

    Args:
        elsewhere: places that are left as they are.
    """
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in compat.variables(eqn.invars)}
    last.update(dict.fromkeys(compat.variables(jaxpr.outvars), len(jaxpr.eqns)))
    loops = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in elsewhere or eqn.primitive.name not in LOOPS:
            continue
        first, end = body_consts(eqn)
        others = {*compat.variables((*eqn.invars[:first], *eqn.invars[end:]))}

        def maker(v: Var, i: int = i, others: set[Var] = others) -> int | None:
            return None if last[v] > i or v in others else producer.get(v)

        read = dict.fromkeys(compat.variables(eqn.invars[first:end]))
        demanded = [v for v in read if maker(v) is not None]
        tie = _tie(eqn) if demanded else None
        if tie is not None:
            loops.append(Loop(place=i, eqn=eqn, made=_made(jaxpr, demanded, maker), tie=tie))
    return loops


def _made(jaxpr: Jaxpr, demanded: list[Var], maker: Callable[[Var], int | None]) -> Jaxpr:
    """The equations that lead to `demanded` from what is there."""
    eqns = [jaxpr.eqns[i] for i in leading_to(demanded, jaxpr.eqns, maker)]
    own = {v for eqn in eqns for v in eqn.outvars}
    invars = dict.fromkeys(v for eqn in eqns for v in compat.variables(eqn.invars) if v not in own)
    return compat.rebuild(jaxpr, eqns=eqns, outvars=demanded, invars=list(invars), constvars=[])


def _tie(eqn: JaxprEqn) -> int | None:
    """The smallest carried value that the body reads and that is no integer, by which XLA may count
    iterations; None if there is none."""
    (body,) = bodies_of(eqn)
    if has_effect(eqn) or any(compat.is_ref(v.aval) for v in eqn.invars):
        return None
    inner, _ = compat.open_jaxpr(body)
    read = {v for e in inner.eqns for v in compat.variables(e.invars)}
    carried = [
        (compat.aval_nbytes(v.aval), k)
        for k, v in enumerate(inner.invars)
        if k in carried_inputs(eqn) and v in read and jnp.issubdtype(array_of(v).dtype, jnp.inexact)
    ]
    return min(carried)[1] if carried else None
