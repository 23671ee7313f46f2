"""The entry of the planners: which code a planner's name stands for.

The exact mode and the baselines are imported here; OR-Tools' CP-SAT only when the exact mode, or its
linear bound, is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Sequence

from passes.ir import Plan, Program
from passes.planners import search
from passes.planners.baselines.plans import BASELINES, PAGING_BASELINES, baseline, paging_baseline
from passes.planners.config import PlannerConfig
from passes.planners.paging.energy import plan_energy
from passes.planners.paging.plans import frontier_paged, least_peak_paged, plan_paged


def plan(program: Program, budget_bytes: int, config: PlannerConfig | None = None) -> Plan:
    """Plan `program` for a peak of at most `budget_bytes`, as `config.planner` says.

    With `config.host_bytes` the plan may have pages; its overhead then counts waiting for the link.

    Returns:
        A plan that keeps the budget, `status.found`; else the plan of lowest peak that was found, with
        status INFEASIBLE if it is proved that there is none and UNKNOWN if nothing is proved.
    """
    config = config or PlannerConfig()
    if config.objective == "energy":
        return plan_energy(program, budget_bytes, config)
    if config.planner in PAGING_BASELINES:
        assert config.link is not None, "PlannerConfig asks for a link"
        return paging_baseline(program, budget_bytes, config.host_bytes, config.link)
    if config.host_bytes and config.planner not in BASELINES:
        made = plan_paged(program, budget_bytes, config)
        return _exact_paged(program, made, config) if config.planner == "exact" else made
    if config.planner in BASELINES:
        made = baseline(program, budget_bytes, config.planner)
    elif config.planner == "exact":
        made = _exact(program, budget_bytes, config)
    else:
        made = search.plan(program, budget_bytes, config)
    if config.strong_bound or config.planner == "exact":
        return _strengthened(program, made)
    return made


def _strengthened(program: Program, made: Plan) -> Plan:
    """The plan with the linear bound beside it."""
    begin = time.perf_counter()
    stronger: Plan = importlib.import_module("passes.planners.exact.linear").strengthened(program, made)
    return dataclasses.replace(stronger, seconds=made.seconds + time.perf_counter() - begin)


def least_peak(program: Program, config: PlannerConfig | None = None) -> Plan:
    """The plan of lowest peak that was found, as `passes.planners.search.least_peak`."""
    config = _searched(config)
    return least_peak_paged(program, config) if config.host_bytes else search.least_peak(program, config)


def frontier(
    program: Program, budgets_bytes: Sequence[int], config: PlannerConfig | None = None
) -> tuple[Plan, ...]:
    """One plan for each budget, as `passes.planners.search.frontier`."""
    config = _searched(config)
    if config.host_bytes:
        return frontier_paged(program, budgets_bytes, config)
    return search.frontier(program, budgets_bytes, config)


def _searched(config: PlannerConfig | None) -> PlannerConfig:
    """The same config with a planner that searches."""
    config = config or PlannerConfig()
    if config.planner == "exact" or config.planner in (*BASELINES, *PAGING_BASELINES):
        return dataclasses.replace(config, planner="auto")
    return config


def _exact_paged(program: Program, hint: Plan, config: PlannerConfig) -> Plan:
    """The director's plan as a hint, then the solver."""
    begin = time.perf_counter()
    solver = importlib.import_module("passes.planners.exact.pages")
    limits = importlib.import_module("passes.planners.exact.limits")
    settings = limits.ExactConfig(
        work_limit=config.exact_work_limit, time_limit_s=config.time_limit_s, report=config.report
    )
    made: Plan = solver.solve_paged(program, hint.budget_bytes, hint, config.link, settings)
    return dataclasses.replace(made, seconds=hint.seconds + time.perf_counter() - begin)


def _exact(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """The search's plan as a hint, then the solver."""
    begin = time.perf_counter()
    hint = search.plan(
        program, budget_bytes, dataclasses.replace(config, planner="auto", placed=config.joint)
    )
    solver = importlib.import_module("passes.planners.exact.solve")
    settings = solver.ExactConfig(
        work_limit=config.exact_work_limit, time_limit_s=config.time_limit_s, report=config.report
    )
    if config.joint:
        solve = importlib.import_module("passes.planners.exact.placed").solve_jointly
    else:
        solve = solver.solve_exact
    made: Plan = solve(program, budget_bytes, hint, settings)
    return dataclasses.replace(made, seconds=time.perf_counter() - begin)
