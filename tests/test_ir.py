"""The IR's own invariants and its JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from strategies import example, programs

from passes.ir import Buffer, BufferId, Op, OpId, Plan, Program, Status


def build(
    ops: list[tuple[tuple[int, ...], tuple[int, ...]]], count: int, outputs: tuple[int, ...] = ()
) -> Program:
    """A program of one-byte buffers from (inputs, outputs) pairs."""
    return Program.build(
        name="built",
        ops=tuple(
            Op(
                id=OpId(i),
                inputs=tuple(BufferId(b) for b in inputs),
                outputs=tuple(BufferId(b) for b in made),
                cost_ns=1,
            )
            for i, (inputs, made) in enumerate(ops)
        ),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=1) for i in range(count)),
        outputs=tuple(BufferId(b) for b in outputs),
    )


def test_arguments_and_producers_are_derived():
    program = build([((0, 0), (1,)), ((1,), (2, 3))], 4, outputs=(3, 0, 3))
    assert program.arguments == (0,)
    assert program.producer == (None, 0, 1, 1)
    assert program.outputs == (0, 3)
    assert program.cost_ns == 2


@pytest.mark.parametrize(
    ("ops", "outputs", "message"),
    [
        ([((), (0,)), ((), (0,))], (), "buffer 0 is written by op 1 and before it"),
        ([((0,), (1,)), ((), (0,))], (), "buffer 0 is written by op 1 and before it"),
        ([((0,), (0,))], (), "op 0 .* reads its own output 0|written by op 0"),
        ([((5,), (0,))], (), "names buffer 5 of 2"),
        ([((), (0,))], (9,), "output 9 is not one of 2 buffers"),
    ],
)
def test_broken_programs_are_refused(
    ops: list[tuple[tuple[int, ...], tuple[int, ...]]], outputs: tuple[int, ...], message: str
):
    with pytest.raises(ValueError, match=message):
        build(ops, 2, outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": OpId(3)}, "op 1 .* has id 3"),
        ({"cost_ns": -1}, "has id 1 and cost -1"),
        ({"workspace_bytes": -1}, "op 1"),
        ({"may_share": ((BufferId(0), BufferId(0)),)}, "shares 0 with 0: not its own"),
    ],
)
def test_broken_ops_are_refused(change: dict[str, object], message: str):
    program = example()
    ops = list(program.ops)
    ops[1] = dataclasses.replace(ops[1], **change)
    with pytest.raises(ValueError, match=message):
        Program.build(name="", ops=tuple(ops), buffers=program.buffers, outputs=program.outputs)


@given(programs())
def test_programs_round_trip_through_json(program: Program):
    again = Program.from_json(program.to_json())
    assert again == program


@pytest.mark.parametrize("text", ['{"format": "coop-program/2"}', "[]", "3"])
def test_other_formats_are_refused(text: str):
    with pytest.raises(ValueError, match='expected "format": "coop-program/1"'):
        Program.from_json(text)


def test_a_fractional_size_is_refused():
    data = json.loads(example().to_json())
    data["buffers"][2] = 1.5
    with pytest.raises(ValueError, match=r"buffers\[2\] is 1.5, expected an integer"):
        Program.from_json(json.dumps(data))


def test_can_recompute_until_the_deadline():
    op = example().ops[1]
    assert op.can_recompute(99)
    assert not dataclasses.replace(op, recomputable=False).can_recompute(1)
    late = dataclasses.replace(op, deadline=4)
    assert [late.can_recompute(slot) for slot in (3, 4, 5)] == [True, True, False]


def test_a_plan_lists_its_re_runs():
    plan = Plan(
        steps=tuple(OpId(s) for s in (0, 1, 0, 2, 1, 1)), peak_bytes=1, budget_bytes=2, overhead_ratio=0.5,
        lower_bound_ratio=0.0, status=Status.FEASIBLE, planner="test", seconds=0.0, offsets=((0,),) * 6,
    )  # fmt: skip
    assert plan.recomputes() == (2, 4, 5)
    data = json.loads(plan.to_json())
    assert data["steps"] == [0, 1, 0, 2, 1, 1]
    assert (data["status"], data["offsets"]) == ("feasible", [[0]] * 6)


def test_statuses_that_keep_the_budget():
    assert [s for s in Status if s.found] == [Status.OPTIMAL, Status.FEASIBLE]
