"""The two bodies of a pair of scans as they are written for one choice; what is not kept the second makes.

Of a pair in segments they are the bodies of the scans over segments, and their slices are those of a segment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import when_needed
from passes.jaxpr.scans.choice import Choice
from passes.jaxpr.scans.pairs import ScanPair
from passes.jaxpr.scans.segments import Segments, first_segment, other_xs


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """What the first scan does in a step.

    Attributes:
        jaxpr: (*consts, *carry, *slices) -> (*carry, *staying, *added).
        staying: slices of stacks that others read, by their variables in the body of an iteration.
        added: slices of stacks that are there for the second scan only; one for each step.
    """

    jaxpr: Jaxpr
    staying: tuple[compat.Atom, ...]
    added: tuple[Var, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """What the second scan does in a step.

    Attributes:
        jaxpr: (*consts, *its own consts, *carry, *slices, *other slices) -> (*carry, *slices).
        consts, slices: variables of the first body, what of it is read whole, and slice by slice.
        others: which of the second scan's sliced operands are no stacks of the first.
    """

    jaxpr: Jaxpr
    consts: tuple[Var, ...]
    slices: tuple[Var, ...]
    others: tuple[int, ...]


def first_body(choice: Choice) -> First:
    """The first scan's body, which stacks what is kept, and still what others read of it."""
    pair, producer = choice.pair, choice.pair.producer
    staying = [y for k, y in enumerate(producer.y_vars) if k not in pair.only]
    if choice.segments is not None:
        carry = producer.jaxpr.invars[producer.n_consts : producer.n_consts + producer.n_carry]
        jaxpr = first_segment(pair, choice.segments, staying)
        return First(jaxpr=jaxpr, staying=tuple(staying), added=tuple(carry))
    there = {*producer.jaxpr.invars[: producer.n_consts], *producer.x_vars, *compat.variables(staying)}
    added = [v for v in choice.kept if v not in there]
    outvars = [*producer.jaxpr.outvars[: producer.n_carry], *staying, *added]
    body = compat.rebuild(producer.jaxpr, outvars=outvars)
    return First(jaxpr=compat.without_dead_code(body), staying=tuple(staying), added=tuple(added))


def second_body(choice: Choice, sliced: Collection[Var]) -> Second:
    """The second scan's body, which runs again what lies between what is kept and what it reads.

    Args:
        sliced: the first body's variables of which there are stacks.
    """
    producer, consumer = choice.pair.producer, choice.pair.consumer
    if choice.segments is not None:
        return _second_segment(choice.pair, choice.segments)
    own = {*producer.jaxpr.invars, *(v for e in producer.jaxpr.eqns for v in e.outvars)}
    kept = set(choice.kept)
    consts = [v for v in choice.kept if v not in sliced]
    slices = [v for v in choice.kept if v in sliced]
    others = [k for k, v in enumerate(consumer.x_vars) if v not in own]
    fixed = consumer.jaxpr.invars[: consumer.n_consts + consumer.n_carry]
    recomputed = [
        without(e, kept) for e in producer.jaxpr.eqns if not has_effect(e) and not kept.issuperset(e.outvars)
    ]
    eqns = consumer.jaxpr.eqns
    body = compat.rebuild(
        consumer.jaxpr,
        eqns=when_needed(recomputed, eqns) if choice.late else [*recomputed, *eqns],
        invars=[*consts, *fixed, *slices, *(consumer.x_vars[k] for k in others)],
        constvars=[],
    )
    return Second(
        jaxpr=compat.without_dead_code(body),
        consts=tuple(consts),
        slices=tuple(slices),
        others=tuple(others),
    )


def _second_segment(pair: ScanPair, segments: Segments) -> Second:
    """As `second_body`, of the scan over segments."""
    producer, consumer = pair.producer, pair.consumer
    n_consts, n_first = producer.n_consts, len(producer.jaxpr.invars)
    own_consts = n_first + consumer.n_consts
    fixed = own_consts + consumer.n_carry
    invars = segments.body.invars
    first, others = invars[:n_first], invars[fixed:]
    order = [*first[:n_consts], *invars[n_first:fixed], *first[n_consts:], *others]
    return Second(
        jaxpr=compat.rebuild(segments.body, invars=order),
        consts=tuple(producer.jaxpr.invars[:n_consts]),
        slices=tuple(producer.jaxpr.invars[n_consts:]),
        others=tuple(other_xs(pair, consumer)),
    )


def without(eqn: JaxprEqn, kept: Collection[Var]) -> JaxprEqn:
    """`eqn` not defining what is kept."""
    return compat.replaced(eqn, outvars=[compat.fresh_var(v) if v in kept else v for v in eqn.outvars])


def at_hand(
    choice: Choice, first: First, operands: Sequence[compat.Atom], stacks: Sequence[compat.Atom]
) -> tuple[dict[Var, compat.Atom], dict[Var, compat.Atom]]:
    """For variables of the first body the whole operands that hold them, and the stacks of their slices.

    Args:
        operands: the first scan's.
        stacks: of `first.staying`, then of `first.added`.
    """
    producer = choice.pair.producer
    invars, cut = producer.jaxpr.invars, producer.n_consts + producer.n_carry
    whole = dict(zip(invars[: producer.n_consts], operands, strict=False))
    sliced = dict(zip(producer.x_vars, operands[cut:], strict=True))
    made = zip((*first.staying, *first.added), stacks, strict=True)
    sliced |= {v: stack for v, stack in made if compat.is_variable(v) and v not in whole}
    return whole, sliced
