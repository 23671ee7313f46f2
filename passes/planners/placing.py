"""Sequences with offsets: by best fit, by the window planner, or planned with slack where packing gets stuck.

Slack is a number of bytes in each slot that a plan leaves free (`Graph.slack_bytes`). It grows where
packing from the ground up gets stuck most often, a little at a time, until a plan's live ranges can be
packed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir import Plan
from passes.liveness import Graph, IntArray
from passes.offsets.placement import StepOffsets, place_graph, stack_graph
from passes.offsets.skyline import Bottleneck, Stacked
from passes.planners.candidate import Candidate, CandidatePool, WorkLimit, rank
from passes.planners.cut import SCHEDULE_UNITS, Style, descend, lower_to, relax
from passes.planners.neighbourhood import alike, improve
from passes.planners.pool_run import Walked
from passes.planners.schedule import Schedule, reverse_delete
from passes.planners.window import walk


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingConfig:
    """Walks, and where slack is left; set by the random layered graphs and the GPT of `benchmarks.planners`.

    Attributes:
        exponents: of the distance to the next use, of every walk.
        excesses: shares of the budget that walks have for a pool, until one keeps it.
        passes: of packing from the ground up.
        units_per_step: work of packing, for every step.
        most_rounds: how often slack is added.
        patience: after how many tries in vain no slack is taken back any more.
        slack_ratio: what is added at once at most, as a share of the budget.
        around_units: work of a search around a plan with slack.
    """

    exponents: tuple[float, ...] = (0.0, 1.0, 0.5)
    excesses: tuple[float, ...] = (1.0, 1.06, 1.2, 1.5)
    passes: int = 10
    units_per_step: int = 10
    most_rounds: int = 60
    patience: int = 24
    slack_ratio: float = 0.005
    around_units: int = 60_000


CONFIG = PlacingConfig()


def end_of(graph: Graph, placed: Candidate | Plan) -> int:
    """The end of the highest live range of a sequence with offsets; pages that come back are left out."""
    ends = [
        offset + graph.nbytes[b]
        for op, offsets in zip(placed.steps, placed.offsets, strict=True)
        for b, offset in zip(graph.outputs[op], offsets, strict=True)
    ]
    return max(ends, default=graph.argument_bytes)


def with_offsets(graph: Graph, candidate: Candidate, budget_bytes: int) -> Candidate:
    """A sequence placed by best fit, or at the offsets that it has if they end lower."""
    placement = place_graph(
        graph, candidate.steps, budget_bytes if candidate.peak_bytes <= budget_bytes else None
    )
    if candidate.offsets and end_of(graph, candidate) < placement.heap_bytes:
        return candidate
    return dataclasses.replace(candidate, offsets=placement.offsets)


class PlacedPool(CandidatePool):
    """Candidates with offsets, for a budget of addresses.

    Args:
        near_ns: what the budget is kept at only if a plan costs no more; dearer ones are not searched on.
    """

    def __init__(self, graph: Graph, budget_bytes: int, first: Candidate, near_ns: int) -> None:
        super().__init__(budget_bytes, first)
        self._graph, self._near_ns = graph, near_ns

    def rank(self, candidate: Candidate) -> tuple[bool, int, int]:
        """As for live bytes, by the end of the highest live range."""
        end_bytes = end_of(self._graph, candidate)
        return rank(dataclasses.replace(candidate, peak_bytes=end_bytes), self.budget_bytes)

    @property
    def keeps_budget(self) -> bool:
        """Whether the best candidate does at hardly any cost."""
        return self.least_ns <= self._near_ns


def walks(graph: Graph, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """A few walks over an address-ordered pool; a larger one only if the budget's own is too small."""
    for excess in CONFIG.excesses:
        for exponent in CONFIG.exponents:
            walked = walk(graph, int(pool.budget_bytes * excess), exponent, work)
            if walked is not None:
                yield _with_offsets(graph, walked, pool.budget_bytes)
            if not work.left:
                return
        if pool.keeps_budget:
            return


def _with_offsets(graph: Graph, walked: Walked, budget_bytes: int) -> Candidate:
    """A walk after reverse delete if best fit still places it, else the walk at its own offsets."""
    schedule = Schedule(graph, walked.steps)
    raw = dataclasses.replace(Candidate.of(schedule), offsets=walked.offsets)
    reverse_delete(schedule, max(budget_bytes, schedule.peak_bytes))
    shorter = Candidate.of(schedule)
    limit_bytes = max(budget_bytes, shorter.peak_bytes)
    placement = place_graph(graph, shorter.steps, limit_bytes)
    if placement.heap_bytes <= limit_bytes:
        return dataclasses.replace(shorter, offsets=placement.offsets)
    return raw


