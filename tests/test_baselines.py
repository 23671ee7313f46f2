"""The baselines at addresses: every replay is checked by the validator and by plain overlap search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import least_cost_ns
from strategies import chain, programs, small_gpt
from test_pool import check_offsets

from passes.ir import Status
from passes.liveness import Graph
from passes.planners import PlannerConfig, plan
from passes.planners.baselines import scores
from passes.planners.baselines.plans import POLICIES
from passes.planners.baselines.runtime import Runtime
from passes.simulate import simulate
from passes.validate import validate


@settings(max_examples=40)
@given(st.data())
def test_replays_keep_their_capacity(data: st.DataObject):
    program = data.draw(programs())
    name = data.draw(st.sampled_from((*POLICIES, "chen")))
    peak_bytes = simulate(program).peak_bytes
    budget_bytes = data.draw(st.integers(peak_bytes // 2, peak_bytes + 2))
    made = plan(program, budget_bytes, PlannerConfig(planner=name))
    validate(program, made)
    if made.status.found:
        check_offsets(program, made.steps, made.offsets, budget_bytes)
        least_ns = least_cost_ns(program, budget_bytes)
        assert least_ns is not None
        assert sum(program.ops[step].cost_ns for step in made.steps) >= least_ns
    if made.status is Status.INFEASIBLE:
        assert least_cost_ns(program, budget_bytes) is None


@pytest.mark.parametrize("name", [*POLICIES, "chen"])
def test_baselines_plan_training_programs_and_auto_beats_them(name: str):
    program = small_gpt(4)
    peak_bytes = simulate(program).peak_bytes
    made = plan(program, int(0.8 * peak_bytes), PlannerConfig(planner=name))
    validate(program, made)
    assert made.status is Status.FEASIBLE
    assert made.recomputes()
    assert made.planner == name
    assert plan(program, made.budget_bytes).overhead_ratio <= made.overhead_ratio


def evicted_chain(policy: scores.Dtr | scores.DtrEq | scores.Dte) -> Runtime:
    """A chain of five values of 8 bytes and cost 10, run once in order; values 1 and 2 are evicted."""
    runtime = Runtime(Graph.of(chain(5)), 1000, policy)
    for op in range(5):
        runtime.slot = op
        runtime.bring(op)
    runtime.slot = 5
    for buffer in (1, 2):
        policy.score(runtime, buffer, 0)
        runtime.evict(buffer)
    return runtime


def test_dtr_counts_evicted_ancestors_and_descendants():
    policy = scores.Dtr()
    runtime = evicted_chain(policy)
    # Value 3 needs 2 and 1 before it; it was last read by op 4, at 50 of the clock's 50.
    runtime.clock_ns = 60
    assert policy.score(runtime, 3, 0) == pytest.approx((10 + 20) / (8 * 10))
    # Value 0 was last read at 20; 1 and 2 wait for it.
    assert policy.score(runtime, 0, 0) == pytest.approx((10 + 20) / (8 * 40))
    # Value 4 is next to nothing that is evicted.
    assert policy.score(runtime, 4, 0) == pytest.approx(10 / (8 * 10))


def test_dtr_eq_joins_what_is_evicted_side_by_side():
    policy = scores.DtrEq()
    runtime = evicted_chain(policy)
    runtime.clock_ns = 60
    assert policy.score(runtime, 3, 0) == pytest.approx((10 + 20) / (8 * 10))
    runtime.bring(1)
    assert policy.score(runtime, 0, 0) == pytest.approx(10 / (8 * 1e-0 * max(1, runtime.clock_ns - 70)))


def test_dte_counts_free_neighbours_and_what_came_back():
    policy = scores.Dte()
    runtime = evicted_chain(policy)
    runtime.clock_ns = 60
    index = runtime.pool.index_of(3)
    # Values 1 and 2 left 16 free bytes below value 3.
    assert policy.score(runtime, 3, index) == pytest.approx((10 + 20) / ((8 + 16) * 10))
    runtime.recomputes[3] = 2
    assert policy.score(runtime, 3, index) == pytest.approx(1.1**2 * (10 + 20) / ((8 + 16) * 10))


def test_coop_evicts_contiguous_bytes():
    program = chain(8)
    runtime = Runtime(Graph.of(program), 48, scores.CoopOnline(100.0))
    for op in range(6):
        runtime.slot = op
        runtime.bring(op)
    held = [block.owner for block in runtime.pool.blocks]
    runtime.policy.make_room(runtime, 16)
    gone = [b for b in held if b >= 0 and not runtime.present[b]]
    assert len(gone) == 2
    assert runtime.pool.fit(16, from_top=False) is not None
