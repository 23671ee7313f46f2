"""Packing from the ground up: at every step one of the items that can lie lowest, as scheduling rules choose.

A packing is a schedule whose machines are the sections of time, an item being a task that takes its bytes on
all the sections in which it is alive. So the rules of job shops work: of the items that can begin before any
other one can end (Giffler and Thompson 1960), the one comes next with the most bytes still to place above it
in one of its sections. An item is not placed where it would leave a section too little room: that is looked
at one step ahead. Where nothing can be placed any more, what is left of the section that has too little room
counts more in the next pass.

Invariant: what is placed has a skyline, one height for each section, and every item lies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passes.liveness import BoolArray, IntArray
from passes.offsets.packing import Item, Span

FloatArray = npt.NDArray[np.float64]

LOOK_UNITS, ROWS_PER_UNIT = 30, 500
NOTHING = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SkylineConfig:
    """How a pass looks ahead, and for how long; set by the GPT of `benchmarks.planners`.

    Attributes:
        looks: how many items, the most urgent first, are tried at a step.
        louder: what an item that was left over counts more in the next pass.
        noise: by how much weights vary from pass to pass.
        most_items: more are not packed this way.
        units: of work, shared by the passes.
    """

    looks: int = 6
    louder: float = 1.2
    noise: float = 0.03
    most_items: int = 4000
    units: int = 1_200_000


CONFIG = SkylineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Where a pass got stuck.

    Attributes:
        start, stop: the section, half-open.
        lacking_bytes: how much more capacity would have let one more item in.
    """

    start: int
    stop: int
    lacking_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked[Offsets]:
    """What a few passes came to.

    Attributes:
        offsets: where everything lies; None if no pass placed it all.
        bottlenecks: where each pass got stuck.
        work: done for it, in units of about a microsecond.
    """

    offsets: Offsets | None
    bottlenecks: tuple[Bottleneck, ...]
    work: int


def stack(items: Sequence[Item], capacity_bytes: int, passes: int) -> Stacked[list[int]]:
    """Pack items from the ground up: in fewer passes where there are many, in none where too many."""
    if len(items) > CONFIG.most_items:
        return Stacked(offsets=None, bottlenecks=(), work=0)
    skyline = Skyline(items)
    affordable = CONFIG.units // max(1, len(skyline.items) * skyline.look_units)
    offsets = skyline.solve(capacity_bytes, min(passes, affordable))
    return Stacked(offsets=offsets, bottlenecks=tuple(skyline.bottlenecks), work=skyline.work)


