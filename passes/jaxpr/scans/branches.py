"""Pairs of conds: one computes values in its branches, a later one that runs the same branch reads them.

    made = cond(p, f0, f1, x)            each branch is a pair of its own: what passes from `f1` to `b1` is
    ...                                  kept or made again, as between the bodies of two scans
    grads = cond(p, b0, b1, made, g)     (`passes.jaxpr.scans.cut`)

Differentiation makes such pairs, in the bodies of scans, too: layers of two kinds, steps that may be over. A
branch is then what a scan of one iteration is, whose slices are the operands and results of the cond.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace

from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import bodies_of, renewed
from passes.jaxpr.scans.pairs import Around, Body, ScanPair, flat, most_passing, pair_of, seen_around


@dataclass(frozen=True, slots=True, kw_only=True)
class CondPair:
    """Two conds of one program, where the second reads what the first one's branches computed.

    Attributes:
        first, second: their places among the program's equations.
        branches: for each branch its two bodies, of (index, *operands), as a pair of scans of one iteration.
        written: bodies by what was chosen for them, so that they are the same objects on other levels.
    """

    first: int
    second: int
    branches: tuple[ScanPair, ...]
    written: dict[Hashable, tuple[ClosedJaxpr, ClosedJaxpr]] = field(default_factory=dict, compare=False)


def find_cond_pairs(jaxpr: Jaxpr, dropped: Collection[Var] = (), *, stacks: bool = False) -> list[CondPair]:
    """Pairs of conds of an open jaxpr, calls inlined, in the order of their second one; none is in two.

    Args:
        dropped: see `passes.jaxpr.scans.pairs.seen_around`.
        stacks: whether the jaxpr is of an iteration of two scans, so that what passes is stacked.
    """
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    places = most_passing(
        (nbytes, first, second)
        for second, eqn in enumerate(jaxpr.eqns)
        if _is_plain_cond(eqn) and not has_effect(eqn)
        for first, nbytes in _sources(jaxpr, second, producer).items()
    )
    around = seen_around(jaxpr, dropped)
    return [_pair(jaxpr, first, second, around, stacks) for first, second in places]


def _is_plain_cond(eqn: JaxprEqn) -> bool:
    """True for a cond that may be written anew: it reads no references."""
    return eqn.primitive.name == "cond" and not any(compat.is_ref(v.aval) for v in eqn.invars)


def _sources(jaxpr: Jaxpr, second: int, producer: dict[Var, int]) -> dict[int, int]:
    """Earlier conds that run the same branch, each with the bytes that the second one reads of them."""
    eqn = jaxpr.eqns[second]
    nbytes: dict[int, int] = {}
    for v in dict.fromkeys(compat.variables(eqn.invars[1:])):
        i = producer.get(v)
        if i is not None and _is_plain_cond(jaxpr.eqns[i]) and _runs_same_branch(jaxpr.eqns[i], eqn):
            nbytes[i] = nbytes.get(i, 0) + compat.aval_nbytes(v.aval)
    return nbytes


def _runs_same_branch(first: JaxprEqn, second: JaxprEqn) -> bool:
    """True if both always run branches of the same number."""
    same_index = compat.is_variable(first.invars[0]) and first.invars[0] is second.invars[0]
    return same_index and len(bodies_of(first)) == len(bodies_of(second))


def _pair(jaxpr: Jaxpr, first: int, second: int, around: Around, stacks: bool) -> CondPair:
    halves = zip(_branches(jaxpr.eqns[first]), _branches(jaxpr.eqns[second]), strict=True)
    branches = [pair_of(first, second, *bodies, around) for bodies in halves]
    # What passes is there in all branches or in none.
    some = frozenset().union(*(pair.only for pair in branches))
    only = frozenset(k for k in some if all(k in pair.only or not _reads(pair, k) for pair in branches))
    return CondPair(
        first=first,
        second=second,
        branches=tuple(replace(pair, only=only, stacks=stacks) for pair in branches),
    )


def _branches(eqn: JaxprEqn) -> list[Body]:
    """The bodies of a cond's branches, each with the index of the branch as its first operand."""
    (index, *_), bodies = eqn.invars, []
    for branch in bodies_of(eqn):
        jaxpr = renewed(flat(branch))
        invars = [compat.fresh_var(index), *jaxpr.invars]
        bodies.append(
            Body(eqn=eqn, jaxpr=compat.rebuild(jaxpr, invars=invars), n_consts=0, n_carry=0, length=1)
        )
    return bodies


def _reads(pair: ScanPair, k: int) -> bool:
    """True if the second body reads the first one's result `k`, as an operand of its own."""
    consumer, result = pair.consumer, pair.producer.ys[k]
    read = {*compat.variables(v for eqn in consumer.jaxpr.eqns for v in eqn.invars)}
    read |= {*compat.variables(consumer.jaxpr.outvars)}
    operands = zip(consumer.xs, consumer.x_vars, strict=True)
    return any(operand is result and v in read for operand, v in operands)
