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

from passes.ir import OpId, Program
from passes.liveness import Copies, Graph, IntArray, copies_of
from passes.offsets.packing import Span
from passes.offsets.skyline import Jam, Skyline
from passes.offsets.sweep import MOST_ITEMS, LimitError, Sweep

MOST_TRIES = 100_000
MOST_STACKED = 4000
PASSES, QUICK_PASSES = 30, 10
PASS_UNITS = 1_200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every copy lies.

    Attributes:
        offsets: for every step the byte offset of each output of that run, in the op's order.
        heap_bytes: end of the highest copy; never less than the peak of live bytes.
        jams: if the limit was missed, the steps at which packing from the ground up got stuck, pass by pass.
        work: of packing from the ground up, in units of about a microsecond.
    """

    offsets: tuple[tuple[int, ...], ...]
    heap_bytes: int
    jams: tuple[Jam, ...] = ()
    work: int = 0


def place(program: Program, steps: Sequence[OpId]) -> Placement:
    """Place all copies of a sequence of steps; O(copies ** 2) with small constants."""
    return place_graph(Graph.of(program), steps)


def place_graph(
    graph: Graph, steps: Sequence[int], limit_bytes: int | None = None, *, quick: bool = False
) -> Placement:
    """`place` for callers that keep the `Graph` of a program.

    Args:
        limit_bytes: where best fit ends above it, pack from the ground up a few times, then search; where
            there are many copies, less or nothing of both.
        quick: fewer passes, and no search.
    """
    copies = copies_of(graph, steps)
    group, segments = copy_groups(graph, steps, copies)
    count = range(len(segments))
    orders = [
        sorted(count, key=lambda g: (*_key(segments[g]), g)),
        sorted(count, key=lambda g: (*_key(segments[g])[::-1], g)),
    ]
    best = min((_pack(segments, order) for order in orders), key=lambda found: _height(segments, found))
    base = graph.argument_bytes
    jams: list[Jam] = []
    work = 0
    if limit_bytes is not None and _height(segments, best) > limit_bytes - base:
        found = None
        if len(segments) <= MOST_STACKED:
            stack = Skyline(segments)
            pass_units = max(1, len(stack.items) * stack.look_units)
            passes = min(QUICK_PASSES if quick else PASSES, PASS_UNITS // pass_units)
            found = stack.solve(limit_bytes - base, passes)
            jams, work = stack.jams, stack.work
        if found is None and not quick:
            found = _searched(segments, limit_bytes - base)
        best = found or best
    offsets: list[tuple[int, ...]] = []
    copy = 0
    for op in steps:
        n_outputs = len(graph.outputs[op])
        offsets.append(tuple(base + best[group[c]] for c in range(copy, copy + n_outputs)))
        copy += n_outputs
    return Placement(
        offsets=tuple(offsets), heap_bytes=base + _height(segments, best), jams=tuple(jams), work=work
    )


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
    group: list[int] = []
    segments: list[list[Span]] = []
    for copy, buffer in enumerate(copies.buffer):
        if copies.place[copy] >= 0:
            group.append(group[copies.place[copy]])
        else:
            group.append(len(segments))
            segments.append([])
        segments[group[copy]].append(
            Span(start=copies.start[copy], stop=copies.stop[copy], nbytes=graph.nbytes[buffer])
        )
    for position, op in enumerate(steps):
        if graph.workspace_bytes[op]:
            nbytes = graph.workspace_bytes[op]
            segments.append([Span(start=position, stop=position + 1, nbytes=nbytes)])
    return group, segments


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
