"""The model with lifetimes and addresses against brute force, and every family on tiny instances."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from strategies import example, in_place, programs, sequences

from passes.ir import OpId, Program
from passes.liveness import Graph, live_ranges
from passes.offsets.placement import range_groups
from passes.planners.exact import lifetimes
from passes.planners.exact.axis import Axis
from passes.planners.exact.lifetimes import Lifetimes
from passes.planners.exact.rectangles import pack
from passes.simulate import simulate

Family = Callable[[Lifetimes], None]


def plans_on(axis: Axis) -> Iterator[tuple[OpId, ...]]:
    """Every sequence that lies on an axis."""
    optional = [p for p, is_first in enumerate(axis.is_first) if not is_first]
    for bits in range(1 << len(optional)):
        out = {p for k, p in enumerate(optional) if bits >> k & 1}
        yield tuple(OpId(op) for p, op in enumerate(axis.steps) if p not in out)


def can_be_placed(program: Program, steps: tuple[OpId, ...], budget_bytes: int) -> bool:
    """Whether the live ranges of a sequence fit, with any choice of who takes a dying input's place."""
    graph = Graph.of(program)
    if budget_bytes < graph.argument_bytes:
        return False
    ranges = live_ranges(graph, steps)
    takers = [live_range for live_range, old in enumerate(ranges.place) if old >= 0]
    for bits in range(1 << len(takers)):
        place = list(ranges.place)
        for k, live_range in enumerate(takers):
            if bits >> k & 1:
                place[live_range] = -1
        _, items = range_groups(graph, steps, dataclasses.replace(ranges, place=place))
        if pack([tuple(item) for item in items], budget_bytes - graph.argument_bytes).fits:
            return True
    return False


def least_ns(axis: Axis, keeps: Callable[[tuple[OpId, ...]], bool]) -> int | None:
    """Cost of the recomputes of the cheapest sequence on an axis that keeps a budget."""
    cost_ns = axis.graph.cost_ns
    once_ns = sum(cost_ns)
    by_cost = sorted((sum(cost_ns[op] for op in steps) - once_ns, steps) for steps in plans_on(axis))
    return next((recompute_ns for recompute_ns, steps in by_cost if keeps(steps)), None)


