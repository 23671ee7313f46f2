"""Plans of least energy: within the budgets, and within a limit of time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from strategies import example, small_gpt

import coop_jax as coop
from coop_jax.errors import UnsupportedError
from coop_jax.report import Report
from examples.models import GPTConfig, gpt, scanned
from passes.cost import DEVICES, kernel_pj
from passes.ir import Program
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.scans.emit import rewrite
from passes.jaxpr.scans.frontier import frontier
from passes.jaxpr.straight import as_it_is
from passes.link import LINKS, PCIE5, Link
from passes.listing import read_plan
from passes.objective import Objective
from passes.outcome import StageOutcome
from passes.pipeline import plan_program
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate
from passes.validate import validate

LINK = Link(to_host_bytes_per_second=3e8, from_host_bytes_per_second=3e8, picojoules_per_byte=1.0)
HOST = {"host_bytes": 1 << 30, "link": LINK, "quick": True}


def energy(max_overhead: float | None = None) -> Objective:
    """The least energy."""
    return Objective(least="energy", max_overhead=max_overhead)


def frugal_gpt() -> Program:
    """A training step whose quick kernels take the most energy."""
    program = small_gpt(3)
    most = max(op.cost_ns for op in program.ops)
    ops = tuple(dataclasses.replace(op, energy_pj=1 + 9 * (most - op.cost_ns)) for op in program.ops)
    return dataclasses.replace(program, ops=ops)


def half_of(program: Program) -> int:
    """Half of the peak."""
    return simulate(program).peak_bytes // 2


@pytest.mark.parametrize("options", [{"quick": True}, HOST], ids=["alone", "host"])
def test_less_energy_is_found_where_time_may_be_spent(options: dict[str, object]):
    program = frugal_gpt()
    budget_bytes = half_of(program)
    kept = plan(program, budget_bytes, PlannerConfig(objective=energy(0.15), **options))
    free = plan(program, budget_bytes, PlannerConfig(objective=energy(), **options))
    quick = plan(program, budget_bytes, PlannerConfig(**options))
    for made in (kept, free):
        validate(program, made, LINK)
        assert made.status.found
    assert kept.overhead_ratio <= 0.15
    assert free.energy_pj <= kept.energy_pj
    spent_pj = sum(program.ops[step].energy_pj for step in quick.steps)
    assert free.energy_pj < spent_pj + LINK.picojoules_per_byte * sum(
        2 * program.buffers[page.buffer].nbytes for page in quick.pages
    )
    assert read_plan(kept.to_json()).energy_pj == kept.energy_pj


def test_what_a_byte_takes_decides_whether_it_is_sent():
    program = frugal_gpt()
    card = LINKS["sd-mcu"]
    assert 2 * card.picojoules_per_byte == pytest.approx(0.33e12 * (1 / 4.44e6 + 1 / 4.61651e6))
    for link, pages in ((card, False), (dataclasses.replace(card, picojoules_per_byte=0.0), True)):
        config = PlannerConfig(host_bytes=1 << 30, link=link, quick=True, objective=energy())
        made = plan(program, half_of(program), config)
        validate(program, made, link)
        assert made.status.found
        assert bool(made.pages) == pages


def test_a_limit_that_no_plan_keeps_is_not_kept_silently():
    program = frugal_gpt()
    made = plan(program, half_of(program), PlannerConfig(objective=energy(0.0), quick=True))
    assert not made.status.found


def test_what_energy_needs_is_said():
    with pytest.raises(ValueError, match="no op of the program has `energy_pj`"):
        plan(example(), 12, PlannerConfig(objective=energy()))
    with pytest.raises(ValueError, match="planner 'dtr' knows time only"):
        PlannerConfig(objective=energy(), planner="dtr")
    with pytest.raises(ValueError, match="it is time or energy"):
        PlannerConfig(objective=Objective(least="money"))
    with pytest.raises(ValueError, match="it is a share, for `objective` energy"):
        PlannerConfig(objective=Objective(max_overhead=0.1))


def test_kernels_of_a_compiled_program_say_their_energy(h200: str) -> None:
    """A real program can be planned for energy; what it takes is what its kernels say, and the link."""
    data, _ = h.scheduled(h.example("mlp", "grad"), "cuda")
    program = h.lifted(data, "cuda").program
    busy = [op for op in program.ops if op.cost_ns > DEVICES["h200"].launch_ns]
    assert busy
    assert all(op.energy_pj > 0 for op in busy)
    budget_bytes = int(0.8 * simulate(program).peak_bytes)
    made = plan(program, budget_bytes, PlannerConfig(objective=energy(), **HOST))
    quick = plan(program, budget_bytes, PlannerConfig(**HOST))
    validate(program, made, LINK)
    assert made.status.found
    assert sum(program.ops[s].energy_pj for s in made.steps) <= made.energy_pj
    assert made.overhead_ratio >= quick.overhead_ratio


def test_energy_of_kernels_follows_the_data_sheet():
    h200 = DEVICES["h200"]
    full_ns = 1e9 * 2**40 / h200.flops_16bit
    moved = int(h200.bytes_per_second * full_ns * 1e-9)
    joules = kernel_pj(h200, nbytes=moved, matrix_flops=2**40, bits=16) * 1e-12
    assert joules / (full_ns * 1e-9) == pytest.approx(h200.watts, rel=1e-3)
    assert kernel_pj(DEVICES["v5e"], nbytes=1) == 0
    assert PCIE5.picojoules_per_byte > h200.memory_picojoules_per_byte


def test_programs_lifted_from_a_jaxpr_say_their_energy() -> None:
    """Products by their flops, a scan by its iterations; no energy where the device's power is not known."""

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        looped = jnp.tanh(x @ ws[0]) @ ws[1]
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), looped, ws)[0] ** 2).mean()

    avals = [jax.typeof(jnp.zeros(shape)) for shape in ((8, 64, 64), (4096, 64))]
    jaxpr = compat.open_jaxpr(inline_calls(compat.trace(lambda *args: [jax.grad(loss)(*args)], avals)))[0]
    h200 = DEVICES["h200"]
    program = lift(jaxpr, h200, as_xla=True).program
    by_name = {op.name: op.energy_pj for op in program.ops}
    flops_pj = 2 * 4096 * 64 * 64 * h200.picojoules_per_flop(32)
    assert flops_pj < by_name["dot_general"] < by_name["scan"] / 8
    assert plan(program, half_of(program), PlannerConfig(objective=energy(), quick=True)).energy_pj
    assert not lift(jaxpr, DEVICES["v5e"], as_xla=True).program.energy_pj


