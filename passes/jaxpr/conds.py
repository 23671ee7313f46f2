"""Conds that are one: what one computes in its branches a later one with the same predicate alone reads.

So it is under `jax.checkpoint`, and where a pair of scans makes again what a cond made. Conds that others
read, too, are pairs: `passes.jaxpr.scans.branches`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import with_flat_bodies
from passes.jaxpr.primitives import Kind
from passes.jaxpr.purity import eqn_kind, has_effect
from passes.jaxpr.rewrite import consts_as_literals, readers_of, with_equations


@compat.cached_by_jaxpr
def join_conds(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr where a cond that computes only what a second one reads is a part of it, in bodies, too.

    The second then takes the first one's operands and runs its branch before its own. Nothing runs twice, and
    a pair of scans that the two had one half each of (`passes.jaxpr.scans.pairs`) is in one body. As it is
    where the first one's operands are more than it passes on: they would be kept until the second.

    Returns:
        The same object if there is no such pair.
    """
    readers, results = readers_of(jaxpr.eqns), {*compat.variables(jaxpr.outvars)}

    def serves_only(first: JaxprEqn, second: JaxprEqn) -> bool:
        passed = [v for v in first.outvars if v in readers]
        others = any(jaxpr.eqns[i] is not second for v in passed for i in readers[v])
        passed_bytes = sum(compat.aval_nbytes(v.aval) for v in passed)
        operand_bytes = sum(compat.aval_nbytes(v.aval) for v in compat.variables(first.invars[1:]))
        return not others and results.isdisjoint(first.outvars) and operand_bytes <= passed_bytes

    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    elsewhere = _read_elsewhere(jaxpr)
    eqns = list(jaxpr.eqns)
    for j, second in enumerate(jaxpr.eqns):
        if second.primitive.name != "cond" or has_effect(second):
            continue
        sources = {producer[v] for v in second.invars if compat.is_variable(v) and v in producer}
        for i in sorted(sources):
            first = jaxpr.eqns[i]
            is_pair = first.primitive.name == "cond" and runs_same_branch(first, second)
            if is_pair and serves_only(first, second):
                eqns[j] = _joined(first, eqns[j], elsewhere)
    new = with_equations(jaxpr, eqns)
    joined = jaxpr if new is jaxpr else compat.without_dead_code(new)
    return with_equations(joined, [with_flat_bodies(eqn, join_conds) for eqn in joined.eqns])


def runs_same_branch(first: JaxprEqn, second: JaxprEqn) -> bool:
    """True if both always run branches of the same number."""
    same_index = compat.is_variable(first.invars[0]) and first.invars[0] is second.invars[0]
    return same_index and len(first.params["branches"]) == len(second.params["branches"])


def _read_elsewhere(jaxpr: Jaxpr) -> set[Var]:
    """Results of the program, and what something else than a single equation reads."""
    readers = Counter(v for eqn in jaxpr.eqns for v in {*compat.variables(eqn.invars)})
    return {v for v, n in readers.items() if n > 1} | {*compat.variables(jaxpr.outvars)}


def _joined(first: JaxprEqn, second: JaxprEqn, elsewhere: set[Var]) -> JaxprEqn:
    """`second` with the branches of `first` before its own; the same object if nothing is won."""
    made: dict[Atom, int] = {v: k for k, v in enumerate(first.outvars) if v not in elsewhere}
    from_first = [compat.is_variable(v) and v in made for v in second.invars[1:]]
    if not any(from_first) or eqn_kind(first) is Kind.OPAQUE:
        return second
    places = [made[v] for v, a in zip(second.invars[1:], from_first, strict=True) if a]
    own = [v for v, a in zip(second.invars[1:], from_first, strict=True) if not a]
    branches = tuple(
        _joined_branch(before, branch, places, from_first)
        for before, branch in zip(first.params["branches"], second.params["branches"], strict=True)
    )
    invars = [second.invars[0], *first.invars[1:], *own]
    return compat.replaced(second, invars=invars, params={**second.params, "branches": branches})


def _joined_branch(
    before: ClosedJaxpr, branch: ClosedJaxpr, places: Sequence[int], from_first: Sequence[bool]
) -> ClosedJaxpr:
    """(operands of `before`, what it does not make of `branch`'s) -> results of `branch`."""
    n_before = len(before.in_avals)

    def run(*values: Any) -> list[Any]:
        made = compat.evaluate(before, values[:n_before])
        passed, own = iter([made[k] for k in places]), iter(values[n_before:])
        return compat.evaluate(branch, [next(passed if a else own) for a in from_first])

    own = [aval for aval, a in zip(branch.in_avals, from_first, strict=True) if not a]
    return compat.close_jaxpr(consts_as_literals(compat.trace(run, [*before.in_avals, *own])), [])
