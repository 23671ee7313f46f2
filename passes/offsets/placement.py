"""Placing a sequence of steps at byte offsets: its live ranges as a packing problem, and back.

A live range that takes a dying input's place has its offset: such a chain moves as one. Arguments lie at the
bottom, workspaces are placed like values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.ir import Page
from passes.liveness import Graph, LiveRanges, live_ranges
from passes.offsets.packers import pack
from passes.offsets.packing import Item, Problem, Span, disjoint, height_bytes
from passes.offsets.skyline import Stacked, stack


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


StepOffsets = tuple[tuple[int, ...], ...]


def place_graph(
    graph: Graph, steps: Sequence[int], limit_bytes: int | None = None, pages: Sequence[Page] = ()
) -> Placement:
    """Place all live ranges of a sequence of steps; O(ranges ** 2) with small constants.

    Args:
        limit_bytes: where best fit ends above it, pack from the ground up a few times, then search; where
            there are many live ranges, less or nothing of both.
    """
    ranges = live_ranges(graph, steps, pages)
    group, items = range_groups(graph, steps, ranges)
    problem = Problem(items=items, capacity_bytes=limit_bytes, ground_bytes=graph.argument_bytes)
    best = pack(problem)
    n_made = len(ranges.buffer) - len(ranges.page)
    back = {page: graph.argument_bytes + best[group[n_made + k]] for k, page in enumerate(ranges.page)}
    return Placement(
        offsets=by_step(graph, steps, group, best),
        heap_bytes=problem.ground_bytes + height_bytes(items, best),
        page_offsets=tuple(back[page] for page in sorted(back)),
    )


def stack_graph(graph: Graph, steps: Sequence[int], limit_bytes: int, passes: int) -> Stacked[StepOffsets]:
    """Pack all live ranges of a sequence of steps from the ground up; fewer passes where there are many."""
    group, items = range_groups(graph, steps, live_ranges(graph, steps))
    stacked = stack(items, limit_bytes - graph.argument_bytes, passes)
    offsets = None if stacked.offsets is None else by_step(graph, steps, group, stacked.offsets)
    return Stacked(offsets=offsets, bottlenecks=stacked.bottlenecks, work=stacked.work)


def by_step(graph: Graph, steps: Sequence[int], group: Sequence[int], of_group: Sequence[int]) -> StepOffsets:
    """The offset of each output of every step, from those of the groups above the arguments."""
    offsets: list[tuple[int, ...]] = []
    live_range = 0
    for op in steps:
        n_outputs = len(graph.outputs[op])
        own = group[live_range : live_range + n_outputs]
        offsets.append(tuple(graph.argument_bytes + of_group[g] for g in own))
        live_range += n_outputs
    return tuple(offsets)


def range_groups(graph: Graph, steps: Sequence[int], ranges: LiveRanges) -> tuple[list[int], list[Item]]:
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
    return group, [disjoint(spans) for spans in segments]
