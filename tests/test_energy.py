"""Plans of least energy: within the budgets, and within a limit of time."""

from __future__ import annotations

import dataclasses

import hlo_support as h
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from strategies import example, small_gpt

from passes.cost import DEVICES, kernel_pj
from passes.ir import Program
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.link import PCIE5, Link
from passes.listing import read_plan
from passes.objective import Objective
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
    return simulate(program, tuple(op.id for op in program.ops)).peak_bytes // 2


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
    budget_bytes = int(0.8 * simulate(program, tuple(op.id for op in program.ops)).peak_bytes)
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
