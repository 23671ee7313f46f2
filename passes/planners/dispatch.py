"""The entry of the planners: calls the one that a config names, as `passes.registry` says.

What OR-Tools' CP-SAT is needed for, the exact mode and the linear bound, is imported when it is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Sequence

from passes.ir import Plan, Program
from passes.planners import search
from passes.planners.config import SEARCHING, PlannerConfig
from passes.planners.paging.plans import frontier_paged, least_peak_paged
from passes.registry import PLANNERS


def plan(program: Program, budget_bytes: int, config: PlannerConfig | None = None) -> Plan:
    """Plan `program` for a peak of at most `budget_bytes`, as `config.planner` says.

    With `config.host_bytes` the plan may have pages; its overhead then counts waiting for the link.

    Returns:
        A plan that keeps the budget, `status.found`; else the plan of lowest peak that was found, with
        status INFEASIBLE if it is proved that there is none and UNKNOWN if nothing is proved.
    """
    begin, config = time.perf_counter(), config or PlannerConfig()
    planner = PLANNERS[config.planner]
    other = planner.paged if config.host_bytes else ""
    if config.objective.least == "energy":
        other = planner.frugal
    module, _, function = (other or planner.entry).partition(":")
    made: Plan = getattr(importlib.import_module(module), function)(program, budget_bytes, config)
    if (config.strong_bound or planner.proves) and not other:
        made = importlib.import_module("passes.planners.exact.linear").strengthened(program, made)
    return dataclasses.replace(made, seconds=time.perf_counter() - begin)


def planner_of(program: Program, config: PlannerConfig) -> Callable[[int], Plan]:
    """`plan` of one program, for any number of budgets: what belongs to none of them is found once."""
    is_searched = config.planner in SEARCHING and config.objective.least != "energy"
    if not is_searched or config.host_bytes or config.strong_bound:
        return lambda budget_bytes: plan(program, budget_bytes, config)
    return search.Search(program, config).within


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
    return config if config.planner in SEARCHING else dataclasses.replace(config, planner="auto")
