"""The exact mode as a planner: the search's plan as a hint, then the solver."""

from __future__ import annotations

import dataclasses

from passes.ir import Plan, Program
from passes.link import PCIE5
from passes.planners import search
from passes.planners.config import PlannerConfig
from passes.planners.exact.limits import ExactConfig
from passes.planners.exact.pages import solve_paged
from passes.planners.exact.placed import solve_jointly
from passes.planners.exact.solve import solve_exact
from passes.planners.paging import energy as frugal
from passes.planners.paging import plans as paging
from passes.planners.paging.director import Prices


def plan(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """A plan that costs no more than `auto`'s, with offsets if `config.joint`."""
    hint = search.plan(
        program, budget_bytes, dataclasses.replace(config, planner="auto", placed=config.joint)
    )
    solve = solve_jointly if config.joint else solve_exact
    return solve(program, budget_bytes, hint, _limits(config))


def plan_paged(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """The same with pages: the director's plan is the hint."""
    assert config.link is not None, "PlannerConfig asks for a link"
    hint = paging.plan_paged(program, budget_bytes, config)
    return solve_paged(program, hint.budget_bytes, hint, config.link, _limits(config))


def plan_energy(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """The plan of least energy, as POET asks for it: the search's plan of least energy is the hint."""
    found = frugal.plan_energy(program, budget_bytes, dataclasses.replace(config, planner="auto"))
    hint = dataclasses.replace(found, planner=config.planner)
    link = config.link or PCIE5
    prices = Prices.of_energy(program, link, config.objective.limit_ns(program.cost_ns))
    if config.link is None:
        here = tuple(dataclasses.replace(b, pageable=False) for b in program.buffers)
        program = dataclasses.replace(program, buffers=here)
    return solve_paged(program, hint.budget_bytes, hint, link, _limits(config), prices)


def _limits(config: PlannerConfig) -> ExactConfig:
    return ExactConfig(
        work_limit=config.exact_work_limit, time_limit_s=config.time_limit_s, report=config.report
    )
