"""Large-neighbourhood search: take some re-runs out of a plan, repair it by cuts, keep what is no worse.

Deterministic: a seeded generator and a work limit. Every state is a valid sequence of steps.
"""

from __future__ import annotations

import random

from passes.liveness import Graph
from passes.planners.cut import Descent, Work, lower_to
from passes.planners.schedule import HOLE, Schedule, prune

LARGEST_DROP = 30


def improve(
    graph: Graph, best: Descent, budget_bytes: int, floor_ns: int, work: Work, seed: int = 0
) -> Descent:
    """Search around a sequence that keeps the budget until `floor_ns` is reached or the work is done."""
    random_number = random.Random(seed)
    current = best
    while work.left and best.cost_ns > floor_ns:
        schedule = Schedule(graph, current.steps)
        work.done += 8 * len(current.steps)
        reruns = schedule.rerun_positions()
        if not reruns:
            break
        for position in _pick(schedule, reruns, random_number):
            if schedule.steps[position] != HOLE:
                schedule.try_delete(position, schedule.graph.argument_bytes + (1 << 62))
        prune(schedule)
        reserve_bytes = int(budget_bytes * random_number.choice((0.0, 0.0, 0.02, 0.06)))
        found = lower_to(graph, schedule.compact(), budget_bytes, reserve_bytes, work)
        if found.peak_bytes <= budget_bytes and found.cost_ns <= current.cost_ns:
            current = found
        if current.cost_ns < best.cost_ns:
            best = current
    return best


def _pick(schedule: Schedule, reruns: list[int], random_number: random.Random) -> list[int]:
    """Which re-runs to take out: scattered ones, neighbours, or those of a range of ops."""
    count = min(len(reruns), random_number.randint(1, LARGEST_DROP))
    kind = random_number.randrange(3)
    if kind == 0:
        return sorted(random_number.sample(reruns, count))
    if kind == 1:
        first = random_number.randrange(len(reruns) - count + 1)
        return reruns[first : first + count]
    by_op = sorted(reruns, key=lambda p: (schedule.steps[p], p))
    first = random_number.randrange(len(by_op) - count + 1)
    return sorted(by_op[first : first + count])
