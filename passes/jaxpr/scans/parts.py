"""Two levels in one pair of scans: its first iterations on the one, the others on the other.

A level is chosen for all iterations of a scan, so between two levels of its frontier there lie the bytes of
whole stacks. Where the higher one does not fit and the lower one leaves room, the pair runs in two parts:

    first    c1, s1 = scan(f1, c0, xs[:k])       keeps little
             c2, s2 = scan(f2, c1, xs[k:])       keeps more
    second   d1     = scan(b2, d0, s2)
             d2     = scan(b1, d1, s1)           makes more again

Nothing is copied for that: operands that have slices for all iterations are read where they are, by the
place of the iteration, and stacks with a slice of every iteration are carried from part to part. A pair on
one level is one part, and its scans are JAX's own. A step of a part is an iteration, or a whole segment
(`passes.jaxpr.scans.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.rewrite import splice
from passes.jaxpr.scans.bodies import at_hand, first_body, second_body
from passes.jaxpr.scans.choice import Choice, InParts, Inside, Level, Site
from passes.jaxpr.scans.segments import folded, unfolded

type Written = tuple[list[JaxprEqn], list[Atom]]
"""Equations, and the atoms of their results."""


def write_first(choice: Choice | InParts, eqn: JaxprEqn) -> tuple[*Written, Callable[[JaxprEqn], Written]]:
    """Equations of the first scan; atoms of its carry and of its stacks that others read, and then of those
    for the second scan only; and how that is written.

    Args:
        eqn: the first scan.
    """
    pair, producer = choice.pair, choice.pair.producer
    bodies = [first_body(part) for part in choice.parts]
    n_consts, n_carry = producer.n_consts, producer.n_carry
    cut = n_consts + n_carry
    staying = [v.aval for k, v in enumerate(eqn.outvars[n_carry:]) if k not in pair.only]

    def run(values: list[Any]) -> list[Any]:
        runs = _Runs(choice, eqn, values[n_consts:cut], staying)
        slices = [(x, True) for x in values[cut:]]
        for k in runs.order:
            runs.run(k, bodies[k].jaxpr, values[:n_consts], slices)
        return [*runs.carry, *runs.stacks, *(x for k in range(len(bodies)) for x in runs.own[k])]

    eqns, atoms = splice(run, eqn.invars, eqn)
    stacks, own = atoms[n_carry:][: len(staying)], atoms[n_carry + len(staying) :]
    ends = pairwise(accumulate((len(body.added) for body in bodies), initial=0))
    hands = [
        at_hand(part, body, eqn.invars, [*stacks, *own[start:end]])
        for part, body, (start, end) in zip(choice.parts, bodies, ends, strict=True)
    ]
    return eqns, atoms, partial(_write_second, choice, [{*body.added} for body in bodies], hands)


def _write_second(
    choice: Choice | InParts,
    own: Sequence[Collection[Var]],
    hands: Sequence[tuple[dict[Var, Atom], dict[Var, Atom]]],
    eqn: JaxprEqn,
) -> Written:
    """Equations and results of the second scan.

    Args:
        own: for each part variables of the first body whose stacks have a slice for each of its steps.
        hands: for each part what is at hand, see `passes.jaxpr.scans.bodies.at_hand`.
    """
    consumer = choice.pair.consumer
    bodies = [second_body(part, sliced) for part, (_, sliced) in zip(choice.parts, hands, strict=True)]
    n_consts, cut = consumer.n_consts, consumer.n_consts + consumer.n_carry
    stacks = [v.aval for v in eqn.outvars[consumer.n_carry :]]
    read = [
        ([whole[v] for v in body.consts], [sliced[v] for v in body.slices])
        for body, (whole, sliced) in zip(bodies, hands, strict=True)
    ]

    def run(values: Any) -> list[Any]:
        operands, read = values
        runs = _Runs(choice, eqn, operands[n_consts:cut], stacks)
        for k in runs.order:
            body, (consts, kept) = bodies[k], read[k]
            slices = [(x, v not in own[k]) for v, x in zip(body.slices, kept, strict=True)]
            slices += [(operands[cut + i], True) for i in body.others]
            runs.run(k, body.jaxpr, [*consts, *operands[:n_consts]], slices)
        return [*runs.carry, *runs.stacks]

    return splice(run, (list(eqn.invars), read), eqn)


class _Runs:
    """A scan that runs part after part, as the equation `like` does.

    Attributes:
        order: the parts in the order in which they run.
        carry: what is carried so far.
        stacks: with slices for all iterations, filled so far.
        own: of each part that ran the stacks with a slice for each of its steps.
    """

    def __init__(
        self, choice: Choice | InParts, like: JaxprEqn, init: Sequence[Any], stacks: Sequence[Any]
    ) -> None:
        self._choice, self._like, self._stack_avals = choice, like, stacks
        self._in_parts = len(choice.parts) > 1
        self.order = range(len(choice.parts))[:: -1 if like.params["reverse"] else 1]
        self.carry = list(init)
        self.stacks: list[Any] = [compat.zeros(aval) for aval in stacks] if self._in_parts else []
        self.own: dict[int, list[Any]] = {}

    def run(self, k: int, body: Jaxpr, consts: Sequence[Any], slices: Sequence[tuple[Any, bool]]) -> None:
        """Run the part `k`.

        Args:
            body: open, (*consts, *carry, *slices) -> (*carry, *slices of the stacks, *slices of its own).
            slices: stacks that are read, each with whether it has slices for all iterations.
        """
        steps, n_carry, closed = self._choice.turns[k], len(self.carry), compat.close_jaxpr(body, [])

        def step(carried: Any, given: Any) -> tuple[Any, Any]:
            (carry, stacks), (place, sliced) = carried, given
            left = iter(sliced)
            read = [
                _at(x, place, steps.step) if self._in_parts and is_whole else next(left)
                for x, is_whole in slices
            ]
            results = compat.evaluate(closed, [*consts, *carry, *read])
            made = results[n_carry:]
            written = [_put(stack, y, place, steps.step) for stack, y in zip(stacks, made, strict=False)]
            return (results[:n_carry], written), made[len(stacks) :]

        (self.carry, stacks), made = jax.lax.scan(
            step,
            (self.carry, self.stacks if self._in_parts else []),
            (
                jnp.asarray(steps, jnp.uint32) if self._in_parts else None,
                [
                    folded(x, len(steps)) if is_whole and steps.step > 1 else x
                    for x, is_whole in slices
                    if not (self._in_parts and is_whole)
                ],
            ),
            length=len(steps),
            reverse=self._like.params["reverse"],
            unroll=self._like.params["unroll"] if steps.step == 1 else 1,
        )
        if not self._in_parts:
            n_stacks = len(self._stack_avals)
            stacks, made = made[:n_stacks], made[n_stacks:]
            stacks = stacks if steps.step == 1 else [unfolded(x) for x in stacks]
        self.stacks, self.own[k] = stacks, made


def _at(stack: Any, place: Any, n: int) -> Any:
    """The slice of a stack at a place, or the slices of the `n` iterations from there."""
    if n == 1:
        return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)
    return jax.lax.dynamic_slice_in_dim(stack, place, n)


def _put(stack: Any, slices: Any, place: Any, n: int) -> Any:
    """A stack with these slices in it."""
    if n == 1:
        return jax.lax.dynamic_update_index_in_dim(stack, slices, place, 0)
    return jax.lax.dynamic_update_slice_in_dim(stack, slices, place, 0)


def between(higher: Level, lower: Level, share: float) -> Level:
    """A level between two: every pair that differs runs its last iterations, about `share` of them, on the
    higher one; of what has no iterations, such as conds, or is in segments the last sites are on it.
    """
    made = [_site_between(*sites, share) for sites in zip(higher, lower, strict=True)]
    whole = [k for k, site in enumerate(made) if site is None]
    left_bytes = share * sum(_more_bytes(higher[k], lower[k]) for k in whole)
    level = [lower[k] if site is None else site for k, site in enumerate(made)]
    for k in reversed(whole):
        left_bytes -= _more_bytes(higher[k], lower[k])
        if left_bytes < 0:
            break
        level[k] = higher[k]
    return tuple(level)


def _more_bytes(higher: Site, lower: Site) -> int:
    return max(higher.stacked_bytes - lower.stacked_bytes, 0)


def _site_between(higher: Site, lower: Site, share: float) -> Site | None:
    """A site in two parts; None for one that is on the one level or the other, and has no part on each."""
    if higher.signature == lower.signature:
        return lower
    if isinstance(higher, Inside) and isinstance(lower, Inside):
        bodies = zip(higher.bodies, lower.bodies, strict=True)
        return replace(lower, bodies=tuple(between(*levels, share) for levels in bodies))
    if not isinstance(higher, Choice) or not isinstance(lower, Choice | InParts) or higher.segments:
        return None
    length, steps = lower.pair.length, lower.turns[0]
    first = -(-(length - int(share * length)) // steps.step) * steps.step
    return InParts(parts=(lower.parts[0], higher), first=first) if 0 < first < steps.stop else lower
