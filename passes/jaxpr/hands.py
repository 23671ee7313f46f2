"""A program's blocks as one would write them by hand, under ready policies of `jax.checkpoint`: candidates.

Either all blocks are under one policy, or the first ones are, as many as a budget asks for, and the others
are under a milder one:

    time   . everything_saveable
             .
               .  <- in between: the first blocks as on the right, the others as on the left
                 . dots_saveable
                      .
                            . nothing_saveable
                                                  fewer bytes ->
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.blocks import are_alike, find_blocks, under_each, under_policies
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.lift import lift_seen
from passes.jaxpr.straight import as_it_is, counts_holes, lift_as_xla, needed_bytes
from passes.jaxpr.values import ConstraintUnsupported

AS_IT_IS = "everything_saveable"
# How many blocks are deep is looked for by interpolation: mostly the first or the second number is it.
_MOST_COUNTS = 4
# Values that are no part of an estimate, as a share of all.
_SMALL = 0.002
# By how much more all blocks may need than all but the last.
_MOST_FOR_THE_LAST = 1.25
# What is made of a jaxpr holds it, so that it would live for ever.
_kept = functools.partial(compat.cached_by_jaxpr, most=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What blocks under a policy, or under two, are expected to need and to take, with the time in which what
    they need is mapped."""

    policy: str
    peak_bytes: int
    run_ns: int


class Hands:
    """What is written by hand of one program; nothing where it has no blocks but the bodies of scans, which
    have levels (see `passes.jaxpr.blocks`).

    Args:
        jaxpr: the open jaxpr that is planned.
        request: of which device.

    Attributes:
        whole: all blocks under the same policy, as XLA is expected to see them; alike ones once.
    """

    def __init__(self, jaxpr: Jaxpr, request: JaxprRequest) -> None:
        self._jaxpr = jaxpr
        self._request = request
        self._asked = request.device, counts_holes(request), request.fresh
        self._count = len(find_blocks(jaxpr).spans)
        self.whole: Sequence[Candidate] = _by_hand(jaxpr, *self._asked) if self._count else ()

    def between(self, nbytes: int) -> Promise | None:
        """What the two that are best left and right of some bytes promise together; None where one of them
        is missing."""
        pair = self._around(nbytes) if self._count > 1 else None
        if pair is None:
            return None
        mild, deep = pair
        count = self._interpolated(nbytes, (0, mild.peak_bytes), (self._count, deep.peak_bytes))
        cost_ns = mild.cost_ns + (deep.cost_ns - mild.cost_ns) * count // self._count
        return self._promise(_name(deep, mild), nbytes, cost_ns)

    def cheapest(
        self, budget_bytes: int, nbytes: int, most_bytes: int, *, than: Candidate | None = None
    ) -> Promise | None:
        """The least time promised for a budget; by the policies of a candidate only if it is less `than` its.

        Estimates may be off: some may be expected to need `nbytes`, or what stays mapped, and all under one
        policy `most_bytes`.
        """
        whole = [self._of(made) for made in self.whole if made.peak_bytes <= most_bytes]
        near = list(whole)
        for aim_bytes in sorted({nbytes, min(nbytes, self._request.kept_bytes or nbytes)}):
            between = self.between(aim_bytes)
            if between is None or self._is_for(whole, between, budget_bytes):
                continue
            # A promise that is no less than what is known is not looked at.
            is_less = than is None or between.run_ns < self._of(than).run_ns
            some = self.under(between.policy, aim_bytes) if is_less else None
            near.append(between if some is None else self._of(some))
        others = [
            p for p in near if than is None or p.policy != than.policy or p.run_ns < self._of(than).run_ns
        ]
        return min(others, key=lambda made: (made.run_ns, made.peak_bytes), default=None)

    def _promise(self, policy: str, nbytes: int, cost_ns: int) -> Promise:
        return Promise(policy=policy, peak_bytes=nbytes, run_ns=cost_ns + self._request.mapping_ns(nbytes))

    def _of(self, made: Candidate) -> Promise:
        return self._promise(made.policy, made.peak_bytes, made.cost_ns)

    def _is_for(self, whole: Sequence[Promise], between: Promise, budget_bytes: int) -> bool:
        """True for a budget that is what one policy needs, where some need no less: small values decide."""
        least_bytes, most_bytes = budget_bytes * (1 - _SMALL), budget_bytes * (1 + _SMALL)
        if not any(least_bytes <= made.peak_bytes <= most_bytes for made in whole):
            return False
        some = self.under(between.policy, int(most_bytes))
        return some is None or some.peak_bytes >= least_bytes

    def under(self, policy: str, nbytes: int) -> Candidate | None:
        """The blocks under a policy, or under the two of a promise, within some bytes if they can be; None if
        there is no such policy."""
        for deep in self.whole:
            if deep.policy == policy:
                return deep
            for mild in self._all:
                if _name(deep, mild) == policy:
                    return self._mixed(mild, deep, nbytes)
        return None

    @functools.cached_property
    def _all(self) -> list[Candidate]:
        as_is = as_it_is(lift_as_xla(self._jaxpr, self._asked[0]), self._asked[2])
        return [replace(as_is, policy=AS_IT_IS), *self.whole]

    def _around(self, nbytes: int) -> tuple[Candidate, Candidate] | None:
        """The neighbours on the lower convex hull of bytes and times, the larger one first. All blocks but
        the last may need less than all: that one would be run again while the most is alive."""
        hull: list[Candidate] = []
        for made in sorted(self._all, key=lambda made: (-made.peak_bytes, made.cost_ns)):
            while hull and _is_above(hull[-2:], made):
                hull.pop()
            hull.append(made)
        pairs = [(mild, deep) for mild, deep in itertools.pairwise(hull) if mild.cost_ns < deep.cost_ns]
        for mild, deep in pairs:
            if deep.peak_bytes <= nbytes < mild.peak_bytes:
                return mild, deep
        if pairs and nbytes < pairs[-1][1].peak_bytes <= _MOST_FOR_THE_LAST * nbytes:
            last = self._with(self._count - 1, *pairs[-1])
            return pairs[-1] if last is not None and last.peak_bytes <= nbytes else None
        return None

    @staticmethod
    def _interpolated(nbytes: int, mild: tuple[int, int], deep: tuple[int, int]) -> int:
        """How many blocks are deep for some bytes, of two numbers of them whose bytes are known: between."""
        share = (mild[1] - nbytes) / max(mild[1] - deep[1], 1)
        return min(max(mild[0] + math.ceil(share * (deep[0] - mild[0])), mild[0] + 1), deep[0] - 1)

    def _with(self, count: int, mild: Candidate, deep: Candidate) -> Candidate | None:
        """The first so many blocks deep; None where a policy asks for what cannot be run twice."""
        names = (deep.policy,) * count + (mild.policy,) * (self._count - count)
        return _under_each(self._jaxpr, names, *self._asked)

    def _mixed(self, mild: Candidate, deep: Candidate, nbytes: int) -> Candidate:
        above, below, found = (0, mild.peak_bytes), (self._count, deep.peak_bytes), deep
        for _ in range(_MOST_COUNTS):
            if below[0] - above[0] <= 1:
                break
            count = self._interpolated(nbytes, above, below)
            if (made := self._with(count, mild, deep)) is None:
                break
            if made.peak_bytes <= nbytes:
                below, found = (count, made.peak_bytes), made
            else:
                above = count, made.peak_bytes
        return found if found is deep else replace(found, policy=_name(deep, mild))


