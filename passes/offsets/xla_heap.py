"""XLA's packing of temporaries: a deterministic best fit, run in two orders; the smaller heap wins.

Input is what XLA's heap simulator hands to its packer (public source, `heap_simulator.cc`): intervals on a
clock of events and the groups that must share an offset. An interval takes the smallest free gap, over its
own time and that of its group, that holds it; on ties the lowest offset. Only starts are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FAR = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One value on the event clock.

    Attributes:
        key: breaks ties; XLA's value id.
        nbytes: size of the storage.
        start, end: first and last event, both included.
        group: index of the storage it belongs to.
        leads: True for the value that was allocated (the others of the group follow it).
    """

    key: int
    nbytes: int
    start: int
    end: int
    group: int
    leads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapLayout:
    """Where every group sits. `offsets[g]` is in bytes, `size` is the end of the highest one."""

    size: int
    offsets: dict[int, int]


class _Placed:
    """The intervals placed so far, as arrays, for overlap queries."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.start = np.zeros(capacity, np.int64)
        self.end = np.zeros(capacity, np.int64)
        self.offset = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)

    def add(self, member: Interval, offset: int, nbytes: int) -> None:
        n = self.count
        self.start[n], self.end[n] = member.start, member.end
        self.offset[n], self.limit[n] = offset, offset + nbytes
        self.count = n + 1

    def overlapping(self, members: list[Interval]) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and ends of placed intervals that are alive with one of `members`, by offset."""
        n = self.count
        start, end = self.start[:n], self.end[:n]
        hit = np.zeros(n, bool)
        for member in members:
            hit |= (start <= member.end) & (end >= member.start)
        offset, limit = self.offset[:n][hit], self.limit[:n][hit]
        order = np.argsort(offset, kind="stable")
        return offset[order], limit[order]


