"""The simulator and the validator: two independent readings of one definition."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import example, programs, sequences

from passes.ir import Buffer, BufferId, Op, OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.planners.schedule import Schedule
from passes.simulate import simulate
from passes.validate import validate


def plan_of(program: Program, steps: tuple[int, ...], budget_bytes: int = 10**9) -> Plan:
    """A plan that claims what the simulator says."""
    wrapped = tuple(OpId(s) for s in steps)
    timeline = simulate(program, wrapped)
    return Plan(
        steps=wrapped,
        peak_bytes=timeline.peak_bytes,
        budget_bytes=budget_bytes,
        overhead_ratio=timeline.overhead_ratio,
        lower_bound_ratio=0.0,
        status=Status.FEASIBLE,
        planner="test",
        seconds=0.0,
    )


def one_op(share: tuple[tuple[int, int], ...], sizes: tuple[int, ...], workspace_bytes: int = 0) -> Program:
    """Ops 0 and 1 make buffers 0 and 1; op 2 reads both and makes the rest."""
    ids = tuple(BufferId(i) for i in range(len(sizes)))
    pairs = tuple((BufferId(o), BufferId(i)) for o, i in share)
    return Program.build(
        name="one op",
        ops=(
            Op(id=OpId(0), inputs=(), outputs=ids[:1], cost_ns=1),
            Op(id=OpId(1), inputs=(), outputs=ids[1:2], cost_ns=1),
            Op(
                id=OpId(2), inputs=ids[:2], outputs=ids[2:], cost_ns=1, may_share=pairs,
                workspace_bytes=workspace_bytes,
            ),
        ),
        buffers=tuple(Buffer(id=i, nbytes=n) for i, n in zip(ids, sizes, strict=True)),
        outputs=ids[2:],
    )  # fmt: skip


def test_the_drawn_example():
    program = example()
    assert simulate(program, range(6)).live_bytes.tolist() == [4, 8, 12, 13, 10, 6]
    timeline = simulate(program, tuple(OpId(s) for s in (0, 1, 2, 3, 1, 4, 5)))
    assert timeline.live_bytes.tolist() == [4, 8, 12, 9, 9, 10, 6]
    assert (timeline.peak_bytes, timeline.peak_step, timeline.cost_ns) == (12, 2, 70)
    validate(program, plan_of(program, (0, 1, 2, 3, 1, 4, 5)))


def test_an_output_in_place_adds_only_the_difference():
    assert simulate(one_op(((2, 0),), (4, 3, 6)), range(3)).live_bytes.tolist() == [4, 7, 9]
    assert simulate(one_op(((2, 0),), (4, 3, 2)), range(3)).live_bytes.tolist() == [4, 7, 7]


def test_each_place_is_taken_once():
    both = one_op(((2, 0), (3, 0)), (4, 3, 4, 4))
    assert simulate(both, range(3)).live_bytes.tolist() == [4, 7, 11]
    twice = one_op(((2, 0), (2, 1)), (4, 3, 4))
    assert simulate(twice, range(3)).live_bytes.tolist() == [4, 7, 7]


def test_nothing_takes_the_place_of_a_program_output():
    program = one_op(((2, 0),), (4, 3, 4))
    program = dataclasses.replace(program, outputs=(BufferId(0), BufferId(2)))
    assert simulate(program, range(3)).live_bytes.tolist() == [4, 7, 11]
    validate(program, plan_of(program, (0, 1, 2)))


def test_workspace_counts_while_its_op_runs():
    assert simulate(one_op((), (4, 3, 1), workspace_bytes=5), range(3)).live_bytes.tolist() == [4, 7, 13]


def test_an_unused_output_dies_after_its_step():
    program = one_op((), (4, 3, 1))
    assert simulate(program, (0, 1, 0, 2)).live_bytes.tolist() == [4, 3, 7, 8]


def test_a_program_without_ops_needs_its_arguments():
    program = Program.build(
        name="none", ops=(), buffers=(Buffer(id=BufferId(0), nbytes=7),), outputs=(BufferId(0),)
    )
    assert simulate(program, ()).peak_bytes == 7
    validate(program, plan_of(program, ()))


@given(st.data())
def test_simulator_validator_and_schedule_agree(data: st.DataObject):
    program = data.draw(programs())
    steps = data.draw(sequences(program))
    validate(program, plan_of(program, steps))
    schedule = Schedule(Graph.of(program), steps)
    assert schedule.live.tolist() == simulate(program, steps).live_bytes.tolist()


@given(st.data())
def test_taking_out_re_runs_keeps_the_profile_exact(data: st.DataObject):
    program = data.draw(programs())
    schedule = Schedule(Graph.of(program), data.draw(sequences(program)))
    limit_bytes = data.draw(st.integers(0, schedule.peak_bytes + 4))
    for position in data.draw(st.permutations(schedule.recompute_positions())):
        before = list(schedule.steps)
        deleted = schedule.try_delete(position, limit_bytes)
        timeline = simulate(program, tuple(OpId(s) for s in schedule.compact()))
        live = [n for n, op in zip(schedule.live.tolist(), schedule.steps, strict=True) if op >= 0]
        assert live == timeline.live_bytes.tolist()
        assert schedule.peak_bytes == timeline.peak_bytes
        assert schedule.cost_ns == timeline.cost_ns
        fresh = Schedule(Graph.of(program), [s for s in before if s >= 0])
        if not deleted:
            assert schedule.steps == before
            assert fresh.peak_bytes == timeline.peak_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": (0, 2, 1, 3, 4, 5)}, "step 1 runs op 2 for the first time before op 1"),
        ({"steps": (0, 1, 2, 3, 4)}, "never runs op 5"),
        ({"steps": (0, 1, 2, 3, 4, 5, 9)}, "runs op 9, but the program has 6 ops"),
        ({"peak_bytes": 11}, "says its peak is 11 bytes, but it needs 12 bytes"),
        ({"budget_bytes": 11}, "feasible for 11 bytes, it says, but needs 12"),
        ({"overhead_ratio": 0.5}, "says its overhead is 0.5, but its recomputes cost"),
        ({"lower_bound_ratio": 0.5}, "lower bound 0.5 is above"),
    ],
)
def test_the_validator_refuses(change: dict[str, object], message: str):
    program = example()
    plan = plan_of(program, (0, 1, 2, 3, 1, 4, 5))
    with pytest.raises(ValueError, match=message):
        validate(program, dataclasses.replace(plan, **change))


def test_the_validator_refuses_re_runs_that_are_not_allowed():
    program = example()
    plan = plan_of(program, (0, 1, 2, 3, 1, 4, 5))
    effect = dataclasses.replace(program.ops[1], recomputable=False)
    late = dataclasses.replace(program.ops[1], deadline=3)
    for op, message in ((effect, "not recomputable"), (late, "in slot 4, after its deadline 3")):
        changed = dataclasses.replace(program, ops=(program.ops[0], op, *program.ops[2:]))
        with pytest.raises(ValueError, match=message):
            validate(changed, plan)
