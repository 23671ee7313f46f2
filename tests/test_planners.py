"""Every planner against brute force, the validator and the simulator."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import least_cost_ns, least_peak_bytes
from strategies import chain, example, programs

from passes.ir import OpId, Plan, Program, Status
from passes.planners import PlannerConfig, cut_bound, frontier, least_peak, plan, working_set_bytes
from passes.planners.config import PLANNERS
from passes.simulate import simulate
from passes.validate import validate

QUICK = PlannerConfig(work_limit=20_000)


def quick(planner: str) -> PlannerConfig:
    """A config with a small work limit."""
    return dataclasses.replace(QUICK, planner=planner)


def check(program: Program, made: Plan) -> None:
    """Validator and simulator agree with the plan, and the status with its bytes."""
    validate(program, made)
    assert simulate(program, made.steps).peak_bytes == made.peak_bytes
    assert made.status.found == (made.peak_bytes <= made.budget_bytes)
    if made.offsets:
        assert len(made.offsets) == len(made.steps)


def own_peak(program: Program) -> int:
    return simulate(program, tuple(op.id for op in program.ops)).peak_bytes


@given(st.data(), st.sampled_from(PLANNERS))
def test_no_planner_contradicts_the_oracle(data: st.DataObject, planner: str):
    program = data.draw(programs(max_ops=5))
    budget_bytes = data.draw(st.integers(0, own_peak(program)))
    made = plan(program, budget_bytes, quick(planner))
    check(program, made)
    best_ns = least_cost_ns(program, budget_bytes)
    bound = cut_bound(program, budget_bytes)
    if best_ns is None:
        assert not made.status.found
    else:
        best_ratio = best_ns / program.cost_ns - 1 if program.cost_ns else 0.0
        assert made.status is not Status.INFEASIBLE
        assert bound <= best_ratio + 1e-9
        if made.status.found:
            assert made.overhead_ratio >= best_ratio - 1e-9
        if made.status is Status.OPTIMAL:
            assert made.overhead_ratio == pytest.approx(best_ratio)


@given(programs(max_ops=5))
def test_least_peak_and_the_working_set_bound_do_not_contradict_the_oracle(program: Program):
    least_bytes = least_peak_bytes(program)
    made = least_peak(program, QUICK)
    check(program, made)
    assert working_set_bytes(program) <= least_bytes <= made.peak_bytes
    if made.status is Status.OPTIMAL:
        assert made.peak_bytes == least_bytes
