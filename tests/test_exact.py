"""The exact planner against brute force, and every constraint family on an instance it allows and one not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import least_cost_ns, least_peak_bytes
from ortools.sat.python import cp_model
from strategies import chain, example, in_place, programs, sequences, small_gpt
from test_pool import check_offsets

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.planners import PlannerConfig, plan, search
from passes.planners.exact import retention
from passes.planners.exact.expand import hint_of, steps_of
from passes.planners.exact.frame import Frame, unit_bytes
from passes.planners.exact.retention import Retention
from passes.planners.exact.solve import ExactConfig, solve_exact
from passes.simulate import simulate
from passes.validate import validate


def exact(program: Program, budget_bytes: int, **options: object) -> Plan:
    """The exact plan without much of a hint, checked by the validator and the simulator."""
    hint = search.plan(program, budget_bytes, search.PlannerConfig(planner="window", work_limit=0))
    made = solve_exact(program, budget_bytes, hint, ExactConfig(**options))  # type: ignore[arg-type]
    validate(program, made)
    assert simulate(program, made.steps).peak_bytes == made.peak_bytes
    return made


@settings(max_examples=80)
@given(st.data())
def test_nothing_that_is_proved_is_refuted_by_brute_force(data: st.DataObject):
    program = data.draw(programs())
    peak_bytes = simulate(program).peak_bytes
    least_bytes = least_peak_bytes(program)
    levels = [least_bytes, (2 * least_bytes + peak_bytes) // 3, max(0, least_bytes - 1)]
    budget_bytes = data.draw(st.sampled_from(levels))
    made = exact(program, budget_bytes)
    least_ns = least_cost_ns(program, budget_bytes)
    if made.status is Status.INFEASIBLE:
        assert least_ns is None
    if least_ns is not None and program.cost_ns:
        base_ns = program.cost_ns
        assert made.lower_bound_ratio <= (least_ns - base_ns) / base_ns + 1e-12
        if made.status is Status.OPTIMAL:
            assert made.overhead_ratio == pytest.approx((least_ns - base_ns) / base_ns)
        else:
            assert made.status in (Status.FEASIBLE, Status.UNKNOWN)


@pytest.mark.parametrize("program", [small_gpt(2), chain(12)], ids=lambda p: p.name)
@pytest.mark.parametrize("ratio", [0.8, 0.6])
def test_training_programs_are_proved(program: Program, ratio: float):
    peak_bytes = simulate(program).peak_bytes
    made = exact(program, int(ratio * peak_bytes))
    assert made.status is Status.OPTIMAL
    again = exact(program, int(ratio * peak_bytes))
    assert made.steps == again.steps
    assert made.overhead_ratio <= search.plan(program, int(ratio * peak_bytes)).overhead_ratio


def test_no_limit_is_worse_than_the_hint():
    program = small_gpt(3)
    peak_bytes = simulate(program).peak_bytes
    budget_bytes = int(0.5 * peak_bytes)
    hint = search.plan(program, budget_bytes)
    made = solve_exact(program, budget_bytes, hint, ExactConfig(work_limit=1e-6))
    validate(program, made)
    assert made.status.found
    assert made.overhead_ratio <= hint.overhead_ratio


def test_an_interrupt_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch):
    program = small_gpt(3)
    peak_bytes = simulate(program).peak_bytes
    hint = search.plan(program, int(0.5 * peak_bytes))
    lines: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("passes.planners.exact.solve.build", interrupt)
    made = solve_exact(program, hint.budget_bytes, hint, ExactConfig(report=lines.append))
    validate(program, made)
    assert made.steps == hint.steps
    assert made.status is Status.FEASIBLE
    assert "stopped" in lines[0]


Family = Callable[[Retention], None]


def model_of(
    program: Program, cuts: Iterable[int], budget_bytes: int, *families: Family, ordered: tuple[int, ...] = ()
) -> Retention:
    """Variables and some families, in bytes."""
    frame = Frame.of(Graph.of(program), tuple(cuts), ordered)
    made = Retention(frame=frame, model=cp_model.CpModel(), capacity=budget_bytes, unit=1)
    retention.add_variables(made)
    for family in families:
        family(made)
    return made


def holds(made: Retention, **fixed: dict[tuple[int, int], bool]) -> bool:
    """Whether a model has an answer with some variables fixed; names are those of `Retention`."""
    model = made.model.clone()
    for name, values in fixed.items():
        for key, value in values.items():
            literal = getattr(made, name)[key]
            model.add(model.get_bool_var_from_proto_index(literal.index) == int(value))
    return cp_model.CpSolver().solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


ALL_CUTS = range(5)


def test_a_live_range_is_kept_only_from_a_live_range():
    made = model_of(example(), ALL_CUTS, 99, retention.add_carrying)
    assert holds(made, kept={(2, 0): True, (3, 0): True})
    assert not holds(made, kept={(2, 0): False, (3, 0): True}, recompute={(2, 0): False})
    assert holds(made, kept={(2, 0): False, (3, 0): True}, recompute={(2, 0): True})


def test_an_op_finds_its_inputs():
    made = model_of(example(), ALL_CUTS, 99, retention.add_inputs)
    assert holds(made, kept={(4, 1): True}, recompute={(4, 1): False})
    assert not holds(made, kept={(4, 1): False}, recompute={(4, 1): False})
    assert not holds(made, kept={(4, 1): False, (4, 0): False}, recompute={(4, 1): True, (4, 0): False})


def test_outputs_are_there_at_the_end():
    made = model_of(example(), range(6), 99, retention.add_outputs)
    assert holds(made, kept={(6, 5): True})
    assert not holds(made, kept={(6, 5): False}, recompute={(6, 5): False})


def test_the_budget_holds_when_a_cut_runs():
    # Op 2 reads b and writes c (8 bytes); a (4 bytes) may be kept beside them, into block 3.
    fits = model_of(example(), ALL_CUTS, 12, retention.add_slot_memory)
    tight = model_of(example(), ALL_CUTS, 11, retention.add_slot_memory)
    assert holds(fits, kept={(3, 0): True})
    assert not holds(tight, kept={(3, 0): True})
    assert holds(tight, kept={(3, 0): False})


def test_a_recompute_fits_beside_what_passes_through():
    # Re-running b in block 4 takes a and b (8 bytes) while dc and db are not there yet or do not pass.
    b_alone = {(4, 1): True}
    assert holds(model_of(example(), ALL_CUTS, 8, retention.add_recompute_memory), recompute=b_alone)
    assert not holds(model_of(example(), ALL_CUTS, 7, retention.add_recompute_memory), recompute=b_alone)


def test_ordered_recomputes_count_what_the_slot_holds():
    # In slot 4, recomputing b: a, b and dc (9 bytes), which the coarse family does not see.
    families = (retention.add_carrying, retention.add_inputs, retention.add_ordered_memory)
    recomputed_b = {(4, 1): True, (4, 0): False}
    fits = model_of(example(), ALL_CUTS, 10, *families, ordered=(4,))
    tight = model_of(example(), ALL_CUTS, 8, *families, ordered=(4,))
    assert holds(fits, recompute=recomputed_b)
    assert not holds(tight, recompute=recomputed_b)


@pytest.mark.parametrize("family", [retention.add_slot_memory, retention.add_ordered_memory])
def test_an_output_in_a_dying_input_s_place_takes_no_bytes(family: Family):
    ordered = (1,) if family is retention.add_ordered_memory else ()
    assert holds(model_of(in_place(read_again=False), (0, 1), 4, family, ordered=ordered))
    assert not holds(model_of(in_place(read_again=False), (0, 1), 3, family, ordered=ordered))


@settings(max_examples=50)
@given(st.data())
def test_every_sequence_is_a_point_of_every_frame(data: st.DataObject):
    program = data.draw(programs(max_ops=6))
    steps = data.draw(sequences(program))
    peak_bytes = simulate(program, steps).peak_bytes
    cuts = data.draw(st.lists(st.integers(0, len(program.ops) - 1), unique=True))
    graph = Graph.of(program)
    frame = Frame.of(graph, tuple(cuts))
    made = retention.build(frame, peak_bytes, unit_bytes(graph, peak_bytes, 10**6))
    recompute, kept = hint_of(frame, list(steps))
    useful = {key for key in recompute if key in made.recompute}
    point = {"recompute": dict.fromkeys(useful, True), "kept": {k: k in kept for k in made.kept}}
    assert holds(made, **point)


@settings(max_examples=50)
@given(st.data())
def test_every_answer_is_a_valid_sequence(data: st.DataObject):
    program = data.draw(programs(max_ops=6))
    graph = Graph.of(program)
    cuts = data.draw(st.lists(st.integers(0, len(program.ops) - 1), unique=True))
    frame = Frame.of(graph, tuple(cuts))
    made = retention.build(frame, 10**6, 1)
    solver = cp_model.CpSolver()
    assert solver.solve(made.model) == cp_model.OPTIMAL
    recompute = {k for k, x in made.recompute.items() if solver.boolean_value(x)}
    kept = {k for k, x in made.kept.items() if solver.boolean_value(x)}
    simulate(program, tuple(OpId(op) for op in steps_of(frame, recompute, kept)))


@settings(max_examples=40)
@given(st.data())
def test_joint_plans_fit_at_their_offsets(data: st.DataObject):
    program = data.draw(programs())
    peak_bytes = simulate(program).peak_bytes
    least_bytes = least_peak_bytes(program)
    budget_bytes = data.draw(st.integers(least_bytes, max(least_bytes, peak_bytes)))
    made = plan(program, budget_bytes, PlannerConfig(planner="exact", joint=True, work_limit=0))
    validate(program, made)
    if made.status.found:
        check_offsets(program, made.steps, made.offsets, budget_bytes)


def test_a_joint_plan_leaves_no_fragmentation_over_its_budget():
    program = small_gpt(4)
    peak_bytes = simulate(program).peak_bytes
    budget_bytes = int(0.6 * peak_bytes)
    made = plan(program, budget_bytes, PlannerConfig(planner="exact", joint=True))
    validate(program, made)
    assert made.status is Status.OPTIMAL
    check_offsets(program, made.steps, made.offsets, budget_bytes)
