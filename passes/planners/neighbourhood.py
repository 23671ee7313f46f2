"""Large-neighbourhood search: take some recomputes out of a plan, repair it by cuts, keep what is no worse.

Identical layers are recognised: what is taken out together may be an op's recomputes in all of them, since a
change in one of many layers is worth little. Deterministic: a seeded generator and a work limit. Every
state is a valid sequence of steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit, rank
from passes.planners.cut import SCHEDULE_UNITS, Style, lower_to
from passes.planners.schedule import HOLE, Schedule, prune


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourhoodConfig:
    """What is taken out, and when to give up; set by the overheads of `benchmarks.planners`.

    Attributes:
        usual_drop: how many recomputes are taken out on average.
        patience: after how many neighbours in vain the search ends.
        whole_ratio: how often all recomputes of like ops are taken out, not a range of them.
        alike_depth: how many reads away the surroundings of like ops are alike, too.
    """

    usual_drop: int = 8
    patience: int = 100
    whole_ratio: float = 0.5
    alike_depth: int = 3


CONFIG = NeighbourhoodConfig()


def improve(
    graph: Graph,
    best: Candidate,
    budget_bytes: int,
    floor_ns: int,
    work: WorkLimit,
    kinds: Sequence[int],
    seed: int = 0,
) -> Candidate:
    """Search around a sequence until the budget is kept at `floor_ns`, the work is done, or nothing helps.

    A sequence over the budget is first led below its own peak, a few percent at a time.

    Args:
        kinds: what `alike` says of the program.
    """
    random_number = random.Random(seed)
    current = best
    stale = 0
    while (
        work.left and stale < CONFIG.patience and (best.cost_ns > floor_ns or best.peak_bytes > budget_bytes)
    ):
        schedule = Schedule(graph, current.steps)
        work.done += 2 * SCHEDULE_UNITS + len(current.steps)
        recomputes = schedule.recompute_positions()
        if not recomputes:
            break
        for position in pick(schedule, recomputes, kinds, random_number):
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
        neighbour = lower_to(graph, schedule.compact(), level_bytes, work, style)
        if rank(neighbour, budget_bytes) <= rank(current, budget_bytes):
            current = neighbour
        stale = 0 if rank(current, budget_bytes) < rank(best, budget_bytes) else stale + 1
        best = min(best, current, key=lambda d: rank(d, budget_bytes))
    return best


def alike(graph: Graph) -> list[int]:
    """A number for every op; ops with the same one look alike, as do their surroundings; O(edges).

    They have the same cost and sizes, and so do the ops that are up to `CONFIG.alike_depth` reads away.
    """
    readers, nbytes = graph.readers(), graph.nbytes
    kinds = _numbered(
        (cost_ns, tuple([nbytes[b] for b in inputs]), tuple([nbytes[b] for b in outputs]))
        for cost_ns, inputs, outputs in zip(graph.cost_ns, graph.inputs, graph.outputs, strict=True)
    )
    for _ in range(CONFIG.alike_depth):
        kinds = _numbered(
            (
                kinds[op],
                tuple([kinds[graph.producer[b]] for b in graph.inputs[op]]),
                tuple(sorted([kinds[r] for b in graph.outputs[op] for r in readers[b]])),
            )
            for op in range(len(kinds))
        )
    return kinds


def _numbered(looks: Iterable[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(look, len(numbers)) for look in looks]


def pick(
    schedule: Schedule, recomputes: list[int], kinds: Sequence[int], random_number: random.Random
) -> list[int]:
    """Which recomputes to take out: a few scattered ones, neighbours, those of a range or of like ops."""
    count = min(len(recomputes), 1 + int(random_number.expovariate(1 / CONFIG.usual_drop)))
    way = random_number.randrange(5)  # two of five: recomputes of like ops
    if way == 0:
        return sorted(random_number.sample(recomputes, count))
    if way == 1:
        first = random_number.randrange(len(recomputes) - count + 1)
        return recomputes[first : first + count]
    if way == 2:
        by_op = sorted(recomputes, key=lambda p: (schedule.steps[p], p))
        first = random_number.randrange(len(by_op) - count + 1)
        return sorted(by_op[first : first + count])
    chosen = kinds[schedule.steps[recomputes[random_number.randrange(len(recomputes))]]]
    same = [p for p in recomputes if kinds[schedule.steps[p]] == chosen]
    if random_number.random() < CONFIG.whole_ratio:
        return same
    first, last = sorted(random_number.randrange(len(same)) for _ in range(2))
    return same[first : last + 1]
