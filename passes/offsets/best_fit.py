"""Placing a sequence of steps at byte offsets: best fit over live ranges, in two orders.

Follows the packing rule of XLA's heap: best fit by (size, duration) and by (duration, size), both
descending; the smaller heap wins, ties to the first. A copy that takes a dying input's place has its
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
from passes.liveness import Copies, Graph, IntArray, copies_of
from passes.offsets.packing import Span, disjoint
from passes.offsets.skyline import Bottleneck, Skyline
from passes.offsets.solver import MOST_ITEMS, LimitError, Sweep

MOST_TRIES = 1_000_000
MOST_STACKED = 4000
PASSES = 24
PASS_UNITS = 1_200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every copy lies.

    Attributes:
        offsets: for every step the byte offset of each output of that run, in the op's order.
        heap_bytes: end of the highest copy; never less than the peak of live bytes.
        page_offsets: for every page the byte offset at which its copy comes back.
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
    """Place all copies of a sequence of steps; O(copies ** 2) with small constants."""
    return place_graph(Graph.of(program), steps)


def place_graph(
    graph: Graph, steps: Sequence[int], limit_bytes: int | None = None, pages: Sequence[Page] = ()
) -> Placement:
    """`place` for callers that keep the `Graph` of a program.

    Args:
        limit_bytes: where best fit ends above it, pack from the ground up a few times, then search; where
            there are many copies, less or nothing of both.
    """
    copies = copies_of(graph, steps, pages)
    group, segments = copy_groups(graph, steps, copies)
    count = range(len(segments))
    orders = [
        sorted(count, key=lambda g: (*_key(segments[g]), g)),
        sorted(count, key=lambda g: (*_key(segments[g])[::-1], g)),
    ]
    best = min((_pack(segments, order) for order in orders), key=lambda found: _height(segments, found))
    if limit_bytes is not None:
        room_bytes = limit_bytes - graph.argument_bytes
        if _height(segments, best) > room_bytes:
            found, _, _ = _stacked(segments, room_bytes, PASSES)
            best = found or _searched(segments, room_bytes) or best
    heap_bytes = graph.argument_bytes + _height(segments, best)
    n_made = len(copies.buffer) - len(copies.page)
    back = {page: graph.argument_bytes + best[group[n_made + k]] for k, page in enumerate(copies.page)}
    return Placement(
        offsets=by_step(graph, steps, group, best),
        heap_bytes=heap_bytes,
        page_offsets=tuple(back[page] for page in sorted(back)),
    )


def stack_graph(graph: Graph, steps: Sequence[int], limit_bytes: int, passes: int) -> Stacked:
    """Pack all copies of a sequence of steps from the ground up; fewer passes where there are many."""
    group, segments = copy_groups(graph, steps, copies_of(graph, steps))
    found, bottlenecks, work = _stacked(segments, limit_bytes - graph.argument_bytes, passes)
    offsets = None if found is None else by_step(graph, steps, group, found)
    return Stacked(offsets=offsets, bottlenecks=bottlenecks, work=work)


def by_step(
    graph: Graph, steps: Sequence[int], group: Sequence[int], found: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The offset of each output of every step, from those of the groups above the arguments."""
    offsets: list[tuple[int, ...]] = []
    copy = 0
    for op in steps:
        n_outputs = len(graph.outputs[op])
        offsets.append(tuple(graph.argument_bytes + found[group[c]] for c in range(copy, copy + n_outputs)))
        copy += n_outputs
    return tuple(offsets)


def _stacked(
    segments: list[list[Span]], room_bytes: int, passes: int
) -> tuple[list[int] | None, tuple[Bottleneck, ...], int]:
    """Offsets of all groups within some bytes, None if not found; where that got stuck, and the work."""
    if len(segments) > MOST_STACKED:
        return None, (), 0
    stack = Skyline(segments)
    affordable = PASS_UNITS // max(1, len(stack.items) * stack.look_units)
    found = stack.solve(room_bytes, min(passes, affordable))
    return found, tuple(stack.bottlenecks), stack.work


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


def copy_groups(graph: Graph, steps: Sequence[int], copies: Copies) -> tuple[list[int], list[list[Span]]]:
    """The group of every copy, and the live ranges of every group; workspaces follow the copies."""
    n_made = len(copies.buffer) - len(copies.page)
    group = [-1] * len(copies.buffer)
    segments: list[list[Span]] = []
    for copy in sorted(range(len(group)), key=lambda c: (copies.start[c], c < n_made)):
        buffer = copies.buffer[copy]
        if copies.place[copy] >= 0:
            group[copy] = group[copies.place[copy]]
        else:
            group[copy] = len(segments)
            segments.append([])
        segments[group[copy]].append(
            Span(start=copies.start[copy], stop=copies.stop[copy], nbytes=graph.nbytes[buffer])
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
