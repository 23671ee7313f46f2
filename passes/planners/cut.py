"""The minimum-cut planner: cut at the peak, insert the missing closures, take out what is not needed.

Staged: the peak goes down to the budget through a few geometric levels, with a reverse delete at each.
Invariant: every state on the way is a valid sequence of steps, so the lowest one is always at hand.
Where two peaks keep spoiling each other's cuts, the reserve grows until the cycle breaks, or patience ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.flow import cheapest_within, cut_problem_at, filled_up, missing_runs
from passes.planners.schedule import Schedule, prune, reverse_delete

DELETE_UNITS = 20
CUT_UNITS = 400
SCHEDULE_UNITS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a candidate cuts. `benchmarks.planners` set what is the same in all styles.

    Attributes:
        stages: through how many geometric levels it goes.
        reserve_ratio: share of the level left free at every cut, for the recomputes' own needs.
        tilt_ratio: see `passes.planners.flow.cut_problem_at`.
        below_ratio: how far below the budget it goes before it takes recomputes out up to the budget.
        filled: how many single values make up a small excess, see `passes.planners.flow.filled_up`.
        fitting: whether values that could not come back within the level are kept.
        patience: after how many cuts in a row that did not lower the peak it gives up.
        bend_ratio: by how much each of these raises the reserve.
    """

    stages: int = 1
    reserve_ratio: float = 0.0
    tilt_ratio: float = 0.0
    below_ratio: float = 0.0
    filled: int = 5
    fitting: bool = True
    patience: int = 12
    bend_ratio: float = 0.02

    def bent(self, stale: int) -> Style:
        """The style after `stale` cuts in vain: more reserve, so that the same state is cut differently."""
        return dataclasses.replace(self, reserve_ratio=self.reserve_ratio + self.bend_ratio * stale)


PLAIN = Style()


def insert(steps: Sequence[int], position_ops: dict[int, list[int]]) -> list[int]:
    """The sequence with ops put in just before positions."""
    result: list[int] = []
    begin = 0
    for position in sorted(position_ops):
        result += steps[begin:position]
        result += position_ops[position]
        begin = position
    result += steps[begin:]
    return result


def cut_once(schedule: Schedule, level_bytes: int, style: Style, work: WorkLimit) -> list[int] | None:
    """Cut at the peak so that it fits `level_bytes`; the new sequence, None if nothing can be evicted."""
    position = schedule.tightest_position(level_bytes)
    reserve_bytes = int(style.reserve_ratio * level_bytes)
    tries = ((level_bytes, reserve_bytes), (None, reserve_bytes), (None, 0))
    for limit_bytes, left_bytes in tries if style.fitting else tries[1:]:
        problem = cut_problem_at(schedule, position, tilt_ratio=style.tilt_ratio, level_bytes=limit_bytes)
        capacity_bytes = level_bytes - left_bytes - problem.forced_bytes
        hull = cheapest_within(problem, capacity_bytes)
        work.done += CUT_UNITS + (hull.flows + 5) * (len(problem.tails) + 200) // 4
        if hull.bound_ns is not None:
            break
    work.done += len(problem.tails) if style.filled else 0
    chosen = filled_up(schedule.graph, problem, hull, capacity_bytes, style.filled)
    inserts = missing_runs(schedule, position, problem, chosen.ops)
    return insert(schedule.steps, dict(inserts)) if inserts else None


def lower_to(
    graph: Graph, steps: Sequence[int], level_bytes: int, work: WorkLimit, style: Style = PLAIN
) -> Candidate:
    """Cut at the peak until it fits, or until `style.patience` cuts have taken off none of its tops."""
    schedule = Schedule(graph, steps)
    best, lowest = Candidate.of(schedule), schedule.tops
    stale = 0
    while schedule.peak_bytes > level_bytes and stale < style.patience and work.left:
        cut = cut_once(schedule, level_bytes, style.bent(stale), work)
        if cut is None:
            break
        schedule = Schedule(graph, cut)
        work.done += SCHEDULE_UNITS + 2 * len(cut) // 3
        prune(schedule)
        now = Candidate.of(schedule)
        schedule = Schedule(graph, now.steps) if len(now.steps) < len(schedule.steps) else schedule
        reached = schedule.tops
        stale = 0 if reached < lowest else stale + 1
        if reached < lowest:
            best, lowest = now, reached
    if best.peak_bytes <= level_bytes:
        final = Schedule(graph, best.steps)
        work.done += len(best.steps) // 2 + DELETE_UNITS * reverse_delete(final, level_bytes)
        best = Candidate.of(final)
    return best


def descend(
    graph: Graph, start: Candidate, budget_bytes: int, work: WorkLimit, style: Style = PLAIN
) -> Candidate:
    """Lower the peak to the budget, or below it and up again, through the style's geometric levels."""
    best = start
    target_bytes = int(budget_bytes * (1 - style.below_ratio))
    for stage in range(1, style.stages + 1):
        level_bytes = target_bytes
        if stage < style.stages and target_bytes > 0:
            ratio = target_bytes / start.peak_bytes
            level_bytes = int(start.peak_bytes * ratio ** (stage / style.stages))
        if best.peak_bytes > level_bytes:
            lower = lower_to(graph, best.steps, level_bytes, work, style)
            best = lower if lower.peak_bytes < best.peak_bytes else best
    return relax(graph, best, budget_bytes) if style.below_ratio else best


def relax(graph: Graph, candidate: Candidate, budget_bytes: int) -> Candidate:
    """A sequence after reverse delete to a larger budget."""
    if candidate.peak_bytes > budget_bytes:
        return candidate
    schedule = Schedule(graph, candidate.steps)
    reverse_delete(schedule, budget_bytes)
    return Candidate.of(schedule) if schedule.cost_ns < candidate.cost_ns else candidate


def deepen(graph: Graph, best: Candidate, budget_bytes: int, work: WorkLimit) -> Candidate:
    """Lower the peak towards the budget in small steps, smaller ones where it gets stuck."""
    step_ratio = 0.03
    while best.peak_bytes > budget_bytes and step_ratio > 0.001 and work.left:
        level_bytes = max(budget_bytes, int(best.peak_bytes * (1 - step_ratio)))
        lower = lower_to(graph, best.steps, level_bytes, work)
        if lower.peak_bytes < best.peak_bytes:
            best = lower
        if lower.peak_bytes > level_bytes:
            step_ratio /= 3
    return best
