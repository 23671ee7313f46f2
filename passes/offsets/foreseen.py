"""The heap that XLA would make of a program's buffers, before there is a schedule of XLA's to replay.

What is alive at once is only a bound from below: XLA places the largest values first, and a small one that
is kept for long has to lie above all large ones that come and go meanwhile. A plan whose activations reach
the budget in one layer and whose logits do in another needed 4.0 GiB in an H200's heap, of 3.3 alive (Gemma).

Invariant: never less than what is alive at once of the values that count (see `LEAST_SHARE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.backend import Backend
from passes.ir import Program
from passes.liveness import LiveRanges
from passes.offsets.xla_heap import PACKERS, Interval
from passes.simulate import Timeline

# Values smaller than this share of the peak are left out: they fit in holes, and there are many of them.
LEAST_SHARE = 1 / 2000


def holes_bytes(program: Program, timeline: Timeline, backend: Backend) -> int:
    """What XLA's heap takes beyond what is alive at once.

    Args:
        program: as XLA is expected to see it.
        timeline: of its ops, each once, in their order.
        backend: whose heap it is.

    Complexity: quadratic in the values that count, in numpy.
    """
    least_bytes = int(timeline.peak_bytes * LEAST_SHARE)
    intervals = _intervals(program, timeline.ranges, least_bytes)
    key = len(timeline.ranges.buffer)
    intervals += [
        Interval(key=key + k, nbytes=op.workspace_bytes, start=k, end=k, group=key + k, leads=True)
        for k, op in enumerate(program.ops)
        if op.workspace_bytes > least_bytes
    ]
    if not intervals:
        return 0
    return max(0, PACKERS[backend.heap](intervals, backend.alignment).size - timeline.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Storage of a result, in which other values may be until it is made.

    Attributes:
        nbytes: of the result.
        until: the op that makes it, or what lies where it will be.
    """

    nbytes: int
    until: int


def in_results_bytes(program: Program, timeline: Timeline, rooms: Sequence[Room]) -> int:
    """By how much less XLA's temporaries need, since some of them are in the storage of results until these
    are made: of all values the largest first, each in the first room that is large enough and free.

    Source: `BufferAssigner` of openxla/xla, which looks for a place in what results take before its heap.
    Args are those of `holes_bytes`.
    """
    if not rooms:
        return 0
    least_bytes = int(timeline.peak_bytes * LEAST_SHARE)
    groups: dict[int, list[Interval]] = {}
    for interval in _intervals(program, timeline.ranges, least_bytes):
        groups.setdefault(interval.group, []).append(interval)
    taken: list[list[tuple[int, int]]] = [[] for _ in rooms]
    live_bytes = timeline.live_bytes.copy()
    for group in sorted(groups.values(), key=lambda group: -max(i.nbytes for i in group)):
        start, end = min(i.start for i in group), max(i.end for i in group)
        nbytes = max(i.nbytes for i in group)
        for room, others in zip(rooms, taken, strict=True):
            is_free = all(end < first or last < start for first, last in others)
            if nbytes <= room.nbytes and end < room.until and is_free:
                others.append((start, end))
                given_bytes = np.zeros_like(live_bytes)
                for interval in group:
                    # A branch has its peak before its results are there.
                    first = interval.start + (program.ops[interval.start].name == "cond")
                    there = given_bytes[first : interval.end + 1]
                    np.maximum(there, interval.nbytes, out=there)
                live_bytes -= given_bytes
                break
    return max(0, timeline.peak_bytes - int(live_bytes.max(initial=0)))


def _intervals(program: Program, ranges: LiveRanges, least_bytes: int) -> list[Interval]:
    """The live ranges of more than `least_bytes`; what takes a dying one's place is of its group."""
    groups: list[int] = []
    found: list[Interval] = []
    for k, (buffer, start, stop) in enumerate(zip(ranges.buffer, ranges.start, ranges.stop, strict=True)):
        place = ranges.place[k]
        groups.append(k if place < 0 else groups[place])
        nbytes = program.buffers[buffer].nbytes
        if nbytes > least_bytes and stop > start:
            found.append(
                Interval(key=k, nbytes=nbytes, start=start, end=stop - 1, group=groups[k], leads=False)
            )
    leaders: dict[int, Interval] = {}
    for interval in found:
        known = leaders.setdefault(interval.group, interval)
        if interval.nbytes > known.nbytes:
            leaders[interval.group] = interval
    return [replace(interval, leads=leaders[interval.group] is interval) for interval in found]
