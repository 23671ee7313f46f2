"""One value at a time: evict at the peak what frees the most for its closure's cost, checked exactly.

Slow and short-sighted, but it sees the real profile, closures' own bytes included; on small irregular
programs it finds plans that the cut does not. It does not take an eviction back: reverse delete does.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.cut import insert
from passes.planners.flow import CutProblem, cut_problem_at, missing_runs
from passes.planners.schedule import Schedule, prune, reverse_delete
from passes.reach import reached


def evict_one_by_one(
    graph: Graph, start: Candidate, budget_bytes: int, work: WorkLimit, tried: int
) -> Candidate:
    """Lower the peak to the budget by single evictions; the lowest state if none helps any more.

    Args:
        tried: how many evictions are looked at each time, those of most bytes for their cost.
    """
    schedule = Schedule(graph, start.steps)
    while schedule.peak_bytes > budget_bytes and work.left:
        eviction = _best_eviction(schedule, budget_bytes, work, tried)
        if eviction is None:
            break
        schedule = eviction
    reverse_delete(schedule, max(budget_bytes, schedule.peak_bytes))
    return Candidate.of(schedule)


def _best_eviction(schedule: Schedule, budget_bytes: int, work: WorkLimit, tried: int) -> Schedule | None:
    """The eviction that takes off the most excess for its cost; None if none takes off any."""
    graph = schedule.graph
    position = schedule.peak_position
    problem = cut_problem_at(schedule, position)
    work.done += 2 * len(problem.tails)
    closures = {b: _closure(schedule, problem, b) for b in problem.demanded}
    cost_ns = {b: sum(graph.cost_ns[op] for op in ops) for b, ops in closures.items()}
    order = sorted(problem.demanded, key=lambda b: (-graph.nbytes[b] / (1 + cost_ns[b]), b))
    before = _excess_bytes(schedule, budget_bytes)
    best: tuple[float, Schedule] | None = None
    for b in order[:tried]:
        alone = dataclasses.replace(problem, demanded={b: problem.demanded[b]})
        inserts = missing_runs(schedule, position, alone, closures[b])
        if not inserts:
            continue
        after = Schedule(graph, insert(schedule.steps, dict(inserts)))
        prune(after)
        work.done += len(after.steps)
        gain = (before - _excess_bytes(after, budget_bytes)) / (1 + after.cost_ns - schedule.cost_ns)
        if before > _excess_bytes(after, budget_bytes) and (best is None or gain > best[0]):
            best = (gain, Schedule(graph, after.compact()))
    return None if best is None else best[1]


def _closure(schedule: Schedule, problem: CutProblem, buffer: int) -> tuple[int, ...]:
    """The ops to run for `buffer` alone if everything else that is alive there stays."""
    graph = schedule.graph
    candidates = frozenset(problem.ops)
    made_by: dict[int, list[int]] = {}
    for op, b in problem.reads:
        if graph.producer[b] in candidates:
            made_by.setdefault(op, []).append(graph.producer[b])
    return tuple(sorted(reached([graph.producer[buffer]], lambda op: made_by.get(op, ()))))


def _excess_bytes(schedule: Schedule, budget_bytes: int) -> int:
    """Bytes over the budget, summed over all positions."""
    return int(np.maximum(schedule.live - budget_bytes, 0).sum())