def solved(made: Lifetimes) -> tuple[int, tuple[OpId, ...]] | None:
    """The optimum of a model and its steps; None if there is none."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(made.model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status == cp_model.INFEASIBLE:
        return None
    steps = [op for op, run in zip(made.axis.steps, made.run, strict=True) if solver.boolean_value(run)]
    return round(solver.objective_value), tuple(OpId(op) for op in steps)


def drawn(data: st.DataObject, max_recomputes: int) -> tuple[Program, Axis, int]:
    """A program, an axis of it, and a budget from half of its peak on."""
    program = data.draw(programs(max_ops=5))
    axis = Axis.of(Graph.of(program), data.draw(sequences(program, max_recomputes=max_recomputes)))
    peak_bytes = simulate(program).peak_bytes
    return program, axis, data.draw(st.integers(peak_bytes // 2, peak_bytes))


@settings(max_examples=150)
@given(st.data())
def test_the_model_of_live_bytes_finds_what_brute_force_finds(data: st.DataObject):
    program, axis, budget_bytes = drawn(data, max_recomputes=4)
    best = solved(lifetimes.build(axis, budget_bytes, placed=False))
    least = least_ns(axis, lambda steps: simulate(program, steps).peak_bytes <= budget_bytes)
    assert (best and best[0]) == least
    assert best is None or simulate(program, best[1]).peak_bytes <= budget_bytes


@settings(max_examples=150)
@given(st.data())
def test_the_model_with_addresses_finds_what_brute_force_finds(data: st.DataObject):
    program, axis, budget_bytes = drawn(data, max_recomputes=3)
    best = solved(lifetimes.build(axis, budget_bytes, placed=True))
    least = least_ns(axis, lambda steps: can_be_placed(program, steps, budget_bytes))
    assert (best and best[0]) == least
    assert best is None or can_be_placed(program, best[1], budget_bytes)


def model_of(program: Program, steps: tuple[int, ...], budget_bytes: int, *families: Family) -> Lifetimes:
    """Which steps run, what is needed, and some more families."""
    made = Lifetimes.of(Axis.of(Graph.of(program), steps), budget_bytes)
    for family in (lifetimes.add_runs, lifetimes.add_needs, *families):
        family(made)
    return made


def holds(made: Lifetimes, *fixed: cp_model.BoundedLinearExpression | cp_model.LiteralT) -> bool:
    """Whether a model has an answer in which some constraints hold, too."""
    model = made.model.clone()
    for constraint in fixed:
        if isinstance(constraint, cp_model.BoundedLinearExpression):
            model.add(constraint)
        else:
            model.add_bool_and(constraint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


# The plan drawn in `passes.ir`: b (buffer 1) is made at 1, read at 2, recomputed at 4, read at 5.
AGAIN = (0, 1, 2, 3, 1, 4, 5)


def test_a_live_range_is_needed_until_it_is_made_again():
    made = model_of(example(), AGAIN, 99)
    run, needed = made.run[4], made.needed[1, 1]
    assert holds(made, run, ~needed)
    assert holds(made, ~run, needed)
    assert not holds(made, run, needed)
    assert not holds(made, ~run, ~needed)


def test_live_bytes_are_within_the_budget_at_every_step():
    fits = model_of(example(), AGAIN, 13, lifetimes.add_sharing, lifetimes.add_live_bytes)
    tight = model_of(example(), AGAIN, 12, lifetimes.add_sharing, lifetimes.add_live_bytes)
    assert holds(fits, ~fits.run[4])
    assert holds(tight, tight.run[4])
    assert not holds(tight, ~tight.run[4])


def test_a_live_range_ends_behind_its_last_reader():
    made = model_of(example(), AGAIN, 99, lifetimes.add_sharing, lifetimes.add_stops)
    stop = made.stop[1, 0]
    assert holds(made, made.run[4], stop == 3)
    assert not holds(made, made.run[4], stop == 2)
    assert holds(made, ~made.run[4], stop == 6)
    assert not holds(made, ~made.run[4], stop == 5)


def test_rectangles_do_not_overlap():
    families = (lifetimes.add_sharing, lifetimes.add_stops, partial(lifetimes.add_places, offsets={}))
    made = model_of(example(), AGAIN, 12, *families)
    a, b, c = made.offset[0, 0], made.offset[1, 0], made.offset[2, 0]
    assert holds(made, made.run[4], a == 4, b == 0, c == 8)
    assert not holds(made, a == 2, b == 0)
    # Here b is in the way of c (4 bytes each) with a (4 bytes) below: there is no room for dc at the top.
    assert not holds(made, ~made.run[4])


@pytest.mark.parametrize("read_again", [False, True])
def test_an_output_lies_in_the_place_of_an_input_only_if_it_dies(read_again: bool):
    families = (
        lifetimes.add_sharing,
        lifetimes.add_live_bytes,
        lifetimes.add_stops,
        partial(lifetimes.add_places, offsets={}),
    )
    made = model_of(in_place(read_again), (0, 1, 2), 12, *families)
    shared, first, second = made.shared[1, 1, 0], made.offset[0, 0], made.offset[1, 0]
    # In units of 4 bytes.
    assert holds(made, ~shared, first == 1, second == 2)
    assert not holds(made, ~shared, first == second)
    assert holds(made, shared) is not read_again
    assert not holds(made, shared, first == 1, second == 2)


def test_a_sequence_beside_the_axis_is_refused():
    axis = Axis.of(Graph.of(example()), AGAIN)
    assert axis.positions((0, 1, 2, 3, 4, 5)) == [0, 1, 2, 3, 5, 6]
    with pytest.raises(ValueError, match="not on the axis"):
        axis.positions((0, 1, 2, 1, 3, 4, 5))


@settings(max_examples=50)
@given(st.data())
def test_a_sequence_lies_on_every_axis_around_it(data: st.DataObject):
    program = data.draw(programs(max_ops=6))
    steps = data.draw(sequences(program))
    window = data.draw(st.sets(st.integers(0, len(program.ops))))
    axis = Axis.around(Graph.of(program), steps, window)
    assert tuple(axis.steps[p] for p in axis.positions(steps)) == steps
    simulate(program, tuple(OpId(op) for op in axis.steps))
