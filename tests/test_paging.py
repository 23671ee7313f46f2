"""Pages in plans: what they hold, how long they take, and what the planners make of them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import example, programs, sequences, small_gpt

from passes.ir import BufferId, OpId, Page, Plan, Program, Status
from passes.link import LINKS, Link
from passes.listing import plan_text, read_plan
from passes.liveness import Graph
from passes.offsets.placement import place_graph
from passes.planners import PlannerConfig, frontier, least_peak, plan
from passes.planners.paging.pager import Host, Pager
from passes.planners.paging.queues import traffic
from passes.simulate import simulate
from passes.validate import validate

SLOW = Link(name="slow", to_host_bytes_per_second=1e9, from_host_bytes_per_second=2e9, latency_ns=1)
FAST = Link(name="fast", to_host_bytes_per_second=1e18, from_host_bytes_per_second=1e18)
HOST = Host(link=SLOW, nbytes=10**9)


def page(buffer: int, run: int, out_done: int, in_start: int, in_done: int) -> Page:
    """A page, for short."""
    return Page(buffer=BufferId(buffer), run=run, out_done=out_done, in_start=in_start, in_done=in_done)


def plan_of(program: Program, steps: tuple[int, ...], pages: tuple[Page, ...], link: Link = SLOW) -> Plan:
    """A plan that claims what the simulators say."""
    wrapped = tuple(OpId(s) for s in steps)
    timeline = simulate(program, wrapped, pages)
    moved = traffic(program, wrapped, pages, link)
    placement = place_graph(Graph.of(program), wrapped, None, pages)
    base_ns = program.cost_ns
    return Plan(
        steps=wrapped, peak_bytes=timeline.peak_bytes, budget_bytes=10**9,
        overhead_ratio=(moved.total_ns - base_ns) / base_ns if base_ns else 0.0, lower_bound_ratio=0.0,
        status=Status.FEASIBLE, planner="test", seconds=0.0, offsets=placement.offsets, pages=pages,
        page_offsets=placement.page_offsets, waiting_ns=moved.waiting_ns,
        host_peak_bytes=moved.host_peak_bytes, host_budget_bytes=10**9,
    )  # fmt: skip


def test_bytes_on_the_host_are_free_in_between():
    program = example()
    paged = (page(1, 1, 3, 4, 4),)
    assert simulate(program, range(6), paged).live_bytes.tolist() == [4, 8, 12, 9, 10, 6]
    found = traffic(program, range(6), paged, SLOW)
    assert found.host_bytes.tolist() == [0, 0, 4, 4, 4, 0, 0]
    assert (found.host_peak_bytes, found.moved_bytes) == (4, 8)
    validate(program, plan_of(program, tuple(range(6)), paged), SLOW)


def test_a_use_waits_for_its_copy_and_a_hidden_copy_costs_nothing():
    program = example()  # every op takes 10 ns; 4 bytes take 5 ns out and 3 ns back
    assert traffic(program, range(6), (page(1, 1, 3, 4, 4),), SLOW).waits_ns.tolist() == [0, 0, 0, 0, 3, 0, 0]
    assert traffic(program, range(6), (page(1, 1, 3, 3, 4),), SLOW).waiting_ns == 0
    slower = dataclasses.replace(SLOW, latency_ns=11)
    found = traffic(program, range(6), (page(1, 1, 3, 3, 4),), slower)
    assert found.waits_ns.tolist() == [0, 0, 0, 5, 3, 0, 0]
    assert found.total_ns == program.cost_ns + 8


def test_copies_one_way_follow_each_other():
    program = example()
    pages = (page(1, 1, 3, 4, 4), page(0, 0, 2, 4, 5))
    found = traffic(program, range(6), pages, dataclasses.replace(SLOW, latency_ns=16))
    # 20 ns out from 10 and from 30 on, 18 ns back from 60 and from 78 on, while step 4 runs until 88
    assert found.waits_ns.tolist() == [0, 0, 10, 10, 18, 8, 0]


def test_a_copy_that_leaves_twice_is_written_once():
    program = small_gpt(1)
    first, *_ = Pager(Graph.of(program), range(len(program.ops)), HOST).gaps.buffer.tolist()
    uses = [i for i, op in enumerate(program.ops) if first in op.inputs]
    run = program.producer[first]
    assert run is not None
    assert len(uses) > 2
    pages = (page(first, run, uses[0] + 1, uses[1], uses[1]), page(first, run, uses[1] + 1, uses[2], uses[2]))
    made = plan_of(program, tuple(range(len(program.ops))), pages[: 1 + (uses[2] > uses[1] + 1)])
    validate(program, made, SLOW)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ((page(1, 1, 1, 4, 4),), "out of order"),
        ((page(1, 1, 2, 4, 4),), "step 2 .*buffer 1 while it is away"),
        ((page(1, 1, 3, 4, 5),), "step 4 .*buffer 1 while it is away"),
        ((page(1, 1, 5, 5, 5),), "nothing needs buffer 1"),
        ((page(1, 0, 3, 4, 4),), "does not make buffer 1"),
        ((page(1, 1, 3, 4, 4), page(1, 1, 3, 3, 4)), "overlap"),
    ],
)
def test_pages_that_cannot_be_are_refused(pages: tuple[Page, ...], message: str):
    program = example()
    whole = plan_of(program, tuple(range(6)), (page(1, 1, 3, 4, 4),))
    with pytest.raises(ValueError, match=message):
        simulate(program, range(6), pages)
    with pytest.raises(ValueError, match=message):
        validate(program, dataclasses.replace(whole, pages=pages, offsets=(), page_offsets=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_peak_bytes": 3}, "3 bytes on the host, but they take 4"),
        ({"host_budget_bytes": 3}, "takes 4 bytes on the host, where 3 are allowed"),
        ({"waiting_ns": 1, "overhead_ratio": 1 / 60}, "waits 1 ns .* on slow it waits 3 ns"),
        ({"overhead_ratio": 0.0}, "its recomputes and waiting cost"),
        ({"page_offsets": (0,)}, "puts buffer"),
    ],
)
def test_the_validator_refuses_false_claims_of_pages(change: dict[str, object], message: str):
    program = example()
    made = plan_of(program, tuple(range(6)), (page(1, 1, 3, 4, 4),))
    with pytest.raises(ValueError, match=message):
        validate(program, dataclasses.replace(made, **change), SLOW)


@given(st.data())
def test_whatever_is_paged_simulator_and_validator_agree(data: st.DataObject):
    program = data.draw(programs())
    steps = data.draw(sequences(program))
    link = data.draw(st.sampled_from([SLOW, FAST, dataclasses.replace(SLOW, latency_ns=7)]))
    pager = Pager(Graph.of(program), steps, Host(link=link, nbytes=10**9))
    least_bytes = pager.least_bytes()
    budget_bytes = data.draw(st.integers(least_bytes, max(least_bytes, pager.schedule.peak_bytes)))
    found = pager.within(budget_bytes)
    assert found is not None
    made = plan_of(program, steps, found.pages, link)
    assert (made.peak_bytes, made.waiting_ns) == (found.peak_bytes, found.waiting_ns)
    assert made.host_peak_bytes == found.host_peak_bytes
    assert made.peak_bytes <= max(budget_bytes, pager.schedule.graph.argument_bytes)
    validate(program, made, link)
    assert read_plan(made.to_json()).pages == made.pages


def test_a_plan_shows_its_pages():
    program = example()
    made = plan_of(program, tuple(range(6)), (page(1, 1, 3, 4, 4),))
    assert "page %1 of step 1: out before 3, in from 4 to 4" in str(made)
    shown = plan_text(made, program)
    assert "1 paged, peak on the host 4 of 1000000000 bytes, waiting 3 ns" in shown
    assert shown.count("out %1[4]") == shown.count("in %1[4]") == 1
    again = read_plan(made.to_json())
    assert (again.pages, again.waiting_ns, again.host_peak_bytes) == (made.pages, 3, 4)


@pytest.mark.parametrize("name", sorted(LINKS))
def test_every_link_moves_bytes_both_ways(name: str):
    link = LINKS[name]
    assert link.to_host_ns(10**9) > link.to_host_ns(0) == link.latency_ns
    assert link.from_host_ns(10**9) > 10**6


def test_a_plan_with_pages_never_costs_more_than_one_without():
    program = small_gpt(4)
    peak_bytes = simulate(program, range(len(program.ops))).peak_bytes
    link = dataclasses.replace(SLOW, to_host_bytes_per_second=3e8, from_host_bytes_per_second=3e8)
    for share in (0.8, 0.5, 0.3):
        budget_bytes = int(share * peak_bytes)
        alone = plan(program, budget_bytes, PlannerConfig(quick=True))
        made = plan(program, budget_bytes, PlannerConfig(quick=True, host_bytes=1 << 30, link=link))
        validate(program, made, link)
        assert made.status.found
        assert made.overhead_ratio <= alone.overhead_ratio


def test_pages_keep_budgets_below_what_recompute_alone_reaches():
    program = small_gpt(4)
    fixed = dataclasses.replace(
        program, ops=tuple(dataclasses.replace(op, recomputable=False) for op in program.ops)
    )
    least_bytes = max(Graph.of(fixed).local_bytes)
    made = plan(fixed, least_bytes, PlannerConfig(host_bytes=1 << 30, link=SLOW, placed=False))
    validate(fixed, made, SLOW)
    assert made.status.found
    assert made.waiting_ns
    tight = plan(fixed, least_bytes, PlannerConfig(host_bytes=made.host_peak_bytes // 2, link=SLOW))
    assert not tight.status.found


def test_delta_keeps_budgets_and_costs_more():
    program = small_gpt(4)
    peak_bytes = simulate(program, range(len(program.ops))).peak_bytes
    link = dataclasses.replace(SLOW, to_host_bytes_per_second=3e8, from_host_bytes_per_second=3e8)
    options = {"host_bytes": 1 << 30, "link": link}
    for share in (0.8, 0.6):
        budget_bytes = int(share * peak_bytes)
        theirs = plan(program, budget_bytes, PlannerConfig(planner="delta", **options))
        validate(program, theirs, link)
        assert theirs.status.found
        ours = plan(program, budget_bytes, PlannerConfig(quick=True, **options))
        assert ours.overhead_ratio <= theirs.overhead_ratio


def test_placed_plans_put_what_comes_back_somewhere_else():
    program = small_gpt(4)
    peak_bytes = simulate(program, range(len(program.ops))).peak_bytes
    link = dataclasses.replace(SLOW, to_host_bytes_per_second=1e9, from_host_bytes_per_second=1e9)
    config = PlannerConfig(quick=True, placed=True, host_bytes=1 << 30, link=link)
    made = plan(program, peak_bytes // 2, config)
    validate(program, made, link)
    assert made.status.found
    assert len(made.page_offsets) == len(made.pages) > 0


def test_what_must_be_paged_is_paged_and_its_bytes_are_free():
    program = small_gpt(3)
    peak_bytes = simulate(program, range(len(program.ops))).peak_bytes
    gaps = Pager(Graph.of(program), range(len(program.ops)), HOST).gaps
    big = int(gaps.buffer[(gaps.time_ns * gaps.nbytes).argmax()])
    config = PlannerConfig(quick=True, host_bytes=1 << 30, link=FAST, must_page=frozenset({BufferId(big)}))
    made = plan(program, peak_bytes, config)
    validate(program, made, FAST)
    assert [page.buffer for page in made.pages] == [big]
    assert made.peak_bytes <= peak_bytes
    refused = plan(program, peak_bytes, dataclasses.replace(config, host_bytes=1))
    assert not refused.status.found


def test_the_lowest_peak_and_the_frontier_know_the_host():
    program = small_gpt(3)
    peak_bytes = simulate(program, range(len(program.ops))).peak_bytes
    config = PlannerConfig(quick=True, host_bytes=1 << 30, link=SLOW)
    alone = least_peak(program, PlannerConfig(quick=True))
    made = least_peak(program, config)
    validate(program, made, SLOW)
    assert made.peak_bytes <= alone.peak_bytes
    plans = frontier(program, [peak_bytes // 3, peak_bytes // 2, peak_bytes], config)
    for one in plans:
        validate(program, one, SLOW)
    assert [p.overhead_ratio for p in plans] == sorted((p.overhead_ratio for p in plans), reverse=True)


def test_what_cannot_be_paged_stays():
    program = example()
    buffers = tuple(dataclasses.replace(b, pageable=b.id != 1) for b in program.buffers)
    program = dataclasses.replace(program, buffers=buffers)
    assert Program.from_json(program.to_json()).buffers[1] == dataclasses.replace(buffers[1], name="")
    with pytest.raises(ValueError, match="buffer 1 cannot be sent"):
        simulate(program, range(6), (page(1, 1, 3, 4, 4),))
    whole = plan_of(example(), tuple(range(6)), (page(1, 1, 3, 4, 4),))
    with pytest.raises(ValueError, match="buffer 1 cannot be sent"):
        validate(program, whole)
    assert 1 not in Pager(Graph.of(program), range(6), HOST).gaps.buffer


@settings(max_examples=40)
@given(st.data())
def test_plans_of_random_programs_keep_both_budgets_or_say_that_they_do_not(data: st.DataObject):
    program = data.draw(programs())
    peak_bytes = simulate(program).peak_bytes
    link = data.draw(st.sampled_from([SLOW, FAST]))
    config = PlannerConfig(
        work_limit=2000, host_bytes=data.draw(st.sampled_from([2, 6, 100])), link=link,
        placed=data.draw(st.booleans()),
        must_page=frozenset(data.draw(st.sets(st.sampled_from(range(len(program.buffers))), max_size=2)))
        if program.buffers
        else frozenset(),
    )  # fmt: skip
    made = plan(program, data.draw(st.integers(0, peak_bytes)), config)
    validate(program, made, link)
    if made.status.found:
        longest = Pager(Graph.of(program), made.steps, HOST).gaps.buffer.tolist()
        paged = {page.buffer for page in made.pages}
        assert {b for b in config.must_page if b in longest} <= paged
