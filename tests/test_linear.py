"""The linear bound: below brute force, above the cut bound, and true whatever prices the solver gives."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import least_cost_ns, least_peak_bytes
from strategies import chain, example, programs, small_gpt

from passes.ir import Plan, Program, Status
from passes.liveness import Graph
from passes.planners import PlannerConfig, cut_bound, plan
from passes.planners.exact import linear
from passes.planners.exact.frame import Frame
from passes.planners.exact.linear import LinearProgram, Row, joined, lp_bound, prices_of, proved_ns
from passes.simulate import simulate
from passes.validate import validate


def peak_bytes(program: Program) -> int:
    """The live peak without recomputes."""
    return simulate(program).peak_bytes


@settings(max_examples=200)
@given(st.data())
def test_no_plan_is_below_the_bound(data: st.DataObject):
    program = data.draw(programs())
    least_bytes = least_peak_bytes(program)
    budget_bytes = data.draw(st.integers(max(0, least_bytes - 1), max(least_bytes, peak_bytes(program))))
    levels = data.draw(st.sampled_from([(1,), (1, 3), (1, 2, 4), (2, 8)]))
    bound_ratio = lp_bound(program, budget_bytes, levels)
    assert bound_ratio >= cut_bound(program, budget_bytes)
    least_ns = least_cost_ns(program, budget_bytes)
    if least_ns is not None and program.cost_ns:
        assert bound_ratio <= (least_ns - program.cost_ns) / program.cost_ns


@settings(max_examples=60)
@given(st.data())
def test_any_prices_prove_something_true(data: st.DataObject):
    program = data.draw(programs())
    budget_bytes = data.draw(st.integers(least_peak_bytes(program), peak_bytes(program)))
    graph = Graph.of(program)
    cuts = linear.tight_ops(graph, budget_bytes, 4)
    frames = [Frame.of(graph, tuple(sorted(cuts[:count]))) for count in (1, 4)]
    relaxed = joined(frames, budget_bytes, 1)
    noise = data.draw(st.lists(st.floats(-1, 9), min_size=len(relaxed.rows), max_size=len(relaxed.rows)))
    prices = [price + more for price, more in zip(prices_of(relaxed), noise, strict=True)]
    least_ns = least_cost_ns(program, budget_bytes)
    assert least_ns is not None
    assert proved_ns(relaxed, prices) <= least_ns - program.cost_ns


def test_prices_that_are_a_little_too_high_are_paid_for():
    relaxed = LinearProgram(cost_ns=(3, 5), rows=(Row(terms=((0, 1), (1, 1)), least=1),))
    assert proved_ns(relaxed, prices_of(relaxed)) == 3
    assert [proved_ns(relaxed, [price]) for price in (1.5, 3.0, 3.1, 6.0, 9.0)] == [2, 3, 3, 2, 0]


def test_room_for_re_runs_counts_at_low_budgets():
    program = chain(12)
    budget_bytes = int(0.25 * peak_bytes(program))
    bound_ratio = lp_bound(program, budget_bytes)
    assert bound_ratio > 4 * cut_bound(program, budget_bytes)
    assert bound_ratio <= plan(program, budget_bytes).overhead_ratio


def test_joined_frames_prove_at_least_what_each_proves():
    program = small_gpt(4)
    budget_bytes = int(0.3 * peak_bytes(program))
    apart = [lp_bound(program, budget_bytes, (count,)) for count in (1, 4)]
    assert lp_bound(program, budget_bytes, (1, 4)) >= max(apart) - 1e-9


def test_large_programs_have_the_cut_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "CONFIG", dataclasses.replace(linear.CONFIG, most_ops=3))
    program = small_gpt(2)
    budget_bytes = int(0.3 * peak_bytes(program))
    assert lp_bound(program, budget_bytes) == cut_bound(program, budget_bytes)


def test_what_fits_or_never_fits_needs_no_program():
    program = example()
    assert lp_bound(program, peak_bytes(program)) == 0.0
    assert lp_bound(program, 1) == float("inf")


def test_a_plan_carries_the_stronger_bound():
    program = chain(12)
    budget_bytes = int(0.25 * peak_bytes(program))
    plans: list[Plan] = [plan(program, budget_bytes, PlannerConfig(strong_bound=s)) for s in (False, True)]
    validate(program, plans[1])
    assert plans[0].steps == plans[1].steps
    assert plans[0].lower_bound_ratio < plans[1].lower_bound_ratio <= plans[1].overhead_ratio
    assert plans[1].status is Status.FEASIBLE