def as_written(made: Candidate, device: DeviceModel) -> Candidate:
    """A candidate whose program is what was written, where that is under a policy, and no longer what XLA is
    expected to make of it."""
    if not made.policy:
        return made
    lifted = lift_as_xla(made.emitted, device)
    return replace(made, lifted=lifted, steps=lifted.program.order)


def _name(deep: Candidate, mild: Candidate) -> str:
    return f"{deep.policy}, then {mild.policy}"


def _is_above(last: Sequence[Candidate], made: Candidate) -> bool:
    """True if the last point of a hull is not on it with one more that needs no more bytes."""
    if last[-1].cost_ns >= made.cost_ns:
        return True
    if len(last) < 2:
        return False
    one, two = last
    rise, next_rise = two.cost_ns - one.cost_ns, made.cost_ns - two.cost_ns
    return rise * (two.peak_bytes - made.peak_bytes) >= next_rise * (one.peak_bytes - two.peak_bytes)


@_kept
def _by_hand(jaxpr: Jaxpr, device: DeviceModel, holes: bool, fresh: frozenset[int]) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    for name, written in under_policies(jaxpr).items():
        if not any(are_alike(written, other.emitted) for other in found):
            found.append(replace(_seen(written, device, holes, fresh), policy=name))
    return tuple(found)


@_kept
def _under_each(
    jaxpr: Jaxpr, names: tuple[str, ...], device: DeviceModel, holes: bool, fresh: frozenset[int]
) -> Candidate | None:
    try:
        return _seen(under_each(jaxpr, names), device, holes, fresh)
    except ConstraintUnsupported:
        return None


def _seen(written: Jaxpr, device: DeviceModel, holes: bool, fresh: frozenset[int]) -> Candidate:
    seen = lift_seen(written, device, held=True)
    alive_bytes, beyond_bytes, given_bytes = needed_bytes(seen, device, fresh)
    return replace(
        as_it_is(seen), emitted=written, foreseen=seen,
        peak_bytes=alive_bytes - given_bytes + (beyond_bytes if holes else 0),
        holes_bytes=0 if holes else beyond_bytes,
    )  # fmt: skip
