"""Placing a sequence of steps at byte offsets: best fit over live ranges, in two orders.

Follows the packing rule of XLA's heap: best fit by (size, duration) and by (duration, size), both
descending; the smaller heap wins, ties to the first. A live range that takes a dying input's place has its
offset: such a chain moves as one. Arguments lie at the bottom, workspaces are placed like values.
It does not model XLA's alias classes and allocation order (`passes.hlo` does).

Where a limit is given and missed, items are packed from the ground up (`passes.offsets.skyline`); where that
does not do either, the exact search has a few tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir import OpId, Page, Program
from passes.liveness import Graph, IntArray, LiveRanges, live_ranges
from passes.offsets.packing import Span, disjoint
from passes.offsets.skyline import Bottleneck, Skyline
from passes.offsets.solver import MOST_ITEMS, LimitError, Sweep

MOST_TRIES = 1_000_000
MOST_STACKED = 4000
PASSES = 24
PASS_UNITS = 1_200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every live range lies.

    Attributes:
        offsets: for every step the byte offset of each output of that run, in the op's order.
        heap_bytes: end of the highest live range; never less than the peak of live bytes.
        page_offsets: for every page the byte offset at which its live range comes back.
    """

    offsets: tuple[tuple[int, ...], ...]
    heap_bytes: int
    page_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """What packing from the ground up came to.

    Attributes:
        offsets: as in `Placement`; None if the limit was missed.
        bottlenecks: at which steps each pass got stuck.
        work: done for it, in units of about a microsecond.
    """

    offsets: tuple[tuple[int, ...], ...] | None
    bottlenecks: tuple[Bottleneck, ...]
    work: int


def place(program: Program, steps: Sequence[OpId]) -> Placement:
    """Place all live ranges of a sequence of steps; O(ranges ** 2) with small constants."""
    return place_graph(Graph.of(program), steps)


def place_graph(
    graph: Graph, steps: Sequence[int], limit_bytes: int | None = None, pages: Sequence[Page] = ()
) -> Placement:
    """`place` for callers that keep the `Graph` of a program.

    Args:
        limit_bytes: where best fit ends above it, pack from the ground up a few times, then search; where
            there are many live ranges, less or nothing of both.
    """
    ranges = live_ranges(graph, steps, pages)
    group, segments = range_groups(graph, steps, ranges)
    count = range(len(segments))
    orders = [
        sorted(count, key=lambda g: (*_key(segments[g]), g)),
        sorted(count, key=lambda g: (*_key(segments[g])[::-1], g)),
    ]
    best = min((_pack(segments, order) for order in orders), key=lambda offsets: _height(segments, offsets))
    if limit_bytes is not None:
        capacity_bytes = limit_bytes - graph.argument_bytes
        if _height(segments, best) > capacity_bytes:
            offsets, _, _ = _stacked(segments, capacity_bytes, PASSES)
            best = offsets or _searched(segments, capacity_bytes) or best
    heap_bytes = graph.argument_bytes + _height(segments, best)
    n_made = len(ranges.buffer) - len(ranges.page)
    back = {page: graph.argument_bytes + best[group[n_made + k]] for k, page in enumerate(ranges.page)}
    return Placement(
        offsets=by_step(graph, steps, group, best),
        heap_bytes=heap_bytes,
        page_offsets=tuple(back[page] for page in sorted(back)),
    )


def stack_graph(graph: Graph, steps: Sequence[int], limit_bytes: int, passes: int) -> Stacked:
    """Pack all live ranges of a sequence of steps from the ground up; fewer passes where there are many."""
    group, segments = range_groups(graph, steps, live_ranges(graph, steps))
    packed, bottlenecks, work = _stacked(segments, limit_bytes - graph.argument_bytes, passes)
    offsets = None if packed is None else by_step(graph, steps, group, packed)
    return Stacked(offsets=offsets, bottlenecks=bottlenecks, work=work)


