"""Plans at budgets that the cuts do not reach."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from oracle import least_peak_bytes
from strategies import programs, random_program

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.rebuild import rebuild
from passes.planners.schedule import Schedule
from passes.validate import validate


def start(program: Program) -> Candidate:
    return Candidate.of(Schedule(Graph.of(program), range(len(program.ops))))


def check(program: Program, found: Candidate, budget_bytes: int) -> None:
    """Validate a sequence as a plan of this budget."""
    base_ns = program.cost_ns
    validate(
        program,
        Plan(
            steps=tuple(OpId(op) for op in found.steps),
            peak_bytes=found.peak_bytes,
            budget_bytes=budget_bytes,
            overhead_ratio=(found.cost_ns - base_ns) / base_ns if base_ns else 0.0,
            lower_bound_ratio=0.0,
            status=Status.FEASIBLE,
            planner="auto",
            seconds=0.0,
        ),
    )


@settings(max_examples=60)
@given(programs(plain=True))
def test_the_least_peak_is_always_reached(program: Program):
    least_bytes = least_peak_bytes(program)
    found = rebuild(Graph.of(program), start(program), least_bytes, WorkLimit(10**6))
    assert found.peak_bytes == least_bytes or found.peak_bytes <= start(program).peak_bytes <= least_bytes
    check(program, found, least_bytes)


def test_a_budget_below_the_least_is_not_met():
    program = random_program(random.Random(1), 8)
    least_bytes = least_peak_bytes(program)
    assert rebuild(Graph.of(program), start(program), least_bytes - 1, WorkLimit(10**6)) == start(program)


def test_ops_that_must_not_run_again_are_left_alone():
    program = random_program(random.Random(3), 12)
    ops = tuple(dataclasses.replace(op, recomputable=op.id != 2) for op in program.ops)
    fixed = dataclasses.replace(program, ops=ops)
    budget_bytes = start(program).peak_bytes - 1
    assert rebuild(Graph.of(fixed), start(fixed), budget_bytes, WorkLimit(10**6)) == start(fixed)


def test_too_little_work_leaves_the_sequence_as_it_was():
    program = random_program(random.Random(3), 12)
    assert rebuild(Graph.of(program), start(program), 1, WorkLimit(10)) == start(program)
