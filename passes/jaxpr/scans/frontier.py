"""The frontier of a program with scans or conds: choices from fast to small, at rising prices of a byte.

One price holds for all pairs of a program and for those inside their bodies, so that bytes are given up where
they cost least. Below the lowest level there are segments (`passes.jaxpr.scans.segments`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import bodies_of
from passes.jaxpr.scans.branch_bodies import places_for
from passes.jaxpr.scans.branches import CondPair, find_cond_pairs
from passes.jaxpr.scans.choice import (
    Choice,
    InBranches,
    InParts,
    Inside,
    Level,
    MadeInside,
    Site,
    place_of,
)
from passes.jaxpr.scans.cut import (
    TILT_RATIO,
    Iteration,
    choose,
    choose_by_policy,
    iteration_of,
    iteration_of_loop,
    joined_body,
    kernels_of,
    recomputed_vars,
)
from passes.jaxpr.scans.emit import rewrite, rewrite_groups, with_groups
from passes.jaxpr.scans.loops import find_loops
from passes.jaxpr.scans.pairs import Enclosure, ScanPair, find_enclosures, find_pairs
from passes.jaxpr.scans.segments import Segments, segment_program, segmentations
from passes.jaxpr.scans.weight import Weight

Choose = Callable[[Iteration], Choice | MadeInside]
Place = Callable[[Choose], Site]

# What users write by hand, the deepest last.
_READY = jax.checkpoint_policies
POLICIES = (_READY.dots_saveable, _READY.dots_with_no_batch_dims_saveable, _READY.nothing_saveable)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierConfig:
    """At how many prices choices are made; set by `benchmarks.scan`.

    Attributes:
        first_price: of a byte, in units of the time, or energy, that the device takes to move one.
        growth: how many times as high the next price is.
        prices: how many there are.
        refinements: how often prices are halved between two levels that are far from each other.
        step_ratio: how far: their bytes differ by more than this share of those of the first level.
        segment_levels: how many levels, the lowest among them, are also run in segments.
    """

    first_price: float = 0.02
    growth: float = 1.35
    prices: int = 45
    refinements: int = 5
    step_ratio: float = 0.04
    segment_levels: int = 4

    @property
    def highest_price(self) -> float:
        """The last one."""
        return self.first_price * self.growth ** (self.prices - 1)


CONFIG = FrontierConfig()


def frontier(jaxpr: Jaxpr, device: DeviceModel, least: str = "time") -> list[Level]:
    """Choices for all pairs of an open jaxpr at rising prices of a byte, from fast to small.

    The first one stacks what is faster to read than to make, or takes less energy; the last one as little as
    possible.

    Args:
        least: one of `passes.objective.OBJECTIVES`.
    """
    weight = Weight(device=device, least=least)
    sites = _sites(jaxpr, weight)
    if not sites:
        return []

    def level(price: float) -> Level:
        of_byte = price * weight.of_byte
        tilts = (1 + TILT_RATIO * k / len(sites) for k in range(len(sites)))
        return tuple(site(_AtPrice(of_byte * tilt)) for site, tilt in zip(sites, tilts, strict=True))

    prices = [0.0, *(CONFIG.first_price * CONFIG.growth**k for k in range(CONFIG.prices))]
    at_price = {price: level(price) for price in prices}
    step_bytes = CONFIG.step_ratio * _bytes(at_price[0.0])
    for low, high in itertools.pairwise(prices):
        _refine(at_price, low, high, step_bytes, level)
    levels = [at_price[price] for price in sorted(at_price)]
    return [r for k, r in enumerate(levels) if k == 0 or _signatures(r) != _signatures(levels[k - 1])]


def hand_levels(jaxpr: Jaxpr, device: DeviceModel) -> list[Level]:
    """What ready policies of `jax.checkpoint` around every iteration keep; none without pairs of scans."""
    sites = _sites(jaxpr, Weight(device=device))
    levels = (tuple(site(partial(choose_by_policy, policy=p)) for site in sites) for p in POLICIES)
    return [level for level in levels if level]


def _refine(
    levels: dict[float, Level],
    low: float,
    high: float,
    step_bytes: float,
    level: Callable[[float], Level],
    depth: int = CONFIG.refinements,
) -> None:
    """Look between two prices while their choices lie far apart."""
    if depth and _bytes(levels[low]) - _bytes(levels[high]) > step_bytes:
        middle = (low + high) / 2
        levels[middle] = level(middle)
        _refine(levels, low, middle, step_bytes, level, depth - 1)
        _refine(levels, middle, high, step_bytes, level, depth - 1)


def _bytes(level: Level) -> int:
    return sum(c.stacked_bytes for c in level)


def _signatures(level: Level) -> list[Any]:
    return [c.signature for c in level]


def segment_frontier(level: Level, device: DeviceModel, least: str = "time") -> list[Level]:
    """Levels below `level`, the lowest of the frontier: one pair after the other runs in segments.

    The pair with the largest stacks comes first. One pair in segments says nothing of the others: each
    keeps its stacks until its own second scan, and what they are together is what counts.
    """
    levels: list[Level] = []
    left = sorted(range(len(level)), key=lambda k: (-level[k].stacked_bytes, k))
    for k in left:
        lower = [(*level[:k], site, *level[k + 1 :]) for site in _segmented(level[k], device, least)]
        levels += lower
        level = lower[-1] if lower else level
    return levels


def _segmented(choice: Site, device: DeviceModel, least: str) -> list[Site]:
    """One site in segments, with fewer and fewer bytes; none if it cannot be, or if that saves nothing."""
    segmented: list[Site] = []
    if isinstance(choice, Inside):
        bodies = choice.bodies
        for b in sorted(range(len(bodies)), key=lambda b: (-_bytes(bodies[b]), b)):
            for lower in segment_frontier(bodies[b], device, least):
                bodies = (*bodies[:b], lower, *bodies[b + 1 :])
                segmented.append(dataclasses.replace(choice, bodies=bodies))
    elif isinstance(choice, InBranches):
        branches = choice.branches
        for b in sorted(range(len(branches)), key=lambda b: (-_bytes(branches[b].inner), b)):
            nested = _Nested(choice.pair.branches[b], Weight(device=device, least=least))
            for lower in segment_frontier(branches[b].inner, device, least):
                branches = (*branches[:b], nested.least_kept(lower), *branches[b + 1 :])
                segmented.append(_in_branches(choice.pair, branches))
    elif isinstance(choice, Choice):
        for count, iterations in segmentations(choice.pair.length):
            first = count * iterations
            for segments in _in_segments(choice.pair, iterations, device, least):
                is_all = first == choice.pair.length
                segmented.append(segments if is_all else InParts(parts=(segments, choice), first=first))
    segmented = [site for site in segmented if site.stacked_bytes < choice.stacked_bytes]
    return sorted(segmented, key=lambda site: -site.stacked_bytes)


def _in_segments(pair: ScanPair, iterations: int, device: DeviceModel, least: str) -> list[Choice]:
    """The pair in segments of some iterations, with a few choices of what is stacked within one.

    None for a pair with anything inside that must not be recomputed, as the first pass would.
    """
    if any(eqn_kind(half.eqn) is Kind.OPAQUE for half in (pair.producer, pair.consumer)):
        return []
    program = segment_program(pair, iterations)
    levels = frontier(program, device, least)
    n_consts, n_carry = pair.producer.n_consts, pair.producer.n_carry
    carry = pair.producer.jaxpr.invars[n_consts : n_consts + n_carry]
    start_bytes = sum(compat.aval_nbytes(v.aval) for v in carry)
    kernels = kernels_of(iteration_of(pair, Weight(device=device)))
    return [
        Choice(
            pair=pair,
            kept=(),
            stacked_bytes=pair.length * start_bytes // iterations + _bytes(level),
            recomputed=kernels,
            inner=level,
            segments=Segments(iterations=iterations, body=rewrite(program, level)),
        )
        for level in levels[-1 :: -max(1, len(levels) // CONFIG.segment_levels)]
    ]


def _sites(
    jaxpr: Jaxpr, weight: Weight, dropped: Collection[Var] = (), *, stacks: bool = False
) -> list[Place]:
    """The places of an open jaxpr where something is chosen: (how, of one iteration) -> what is chosen.

    Args:
        dropped, stacks: see `passes.jaxpr.scans.branches.find_cond_pairs`.
    """
    pairs, conds = find_pairs(jaxpr, dropped), find_cond_pairs(jaxpr, dropped, stacks=stacks)
    sites = [_pair_site(pair, weight) for pair in pairs]
    for cond in conds:
        branches = [_pair_site(branch, weight) for branch in cond.branches]
        sites.append(_Branches(cond, branches))
    for loop in find_loops(jaxpr, {place for pair in pairs for place in (pair.first, pair.second)}):
        sites.append(_site_of(iteration_of_loop(loop, weight)))
    for enclosure in find_enclosures(jaxpr, [*pairs, *conds]):
        inner = [_sites(body, weight) for body in enclosure.bodies]
        if any(inner):
            sites.append(partial(_choose_inside, enclosure, inner))
    return sites


def _pair_site(pair: ScanPair, weight: Weight) -> Place:
    inner = _sites(joined_body(pair, passed=False), weight, pair.dropped, stacks=pair.stacks)
    if inner:
        return partial(_choose_nested, _Nested(pair, weight), inner)
    return _site_of(iteration_of(pair, weight))


def _site_of(iteration: Iteration) -> Place:
    return lambda choose_one: choose_one(iteration)


@dataclass(frozen=True, slots=True)
class _AtPrice:
    """Chooses at a price of a byte."""

    of_byte: float

    def __call__(self, iteration: Iteration) -> Choice | MadeInside:
        return choose(iteration, of_byte=self.of_byte)


class _Branches:
    """What is chosen in the branches of a cond.

    There is a place for what any of them keeps, so what one of them gives up alone frees nothing: it keeps
    what it kept at the lowest price at which there are no more places.
    """

    def __init__(self, conds: CondPair, sites: Sequence[Place]) -> None:
        self._conds, self._sites = conds, sites
        self._at_price: dict[float, tuple[Choice, ...]] = {}

    def __call__(self, choose_one: Choose) -> InBranches:
        branches = tuple(_of_pair(site(choose_one)) for site in self._sites)
        made = _in_branches(self._conds, branches)
        if isinstance(choose_one, _AtPrice):
            self._at_price[choose_one.of_byte] = branches
            prices = sorted(price for price in self._at_price if price < choose_one.of_byte)
            for k in range(len(branches)):
                made = self._as_fast([self._at_price[price][k] for price in prices], made, k)
        return made

    def _as_fast(self, faster: Sequence[Choice], made: InBranches, k: int) -> InBranches:
        """The first of some choices for branch `k`, whose places fall, that needs no more; else as it is."""

        def having(choice: Choice) -> InBranches:
            return _in_branches(self._conds, (*made.branches[:k], choice, *made.branches[k + 1 :]))

        enough = bisect.bisect_left(
            faster, True, key=lambda choice: having(choice).stacked_bytes <= made.stacked_bytes
        )
        return having(faster[enough]) if enough < len(faster) else made


def _of_pair(site: Site) -> Choice:
    assert isinstance(site, Choice), "a branch is a pair"
    return site


def _in_branches(conds: CondPair, branches: tuple[Choice, ...]) -> InBranches:
    return InBranches(pair=conds, branches=branches, places=places_for(branches))


def _choose_inside(enclosure: Enclosure, sites: Sequence[Sequence[Place]], choose_one: Choose) -> Inside:
    bodies = tuple(tuple(site(choose_one) for site in body) for body in sites)
    return Inside(enclosure=enclosure, bodies=bodies)


class _Nested:
    """A pair's iteration for what is chosen inside its bodies; at most prices that is what it was before."""

    def __init__(self, pair: ScanPair, weight: Weight) -> None:
        self._pair, self._weight, self._joined = pair, weight, joined_body(pair, passed=False)
        self._made: dict[tuple[Any, ...], tuple[Level, Iteration, list[list[JaxprEqn]]]] = {}

    @property
    def length(self) -> int:
        """The number of iterations."""
        return self._pair.length

    def _with(self, inner: Level) -> tuple[Level, Iteration, list[list[JaxprEqn]]]:
        """The inner choices, those that were made first among equal ones, the iteration with them, and what
        stands in the place of each equation of its body."""
        signature = tuple(_signatures(inner))
        if signature not in self._made:
            groups, rename = rewrite_groups(self._joined, inner)
            pair = with_groups(self._pair, groups, rename)
            self._made[signature] = inner, iteration_of(pair, self._weight), groups
        return self._made[signature]

    def chosen(self, inner: Level, choose_one: Choose) -> Choice:
        """The choice for the pair with these inside its bodies."""
        inner, iteration, _ = self._with(inner)
        choice = choose_one(iteration)
        assert isinstance(choice, Choice), "a pair is no loop"
        return dataclasses.replace(choice, inner=inner)

    def are_recomputed(self, choice: Choice) -> list[bool]:
        """For each choice inside whether the second half recomputes the first of its pair."""
        _, iteration, groups = self._with(choice.inner)
        recomputed = recomputed_vars(iteration, choice)
        return [
            not isinstance(site, MadeInside)
            and any(recomputed.intersection(eqn.outvars) for eqn in groups[place_of(site)] if bodies_of(eqn))
            for site in choice.inner
        ]

    def least_kept(self, inner: Level) -> Choice:
        """The same at the highest price of a byte."""
        return self.chosen(inner, _AtPrice(CONFIG.highest_price * self._weight.of_byte))


def _choose_nested(nested: _Nested, sites: Sequence[Place], choose_one: Choose) -> Choice:
    """The choice for one pair after what is inside its bodies has been rewritten in the same way.

    What the second half recomputes keeps its bytes in one iteration at a time, and not on a stack of all: for
    that they cost a share of the price.
    """
    choice = nested.chosen(tuple(site(choose_one) for site in sites), choose_one)
    recomputed = nested.are_recomputed(choice)
    if not any(recomputed):
        return choice
    once = _AtPrice(choose_one.of_byte / nested.length if isinstance(choose_one, _AtPrice) else 0.0)
    chosen = zip(sites, choice.inner, recomputed, strict=True)
    faster = nested.chosen(
        tuple(site(once) if is_once else made for site, made, is_once in chosen), choose_one
    )
    return faster if faster.stacked_bytes <= choice.stacked_bytes else choice
