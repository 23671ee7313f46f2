"""The driver of the planners: what `plan`, `least_peak` and `frontier` do.

A budget is tried from the program as it is: candidates in several styles, each a series of minimum cuts.
Where they miss it, the best is led below its own peak, and the program's deepest plan, which belongs to no
budget, is relaxed up to it: what one budget was found to need is enough for the next. A large-neighbourhood
search ends it. `passes.planners.strategies` has all that in order.

Invariant: whatever is returned is a valid sequence of steps; the status says what is known about it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import pairwise

from passes.ir import OpId, Plan, Program, Status
from passes.planners import strategies
from passes.planners.candidate import Candidate, CandidatePool, rank
from passes.planners.config import PlannerConfig
from passes.planners.cut import relax
from passes.planners.placing import PlacedPool, end_of, with_offsets
from passes.planners.state import SearchState
from passes.planners.strategies import PLACING, STRATEGIES, run_all


class Search(SearchState):
    """One program's planning, for any number of budgets."""

    def best(self, budget_bytes: int, known: Sequence[Candidate] = ()) -> Candidate:
        """The cheapest sequence within the budget, or the one of lowest peak.

        Args:
            known: sequences to start from besides the schedule without recomputes.
        """
        if self.start.peak_bytes <= budget_bytes:
            return self.start
        pool = CandidatePool(budget_bytes, self.start)
        pool.offer(known)
        if budget_bytes < self.working_set_bytes:
            pool.offer([strategies.deepest(self)])
        else:
            run_all(self, STRATEGIES[self.config.planner], pool)
        return pool.best

    def within(self, budget_bytes: int) -> Plan:
        """What `plan` returns; what belongs to no budget is found once for all of them."""
        self.reset()
        candidate = self.best(budget_bytes)
        if not self.config.placed:
            return self.plan(candidate, budget_bytes)
        candidate, heap_bytes = self.placed(candidate, budget_bytes)
        made = self.plan(candidate, budget_bytes)
        misses = made.status.found and heap_bytes > budget_bytes
        return dataclasses.replace(made, status=Status.UNKNOWN) if misses else made

    def placed(self, candidate: Candidate, budget_bytes: int) -> tuple[Candidate, int]:
        """A sequence with the offsets of its live ranges, planned anew until they fit; also their heap."""
        first = with_offsets(self.graph, candidate, budget_bytes)
        near_ns = candidate.cost_ns + int(strategies.CONFIG.near_placed * self.start.cost_ns)
        pool = PlacedPool(self.graph, budget_bytes, first, near_ns)
        if candidate.peak_bytes <= budget_bytes and self.config.planner != "window":
            run_all(self, PLACING, pool)
        return pool.best, end_of(self.graph, pool.best)

    def plan(self, candidate: Candidate, budget_bytes: int) -> Plan:
        """A plan of what was found, with its bound and status."""
        lower_bound_ratio = self.bound_ratio(budget_bytes)
        base_ns = self.start.cost_ns
        overhead_ratio = (candidate.cost_ns - base_ns) / base_ns if base_ns else 0.0
        if candidate.peak_bytes > budget_bytes:
            proved = self.is_shown_impossible(budget_bytes)
            status = Status.INFEASIBLE if proved else Status.UNKNOWN
        elif candidate.cost_ns <= self.at_least_ns(lower_bound_ratio):
            status = Status.OPTIMAL
        else:
            status = Status.FEASIBLE
        return Plan(
            steps=tuple(OpId(op) for op in candidate.steps),
            peak_bytes=candidate.peak_bytes,
            budget_bytes=budget_bytes,
            overhead_ratio=overhead_ratio,
            lower_bound_ratio=lower_bound_ratio,
            status=status,
            planner=self.config.planner,
            seconds=0.0,
            offsets=candidate.offsets,
        )


def plan(program: Program, budget_bytes: int, config: PlannerConfig | None = None) -> Plan:
    """Plan `program` for a peak of at most `budget_bytes`.

    Returns:
        A plan that keeps the budget, `status.found`; else the plan of lowest peak that was found, with
        status INFEASIBLE if the budget is below the working-set bound and UNKNOWN if nothing is proved.
    """
    begin = time.perf_counter()
    return _timed(Search(program, config or PlannerConfig()).within(budget_bytes), begin)


def least_peak(program: Program, config: PlannerConfig | None = None) -> Plan:
    """The plan of lowest peak that was found; OPTIMAL if its peak is the working-set bound.

    The plan's budget is its own peak.
    """
    begin = time.perf_counter()
    search = Search(program, config or PlannerConfig())
    candidate = strategies.deepest(search)
    made = search.plan(candidate, candidate.peak_bytes)
    proved = search.is_shown_impossible(candidate.peak_bytes - 1)
    status = Status.OPTIMAL if proved else Status.FEASIBLE
    return _timed(dataclasses.replace(made, status=status), begin)


def frontier(
    program: Program, budgets_bytes: Sequence[int], config: PlannerConfig | None = None
) -> tuple[Plan, ...]:
    """One plan for each budget, in the order given; a larger budget's plan never costs more.

    The work limit is shared out over the budgets. Each plan's `seconds` are those of the whole call.
    """
    begin = time.perf_counter()
    search = Search(program, config or PlannerConfig())
    levels = sorted(set(budgets_bytes))
    search.effort = 2.0 / max(2, len(levels))
    candidates: dict[int, Candidate] = {}
    known: tuple[Candidate, ...] = ()
    for budget_bytes in reversed(levels):
        search.reset()
        known = (search.best(budget_bytes, known),)
        candidates[budget_bytes] = known[0]
    for small, large in pairwise(levels):
        relaxed = relax(search.graph, candidates[small], large)
        candidates[large] = min(candidates[large], relaxed, key=lambda d: rank(d, large))
    plans = tuple(search.plan(candidates[b], b) for b in budgets_bytes)
    return tuple(_timed(p, begin) for p in plans)


def _timed(made: Plan, begin: float) -> Plan:
    return dataclasses.replace(made, seconds=time.perf_counter() - begin)
