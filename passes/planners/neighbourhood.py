"""Large-neighbourhood search: take some re-runs out of a plan, repair it by cuts, keep what is no worse.

Deterministic: a seeded generator and a work limit. Every state is a valid sequence of steps.
"""

from __future__ import annotations

import random

from passes.liveness import Graph
from passes.planners.cut import SCHEDULE_UNITS, Descent, Style, Work, lower_to, rank
from passes.planners.schedule import HOLE, Schedule, prune

USUAL_DROP = 8
PATIENCE = 100


def improve(
    graph: Graph, best: Descent, budget_bytes: int, floor_ns: int, work: Work, seed: int = 0
) -> Descent:
    """Search around a sequence until the budget is kept at `floor_ns`, the work is done, or nothing helps.

    A sequence over the budget is first led below its own peak, a few percent at a time.
    """
    random_number = random.Random(seed)
    current = best
    stale = 0
    while work.left and stale < PATIENCE and (best.cost_ns > floor_ns or best.peak_bytes > budget_bytes):
        schedule = Schedule(graph, current.steps)
        work.done += 2 * SCHEDULE_UNITS + len(current.steps)
        reruns = schedule.rerun_positions()
        if not reruns:
            break
        for position in _pick(schedule, reruns, random_number):
            if schedule.steps[position] != HOLE:
                schedule.try_delete(position, schedule.graph.argument_bytes + (1 << 62))
        prune(schedule)
        style = Style(
            reserve_ratio=random_number.choice((0.0, 0.0, 0.02, 0.06)),
            tilt_ratio=random_number.choice((0.0, 0.1, -0.1)),
        )
        level_bytes = budget_bytes
        if current.peak_bytes > budget_bytes:
            level_bytes = max(budget_bytes, int(current.peak_bytes * (1 - style.reserve_ratio)) - 1)
        found = lower_to(graph, schedule.compact(), level_bytes, work, style)
        if rank(found, budget_bytes) <= rank(current, budget_bytes):
            current = found
        stale = 0 if rank(current, budget_bytes) < rank(best, budget_bytes) else stale + 1
        best = min(best, current, key=lambda d: rank(d, budget_bytes))
    return best


def _pick(schedule: Schedule, reruns: list[int], random_number: random.Random) -> list[int]:
    """Which re-runs to take out, mostly few: scattered ones, neighbours, or those of a range of ops."""
    count = min(len(reruns), 1 + int(random_number.expovariate(1 / USUAL_DROP)))
    kind = random_number.randrange(3)
    if kind == 0:
        return sorted(random_number.sample(reruns, count))
    if kind == 1:
        first = random_number.randrange(len(reruns) - count + 1)
        return reruns[first : first + count]
    by_op = sorted(reruns, key=lambda p: (schedule.steps[p], p))
    first = random_number.randrange(len(by_op) - count + 1)
    return sorted(by_op[first : first + count])