def with_slack(
    graph: Graph, start: Candidate, candidate: Candidate, budget_bytes: int, work: WorkLimit
) -> Candidate | None:
    """A sequence with offsets, planned with slack in the slots in which packing got stuck, ever more of it.

    Args:
        start: the schedule without recomputes.
        candidate: a sequence within the budget, the first to be packed.

    Returns:
        None if work or bytes do not suffice.
    """
    slack_bytes: IntArray = np.zeros(len(graph.cost_ns) + 1, dtype=np.int64)
    kinds = alike(graph)
    for rounds in range(CONFIG.most_rounds):
        if not work.left:
            break
        stacked = _stacked(graph, candidate, budget_bytes, work)
        if stacked.offsets is not None:
            placed = dataclasses.replace(candidate, offsets=stacked.offsets)
            return _with_less_slack(graph, kinds, placed, budget_bytes, slack_bytes, work)
        if not stacked.bottlenecks:
            break
        schedule = Schedule(graph, candidate.steps)
        slack_bytes = _more_slack(schedule, stacked.bottlenecks, 1 + rounds, budget_bytes, slack_bytes)
        slackened = dataclasses.replace(graph, slack_bytes=slack_bytes)
        whole = Candidate.of(Schedule(slackened, start.steps))
        lower = min(
            lower_to(slackened, candidate.steps, budget_bytes, work),
            descend(slackened, whole, budget_bytes, work, Style(tilt_ratio=0.1)),
            key=lambda d: rank(d, budget_bytes),
        )
        if lower.peak_bytes > budget_bytes:
            slack_bytes = slack_bytes // 2
        else:
            candidate = _around(slackened, kinds, lower, budget_bytes, work)
    return None


def _with_less_slack(
    graph: Graph,
    kinds: Sequence[int],
    best: Candidate,
    budget_bytes: int,
    slack_bytes: IntArray,
    work: WorkLimit,
) -> Candidate:
    """The cheapest placed sequence found while some of the slots, time and again others, lose their slack."""
    random_number = random.Random(0)
    slots = np.flatnonzero(slack_bytes).tolist()
    stale = 0
    while work.left and slots and stale < CONFIG.patience:
        count = max(1, random_number.randrange(len(slots) + 1) // 2)
        first = random_number.randrange(len(slots) - count + 1)
        less_bytes = slack_bytes.copy()
        less_bytes[slots[first : first + count]] = 0
        slackened = dataclasses.replace(graph, slack_bytes=less_bytes)
        candidate = _around(slackened, kinds, relax(slackened, best, budget_bytes), budget_bytes, work, stale)
        stale += 1
        if candidate.cost_ns < best.cost_ns:
            stacked = _stacked(graph, candidate, budget_bytes, work)
            if stacked.offsets is not None:
                best = dataclasses.replace(candidate, offsets=stacked.offsets)
                slots = [*slots[:first], *slots[first + count :]]
                slack_bytes, stale = less_bytes, 0
    return dataclasses.replace(best, peak_bytes=Schedule(graph, best.steps).peak_bytes)


def _around(
    slackened: Graph,
    kinds: Sequence[int],
    candidate: Candidate,
    budget_bytes: int,
    work: WorkLimit,
    seed: int = 0,
) -> Candidate:
    """The best of a short search around a sequence."""
    part = WorkLimit(max(0, min(CONFIG.around_units, work.limit - work.done)))
    candidate = improve(slackened, candidate, budget_bytes, 0, part, kinds, seed)
    work.done += part.done
    return candidate


def _stacked(graph: Graph, candidate: Candidate, budget_bytes: int, work: WorkLimit) -> Stacked[StepOffsets]:
    """What packing a sequence from the ground up comes to."""
    stacked = stack_graph(graph, candidate.steps, budget_bytes, CONFIG.passes)
    work.done += stacked.work + SCHEDULE_UNITS + CONFIG.units_per_step * len(candidate.steps)
    return stacked


def _more_slack(
    schedule: Schedule, bottlenecks: Sequence[Bottleneck], most: int, budget_bytes: int, slack_bytes: IntArray
) -> IntArray:
    """Reserved bytes with which the sequence is over the budget where packing got stuck most often.

    Args:
        most: at how many places.
    """
    lacking: dict[tuple[int, int], list[int]] = {}
    for bottleneck in bottlenecks:
        lacking.setdefault((bottleneck.start, bottleneck.stop), []).append(bottleneck.lacking_bytes)
    new_bytes = slack_bytes.copy()
    for start, stop in sorted(lacking, key=lambda section: (-len(lacking[section]), section))[:most]:
        lacks = sorted(lacking[start, stop])
        lacking_bytes = lacks[len(lacks) // 2]
        more_bytes = max(1, min(lacking_bytes, int(CONFIG.slack_ratio * budget_bytes)))
        slots = np.asarray(schedule.slots[start:stop])
        live = schedule.live[start:stop]
        full = live >= live.max() - lacking_bytes // 2
        np.maximum.at(new_bytes, slots[full], budget_bytes - live[full] + more_bytes)
    return new_bytes
