"""The joint mode and the search around a plan: against brute force, stopped, and never worse."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import least_peak_bytes
from ortools.sat.python import cp_model
from strategies import programs, random_program, small_gpt
from test_exact_lifetimes import can_be_placed, least_ns
from test_pool import check_offsets

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.offsets.packing import Span, disjoint
from passes.offsets.placement import place_graph
from passes.planners import PlannerConfig, plan, search
from passes.planners.candidate import Candidate
from passes.planners.exact import lifetimes, placed
from passes.planners.exact.axis import Axis
from passes.planners.exact.limits import Clock, ExactConfig
from passes.planners.exact.rectangles import pack
from passes.planners.exact.slots import improve, lower
from passes.planners.placing import end_of
from passes.planners.schedule import Schedule
from passes.simulate import simulate, simulate_graph
from passes.validate import validate


def jointly(program: Program, budget_bytes: int, work_limit: float) -> Plan:
    """The joint plan from a quick hint, checked by the validator and the naive check of offsets."""
    config = PlannerConfig(planner="exact", joint=True, work_limit=100_000, exact_work_limit=work_limit)
    made = plan(program, budget_bytes, config)
    validate(program, made)
    if made.status.found:
        check_offsets(program, made.steps, made.offsets, budget_bytes)
    return made


@settings(max_examples=40)
@given(st.data())
def test_no_placed_plan_in_schedule_order_costs_less(data: st.DataObject):
    program = data.draw(programs(max_ops=5))
    budget_bytes = least_peak_bytes(program) + data.draw(st.integers(0, 3))
    made = jointly(program, budget_bytes, 1.0)
    graph = Graph.of(program)
    axis = Axis.around(graph, range(len(program.ops)), range(len(program.ops) + 1))
    least = least_ns(axis, lambda steps: can_be_placed(program, steps, budget_bytes))
    if least is not None:
        assert made.status.found
        assert made.overhead_ratio * program.cost_ns <= least + 1e-6


def test_a_chain_whose_live_ranges_meet_is_packed_as_one_item():
    # The second live range takes the first one's place at 2, where something else is alive, too.
    chain = disjoint((Span(start=0, stop=3, nbytes=2), Span(start=2, stop=4, nbytes=1)))
    assert chain == (Span(start=0, stop=3, nbytes=2), Span(start=3, stop=4, nbytes=1))
    beside = (Span(start=2, stop=4, nbytes=1),)
    assert pack([chain, beside], 3).fits
    assert pack([chain, beside], 2).fits is False


def test_what_the_cheapest_plan_lacks_in_room_is_paid_for():
    # Its cheapest plan cannot be packed: 19 in 25 bytes is the least that a placed one costs.
    program = random_program(random.Random(84_000), 12)
    live = plan(program, 25, PlannerConfig(planner="exact"))
    made = jointly(program, 25, 2.0)
    assert round(live.overhead_ratio * program.cost_ns) == 28
    assert round(made.overhead_ratio * program.cost_ns) == 29
    assert made.status is Status.FEASIBLE


def test_a_plan_is_placed_that_no_lower_budget_leads_to():
    program = random_program(random.Random(24_003), 24)
    made = jointly(program, 25, 2.0)
    assert made.status is Status.OPTIMAL


def unproved() -> tuple[Graph, int, Candidate]:
    """A program, a budget near its least, and the search's plan, which is far from the optimum."""
    program = random_program(random.Random(32_000), 32)
    hint = search.plan(program, 34, PlannerConfig(work_limit=200_000))
    graph = Graph.of(program)
    assert hint.status.found
    return graph, 34, Candidate.of(Schedule(graph, hint.steps))


def test_slots_that_are_chosen_anew_cost_less():
    graph, budget_bytes, start = unproved()
    found = improve(graph, budget_bytes, start, Clock(ExactConfig(work_limit=0.5)), 0)
    assert simulate_graph(graph, found.steps).peak_bytes <= budget_bytes
    assert found.cost_ns < start.cost_ns
    assert found == improve(graph, budget_bytes, start, Clock(ExactConfig(work_limit=0.5)), 0)


def test_a_placed_plan_is_led_into_the_budget():
    graph, budget_bytes, start = unproved()
    placed = dataclasses.replace(start, offsets=place_graph(graph, start.steps).offsets)
    assert end_of(graph, placed) > budget_bytes
    clock = Clock(ExactConfig(work_limit=1.0))
    found = lower(graph, budget_bytes, placed, clock, most_ns=None, keep=0.0)
    assert end_of(graph, found) < end_of(graph, placed)
    steps = tuple(OpId(op) for op in found.steps)
    check_offsets(graph.program, steps, found.offsets, end_of(graph, found))
    assert clock.left == 0.0 or end_of(graph, found) <= budget_bytes


class Interrupted(cp_model.CpSolver):
    """A solver to which Ctrl-C comes with its first answer."""

    def solve(self, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
        callback = cp_model.CpSolverSolutionCallback()
        callback.on_solution_callback = callback.stop_search
        return super().solve(model, callback)


def test_a_solver_that_ends_early_was_stopped():
    lines: list[str] = []
    clock = Clock(ExactConfig(work_limit=5.0, report=lines.append))
    graph, budget_bytes, start = unproved()
    axis = Axis.around(graph, start.steps, range(33))
    made = lifetimes.build(axis, budget_bytes, placed=False)
    lifetimes.add_hint(made, axis.positions(start.steps), {})
    assert clock.solve(Interrupted(), made.model) == cp_model.FEASIBLE
    assert clock.stopped
    assert clock.left == 0.0
    assert "stopped" in lines[-1]


def test_a_limit_that_is_reached_is_no_stop():
    clock = Clock(ExactConfig(work_limit=0.05))
    graph, budget_bytes, start = unproved()
    made = lifetimes.build(Axis.around(graph, start.steps, range(33)), budget_bytes, placed=False)
    clock.solve(cp_model.CpSolver(), made.model)
    assert not clock.stopped
    assert clock.left == 0.0


def test_an_interrupt_keeps_the_best_placed_plan(monkeypatch: pytest.MonkeyPatch):
    program = small_gpt(3)
    peak_bytes = simulate(program).peak_bytes
    hint = search.plan(program, int(0.6 * peak_bytes), PlannerConfig(placed=True))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("passes.planners.exact.placed.solve_within", interrupt)
    made = placed.solve_jointly(program, hint.budget_bytes, hint, ExactConfig())
    validate(program, made)
    assert made.steps == hint.steps
    assert made.offsets == hint.offsets
    assert made.status is Status.FEASIBLE
