"""Static allocation: items with fixed lifetimes, to be placed in a given number of bytes.

An item is one or more spans that share an offset (a chain of live ranges that take each other's places); no
two of them are at one time (`disjoint`).
Lifetimes are half-open. `check_packing` is the plain quadratic check, which knows only the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes that an item holds from time `start` until before time `stop`."""

    start: int
    stop: int
    nbytes: int


Item = tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Items to be placed.

    Attributes:
        items: what is placed.
        capacity_bytes: where the highest one may end, the ground included; None for wherever it ends.
        ground_bytes: what lies below all of them, such as a program's arguments.
    """

    items: Sequence[Item]
    capacity_bytes: int | None
    ground_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What the items may take."""
        assert self.capacity_bytes is not None, "only asked where best fit does not do"
        return self.capacity_bytes - self.ground_bytes

    def holds(self, height_bytes: int) -> bool:
        """True if items that end at a height above the ground keep the capacity."""
        return self.capacity_bytes is None or height_bytes <= self.room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What is known about a problem.

    Attributes:
        fits: True with offsets, False if it is proved that there are none, None if neither is known.
        offsets: for every item its byte offset; empty without a packing.
        method: what found or proved it: "live bytes", "sweep" or "cp-sat"; "" for nothing.
        seconds: wall time.
    """

    fits: bool | None
    offsets: tuple[int, ...]
    method: str
    seconds: float


def disjoint(spans: Sequence[Span]) -> Item:
    """An item's spans cut so that no two are at one time; where several are, the most bytes count."""
    times = sorted({time for span in spans for time in (span.start, span.stop)})
    pieces: list[Span] = []
    for start, stop in pairwise(times):
        nbytes = max((span.nbytes for span in spans if span.start <= start < span.stop), default=0)
        if pieces and pieces[-1].stop == start and pieces[-1].nbytes == nbytes:
            start = pieces.pop().start
        pieces.append(Span(start=start, stop=stop, nbytes=nbytes))
    return tuple(pieces)


def apart(items: Sequence[Item]) -> list[list[int]]:
    """Indices of the items in groups; no item of one group is alive between start and stop of another."""
    spans = [[span for span in item if span.start < span.stop and span.nbytes] for item in items]
    lives = [(min((s.start for s in own), default=0), max((s.stop for s in own), default=0)) for own in spans]
    groups: list[list[int]] = []
    reach: int | None = None
    for i in sorted(range(len(items)), key=lambda i: (lives[i], i)):
        if reach is None or lives[i][0] >= reach:
            groups.append([])
            reach = lives[i][1]
        groups[-1].append(i)
        reach = max(reach, lives[i][1])
    return [sorted(group) for group in groups]


def live_bytes(items: Sequence[Item]) -> int:
    """The most bytes alive at once: no packing needs less."""
    changes: dict[int, int] = {}
    for item in items:
        for span in item:
            if span.start < span.stop:
                changes[span.start] = changes.get(span.start, 0) + span.nbytes
                changes[span.stop] = changes.get(span.stop, 0) - span.nbytes
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)


def height_bytes(items: Sequence[Item], offsets: Sequence[int]) -> int:
    """The end of the highest span."""
    ends = (offset + span.nbytes for item, offset in zip(items, offsets, strict=True) for span in item)
    return max(ends, default=0)


def check_packing(items: Sequence[Item], offsets: Sequence[int], capacity_bytes: int) -> None:
    """Check that everything lies in the capacity and nothing overlaps in time and bytes; O(spans ** 2).

    Raises:
        ValueError: a sentence that says what is wrong.
    """
    if len(items) != len(offsets):
        raise ValueError(f"there are {len(items)} items and {len(offsets)} offsets")
    placed = []
    for index, (item, offset) in enumerate(zip(items, offsets, strict=True)):
        for span in item:
            if offset < 0 or offset + span.nbytes > capacity_bytes:
                raise ValueError(
                    f"item {index} lies at bytes {offset} to {offset + span.nbytes} of {capacity_bytes}"
                )
            placed.append((index, span, offset))
    for (one, a, low), (two, b, other_low) in combinations(placed, 2):
        meet = a.start < b.stop and b.start < a.stop
        if one != two and meet and low < other_low + b.nbytes and other_low < low + a.nbytes:
            raise ValueError(
                f"items {one} and {two} overlap: bytes {low} to {low + a.nbytes} in times {a.start} to "
                f"{a.stop}, and bytes {other_low} to {other_low + b.nbytes} in times {b.start} to {b.stop}"
            )