def _best_gap(offset: np.ndarray, limit: np.ndarray, nbytes: int, alignment: int) -> int:
    """The smallest gap between occupied ranges that holds `nbytes`; the lowest on ties."""
    if not offset.size:
        return 0
    top = np.concatenate(([0], np.maximum.accumulate(limit)))
    starts = -(-top // alignment) * alignment
    sizes = np.concatenate((offset, [_FAR])) - starts
    sizes[sizes < nbytes] = _FAR
    sizes[-1] = min(int(_FAR - starts[-1]), _FAR - 1)
    return int(starts[int(np.argmin(sizes))])


def xla_order(intervals: list[Interval], *, temporal: bool) -> list[Interval]:
    """The leaders, largest first, or longest-lived first if `temporal`."""
    leaders = [i for i in intervals if i.leads]
    if not temporal:
        return sorted(leaders, key=lambda i: (-i.nbytes, i.start - i.end, i.key))
    first, last = _lives(intervals)
    return sorted(leaders, key=lambda i: (first[i.group] - last[i.group], -i.nbytes, i.key))


def _lives(intervals: list[Interval]) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last event of every group."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in intervals:
        first[i.group] = min(first.get(i.group, i.start), i.start)
        last[i.group] = max(last.get(i.group, i.end), i.end)
    return first, last


def best_fit(intervals: list[Interval], alignment: int, leaders: list[Interval]) -> HeapLayout:
    """Place the groups in the order of their `leaders`, each in the tightest gap that is left for it."""
    members: dict[int, list[Interval]] = {}
    for interval in intervals:
        members.setdefault(interval.group, []).append(interval)
    placed = _Placed(len(intervals))
    offsets: dict[int, int] = {}
    size = 0
    for leader in leaders:
        group = members[leader.group]
        nbytes = max(m.nbytes for m in group)
        at = _best_gap(*placed.overlapping(group), nbytes, alignment) if nbytes else 0
        offsets[leader.group] = at
        size = max(size, at + nbytes)
        if nbytes:
            for member in group:
                placed.add(member, at, member.nbytes)
    return HeapLayout(size=size, offsets=offsets)


def pack(intervals: list[Interval], alignment: int) -> HeapLayout:
    """Place every group of intervals as XLA does.

    Args:
        intervals: values on the event clock; every group has exactly one leader.
        alignment: of starts, in bytes: 64 on CPU, 256 on GPU.

    Complexity: O(n^2) in numpy.
    """
    by_size = best_fit(intervals, alignment, xla_order(intervals, temporal=False))
    by_time = best_fit(intervals, alignment, xla_order(intervals, temporal=True))
    return by_time if by_time.size < by_size.size else by_size


def pack_in_time(intervals: list[Interval], alignment: int) -> HeapLayout:
    """Place every group of intervals when it comes alive, as XLA does on a TPU.

    A group takes the smallest hole that holds it among what is free then between others, the lowest on ties.
    Where none does, it starts at the end of what is taken: what is free there is no hole.

    Args:
        intervals: values on the event clock; every group has exactly one leader.
        alignment: of starts, in bytes.

    Complexity: O(n * holes).
    """
    events: list[tuple[int, bool, int]] = []
    nbytes: dict[int, int] = {}
    first, last = _lives(intervals)
    for i in intervals:
        nbytes[i.group] = max(nbytes.get(i.group, 0), i.nbytes)
    for group in nbytes:
        events += [(first[group], False, group), (last[group], True, group)]
    heap = Holes(alignment)
    offsets: dict[int, int] = {}
    size = 0
    for _, is_end, group in sorted(events):
        if not nbytes[group]:
            offsets[group] = 0
        elif is_end:
            heap.give(offsets[group])
        else:
            offsets[group] = heap.take(nbytes[group])
            size = max(size, offsets[group] + nbytes[group])
    return HeapLayout(size=size, offsets=offsets)


class Holes:
    """What is free in a heap that is packed in time order.

    Starts are aligned, sizes are not. What a value leaves of its hole stays free, but the next one starts
    where that is aligned: the bytes between are lost when it is placed, until both are free again.

    Attributes:
        alignment: of starts, in bytes.
        free: sorted ranges that nothing holds, neighbours joined; the last may be the heap's free end.
        end: of what was ever taken and not given back at the end.
        stops: of every value that is there, by its start: where it ends.
    """

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.free: list[tuple[int, int]] = []
        self.end = 0
        self.stops: dict[int, int] = {}

    def copy(self) -> Holes:
        """The same holes, to try something with."""
        other = Holes(self.alignment)
        other.free, other.end, other.stops = list(self.free), self.end, dict(self.stops)
        return other

    def aligned(self, at: int) -> int:
        """The next place at which a value may start."""
        return -(-at // self.alignment) * self.alignment

    @property
    def _ends_free(self) -> bool:
        """True if the last free range is the heap's free end."""
        return bool(self.free) and self.free[-1][1] == self.end

    @property
    def tail(self) -> int:
        """Where a value at the free end starts."""
        return self.aligned(self.free[-1][0] if self._ends_free else self.end)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """What is free between others, from where a value may start."""
        between = self.free[:-1] if self._ends_free else self.free
        return [(at, stop) for start, stop in between if (at := self.aligned(start)) < stop]

    def take(self, nbytes: int) -> int:
        """Where XLA places a value: in the smallest hole that holds it, the lowest on ties, or at the end."""
        fits = [(stop - start, start, stop) for start, stop in self.holes if nbytes <= stop - start]
        if fits:
            _, start, stop = min(fits)
            self.free = [hole for hole in self.free if hole[1] != stop]
            if start + nbytes < stop:
                self.free = sorted([*self.free, (start + nbytes, stop)])
        else:
            start = self.tail
            if self._ends_free:
                self.free.pop()
            self.end = start + nbytes
        self.stops[start] = start + nbytes
        return start

    def give(self, start: int) -> None:
        """A value that started there is dead."""
        stop, kept = self.stops.pop(start), []
        for low, high in self.free:
            if self.aligned(high) == start:
                start = low
            elif low in (stop, self.aligned(stop)):
                stop = high
            else:
                kept.append((low, high))
        self.free = sorted([*kept, (start, stop)])


PACKERS = {"largest first": pack, "in time order": pack_in_time}