def by_step(
    graph: Graph, steps: Sequence[int], group: Sequence[int], of_group: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The offset of each output of every step, from those of the groups above the arguments."""
    offsets: list[tuple[int, ...]] = []
    live_range = 0
    for op in steps:
        n_outputs = len(graph.outputs[op])
        offsets.append(
            tuple(
                graph.argument_bytes + of_group[group[c]] for c in range(live_range, live_range + n_outputs)
            )
        )
        live_range += n_outputs
    return tuple(offsets)


def _stacked(
    segments: list[list[Span]], capacity_bytes: int, passes: int
) -> tuple[list[int] | None, tuple[Bottleneck, ...], int]:
    """Offsets of all groups within some bytes, None if not found; where that got stuck, and the work."""
    if len(segments) > MOST_STACKED:
        return None, (), 0
    stack = Skyline(segments)
    affordable = PASS_UNITS // max(1, len(stack.items) * stack.look_units)
    packed = stack.solve(capacity_bytes, min(passes, affordable))
    return packed, tuple(stack.bottlenecks), stack.work


def _searched(segments: list[list[Span]], limit_bytes: int) -> list[int] | None:
    """Offsets that end within a limit, by the exact search; None if it finds none."""
    if len(segments) > MOST_ITEMS:
        return None
    try:
        return Sweep([tuple(group) for group in segments], limit_bytes).solve(
            MOST_TRIES // max(1, len(segments))
        )
    except LimitError:
        return None


def range_groups(
    graph: Graph, steps: Sequence[int], ranges: LiveRanges
) -> tuple[list[int], list[list[Span]]]:
    """The group of every live range, and the spans of every group; workspaces come last."""
    n_made = len(ranges.buffer) - len(ranges.page)
    group = [-1] * len(ranges.buffer)
    segments: list[list[Span]] = []
    for live_range in sorted(range(len(group)), key=lambda c: (ranges.start[c], c < n_made)):
        buffer = ranges.buffer[live_range]
        if ranges.place[live_range] >= 0:
            group[live_range] = group[ranges.place[live_range]]
        else:
            group[live_range] = len(segments)
            segments.append([])
        segments[group[live_range]].append(
            Span(start=ranges.start[live_range], stop=ranges.stop[live_range], nbytes=graph.nbytes[buffer])
        )
    for position, op in enumerate(steps):
        if graph.workspace_bytes[op]:
            nbytes = graph.workspace_bytes[op]
            segments.append([Span(start=position, stop=position + 1, nbytes=nbytes)])
    return group, [list(disjoint(spans)) for spans in segments]


def _key(group: list[Span]) -> tuple[int, int]:
    """(-size, -duration): ascending order is largest first."""
    return -max(s.nbytes for s in group), -(max(s.stop for s in group) - min(s.start for s in group))


def _height(segments: list[list[Span]], offsets: list[int]) -> int:
    ends = [offsets[g] + s.nbytes for g, group in enumerate(segments) for s in group]
    return max(ends, default=0)


def _pack(segments: list[list[Span]], order: Sequence[int]) -> list[int]:
    """Best fit in the given order of groups; returns the offset of every group."""
    count = sum(len(group) for group in segments)
    placed = np.zeros((4, count), dtype=np.int64)
    offsets = [0] * len(segments)
    done = 0
    for g in order:
        offset = _best_offset(segments[g], placed[:, :done])
        offsets[g] = offset
        for s in segments[g]:
            if s.nbytes:
                placed[:, done] = (s.start, s.stop, offset, s.nbytes)
                done += 1
    return offsets


def _best_offset(group: list[Span], placed: IntArray) -> int:
    """The start of the tightest gap that holds the group, the lowest on ties, else above everything.

    An offset is forbidden if a segment of the group would overlap a placed one in time and bytes.
    """
    lows, highs = [], []
    start, stop, offset, nbytes = placed
    for s in group:
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
