"""Pack intervals tighter than XLA does: best fit in several orders, a search, then what sticks out first.

The result is never larger than XLA's own packing of the same intervals. It stops as soon as the heap is as
small as what is alive at once. Work is limited in rounds and tries, so the result does not depend on the
machine.
"""

from __future__ import annotations

from passes.offsets.packing import Item, Span, disjoint
from passes.offsets.solver import MOST_ITEMS, search
from passes.offsets.xla_heap import HeapLayout, Interval, best_fit, xla_order

MAX_ROUNDS = 128
MAX_TRIES = 1800
_MAX_SEARCHES = 4
_MOST_WORK = 4_000_000


def live_bound(intervals: list[Interval], alignment: int) -> int:
    """No packing is smaller: the largest sum of bytes in use at once, the gaps of alignment included."""
    events: list[tuple[int, int, Interval]] = []
    for interval in intervals:
        if interval.nbytes:
            events += [(interval.start, 1, interval), (interval.end + 1, 0, interval)]
    events.sort(key=lambda e: e[:2])
    total = peak = 0
    alive: dict[int, int] = {}
    for _, starts, interval in events:
        padded = -(-interval.nbytes // alignment) * alignment
        if starts:
            total += padded
            alive[id(interval)] = padded - interval.nbytes
            # The topmost block needs no padding behind it.
            peak = max(peak, total - max(alive.values()))
        else:
            total -= padded
            del alive[id(interval)]
    return peak


def pack_tight(intervals: list[Interval], alignment: int, *, rounds: int = MAX_ROUNDS) -> HeapLayout:
    """Place every group of intervals within as few bytes as can be found.

    Args:
        intervals: as in `passes.offsets.xla_heap.pack`.
        alignment: of starts, in bytes.
        rounds: how many orders are tried after the first three; fewer than `MAX_ROUNDS` leave out the search.

    Complexity: O(n^2) in numpy for each round.
    """
    bound = live_bound(intervals, alignment)
    by_size = xla_order(intervals, temporal=False)
    area = sorted(by_size, key=lambda i: (-i.nbytes * (i.end - i.start + 1), i.key))
    best: HeapLayout | None = None
    best_order: list[Interval] = []
    for order in (by_size, xla_order(intervals, temporal=True), area):
        packed = best_fit(intervals, alignment, order)
        if best is None or packed.size < best.size:
            best, best_order = packed, order
    assert best is not None, "three orders were tried"
    if rounds >= MAX_ROUNDS:
        packed = _searched(intervals, alignment, best, bound)
        if packed.size <= bound + alignment:
            return packed
        best = min(packed, best, key=lambda layout: layout.size)
    most = min(rounds, _MOST_WORK // max(1, len(intervals) ** 2))
    return _improved(intervals, alignment, best, best_order, bound, most)


def _searched(intervals: list[Interval], alignment: int, best: HeapLayout, bound: int) -> HeapLayout:
    """The exact search for ever less room below `best`: the bound first, then halfway between."""
    groups = list(dict.fromkeys(i.group for i in intervals))
    if best.size <= bound or len(groups) > MOST_ITEMS:
        return best
    items = _items(intervals, groups, alignment)
    low, high = -(-bound // alignment), -(-best.size // alignment)
    capacity = low
    for _ in range(_MAX_SEARCHES):
        if capacity >= high:
            break
        packed = search(items, capacity, MAX_TRIES)
        if packed is None:
            low = capacity + 1
        else:
            offsets = {g: alignment * at for g, at in zip(groups, packed, strict=True)}
            size = max(offsets[i.group] + i.nbytes for i in intervals)
            if size < best.size:
                best = HeapLayout(size=size, offsets=offsets)
            high = capacity
        capacity = (low + high) // 2
    return best


def _items(intervals: list[Interval], groups: list[int], alignment: int) -> list[Item]:
    """The groups with their lives on a half-open clock, in units of the alignment."""
    spans: dict[int, list[Span]] = {g: [] for g in groups}
    for i in intervals:
        units = -(-i.nbytes // alignment)
        spans[i.group].append(Span(start=i.start, stop=i.end + 1, nbytes=units))
    return [disjoint(spans[g]) for g in groups]


def _improved(
    intervals: list[Interval],
    alignment: int,
    best: HeapLayout,
    order: list[Interval],
    bound: int,
    rounds: int,
) -> HeapLayout:
    """Again and again place the groups that end at the top earlier."""
    layout, step = best_fit(intervals, alignment, order), 0
    while best.size > bound and step < rounds:
        step += 1
        top = [i for i in order if layout.offsets[i.group] + i.nbytes == layout.size]
        at = min(order.index(i) for i in top)
        # A little earlier at first, to the very front now and then.
        goal = 0 if step % 8 == 0 else at // 2
        rest = [i for i in order if i not in top]
        order = rest[:goal] + top + rest[goal:]
        layout = best_fit(intervals, alignment, order)
        if layout.size < best.size:
            best = layout
    return best
