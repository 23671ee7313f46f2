"""The benchmark of pages: its programs, its rows, and the figures that it must not lose."""

from __future__ import annotations

import pytest

from benchmarks import paging
from benchmarks.kernels import Transformer, resnet, transformer
from passes.link import C2C, PCIE5
from passes.liveness import Graph
from passes.planners import PlannerConfig, plan
from passes.planners.bounds import Bound
from passes.simulate import simulate
from passes.validate import validate


def test_rows_and_table_of_a_small_transformer():
    program = transformer(Transformer(width=4096, layers=2, vocab=1024))
    rows = paging.measure(program, [PCIE5], [0.6], energy=True) + paging.measure_least(program, [PCIE5])
    by_way = {row.way: row for row in rows if row.link == "pcie5"}
    alone = next(row for row in rows if row.way == "alone")
    assert by_way["pages"].overhead_ratio <= min(alone.overhead_ratio, by_way["delta"].overhead_ratio)
    assert by_way["least energy"].energy_ratio <= min(alone.energy_ratio, by_way["pages"].energy_ratio)
    assert by_way["least energy"].overhead_ratio <= alone.overhead_ratio
    text = paging.table(rows)
    assert "nothing here is compiled or measured" in text
    assert "recompute alone" in text


@pytest.mark.parametrize(
    ("width", "ratio", "most"), [(4096, 0.5, 0.015), (4096, 0.3, 0.09), (8192, 0.3, 0.01), (8192, 0.2, 0.042)]
)
def test_what_pages_give_a_wide_transformer(width: int, ratio: float, most: float):
    program = transformer(Transformer(width=width))
    budget_bytes = int(ratio * simulate(program).peak_bytes)
    config = PlannerConfig(quick=True, host_bytes=paging.HOST_BYTES, link=PCIE5)
    made = plan(program, budget_bytes, config)
    validate(program, made, PCIE5)
    assert made.status.found
    assert made.overhead_ratio <= most
    assert made.overhead_ratio - made.lower_bound_ratio <= 0.012


@pytest.mark.parametrize(("ratio", "alone_ratio", "paged_ratio"), [(0.5, 0.062, 0.007), (0.3, 0.146, 0.07)])
def test_the_prototypes_figures_are_below_what_any_plan_of_this_program_can_cost(
    ratio: float, alone_ratio: float, paged_ratio: float
):
    """Without pages, too: it was another program. With pages the bound is that of what the link adds."""
    program = transformer(Transformer(width=4096))
    bound = Bound(Graph.of(program), 8)
    peak_bytes = int(bound.schedule.live.max())
    until_ns = sum(bound.graph.cost_ns[: bound.schedule.peak_position])
    carried_bytes = until_ns * PCIE5.to_host_bytes_per_second / 1e9
    assert bound.ratio(int(ratio * peak_bytes)) > alone_ratio
    paged = bound.paged_ratio(int(ratio * peak_bytes), PCIE5, paging.HOST_BYTES)
    assert paged > paged_ratio
    assert paged == pytest.approx(bound.ratio(int(ratio * peak_bytes + carried_bytes)), rel=1e-3)


def test_a_quick_link_makes_recompute_needless():
    program = transformer(Transformer(width=4096, layers=4))
    budget_bytes = int(0.3 * simulate(program).peak_bytes)
    made = plan(program, budget_bytes, PlannerConfig(host_bytes=paging.HOST_BYTES, link=C2C, quick=True))
    assert made.overhead_ratio <= 0.02


def test_the_resnets_have_their_layers():
    depths = (18, 50, 101)
    assert [len([op for op in resnet(d, 2).ops if op.name == "conv"]) for d in depths] == [20, 53, 104]
