"""Best fit over live ranges, as XLA's heap does it: each item goes into the tightest gap that holds it.

Two orders are tried: by (size, duration) and by (duration, size), both descending; the smaller heap wins,
ties to the first. XLA's alias classes and order of allocation are not modelled here, but in
`passes.offsets.xla_heap`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.liveness import IntArray
from passes.offsets.packing import Item, height_bytes


def best_fit(items: Sequence[Item]) -> list[int]:
    """Offsets of all items, by the better one of the two orders; O(items ** 2) with small constants."""
    count = range(len(items))
    keys = [_key(item) for item in items]
    orders = [sorted(count, key=lambda i: (*keys[i], i)), sorted(count, key=lambda i: (*keys[i][::-1], i))]
    return min(
        (_in_order(items, order) for order in orders), key=lambda offsets: height_bytes(items, offsets)
    )


def _key(item: Item) -> tuple[int, int]:
    """(-size, -duration): ascending order is largest first."""
    return -max(s.nbytes for s in item), -(max(s.stop for s in item) - min(s.start for s in item))


def _in_order(items: Sequence[Item], order: Sequence[int]) -> list[int]:
    """Best fit in the given order of items."""
    count = sum(map(len, items))
    placed = np.zeros((4, count), dtype=np.int64)
    offsets = [0] * len(items)
    done = 0
    for i in order:
        offset = _best_offset(items[i], placed[:, :done])
        offsets[i] = offset
        for s in items[i]:
            if s.nbytes:
                placed[:, done] = (s.start, s.stop, offset, s.nbytes)
                done += 1
    return offsets


def _best_offset(item: Item, placed: IntArray) -> int:
    """The start of the tightest gap that holds an item, the lowest on ties, else above everything.

    An offset is forbidden if a span of the item would overlap a placed one in time and bytes.
    """
    lows, highs = [], []
    start, stop, offset, nbytes = placed
    for s in item:
        if s.nbytes:
            meets = np.flatnonzero((start < s.stop) & (s.start < stop))
            lows.append(offset[meets] - s.nbytes)
            highs.append(offset[meets] + nbytes[meets])
    low = np.concatenate(lows) if lows else start[:0]
    if not len(low):
        return 0
    order = np.argsort(low, kind="stable")
    low = low[order]
    reached = np.maximum.accumulate(np.concatenate(highs)[order])
    free_from = np.concatenate((np.zeros(1, dtype=np.int64), reached[:-1]))
    gap = low - free_from
    fits = np.flatnonzero(gap >= 0)
    if not len(fits):
        return int(reached[-1])
    return int(free_from[fits[np.argmin(gap[fits])]])
