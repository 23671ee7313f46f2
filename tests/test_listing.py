"""Programs and plans as text: what is written is read back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from reading import read_plan_text, read_program
from strategies import example, programs, small_gpt

from passes.checked import InputError
from passes.ir import BufferId, Page, Program
from passes.listing import plan_text, program_text, read_plan
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate


def test_the_drawn_example_is_read_by_people() -> None:
    text = str(example())
    lines = text.split("\n")
    assert lines[0].startswith("program ")
    assert [int(line.split("|")[1].split()[-1]) for line in lines[1:7]] == [4, 8, 12, 13, 10, 6]
    assert "%4[1] = " in text
    assert lines[7] == "outputs %5"


@given(programs())
def test_a_program_survives_its_text(program: Program) -> None:
    assert read_program(program_text(program)) == program


def test_a_large_program_survives_its_text() -> None:
    program = small_gpt(3)
    assert read_program(str(program)) == program


def test_energy_and_what_stays_survive_text_and_json() -> None:
    program = small_gpt(1)
    ops = tuple(dataclasses.replace(op, energy_pj=op.id) for op in program.ops)
    buffers = tuple(dataclasses.replace(b, pageable=b.id % 3 > 0) for b in program.buffers)
    program = dataclasses.replace(program, ops=ops, buffers=buffers)
    assert read_program(str(program)) == program == Program.from_json(program.to_json())


def test_a_plan_shows_what_it_recomputes() -> None:
    program = example()
    made = plan(program, 12, PlannerConfig())
    text = plan_text(made, program)
    assert text.count("| *") == len(made.recomputes()) == 1
    live = simulate(program, made.steps).live_bytes.tolist()
    assert [int(line.split("|")[1].split()[-1]) for line in text.split("\n")[2:-1]] == live
    assert str(made).count("*") == 1
    assert read_plan(made.to_json()).steps == made.steps


@pytest.mark.parametrize("ratio", [1.0, 0.6, 0.3])
@pytest.mark.parametrize("placed", [False, True])
def test_a_plan_survives_its_text_with_and_without_its_program(ratio: float, placed: bool) -> None:
    program = small_gpt(3)
    peak_bytes = simulate(program).peak_bytes
    made = plan(program, int(ratio * peak_bytes), PlannerConfig(quick=True, placed=placed))
    assert bool(made.offsets) == placed
    assert read_plan_text(str(made)) == made
    assert read_plan_text(plan_text(made, program)) == made


def test_pages_survive_the_text_of_a_plan() -> None:
    pages = (
        Page(buffer=BufferId(0), run=0, out_done=2, in_start=4, in_done=5),
        Page(buffer=BufferId(1), run=1, out_done=3, in_start=4, in_done=4),
    )
    plain = plan(example(), 13, PlannerConfig())
    made = dataclasses.replace(
        plain, pages=pages, planner="", host_budget_bytes=9, host_peak_bytes=8, waiting_ns=3
    )
    assert "page %0 of step 0: out before 2, in from 4 to 5" in str(made)
    assert read_plan_text(str(made)) == made
    placed = dataclasses.replace(made, page_offsets=(64, 0))
    assert read_plan_text(str(placed)) == placed


def test_what_is_no_text_of_a_plan_is_refused() -> None:
    text = str(plan(example(), 12, PlannerConfig()))
    for wrong in ("", "plan", text + "nonsense", text.replace("peak", "top")):
        with pytest.raises(InputError):
            read_plan_text(wrong)


def test_what_is_no_text_of_a_program_is_refused() -> None:
    for text in ("", "program", 'program "x", 1 ops, 1 buffers, cost 1\nnonsense\noutputs'):
        with pytest.raises(InputError):
            read_program(text)
    with pytest.raises(InputError, match="coop-plan/1"):
        read_plan("{}")
    with pytest.raises(InputError, match="not one of this program's"):
        plan_text(read_plan('{"format": "coop-plan/1", "steps": [99], "peak_bytes": 1, "budget_bytes": 1, '
                            '"status": "feasible"}'), example())  # fmt: skip
