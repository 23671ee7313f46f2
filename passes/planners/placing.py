"""Sequences with offsets, and what the window planner makes of a budget."""

from __future__ import annotations

import dataclasses

from passes.liveness import Graph
from passes.offsets.best_fit import place_graph
from passes.planners.cut import Descent, Work, of_schedule, rank
from passes.planners.schedule import Schedule, reverse_delete
from passes.planners.window import Walked, walk

WINDOW_EXPONENTS = (0.0, 1.0, 0.5)
WINDOW_EXCESS = (1.0, 1.06, 1.2, 1.5)
WINDOW_UNITS_PER_OP = 250


def end_of(graph: Graph, found: Descent) -> int:
    """The end of the highest copy of a sequence with offsets."""
    ends = [
        offset + graph.nbytes[b]
        for op, offsets in zip(found.steps, found.offsets, strict=True)
        for b, offset in zip(graph.outputs[op], offsets, strict=True)
    ]
    return max(ends, default=graph.argument_bytes)


def with_offsets(graph: Graph, found: Descent, budget_bytes: int) -> Descent:
    """A sequence placed by best fit, or at the offsets that it has if they end lower."""
    placement = place_graph(graph, found.steps, budget_bytes if found.peak_bytes <= budget_bytes else None)
    if found.offsets and end_of(graph, found) < placement.heap_bytes:
        return found
    return dataclasses.replace(found, offsets=placement.offsets)


def walks(graph: Graph, budget_bytes: int, work: Work) -> list[Descent]:
    """Walks in a pool of the budget's size, with offsets."""
    found = [walk(graph, budget_bytes, exponent, work) for exponent in WINDOW_EXPONENTS]
    return [_with_offsets(graph, walked, budget_bytes) for walked in found if walked is not None]


def windows(graph: Graph, planner: str, budget_bytes: int, best: Descent, work: Work) -> Descent:
    """The best of a few walks over the pool; larger pools only if the budget's own is too small."""
    if planner == "auto" and WINDOW_UNITS_PER_OP * len(graph.cost_ns) > work.limit:
        return best
    for excess in WINDOW_EXCESS:
        for exponent in WINDOW_EXPONENTS:
            walked = walk(graph, int(budget_bytes * excess), exponent, work)
            if walked is not None and planner == "auto":
                best = min(best, _trimmed(graph, walked, budget_bytes), key=lambda d: rank(d, budget_bytes))
            elif walked is not None:
                placed = _with_offsets(graph, walked, budget_bytes)
                best = min(best, placed, key=lambda d: rank(d, budget_bytes))
            if not work.left:
                return best
        if planner == "auto" or best.peak_bytes <= budget_bytes:
            break
    return best


def _trimmed(graph: Graph, walked: Walked, budget_bytes: int) -> Descent:
    """A walk after reverse delete."""
    schedule = Schedule(graph, walked.steps)
    reverse_delete(schedule, max(budget_bytes, schedule.peak_bytes))
    return of_schedule(schedule)


def _with_offsets(graph: Graph, walked: Walked, budget_bytes: int) -> Descent:
    """A walk after reverse delete if best fit still places it, else the walk at its own offsets."""
    raw = dataclasses.replace(of_schedule(Schedule(graph, walked.steps)), offsets=walked.offsets)
    shorter = _trimmed(graph, walked, budget_bytes)
    limit_bytes = max(budget_bytes, shorter.peak_bytes)
    placement = place_graph(graph, shorter.steps, limit_bytes)
    if placement.heap_bytes <= limit_bytes:
        return dataclasses.replace(shorter, offsets=placement.offsets)
    return raw
