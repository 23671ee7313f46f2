"""A pair of conds as it is written for one choice; what a branch does not keep, the second one makes.

What is kept has the same types in all branches: values of one type share a place, and a branch that has
nothing for a place has zeros there, as what JAX's own derivative of a cond keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.rewrite import consts_as_literals, is_needed, with_bodies, without_inputs
from passes.jaxpr.scans.bodies import first_body, second_body
from passes.jaxpr.scans.choice import Choice, InBranches
from passes.jaxpr.scans.pairs import ScanPair


def places_for(branches: Sequence[Choice]) -> tuple[ShapedArray, ...]:
    """Abstract values of as many places as hold what each of these branches keeps for the second cond."""
    most: Counter[ShapedArray] = Counter()
    for choice in branches:
        most |= Counter(map(_strong, first_body(choice).added))
    return tuple(most.elements())


def write_first(choice: InBranches, eqn: JaxprEqn) -> JaxprEqn:
    """The first cond, whose results are those that stay and what is in the places.

    Args:
        eqn: the first cond as it is.
    """
    only = choice.pair.branches[0].only
    bodies = [first for first, _ in _written(choice)]
    results = iter(compat.open_jaxpr(bodies[0])[0].outvars)
    staying = [(v, next(results)) for k, v in enumerate(eqn.outvars) if k not in only]
    # What nobody read the second one may read now.
    outvars = [compat.fresh_var(new) if isinstance(v, compat.DropVar) else v for v, new in staying]
    return compat.replaced(with_bodies(eqn, bodies), outvars=[*outvars, *map(compat.fresh_var, results)])


def write_second(choice: InBranches, first: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """The second cond; it reads the first one's operands, too, where it makes something again.

    Args:
        first: the first cond as it was written.
        eqn: the second cond as it is.
    """
    own = _own_operands(choice.pair.branches[0])
    bodies = [second for _, second in _written(choice)]
    operands = [*first.invars[1:], *first.outvars, *(eqn.invars[k] for k in own)]
    unread = [i for i in range(len(operands)) if not any(is_needed(body, i) for body in bodies)]
    branches = [without_inputs(body, unread, []) for body in bodies]
    invars = [eqn.invars[0], *(v for i, v in enumerate(operands) if i not in unread)]
    return compat.replaced(with_bodies(eqn, branches), invars=invars)


def _written(choice: InBranches) -> list[tuple[ClosedJaxpr, ClosedJaxpr]]:
    """The bodies of each branch."""
    known, places = choice.pair.written, choice.places
    own = _own_operands(choice.pair.branches[0])
    written = []
    for k, branch in enumerate(choice.branches):
        key = k, branch.signature, places
        if key not in known:
            known[key] = _first_branch(branch, places), _second_branch(branch, places, own)
        written.append(known[key])
    return written


def _own_operands(pair: ScanPair) -> list[int]:
    """Which operands of the second cond, its index aside, are no results that the first passes to it only."""
    passed = {v for k, v in enumerate(pair.producer.ys) if k in pair.only}
    operands = enumerate(pair.consumer.xs)
    return [k for k, v in operands if k and (not compat.is_variable(v) or v not in passed)]


def _first_branch(choice: Choice, places: Sequence[ShapedArray]) -> ClosedJaxpr:
    """Operands -> (results that stay, what is in each of the places)."""
    first, operands = first_body(choice), choice.pair.producer.x_vars
    place, n_staying = _in_places(first.added, places), len(first.staying)

    def run(*given: Any) -> list[Any]:
        results = _evaluated(first.jaxpr, operands, dict(zip(operands[1:], given, strict=True)))
        added = {place[v]: x for v, x in zip(first.added, results[n_staying:], strict=True)}
        kept = (added[k] if k in added else _nothing(aval) for k, aval in enumerate(places))
        return [*results[:n_staying], *kept]

    return _traced(run, [v.aval for v in operands[1:]])


def _second_branch(choice: Choice, places: Sequence[ShapedArray], own: Sequence[int]) -> ClosedJaxpr:
    """(The first cond's operands, its results as it is written, the second one's operands `own`) ->
    results."""
    pair, first, second = choice.pair, first_body(choice), second_body(choice, choice.kept)
    operands, read = pair.producer.x_vars[1:], [pair.consumer.x_vars[k] for k in own]
    place = {k: v for v, k in _in_places(first.added, places).items()}
    names: list[Atom | None] = [
        *operands, *first.staying, *(place.get(k) for k in range(len(places))), *read
    ]  # fmt: skip
    avals = [*(v.aval for v in (*operands, *first.staying)), *places, *(v.aval for v in read)]

    def run(*given: Any) -> list[Any]:
        at_hand: dict[Var, Any] = {}
        for v, x in zip(names, given, strict=True):
            if v is not None and compat.is_variable(v):
                at_hand.setdefault(v, x)
        others = [pair.consumer.x_vars[k] for k in second.others]
        return _evaluated(second.jaxpr, [*second.slices, *others], at_hand)

    return _traced(run, avals)


def _evaluated(jaxpr: Jaxpr, operands: Sequence[Var], at_hand: Mapping[Var, Any]) -> list[Any]:
    """Results of an open jaxpr, which does not read those of its operands that are not at hand."""
    closed = compat.close_jaxpr(jaxpr, [])
    missing = [i for i, v in enumerate(operands) if v not in at_hand]
    assert not any(is_needed(closed, i) for i in missing), "what a branch reads is at hand"
    return compat.evaluate(closed, [at_hand[v] if v in at_hand else _nothing(array_of(v)) for v in operands])


def _in_places(kept: Sequence[Var], places: Sequence[ShapedArray]) -> dict[Var, int]:
    free = list(range(len(places)))
    place = {}
    for v in kept:
        place[v] = next(k for k in free if places[k] == _strong(v))
        free.remove(place[v])
    return place


def _strong(v: Var) -> ShapedArray:
    """The abstract value of `v`, not weakly typed."""
    strong: ShapedArray = array_of(v).update(weak_type=False)
    return strong


def _nothing(aval: ShapedArray) -> Any:
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return jax.lax.full(aval.shape, 0, dtype=aval.dtype) if is_key else compat.zeros(aval)


def _traced(run: Callable[..., list[Any]], avals: Sequence[Any]) -> ClosedJaxpr:
    traced = consts_as_literals(compat.trace(run, avals))
    return compat.close_jaxpr(compat.without_dead_code(traced), [])
