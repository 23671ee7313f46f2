"""Plans with pages: what `plan`, `least_peak` and `frontier` do where there is a host budget.

`passes.planners.paging.director` finds the sequence and its pages; here they become a plan: placed if asked
for, with its bound and status. What recompute alone does is one of the candidates, placed as it would be
without a host budget, so that a plan with one never costs more.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.offsets.placement import place_graph
from passes.planners import search
from passes.planners.bounds import Bound, at_least_ns
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.config import PlannerConfig
from passes.planners.paging.director import Director, Mixed
from passes.planners.paging.pager import Host, Pager
from passes.planners.schedule import Schedule
from passes.planners.state import SEARCH
from passes.planners.strategies import CONFIG

# Halvings between what one op holds and the least without pages.
LEAST_ROUNDS = 12


def plan_paged(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """Plan `program` within the budgets of device and host; the entry for configs with `host_bytes`.

    Returns:
        A plan that keeps both budgets, `status.found`; else the plan of lowest peak that was found, without
        pages if even all of them do not suffice.
    """
    begin = time.perf_counter()
    alone = search.plan(program, budget_bytes, _alone(config))
    made = _Paging(program, config).plan(budget_bytes, alone)
    return dataclasses.replace(made, planner=config.planner, seconds=time.perf_counter() - begin)


def least_peak_paged(program: Program, config: PlannerConfig) -> Plan:
    """The plan of lowest peak that is found; its budget is its own peak."""
    begin = time.perf_counter()
    made = _Paging(program, config).least(search.least_peak(program, _alone(config)))
    return dataclasses.replace(made, planner=config.planner, seconds=time.perf_counter() - begin)


def frontier_paged(program: Program, budgets_bytes: Sequence[int], config: PlannerConfig) -> tuple[Plan, ...]:
    """One plan for each budget, in the order given; a larger budget's plan never costs more."""
    begin = time.perf_counter()
    paging = _Paging(program, config)
    alone = search.frontier(program, budgets_bytes, _alone(config))
    plans: dict[int, Plan] = {}
    for plan in sorted(alone, key=lambda plan: plan.budget_bytes):
        made = paging.plan(plan.budget_bytes, plan)
        for other in plans.values():
            cheaper = made.status.found and other.overhead_ratio >= made.overhead_ratio
            if other.status.found and not cheaper:
                made = _for_more(other, made)
        plans[plan.budget_bytes] = made
    seconds = time.perf_counter() - begin
    return tuple(
        dataclasses.replace(plans[b], planner=config.planner, seconds=seconds) for b in budgets_bytes
    )


def _for_more(cheaper: Plan, made: Plan) -> Plan:
    """A smaller budget's plan for the budget of `made`, of which it knows what is proved there."""
    proved = cheaper.overhead_ratio <= made.lower_bound_ratio + 1e-12
    return dataclasses.replace(
        cheaper,
        budget_bytes=made.budget_bytes,
        lower_bound_ratio=made.lower_bound_ratio,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
    )


def _alone(config: PlannerConfig) -> PlannerConfig:
    """The same without a host."""
    planner = "auto" if config.planner == "exact" else config.planner
    return dataclasses.replace(config, planner=planner, host_bytes=0, link=None, must_page=frozenset())