def normalized_loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Products, which take energy, beside many small kernels, which take time."""
    for w in ws:
        h = x @ w
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        x = x + jnp.tanh(h) @ w.T
    return (x**2).mean()


def flat(function: Callable[..., Any], specs: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """A function of flat arguments and results, and what they are."""
    leaves, tree = jax.tree.flatten(specs)
    avals = [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]
    return lambda *xs: jax.tree.leaves(function(*jax.tree.unflatten(tree, xs))), avals


@functools.cache
def planned(objective: str = "time", max_overhead: float | None = None) -> Report:
    """The gradient of these for an H200 that is not here, below its peak."""
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (*[(512, 512)] * 3, (1024, 512))]
    return coop.plan(
        jax.grad(normalized_loss), specs[:-1], specs[-1], budget=13_600_000, device="h200",
        objective=objective, max_overhead=max_overhead,
    )  # fmt: skip


def test_a_decorated_program_is_planned_for_the_least_energy(h200: str) -> None:
    quick, frugal = planned(), planned("energy")
    for made in (quick, frugal):
        assert made.changed
        assert made.compiled_total_bytes <= made.budget_bytes
        assert "energy of a run: estimated" in str(made)
    assert 0 < frugal.compiled_energy_pj <= quick.compiled_energy_pj
    assert "planned for the least energy" in str(frugal)
    assert Report.from_dict(frugal.to_dict()) == frugal


def test_the_jaxpr_stage_spends_time_to_save_energy_and_no_more_than_it_may() -> None:
    made = gpt.problem(GPTConfig(layers=2, width=256, heads=4, seq=128, batch=8, vocab=64))
    jaxpr = compat.trace(*flat(jax.grad(made.loss), made.specs()))

    def outcome(share: float, objective: Objective) -> StageOutcome:
        request = JaxprRequest(
            budget_bytes=1 << 40, argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["h200"],
            objective=objective,
        )  # fmt: skip
        before_bytes = plan_program(inline_calls(jaxpr), request)[1].before_temp_bytes
        request = dataclasses.replace(request, budget_bytes=int(share * before_bytes))
        return plan_program(inline_calls(jaxpr), request)[1]

    quick, frugal, late = outcome(0.6, Objective()), outcome(0.6, energy()), outcome(0.6, energy(0.01))
    assert frugal.recompute_pj < 0.9 * quick.recompute_pj
    assert late.recompute_ns == quick.recompute_ns


def test_what_scans_keep_is_weighed_by_energy_where_that_is_asked_for() -> None:
    """Levels of the frontier by energy take less of it, in the same bytes; the stage takes them."""
    h200 = DEVICES["h200"]
    made = scanned.problem(GPTConfig(layers=8, width=256, heads=4, seq=128, batch=8, vocab=64))
    traced = inline_calls(compat.trace(*flat(jax.grad(made.loss), made.specs())))
    jaxpr = compat.without_dead_code(compat.open_jaxpr(traced)[0])
    limit_bytes = as_it_is(lift(jaxpr, h200, as_xla=True)).peak_bytes // 4

    def least_pj(least: str) -> int:
        levels = (as_it_is(lift(rewrite(jaxpr, k), h200, as_xla=True)) for k in frontier(jaxpr, h200, least))
        return min(level.energy_pj for level in levels if level.peak_bytes <= limit_bytes)

    assert least_pj("energy") < least_pj("time")
    request = JaxprRequest(
        budget_bytes=limit_bytes, argument_bytes=0, output_bytes=0, alias_bytes=0, device=h200,
        objective=energy(),
    )  # fmt: skip
    outcome = plan_program(traced, request)[1]
    assert outcome.status.found
    assert outcome.energy_pj + outcome.recompute_pj <= least_pj("energy")


def test_a_limit_of_time_that_no_plan_keeps_is_said(h200: str) -> None:
    within = planned("energy", 0.0)
    assert within.compiled_total_bytes <= within.budget_bytes
    assert within.overhead_ratio > 0
    assert "within 0% more time, which no plan keeps" in str(within)
    assert within.overhead_ratio <= planned("energy").overhead_ratio


def test_what_is_asked_of_energy_in_vain_is_said() -> None:
    for options, text in (
        ({"objective": "money"}, "it is time or energy"),
        ({"max_overhead": 0.1}, "it is a share, for `objective` energy"),
        ({"objective": "energy", "max_overhead": -0.1}, "it is a share"),
        ({"objective": "energy", "max_overhead": "much"}, "it is a share"),
        ({"objective": "energy", "planner": "dtr"}, "'dtr' knows time only"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            coop.remat(budget="1GiB", **options)
    with pytest.raises(UnsupportedError, match="what a cpu takes is not known"):
        jax.jit(coop.remat(jnp.tanh, budget="1GiB", objective="energy")).lower(jnp.ones(3))
