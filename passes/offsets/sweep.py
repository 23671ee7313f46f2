"""An exact packer: depth-first search over items in the order of their offsets, section by section.

After MiniMalloc (ASPLOS 2023). Time is cut into sections in which the same items are alive. Items are
placed from low to high offsets, each at the lowest offset that what is placed leaves it:

canonical   offsets never fall from one placement to the next, ties in the order of `rank`.
dominance   no item is placed so high that another one that is left would fit below it.
inference   in every section the floor (the lowest offset of an item that is left, and no lower than the
            last placement) and the bytes that are left must not exceed the capacity.
hatless     an item with nothing left above it is placed once: no other choice can be better.
parts       sections that no item that is left joins any more are solved one by one, the tightest first,
            and what is known about such a part is remembered.

A search that ends without a placement is a proof. Some orders of `rank` take turns, each with a growing
limit of tries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from passes.liveness import IntArray
from passes.offsets.packing import Item

MOST_ITEMS = 400
FIRST_TRIES = 600
MORE = 30
NONE_LEFT = 1 << 62

BoolArray = npt.NDArray[np.bool_]


class LimitError(Exception):
    """The limit of tries is reached, or somebody else has the answer."""


class Sweep:
    """One problem in sections.

    Attributes:
        held: bytes of every item in every section, shape (sections, items).
        first, last: the first and the last section of every item.
        lift: how far above item `i`'s offset item `j` must lie, shape (items, items); 0 if they never meet.
        tries: placements tried so far.
    """

    def __init__(
        self, items: Sequence[Item], capacity_bytes: int, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.stop = stop
        self.held = _sections(items)
        alive = self.held > 0
        self.size: IntArray = self.held.max(axis=0, initial=0)
        self.first: IntArray = alive.argmax(axis=0)
        self.last: IntArray = len(alive) - 1 - alive[::-1].argmax(axis=0)
        meet = alive.T.astype(np.int64) @ alive.astype(np.int64) > 0
        self.lift = np.zeros((len(items), len(items)), dtype=np.int64)
        for i in range(len(items)):
            self.lift[i] = (self.held[:, i, None] * alive).max(axis=0, initial=0) * meet[i]
            self.lift[i, i] = 0
        self.tries = 0
        self._limit = 0
        self._rank = np.arange(len(items))
        self._offsets = [0] * len(items)
        self._known: dict[tuple[bytes, bytes], list[int] | None] = {}

    def solve(self, max_tries: int) -> list[int] | None:
        """Offsets of all items; None if it is proved that there are none.

        Raises:
            LimitError: neither is known after `max_tries` placements, or `stop` says so.
        """
        if self.held.sum(axis=1).max(initial=0) > self.capacity_bytes:
            return None
        active = np.flatnonzero(self.size > 0)
        tries = FIRST_TRIES
        while self.tries < max_tries:
            for order in self._orders():
                self._rank[order] = np.arange(len(order))
                self._limit = min(max_tries, self.tries + tries)
                self._known.clear()
                try:
                    zeros = np.zeros(len(self.size), dtype=np.int64)
                    found = self._solve_parts(active, zeros, 0, -1)
                    return list(self._offsets) if found else None
                except LimitError:
                    if self.stop():
                        raise
            tries *= MORE
        raise LimitError

    def _orders(self) -> list[IntArray]:
        """Items by what is hard to place: time taken, area, and the bytes of their fullest section."""
        width = self.last - self.first + 1
        area = self.held.sum(axis=0)
        total = np.where(self.held > 0, self.held.sum(axis=1)[:, None], 0).max(axis=0, initial=0)
        keys = ((area, width, total), (width, area, total), (total, width, area))
        return [np.lexsort([-k for k in reversed(key)]) for key in keys]

    def _solve_parts(self, items: IntArray, low: IntArray, least: int, rank: int) -> bool:
        """Place `items` at no less than their `low`; part by part where sections have come apart."""
        parts = self._parts(items, low)
        if len(parts) == 1:
            return self._place(items, low, least, rank)
        for part in parts:
            key = (part.tobytes(), low[part].tobytes())
            if key not in self._known:
                found = self._place(part, low, 0, -1)
                self._known[key] = [self._offsets[i] for i in part.tolist()] if found else None
            offsets = self._known[key]
            if offsets is None:
                return False
            for i, offset in zip(part.tolist(), offsets, strict=True):
                self._offsets[i] = offset
        return True

    def _parts(self, items: IntArray, low: IntArray) -> list[IntArray]:
        """Groups of items that share no section, the one with the least slack first."""
        if not len(items):
            return []
        order = items[np.argsort(self.first[items], kind="stable")]
        reach = np.maximum.accumulate(self.last[order])
        breaks = np.flatnonzero(self.first[order][1:] > reach[:-1]) + 1
        if not len(breaks):
            return [items]
        parts = [np.sort(part) for part in np.split(order, breaks)]
        return sorted(parts, key=lambda part: (self._slack(part, low), len(part)))

    def _slack(self, items: IntArray, low: IntArray) -> int:
        """Bytes to spare in the fullest section of some items."""
        left, floor = self._left(items, low[items])
        return int((self.capacity_bytes - left - floor)[left > 0].min())

    def _left(self, items: IntArray, low: IntArray) -> tuple[IntArray, IntArray]:
        """For the sections of some items the bytes left to place and the floor."""
        held = self.held[int(self.first[items].min()) : int(self.last[items].max()) + 1, items]
        left: IntArray = held.sum(axis=1)
        floor: IntArray = np.where(held > 0, low, NONE_LEFT).min(axis=1)
        return left, np.where(left > 0, floor, 0)

    def _place(self, items: IntArray, low: IntArray, least: int, rank: int) -> bool:
        """Place one of `items`, and then the others."""
        begin = int(self.first[items].min())
        held = self.held[begin : int(self.last[items].max()) + 1, items]
        alive = held > 0
        mine, left, ranks = low[items], held.sum(axis=1), self._rank[items]
        highest = int((self.capacity_bytes - left)[left > 0].min())
        below = int((mine + self.size[items]).min())
        later = (mine > least) | ((mine == least) & (ranks > rank))
        chosen = np.flatnonzero(later & (mine < below) & (mine <= highest))
        for k in chosen[np.lexsort((ranks[chosen], mine[chosen]))].tolist():
            self._count()
            item, offset = int(items[k]), int(mine[k])
            self._offsets[item] = offset
            if len(items) == 1:
                return True
            lift = self.lift[item, items]
            raised = np.where(lift > 0, np.maximum(mine, offset + lift), mine)
            if self._may_fit(alive, held, raised, left, offset, k):
                after = low.copy()
                after[items] = raised
                rest = np.delete(items, k)
                if self._solve_parts(rest, after, offset, int(ranks[k])):
                    return True
            if not lift.any():
                break
        return False

    def _may_fit(
        self, alive: BoolArray, held: IntArray, raised: IntArray, left: IntArray, offset: int, k: int
    ) -> bool:
        """Whether floor and bytes left are in the capacity in every section after placing item `k`."""
        lows = raised.copy()
        lows[k] = NONE_LEFT
        floor = np.maximum(np.where(alive, lows, NONE_LEFT).min(axis=1), offset)
        rest = left - held[:, k]
        return not bool(((floor + rest > self.capacity_bytes) & (rest > 0)).any())

    def _count(self) -> None:
        self.tries += 1
        if self.tries > self._limit or (self.tries % 64 == 0 and self.stop()):
            raise LimitError


def _sections(items: Sequence[Item]) -> IntArray:
    """Bytes of every item at every time at which one begins, without times that another one includes."""
    times = sorted({span.start for item in items for span in item if span.start < span.stop})
    held = np.zeros((len(times), len(items)), dtype=np.int64)
    at = np.asarray(times, dtype=np.int64)
    for i, item in enumerate(items):
        for span in item:
            held[(span.start <= at) & (at < span.stop), i] = span.nbytes
    kept = [k for k in range(len(times)) if k + 1 == len(times) or (held[k] > held[k + 1]).any()]
    return held[kept]
