"""The two-ended pool and the best-fit placement, checked by re-deriving every overlap."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import chain, example, programs, sequences

from passes.ir import OpId, Program
from passes.liveness import Graph
from passes.offsets.placement import place_graph
from passes.offsets.pool import FREE, Pool
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate


def naive_ranges(program: Program, steps: tuple[OpId, ...]) -> list[tuple[int, int, int, int]]:
    """(buffer, index in the op's outputs, first step, last step) of every live range, by plain search."""
    ranges = []
    for run, step in enumerate(steps):
        for k, buffer in enumerate(program.ops[step].outputs):
            last = run
            for later in range(run + 1, len(steps)):
                if buffer in program.ops[steps[later]].inputs:
                    last = later
                if buffer in program.ops[steps[later]].outputs:
                    break
            else:
                last = len(steps) if buffer in program.outputs else last
            ranges.append((buffer, k, run, last))
    return ranges


def check_offsets(
    program: Program, steps: tuple[OpId, ...], offsets: tuple[tuple[int, ...], ...], heap_bytes: int
) -> None:
    """No two live ranges overlap in time and bytes but an output and a dying input whose place it takes."""
    assert len(offsets) == len(steps)
    spans = []
    for buffer, k, first, last in naive_ranges(program, steps):
        offset, nbytes = offsets[first][k], program.buffers[buffer].nbytes
        assert nbytes == 0 or offset + nbytes <= heap_bytes
        assert nbytes == 0 or offset >= sum(program.buffers[b].nbytes for b in program.arguments)
        if nbytes:
            spans.append((buffer, first, last, offset, offset + nbytes))
    for a, b in combinations(spans, 2):
        early, late = sorted((a, b), key=lambda span: span[1])
        if late[1] <= early[2] and a[3] < b[4] and b[3] < a[4]:
            op = program.ops[steps[late[1]]]
            assert early[2] == late[1], f"{early} and {late} overlap"
            assert (late[0], early[0]) in op.may_share, f"{early} and {late} overlap"
            assert early[3] == late[3], f"{late} is not in the place of {early}"


@given(st.data())
def test_best_fit_places_without_overlap(data: st.DataObject):
    program = data.draw(programs())
    steps = data.draw(sequences(program))
    placement = place_graph(Graph.of(program), steps)
    check_offsets(program, steps, placement.offsets, placement.heap_bytes)
    assert placement.heap_bytes >= simulate(program, steps).peak_bytes


def test_best_fit_of_the_example_has_no_fragmentation():
    program = example()
    for steps in ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 1, 4, 5)):
        wrapped = tuple(OpId(s) for s in steps)
        assert place_graph(Graph.of(program), wrapped).heap_bytes == simulate(program, wrapped).peak_bytes


@given(st.data())
def test_the_window_planner_places_what_it_plans(data: st.DataObject):
    program = data.draw(programs())
    peak_bytes = simulate(program).peak_bytes
    budget_bytes = data.draw(st.integers(0, peak_bytes))
    made = plan(program, budget_bytes, PlannerConfig(planner="window", work_limit=20_000, bound=False))
    if made.offsets and made.status.found:
        check_offsets(program, made.steps, made.offsets, budget_bytes)


def test_the_window_planner_places_a_chain_within_its_budget():
    program = chain(16)
    made = plan(program, 96, PlannerConfig(planner="window"))
    assert made.status.found
    assert made.recomputes()
    check_offsets(program, made.steps, made.offsets, 96)


def check_blocks(pool: Pool, start: int, stop: int) -> None:
    """Blocks cover the pool in order, and no two free ones touch."""
    assert [b.offset for b in pool.blocks] == [
        start + sum(b.nbytes for b in pool.blocks[:k]) for k in range(len(pool.blocks))
    ]
    assert sum(b.nbytes for b in pool.blocks) == stop - start
    assert all(b.nbytes > 0 for b in pool.blocks)
    assert all(a.owner != FREE or b.owner != FREE for a, b in zip(pool.blocks, pool.blocks[1:], strict=False))


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=40))
def test_the_pool_keeps_its_blocks_in_order(requests: list[tuple[int, bool, int]]):
    pool = Pool(32, ground_bytes=2)
    for owner, (nbytes, from_top, choice) in enumerate(requests):
        index = pool.fit(nbytes, from_top=from_top)
        if index is not None:
            offset = pool.take(index, nbytes, owner, from_top=from_top)
            assert pool.blocks[pool.index_of(owner)].offset == offset
        else:
            windows = list(pool.windows(nbytes, frozenset()))
            low, high = windows[choice % len(windows)]
            assert sum(b.nbytes for b in pool.blocks[low : high + 1]) >= nbytes
            assert pool.blocks[pool.evict(low, high)].nbytes >= nbytes
        owners = [b.owner for b in pool.blocks if b.owner != FREE]
        if owners and choice % 3 == 0:
            pool.release(owners[choice % len(owners)])
        check_blocks(pool, 2, 32)


def test_cheap_and_dear_values_grow_from_opposite_ends():
    pool = Pool(16)
    assert pool.take(0, 4, 1, from_top=False) == 0
    index = pool.fit(4, from_top=True)
    assert index is not None
    assert pool.take(index, 4, 2, from_top=True) == 12


def test_a_pinned_block_restarts_the_window():
    pool = Pool(16)
    for owner in range(4):
        pool.take(len(pool.blocks) - 1, 4, owner, from_top=False)
    assert list(pool.windows(8, frozenset())) == [(0, 1), (1, 2), (2, 3)]
    assert list(pool.windows(8, frozenset({1}))) == [(2, 3)]
    assert list(pool.windows(12, frozenset({1}))) == []


def test_free_blocks_count_towards_a_window():
    pool = Pool(12)
    for owner in range(3):
        pool.take(len(pool.blocks) - 1, 4, owner, from_top=False)
    pool.release(1)
    assert list(pool.windows(8, frozenset({2}))) == [(0, 1)]
    assert pool.evict(0, 1) == 0
    assert (pool.blocks[0].offset, pool.blocks[0].nbytes) == (0, 8)


def test_an_heir_keeps_the_address():
    pool = Pool(12)
    pool.take(0, 8, 1, from_top=False)
    assert pool.hand_over(1, 2, 4) == 0
    assert [(b.offset, b.nbytes, b.owner) for b in pool.blocks] == [(0, 4, 2), (4, 8, FREE)]
    with pytest.raises(KeyError, match="owner 1 has no block"):
        pool.index_of(1)
