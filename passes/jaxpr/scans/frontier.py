"""The ladder of a program with scans: choices from fast to small, at rising prices of a byte.

One price holds for all pairs of scans of a program and for those inside their bodies, so that bytes are
given up where they cost least. Below the lowest rung there are segments (`passes.jaxpr.scans.segments`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.primitives import Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.scans.choice import Choice, Inside, Rung
from passes.jaxpr.scans.cut import choose, joined_body, kernels_of, turn_of
from passes.jaxpr.scans.emit import rewrite, with_inner
from passes.jaxpr.scans.pairs import Enclosure, ScanPair, find_enclosures, find_pairs
from passes.jaxpr.scans.segments import Segments, segment_counts, segment_program

Site = Callable[[float], Choice | Inside]

# Prices of a byte, in units of the time that the device takes to move one.
FIRST_PRICE = 0.02
GROWTH = 1.35
PRICES = 45
REFINEMENTS = 5
STEP_RATIO = 0.04
SEGMENT_RUNGS = 4


def ladder(jaxpr: Any, device: DeviceModel) -> list[Rung]:
    """Choices for all pairs of an open jaxpr at rising prices of a byte, from fast to small.

    The first one stacks what is faster to read than to make; the last one as little as possible.
    """
    sites = _sites(jaxpr, device)
    if not sites:
        return []

    def rung(price: float) -> Rung:
        ns_per_byte = price * 1e9 / device.bytes_per_second
        return tuple(site(ns_per_byte) for site in sites)

    prices = [0.0, *(FIRST_PRICE * GROWTH**k for k in range(PRICES))]
    found = {price: rung(price) for price in prices}
    step_bytes = STEP_RATIO * _bytes(found[0.0])
    for low, high in itertools.pairwise(prices):
        _refine(found, low, high, step_bytes, rung)
    rungs = [found[price] for price in sorted(found)]
    return [r for k, r in enumerate(rungs) if k == 0 or _signatures(r) != _signatures(rungs[k - 1])]


def _refine(
    found: dict[float, Rung],
    low: float,
    high: float,
    step_bytes: float,
    rung: Callable[[float], Rung],
    depth: int = REFINEMENTS,
) -> None:
    """Look between two prices while their choices lie far apart."""
    if depth and _bytes(found[low]) - _bytes(found[high]) > step_bytes:
        middle = (low + high) / 2
        found[middle] = rung(middle)
        _refine(found, low, middle, step_bytes, rung, depth - 1)
        _refine(found, middle, high, step_bytes, rung, depth - 1)


def _bytes(rung: Rung) -> int:
    return sum(c.stacked_bytes for c in rung)


def _signatures(rung: Rung) -> list[Any]:
    return [c.signature for c in rung]


def segment_ladder(rung: Rung, device: DeviceModel) -> list[Rung]:
    """Rungs below `rung`, the lowest of the ladder: one pair after the other runs in segments.

    The pair with the largest stacks comes first. One pair in segments says nothing of the others: each
    keeps its stacks until its own second scan, and what they are together is what counts.
    """
    found: list[Rung] = []
    left = sorted(range(len(rung)), key=lambda k: (-rung[k].stacked_bytes, k))
    for k in left:
        lower = [(*rung[:k], site, *rung[k + 1 :]) for site in _segmented(rung[k], device)]
        found += lower
        rung = lower[-1] if lower else rung
    return found


def _segmented(choice: Choice | Inside, device: DeviceModel) -> list[Choice | Inside]:
    """One site in segments, with fewer and fewer bytes; none if it cannot be, or if that saves nothing."""
    found: list[Choice | Inside] = []
    if isinstance(choice, Inside):
        bodies = choice.bodies
        for b in sorted(range(len(bodies)), key=lambda b: (-_bytes(bodies[b]), b)):
            for lower in segment_ladder(bodies[b], device):
                bodies = (*bodies[:b], lower, *bodies[b + 1 :])
                found.append(dataclasses.replace(choice, bodies=bodies))
    else:
        for count in segment_counts(choice.pair.length):
            found += _in_segments(choice.pair, count, device)
    found = [site for site in found if site.stacked_bytes < choice.stacked_bytes]
    return sorted(found, key=lambda site: -site.stacked_bytes)


def _in_segments(pair: ScanPair, count: int, device: DeviceModel) -> list[Choice]:
    """The pair in `count` segments, with a few choices of what is stacked within one.

    None for a pair with anything inside that must not run again, as the first pass over all segments would.
    """
    if any(eqn_kind(half.eqn) is Kind.OPAQUE for half in (pair.make, pair.take)):
        return []
    program = segment_program(pair, count)
    rungs = ladder(program, device)
    n_consts, n_carry = pair.make.n_consts, pair.make.n_carry
    carry = pair.make.jaxpr.invars[n_consts : n_consts + n_carry]
    start_bytes = sum(compat.aval_nbytes(v.aval) for v in carry)
    again = kernels_of(turn_of(pair, device))
    turns = pair.length // count
    return [
        Choice(
            pair=pair,
            kept=(),
            stacked_bytes=count * start_bytes + _bytes(rung),
            remade=again,
            inner=rung,
            segments=Segments(count=count, turns=turns, body=rewrite(program, rung)),
        )
        for rung in rungs[-1 :: -max(1, len(rungs) // SEGMENT_RUNGS)]
    ]


def _sites(jaxpr: Any, device: DeviceModel) -> list[Site]:
    """The places of an open jaxpr where something is chosen: (ns per byte) -> what is cheapest there."""
    pairs = find_pairs(jaxpr)
    sites = [_pair_site(pair, device) for pair in pairs]
    for enclosure in find_enclosures(jaxpr, pairs):
        inner = [_sites(body, device) for body in enclosure.bodies]
        if any(inner):
            sites.append(partial(_choose_inside, enclosure, inner))
    return sites


def _pair_site(pair: ScanPair, device: DeviceModel) -> Site:
    inner = _sites(joined_body(pair), device)
    return partial(_choose_nested, pair, inner, device) if inner else partial(choose, turn_of(pair, device))


def _choose_inside(enclosure: Enclosure, sites: Sequence[Sequence[Site]], ns_per_byte: float) -> Inside:
    bodies = tuple(tuple(site(ns_per_byte) for site in body) for body in sites)
    return Inside(enclosure=enclosure, bodies=bodies)


def _choose_nested(pair: ScanPair, sites: Sequence[Site], device: DeviceModel, ns_per_byte: float) -> Choice:
    """The choice for one pair after what is inside its bodies has been rewritten for the same price."""
    inner = tuple(site(ns_per_byte) for site in sites)
    pair = with_inner(pair, joined_body(pair), inner)
    return dataclasses.replace(choose(turn_of(pair, device), ns_per_byte), inner=inner)