class Skyline:
    """One packing problem in sections, those in which most is alive.

    Attributes:
        start, stop: when every section begins and ends.
        load: bytes in every section.
        bottlenecks: where each pass of the last `solve` got stuck.
        work: done so far, in units of about a microsecond.
    """

    def __init__(self, items: Sequence[Sequence[Span]]) -> None:
        held = [[s for s in item if s.nbytes and s.start < s.stop] for item in items]
        self.count = len(items)
        self.items = [i for i, spans in enumerate(held) if spans]
        self.start, self.stop = _sections([s for spans in held for s in spans])
        self.first, self.heights = [], []
        self.load: IntArray = np.zeros(len(self.start) + 1, dtype=np.int64)
        for i in self.items:
            low, height = self._height(held[i])
            self.first.append(low)
            self.heights.append(height)
            self.load[low : low + len(height)] += height
        self.size: IntArray = np.asarray([height.max() for height in self.heights], dtype=np.int64)
        last = [low + len(height) for low, height in zip(self.first, self.heights, strict=True)]
        self._bounds: IntArray = np.asarray([self.first, last], dtype=np.int64).T.ravel()
        member = np.repeat(np.arange(len(self.items)), [len(height) for height in self.heights])
        section = np.concatenate([np.arange(a, b) for a, b in zip(self.first, last, strict=True)] or [member])
        self._members: IntArray = member[np.argsort(section, kind="stable")]
        self._first_member: IntArray = np.searchsorted(np.sort(section), np.arange(len(self.start)))
        self.bottlenecks: list[Bottleneck] = []
        self.work = 0

    def _height(self, spans: Sequence[Span]) -> tuple[int, IntArray]:
        """The first section of an item, and its bytes in that and the following ones."""
        begin, end = min(s.start for s in spans), max(s.stop for s in spans)
        low, high = np.searchsorted(self.start, (begin, end)).tolist()
        height = np.zeros(high - low, dtype=np.int64)
        for s in spans:
            a, b = np.searchsorted(self.start, (s.start, s.stop)).tolist()
            np.maximum(height[a - low : b - low], s.nbytes, out=height[a - low : b - low])
        return low, height

    @property
    def look_units(self) -> int:
        """Work of one look at all items that are left in all their sections."""
        return LOOK_UNITS + len(self._members) // ROWS_PER_UNIT

    def solve(self, capacity_bytes: int, passes: int, seed: int = 0) -> list[int] | None:
        """Offsets of all items within a capacity; None if no pass finds them, which proves nothing."""
        self.bottlenecks = []
        if self.load.max(initial=0) > capacity_bytes:
            return None
        random_number = np.random.default_rng(seed)
        weight = np.ones(len(self.items))
        for _ in range(passes):
            offsets, left = self._pass(capacity_bytes, weight)
            if not left.any():
                best = [0] * self.count
                for i, offset in zip(self.items, offsets.tolist(), strict=True):
                    best[i] = offset
                return best
            weight[left & self._meets(self.bottlenecks[-1])] *= CONFIG.louder
            weight *= random_number.uniform(1 - CONFIG.noise, 1 + CONFIG.noise, len(weight))
        return None

    def _meets(self, bottleneck: Bottleneck) -> BoolArray:
        """Which items are alive in a section."""
        low, high = np.searchsorted(self.start, (bottleneck.start, bottleneck.stop)).tolist()
        meets: BoolArray = (self._bounds[::2] < high) & (low < self._bounds[1::2])
        return meets

    def _pass(self, capacity_bytes: int, weight: FloatArray) -> tuple[IntArray, BoolArray]:
        """Place items until there are none or none fits; offsets, and what is left."""
        offsets = np.zeros(len(self.items), dtype=np.int64)
        left = np.ones(len(self.items), dtype=np.bool_)
        load, sky = self.load.copy(), np.zeros_like(self.load)
        low = offsets.copy()
        while left.any():
            most = np.maximum.reduceat(load, self._bounds)[::2]
            fits = np.flatnonzero(left & (low + most <= capacity_bytes))
            if len(fits):
                fits = fits[low[fits] < (low[fits] + self.size[fits]).min()]
            urgent = most[fits] * weight[fits] - low[fits]
            bottlenecks: list[tuple[int, int]] = []
            for i in fits[np.argsort(-urgent, kind="stable")[: CONFIG.looks]].tolist():
                a, b = self.first[i], self.first[i] + len(self.heights[i])
                before = sky[a:b].copy()
                sky[a:b] = low[i] + self.heights[i]
                load[a:b] -= self.heights[i]
                left[i] = False
                above = np.maximum.reduceat(sky, self._bounds)[::2]
                lacking_bytes, section = self._lacking(above, left, load, capacity_bytes)
                if lacking_bytes <= 0:
                    offsets[i], low = low[i], above
                    break
                bottlenecks.append((lacking_bytes, section))
                sky[a:b] = before
                load[a:b] += self.heights[i]
                left[i] = True
            else:
                self._note(*min(bottlenecks, default=self._lacking(low, left, load, capacity_bytes)))
                break
        return offsets, left

    def _lacking(
        self, low: IntArray, left: BoolArray, load: IntArray, capacity_bytes: int
    ) -> tuple[int, int]:
        """By how much the items that are left do not fit above the lowest of them, and where most."""
        self.work += self.look_units
        lowest = np.minimum.reduceat(np.where(left, low, NOTHING)[self._members], self._first_member)
        lacking = np.where(lowest < NOTHING, lowest + load[:-1] - capacity_bytes, -NOTHING)
        section = int(lacking.argmax())
        return int(lacking[section]), section

    def _note(self, lacking_bytes: int, section: int) -> None:
        start, stop = int(self.start[section]), int(self.stop[section])
        self.bottlenecks.append(Bottleneck(start=start, stop=stop, lacking_bytes=lacking_bytes))


def _sections(spans: Sequence[Span]) -> tuple[IntArray, IntArray]:
    """Where spans begin and the next ones do, without times all of whose spans are alive at the next, too."""
    starts = np.unique(np.asarray([s.start for s in spans], dtype=np.int64))
    stops = np.unique(np.asarray([s.stop for s in spans], dtype=np.int64))
    if not len(starts):
        return starts, starts
    until = np.append(starts[1:], stops[-1])
    ends = stops[np.minimum(np.searchsorted(stops, starts, side="right"), len(stops) - 1)]
    kept = ends <= until
    return starts[kept], until[kept]
