"""Packing from the ground up, and slack where it gets stuck."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import items_to_pack, random_program

from benchmarks.pack import cut_up
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.liveness import Graph
from passes.offsets.packing import Item, Span, check_packing, live_bytes
from passes.offsets.placement import place_graph, stack_graph
from passes.offsets.skyline import Skyline
from passes.planners import PlannerConfig, plan
from passes.planners.placing import end_of, with_offsets
from passes.planners.schedule import Schedule
from passes.planners.search import Search
from passes.validate import validate


@given(items_to_pack(), st.integers(0, 8))
def test_what_is_found_is_a_packing(items: list[Item], spare: int):
    stack = Skyline(items)
    capacity_bytes = live_bytes(items) + spare
    found = stack.solve(capacity_bytes, 4)
    if found is not None:
        check_packing(items, found, capacity_bytes)
    else:
        assert len(stack.bottlenecks) == 4


def test_less_than_what_is_alive_at_once_is_not_tried():
    items = cut_up(10, 12, 64, seed=0)
    stack = Skyline(items)
    assert stack.solve(63, 4) is None
    assert not stack.bottlenecks


def test_a_chain_moves_as_one_and_holds_the_larger_of_both_where_it_changes():
    chain = (Span(start=0, stop=3, nbytes=8), Span(start=2, stop=5, nbytes=4))
    beside = (Span(start=2, stop=3, nbytes=2),)
    found = Skyline([chain, beside]).solve(10, 1)
    assert found is not None
    check_packing([chain, beside], found, 10)
    assert Skyline([chain, beside]).solve(9, 1) is None


@pytest.mark.parametrize("seed", range(12))
def test_rectangles_are_put_together_again_without_a_hole(seed: int):
    items = cut_up(40, 30, 64, seed=seed)
    found = Skyline(items).solve(64, 8)
    assert found is not None
    check_packing(items, found, 64)


def test_a_bottleneck_says_where_and_how_much_is_lacking():
    stack = Skyline(cut_up(120, 60, 256, seed=0))
    assert stack.solve(256, 3) is None
    assert len(stack.bottlenecks) == 3
    for bottleneck in stack.bottlenecks:
        assert 0 <= bottleneck.start < bottleneck.stop <= 60
        assert bottleneck.lacking_bytes > 0


def layered(n_ops: int, width: int, seed: int) -> Program:
    """Layers of ops that read some of the two layers before, of arbitrary sizes and costs."""
    generator = random.Random(seed)
    ops: list[Op] = []
    layers: list[Sequence[int]] = []
    while len(ops) < n_ops:
        layer = range(len(ops), min(n_ops, len(ops) + generator.randint(1, width)))
        before = [b for other in layers[-2:] for b in other]
        for i in layer:
            reads = generator.sample(before, min(len(before), generator.randint(1, 3)))
            if len(layers) > 4 and generator.random() < 0.2:
                reads.append(generator.choice(layers[generator.randrange(len(layers) - 3)]))
            inputs = tuple(BufferId(b) for b in sorted(set(reads)))
            ops.append(
                Op(id=OpId(i), inputs=inputs, outputs=(BufferId(i),), cost_ns=generator.randint(1, 999))
            )
        layers.append(layer)
    buffers = tuple(Buffer(id=BufferId(i), nbytes=generator.randint(2, 600)) for i in range(n_ops))
    return Program.build(name="layered", ops=tuple(ops), buffers=buffers, outputs=())


@pytest.mark.parametrize("seed", [0, 9])
def test_slack_where_packing_gets_stuck_places_a_plan_within_the_budget(seed: int):
    program = layered(150, 8, seed)
    search = Search(program, PlannerConfig(quick=True))
    budget_bytes = int(0.8 * search.start.peak_bytes)
    live = search.best(budget_bytes)
    loose = with_offsets(search.graph, live, budget_bytes)
    assert live.peak_bytes <= budget_bytes < end_of(search.graph, loose)
    made = plan(program, budget_bytes, PlannerConfig(quick=True, placed=True))
    validate(program, made)
    assert made.status.found
    assert search.start.cost_ns * (1 + made.overhead_ratio) <= 1.07 * live.cost_ns


def test_slack_is_counted_as_alive_in_its_slot():
    program = random_program(random.Random(0), 20)
    graph = Graph.of(program)
    plain = Schedule(graph, range(20))
    slack = np.zeros(21, dtype=np.int64)
    slack[19] = 7
    slackened = dataclasses.replace(graph, slack_bytes=slack)
    assert (Schedule(slackened, range(20)).live - plain.live).tolist() == [0] * 19 + [7]


def test_stacking_agrees_with_best_fit_on_what_the_live_ranges_are():
    program = layered(60, 6, 0)
    graph = Graph.of(program)
    steps = program.order
    limit_bytes = place_graph(graph, steps).heap_bytes
    stacked = stack_graph(graph, steps, limit_bytes, 8)
    assert stacked.offsets is not None
    made = plan(program, limit_bytes, PlannerConfig(quick=True))
    validate(program, dataclasses.replace(made, offsets=stacked.offsets))
