"""An exact packer: depth-first search over items in the order of their offsets, section by section.

After MiniMalloc (ASPLOS 2023), with more inference. Time is cut into sections in which the same items are
alive. Items are placed from low to high offsets, each at the lowest offset that what is placed leaves it:

canonical   offsets never fall from one placement to the next, ties in the order of `rank`; every item
            stands on the ground or on another one. An item that is passed over, or that can no longer stand
            on what is placed, will stand on one that is left: that raises the lowest offset it can have.
dominance   no item is placed so high that another one that is left would fit below it.
heads       in every section the items that are left fit above any height which they cannot go below.
not first   an item above whose lowest offset a section's items do not fit has another one of them below it.
hatless     an item with nothing left above it is placed once: no other choice can be better.
parts       sections that no item that is left joins any more are solved one by one, the tightest first.
memory      what is left, and how high it must lie, is searched once.

A search that ends without a placement is a proof. Parts that are apart from the start are searched one
after another; for each some orders of `rank` take turns, each with a growing limit of tries.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.liveness import BoolArray, IntArray
from passes.offsets.packing import Item

MOST_ITEMS = 400
FIRST_TRIES = 300
ORDERS = 6
TURN_TRIES = ORDERS * FIRST_TRIES
MORE = 5
SHARP_TURNS = 2
BLUR = 0.15
MOST_REMEMBERED = 20_000
NONE_LEFT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Left:
    """What is left to place.

    Attributes:
        items: ascending.
        low: for each the lowest offset that it can have.
        stand: for each the height of what is placed below it.
        least, rank: offset and rank of what was placed last, (0, -1) for nothing.
    """

    items: IntArray
    low: IntArray
    stand: IntArray
    least: int
    rank: int

    def key(self) -> bytes:
        """What a search depends on besides `least` and `rank`."""
        return b"".join((self.items.tobytes(), self.low.tobytes(), self.stand.tobytes()))


class LimitError(Exception):
    """The limit of tries is reached, or somebody else has the answer."""


class Sweep:
    """One problem in sections.

    Attributes:
        held: bytes of every item in every section, shape (sections, items).
        first, last: the first and the last section of every item.
        time: how long every item is alive.
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
        spans = [sum(span.stop - span.start for span in item) for item in items]
        self.time: IntArray = np.asarray(spans, dtype=np.int64)
        self.tries = 0
        self._limit = 0
        self._rank = np.arange(len(items))
        self._offsets = [0] * len(items)
        self._failed: dict[bytes, tuple[int, int]] = {}
        self._found: dict[bytes, list[int]] = {}

    def solve(self, max_tries: int, first_turn: int = 0) -> list[int] | None:
        """Offsets of all items; None if it is proved that there are none.

        Args:
            max_tries: of all calls together.
            first_turn: the turn of the orders to begin with.

        Raises:
            LimitError: neither is known after `max_tries` placements, or `stop` says so.
        """
        if self.held.sum(axis=1).max(initial=0) > self.capacity_bytes:
            return None
        active = np.flatnonzero(self.size > 0)
        ground = np.zeros(len(active), dtype=np.int64)
        start = _Left(items=active, low=ground, stand=ground, least=0, rank=-1)
        if not all(self._solve_part(part, max_tries, first_turn) for part in self._parts(start)):
            return None
        return list(self._offsets)

    def _solve_part(self, part: _Left, max_tries: int, first_turn: int) -> bool:
        """Whether a part that was apart from the start can be placed; `_offsets` then says how."""
        for turn in itertools.count(first_turn):
            for order in self._orders(part.items, turn):
                self._rank[order] = np.arange(len(order))
                self._limit = min(max_tries, self.tries + FIRST_TRIES * MORE**turn)
                self._failed.clear()
                self._found.clear()
                try:
                    return self._place(part)
                except LimitError:
                    if self.stop() or self.tries >= max_tries:
                        raise
        raise AssertionError("turns do not end")

    def _orders(self, items: IntArray, turn: int) -> list[IntArray]:
        """Items by what is hard to place; after some turns the keys are blurred, each turn anew."""
        held = self.held[:, items]
        alive = held > 0
        width, area, meets = alive.sum(axis=0), held.sum(axis=0), (self.lift[items] > 0).sum(axis=1)
        total = np.where(alive, held.sum(axis=1)[:, None], 0).max(axis=0, initial=0)
        time, space = self.time[items], self.time[items] * self.size[items]
        orders = (
            (area, total, width),
            (total, width, area),
            (total, meets, width),
            (width, total, area),
            (meets, total, area),
            (space, total, time),
        )
        if turn >= SHARP_TURNS:
            blur = np.random.default_rng(turn).uniform(1 - BLUR, 1 + BLUR, size=(ORDERS, len(items)))
        else:
            blur = np.ones((ORDERS, 1))
        return [
            items[np.lexsort([-(k * factor) for k in reversed(keys)])]
            for keys, factor in zip(orders, blur, strict=True)
        ]

    def _place(self, left: _Left) -> bool:
        """Place what is left, part by part where sections have come apart."""
        parts = self._parts(left)
        for part in parts:
            key = part.key()
            if key in self._found:
                for i, offset in zip(part.items.tolist(), self._found[key], strict=True):
                    self._offsets[i] = offset
                continue
            failed = self._failed.get(key)
            if failed is not None and failed <= (part.least, part.rank):
                return False
            if not self._search(part):
                if len(self._failed) < MOST_REMEMBERED:
                    self._failed[key] = (part.least, part.rank)
                return False
            if len(parts) > 1:
                self._found[key] = [self._offsets[i] for i in part.items.tolist()]
        return True

    def _parts(self, left: _Left) -> list[_Left]:
        """Groups of items that share no section, the one with the least slack first."""
        first = self.first[left.items]
        order = np.argsort(first, kind="stable")
        reach = np.maximum.accumulate(self.last[left.items][order])
        breaks = np.flatnonzero(first[order][1:] > reach[:-1]) + 1
        if not len(breaks):
            return [left] if len(order) else []
        found = [self._part(left, np.sort(chosen)) for chosen in np.split(order, breaks)]
        return sorted(found, key=lambda part: (self._slack(part), len(part.items)))

    def _part(self, left: _Left, chosen: IntArray) -> _Left:
        """Some of what is left, as if nothing was placed before."""
        items, low, stand = left.items[chosen], left.low[chosen], left.stand[chosen]
        return _Left(items=items, low=low, stand=stand, least=0, rank=-1)

    def _held(self, items: IntArray) -> IntArray:
        """Bytes of some items in the sections that they reach over, shape (sections, items)."""
        return self.held[int(self.first[items].min()) : int(self.last[items].max()) + 1, items]

    def _slack(self, left: _Left) -> int:
        """Bytes to spare in the fullest section."""
        held = self._held(left.items)
        floor = np.where(held > 0, left.low, NONE_LEFT).min(axis=1)
        spare = self.capacity_bytes - held.sum(axis=1) - floor
        return int(spare[floor < NONE_LEFT].min())

    def _search(self, left: _Left) -> bool:
        """Place one of the items, and then the others."""
        items, low, ranks = left.items, left.low, self._rank[left.items]
        total = self._held(items).sum(axis=1)
        highest = int((self.capacity_bytes - total)[total > 0].min())
        below = int((left.stand + self.size[items]).min())
        later = (low > left.least) | ((low == left.least) & (ranks > left.rank))
        chosen = np.flatnonzero(later & (low == left.stand) & (low < below) & (low <= highest))
        for k in chosen[np.lexsort((ranks[chosen], low[chosen]))].tolist():
            self._count()
            item = int(items[k])
            self._offsets[item] = int(low[k])
            if len(items) == 1:
                return True
            rest = self._after(left, k)
            if rest is not None and self._place(rest):
                return True
            if not self.lift[item, items].any():
                break
        return False

    def _after(self, left: _Left, k: int) -> _Left | None:
        """What is left once item `k` of what is left lies at its lowest offset; None if it cannot fit."""
        others = np.arange(len(left.items)) != k
        items, low, stand = left.items[others], left.low[others], left.stand[others]
        item, offset = left.items[k], int(left.low[k])
        lift = self.lift[item, items]
        top = np.where(lift > 0, offset + lift, 0)
        stand = np.maximum(stand, top)
        rest = _Left(
            items=items,
            low=np.maximum(low, top),
            stand=stand,
            least=offset,
            rank=int(self._rank[item]),
        )
        return self._inferred(rest)

    def _inferred(self, left: _Left) -> _Left | None:
        """The same with lowest offsets raised as far as the rules tell; None if something cannot fit."""
        held = self._held(left.items)
        ranks = self._rank[left.items]
        low = left.low
        while True:
            reach = np.maximum(low, left.least)
            if self._overflows(held, reach):
                return None
            passed = (low < left.least) | ((low == left.least) & (ranks < left.rank)) | (low > left.stand)
            raised = np.maximum(
                self._above_others(left.items, reach, passed, low), self._not_first(held, reach)
            )
            if (raised >= NONE_LEFT).any():
                return None
            if (raised <= low).all():
                return dataclasses.replace(left, low=low)
            low = np.maximum(low, raised)

    def _overflows(self, held: IntArray, reach: IntArray) -> bool:
        """Whether some items of a section do not fit above the lowest of their offsets."""
        order = np.argsort(reach, kind="stable")
        sorted_held = held[:, order]
        ends = reach[order] + sorted_held[:, ::-1].cumsum(axis=1)[:, ::-1]
        return bool(((ends > self.capacity_bytes) & (sorted_held > 0)).any())

    def _above_others(self, items: IntArray, reach: IntArray, passed: BoolArray, low: IntArray) -> IntArray:
        """Lowest offsets with those of `passed` raised: each stands on one of the other items."""
        raised = low.copy()
        rows = np.flatnonzero(passed)
        if len(rows):
            lift = self.lift[np.ix_(items, items[rows])]
            raised[rows] = np.where(lift > 0, reach[:, None] + lift, NONE_LEFT).min(axis=0)
        return raised

    def _not_first(self, held: IntArray, reach: IntArray) -> IntArray:
        """How low every item can be where it cannot be the lowest of a section."""
        late = (held > 0) & (reach + held.sum(axis=1)[:, None] > self.capacity_bytes)
        rows = np.flatnonzero(late.any(axis=1))
        if not len(rows):
            return np.zeros_like(reach)
        tops = np.where(held[rows] > 0, reach + held[rows], NONE_LEFT)
        two = np.partition(tops, 1, axis=1)[:, :2]
        others = np.where(tops == two[:, :1], two[:, 1:], two[:, :1])
        return np.where(late[rows], others, 0).max(axis=0)

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