class _Paging:
    """One program and its host."""

    def __init__(self, program: Program, config: PlannerConfig) -> None:
        assert config.link is not None, "a host budget comes with a link"
        self.program, self.config = program, config
        self.host = Host(link=config.link, nbytes=config.host_bytes, forced=config.must_page)
        self.graph = Graph.of(program)
        self.base_ns = sum(self.graph.cost_ns)
        self._bound = Bound(self.graph, config.n_cuts(len(program.ops)) if config.bound else 1)

    def plan(self, budget_bytes: int, alone: Plan) -> Plan:
        """The cheaper of recompute alone and of the best sequence with pages."""
        bound_ratio = self._bound.paged_ratio(budget_bytes, self.host.link, self.host.nbytes)
        near_ratio = bound_ratio * (1 + SEARCH.near_bound) + SEARCH.near_overhead
        mixed = self._directed(alone, budget_bytes, self.base_ns + int(near_ratio * self.base_ns))
        if not self.config.bound:
            bound_ratio = 0.0
        if mixed is None or (mixed.end_bytes > budget_bytes and alone.status.found):
            return self._without(alone, bound_ratio)
        made = self._plan(mixed, budget_bytes, bound_ratio)
        if alone.status.found and not self.host.forced and alone.overhead_ratio <= made.overhead_ratio:
            return self._without(alone, bound_ratio)
        return made

    def least(self, alone: Plan) -> Plan:
        """The plan of lowest peak, and the cheapest of these."""
        low_bytes = Pager(self.graph, range(len(self.graph.cost_ns)), self.host).least_bytes()
        high_bytes = alone.peak_bytes
        best = self.plan(high_bytes, alone)
        for _ in range(LEAST_ROUNDS):
            if low_bytes >= high_bytes:
                break
            mixed = self._directed(alone, low_bytes, 0, placed=False)
            if mixed is not None:
                best, high_bytes = self._plan(mixed, low_bytes, 0.0), low_bytes
                break
            low_bytes = max(low_bytes + 1, (low_bytes + high_bytes) // 2)
        return best

    def _directed(
        self, alone: Plan, budget_bytes: int, floor_ns: int, placed: bool | None = None
    ) -> Mixed | None:
        """The best sequence with pages; placed with ever more room until its offsets fit."""
        candidate = Candidate.of(Schedule(self.graph, alone.steps))
        best: Mixed | None = None
        placed = self.config.placed if placed is None else placed
        for ratio in (1.0, *(CONFIG.tighter_ratios if placed else ())):
            work = WorkLimit(self.config.units(len(self.graph.cost_ns)))
            director = Director(self.graph, int(ratio * budget_bytes), self.host, work)
            mixed = director.direct(candidate, floor_ns)
            if mixed is None or not placed:
                return mixed or best
            mixed = self._placed(mixed, budget_bytes)
            if best is None or mixed.end_bytes < best.end_bytes:
                best = mixed
            if best.end_bytes <= budget_bytes:
                break
        return best

    def _placed(self, mixed: Mixed, budget_bytes: int) -> Mixed:
        """The same with offsets, of what comes back, too."""
        placement = place_graph(self.graph, mixed.candidate.steps, budget_bytes, mixed.paged.pages)
        return dataclasses.replace(
            mixed,
            candidate=dataclasses.replace(mixed.candidate, offsets=placement.offsets),
            page_offsets=placement.page_offsets,
            end_bytes=placement.heap_bytes,
        )

    def _without(self, alone: Plan, bound_ratio: float) -> Plan:
        """What recompute alone does; nothing is proved by what it cannot do, nor done if pages are forced."""
        status = alone.status
        if status is Status.OPTIMAL and alone.overhead_ratio > bound_ratio + 1e-9:
            status = Status.FEASIBLE
        if self.host.forced:
            status = Status.UNKNOWN
        if not status.found:
            all_bytes = max(self.graph.local_bytes, default=0) + self.graph.argument_bytes
            status = Status.INFEASIBLE if all_bytes > alone.budget_bytes else Status.UNKNOWN
        return dataclasses.replace(
            alone, status=status, lower_bound_ratio=bound_ratio, host_budget_bytes=self.host.nbytes
        )

    def _plan(self, mixed: Mixed, budget_bytes: int, bound_ratio: float) -> Plan:
        """A plan of what was found."""
        proved = mixed.total_ns <= at_least_ns(self.base_ns, bound_ratio)
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        misses = max(mixed.paged.peak_bytes, mixed.end_bytes) > budget_bytes
        return Plan(
            steps=tuple(OpId(op) for op in mixed.candidate.steps),
            peak_bytes=mixed.paged.peak_bytes,
            budget_bytes=budget_bytes,
            overhead_ratio=(mixed.total_ns - self.base_ns) / self.base_ns if self.base_ns else 0.0,
            lower_bound_ratio=bound_ratio,
            status=Status.UNKNOWN if misses else status,
            planner=self.config.planner,
            seconds=0.0,
            offsets=mixed.candidate.offsets,
            pages=mixed.paged.pages,
            page_offsets=mixed.page_offsets,
            waiting_ns=mixed.paged.waiting_ns,
            host_peak_bytes=mixed.paged.host_peak_bytes,
            host_budget_bytes=self.host.nbytes,
        )
