"""Every strategy of the search gives something: a program that is planned worse without it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from strategies import random_program
from test_skyline import layered

from passes.ir import Plan, Program
from passes.planners import PlannerConfig, least_peak, plan
from passes.planners.strategies import DEEPEST, PLACING, STRATEGIES
from passes.simulate import simulate


def share_of_peak(program: Program, ratio: float) -> int:
    return int(ratio * simulate(program).peak_bytes)


def is_worse(made: Plan, than: Plan) -> bool:
    return not made.status.found or made.overhead_ratio > than.overhead_ratio


@pytest.mark.parametrize(
    ("strategy", "seed", "n_ops"),
    [
        ("cuts", 4, 30),
        ("longer cuts", 14, 60),
        ("segments", 1, 30),
        ("neighbourhoods", 0, 20),
        ("relaxed", 4, 20),
    ],
)
def test_without_a_strategy_a_plan_costs_more_or_is_not_found(strategy: str, seed: int, n_ops: int):
    program = random_program(random.Random(seed), n_ops)
    budget_bytes = share_of_peak(program, 0.6)
    made = plan(program, budget_bytes, PlannerConfig(work_limit=50_000))
    without = PlannerConfig(work_limit=50_000, without=frozenset({strategy}))
    assert made.status.found
    assert is_worse(plan(program, budget_bytes, without), made)


def test_without_evictions_a_small_irregular_program_costs_more():
    program = random_program(random.Random(112), 30)
    budget_bytes = share_of_peak(program, 0.8)
    made = plan(program, budget_bytes, PlannerConfig(quick=True))
    without = PlannerConfig(quick=True, without=frozenset({"evictions"}))
    assert is_worse(plan(program, budget_bytes, without), made)


def test_without_leading_it_below_a_plan_that_nearly_fits_costs_more():
    program = random_program(random.Random(32), 40)
    config = PlannerConfig(work_limit=50_000, bound=False)
    made = plan(program, 38, config)
    assert made.status.found
    assert is_worse(plan(program, 38, dataclasses.replace(config, without=frozenset({"led below"}))), made)


@pytest.mark.parametrize(
    ("strategy", "seed", "n_ops"), [("cuts", 15, 60), ("bisection", 1, 30), ("small steps", 2, 40)]
)
def test_without_a_strategy_the_least_peak_is_higher(strategy: str, seed: int, n_ops: int):
    program = random_program(random.Random(seed), n_ops)
    made = least_peak(program, PlannerConfig(work_limit=50_000))
    without = least_peak(program, PlannerConfig(work_limit=50_000, without=frozenset({strategy})))
    assert without.peak_bytes > made.peak_bytes


@pytest.mark.parametrize(
    ("strategy", "program", "ratio", "work_limit"),
    [
        ("tighter", layered(100, 6, 2), 0.8, 100_000),
        ("slack", layered(120, 6, 3), 0.6, 200_000),
        ("much tighter", layered(60, 6, 1), 0.6, 200_000),
    ],
)
def test_without_a_strategy_of_placing_holes_cost_more(
    strategy: str, program: Program, ratio: float, work_limit: int
):
    budget_bytes = share_of_peak(program, ratio)
    config = PlannerConfig(work_limit=work_limit, bound=False, placed=True)
    made = plan(program, budget_bytes, config)
    assert made.status.found
    without = dataclasses.replace(config, without=frozenset({strategy}))
    assert is_worse(plan(program, budget_bytes, without), made)


def test_every_strategy_is_switched_off_by_a_test_above():
    guarded = {"cuts", "longer cuts", "segments", "evictions", "led below", "relaxed", "neighbourhoods"}
    guarded |= {"small steps", "bisection", "tighter", "slack", "much tighter"}
    listed = {s.name for strategies in (*STRATEGIES.values(), DEEPEST, PLACING) for s in strategies}
    assert listed == guarded | {"walks"}, "`walks` is all that the window planner does"


def test_every_strategy_has_a_name_of_its_own_and_says_what_it_does():
    for strategies in (*STRATEGIES.values(), PLACING):
        assert len({s.name for s in strategies}) == len(strategies)
        assert all(s.run.__doc__ for s in strategies)
