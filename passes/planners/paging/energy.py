"""Plans of least energy, after POET (ICML 2022): within the budgets, and within a limit of time.

The cuts weigh energy instead of time, copies over the link have theirs for each byte, and what is slower than
the limit does not count. The plan of least time is a candidate, so that a limit that it keeps is kept.
Waiting costs time only: idle power is not in the model.
"""

from __future__ import annotations

import dataclasses
import time

from passes.ir import OpId, Plan, Program, Status
from passes.link import Link
from passes.liveness import Graph
from passes.objective import LEAST_TIME
from passes.planners import search
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.config import PlannerConfig
from passes.planners.paging.director import Director, Mixed, Prices
from passes.planners.paging.pager import Host
from passes.planners.paging.plans import plan_paged
from passes.planners.paging.queues import traffic
from passes.planners.schedule import Schedule
from passes.simulate import simulate


def plan_energy(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """The plan of least energy that is found; `status.found` if it keeps the budgets and the time.

    Live bytes count, holes do not: it is not placed. Nothing is proved of its energy; the lower bound is of
    its time.

    Raises:
        ValueError: no op says what energy it takes.
    """
    if program.ops and not any(op.energy_pj for op in program.ops):
        raise ValueError("the objective is energy, but no op of the program has `energy_pj`")
    begin = time.perf_counter()
    quickest = dataclasses.replace(config, objective=LEAST_TIME, placed=False)
    run = plan_paged if config.host_bytes else search.plan
    tried = [run(program, budget_bytes, quickest), _frugal_alone(program, budget_bytes, quickest)]
    if config.host_bytes:
        tried += _with_pages(program, tried, config)
    tried = [with_energy(program, made, config.link) for made in tried]
    limit_ns = config.objective.limit_ns(program.cost_ns)
    kept = [made for made in tried if made.status.found and time_ns(program, made) <= limit_ns]
    best = min(kept, key=lambda made: made.energy_pj, default=None)
    if best is None:
        missed = Status.UNKNOWN if tried[0].status.found else tried[0].status
        best = dataclasses.replace(tried[0], status=missed)
    status = Status.FEASIBLE if best.status is Status.OPTIMAL else best.status
    seconds = time.perf_counter() - begin
    return dataclasses.replace(
        best, status=status, lower_bound_ratio=tried[0].lower_bound_ratio, seconds=seconds,
        planner=config.planner, host_budget_bytes=config.host_bytes,
    )  # fmt: skip


def time_ns(program: Program, made: Plan) -> int:
    """Estimated time of a plan, its waiting for copies included."""
    return round(program.cost_ns * (1 + made.overhead_ratio))


def _frugal_alone(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """Recompute alone, its prices in energy; the plan tells of its time."""
    ops = tuple(dataclasses.replace(op, cost_ns=op.energy_pj) for op in program.ops)
    alone = dataclasses.replace(config, host_bytes=0, link=None, must_page=frozenset(), bound=False)
    made = search.plan(dataclasses.replace(program, ops=ops), budget_bytes, alone)
    timeline = simulate(program, made.steps)
    missed = config.must_page and made.status.found
    return dataclasses.replace(
        made, overhead_ratio=timeline.overhead_ratio, lower_bound_ratio=0.0,
        status=Status.UNKNOWN if missed else made.status,
    )  # fmt: skip


def _with_pages(program: Program, known: list[Plan], config: PlannerConfig) -> list[Plan]:
    """The director's plan for energy."""
    assert config.link is not None, "a host budget comes with a link"
    graph = Graph.of(program)
    base_ns, budget_bytes = program.cost_ns, known[0].budget_bytes
    prices = Prices.of_energy(program, config.link, config.objective.limit_ns(base_ns))
    host = Host(link=config.link, nbytes=config.host_bytes, forced=config.must_page)
    director = Director(graph, budget_bytes, host, WorkLimit(config.units(len(program.ops))), prices)
    start = Candidate.of(Schedule(graph, known[-1].steps))
    mixed = director.direct(start, 0)
    return [] if mixed is None else [_plan_of(mixed, known[0], base_ns)]


def _plan_of(mixed: Mixed, like: Plan, base_ns: int) -> Plan:
    return dataclasses.replace(
        like,
        steps=tuple(OpId(op) for op in mixed.candidate.steps),
        peak_bytes=mixed.paged.peak_bytes,
        overhead_ratio=(mixed.total_ns - base_ns) / base_ns if base_ns else 0.0,
        status=Status.FEASIBLE,
        pages=mixed.paged.pages,
        waiting_ns=mixed.paged.waiting_ns,
        host_peak_bytes=mixed.paged.host_peak_bytes,
    )


def with_energy(program: Program, made: Plan, link: Link | None) -> Plan:
    """A plan with the energy of its steps and copies."""
    energy_pj = sum(program.ops[step].energy_pj for step in made.steps)
    if made.pages and link is not None:
        moved = traffic(program, made.steps, made.pages, link).moved_bytes
        energy_pj += round(link.picojoules_per_byte * moved)
    return dataclasses.replace(made, energy_pj=energy_pj)
