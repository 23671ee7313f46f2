"""The report, `coop.plan` and `coop.minimum_budget` on a small program."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax import aot, mark, planning
from coop_jax.host_use import HostUse
from coop_jax.offsets import Offsets
from coop_jax.record import Record
from coop_jax.report import _assemble
from examples.models import adam_init, adam_step
from passes.ir import Status
from passes.outcome import Recomputed, StageOutcome
from passes.recipe import Recipe
from tests.models import small_mlp

KEYS = {
    "budget_bytes", "baseline_total_bytes", "planned_total_bytes", "compiled_total_bytes", "argument_bytes",
    "output_bytes", "alias_bytes", "temp_bytes", "overhead_ratio", "lower_bound_ratio", "status",
    "recomputed", "offsets", "seconds", "baseline_compiled",
}  # fmt: skip
OFFSET_KEYS = {
    "buffers", "equal", "predicted_temp_bytes", "compiled_temp_bytes", "live_temp_bytes", "pinned",
    "packed_temp_bytes", "saved_temp_bytes", "pin_reason",
}  # fmt: skip
NO_HOST = HostUse()
OFFSETS = Offsets(
    buffers=9, equal=9, predicted_temp_bytes=800, compiled_temp_bytes=790,
    live_temp_bytes=750, packed_temp_bytes=760, saved_temp_bytes=0, pinned=False,
    pin_reason=None,
)  # fmt: skip


def stage(name: str, **changes: object) -> StageOutcome:
    """An outcome with round numbers."""
    fields = {
        "stage": name, "changed": True, "budget_bytes": 1000, "argument_bytes": 100, "output_bytes": 50,
        "alias_bytes": 20, "before_temp_bytes": 2000, "planned_temp_bytes": 800, "cost_ns": 1000,
        "recompute_ns": 100, "lower_bound_ratio": 0.05, "status": Status.FEASIBLE,
        "recipe": Recipe(recompute="cut"),
        "seconds": 0.5,
        "recomputed": (
            Recomputed(op="dot", source="a/b/model.py:3 (f)", nbytes=640, cost_ns=100, stage=name),
        ),
    }  # fmt: skip
    return StageOutcome(**{**fields, **changes})  # type: ignore[arg-type]


MEMORY = aot.Memory(argument_bytes=100, output_bytes=50, temp_bytes=790, alias_bytes=20, total_bytes=920)


def record(**changes: object) -> Record:
    """A record of both stages."""
    fields = {
        "budget": "1000 B", "budget_bytes": 1000, "planner": "auto", "device_name": "cpu",
        "jaxpr": stage("jaxpr"), "hlo": stage("hlo"),
    }  # fmt: skip
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def test_both_stages_count() -> None:
    found = _assemble(record(), MEMORY, OFFSETS, NO_HOST)
    assert found.overhead_ratio == pytest.approx(1.1 * 1.1 - 1)
    assert found.planned_total_bytes == 130 + 800
    assert found.baseline_total_bytes == 130 + 2000
    assert not found.baseline_compiled
    assert len(found.recomputed) == 2
    assert found.seconds == {"jaxpr": 0.5, "hlo": 0.5}
    assert found.status is Status.FEASIBLE


def test_kernels_of_one_kind_and_line_are_one_row_by_what_the_user_wrote() -> None:
    kernels = tuple(
        Recomputed(
            op=f"gemm_fusion_dot.{n}", source="/home/me/train.py:24 (jit(step)/jit(step)/jvp()/dot_general)",
            nbytes=1 << 20, cost_ns=1000, stage="hlo",
        )
        for n in (3, 11)
    )  # fmt: skip
    text = str(_assemble(record(hlo=stage("hlo", recomputed=kernels)), MEMORY, OFFSETS, NO_HOST))
    (row,) = (line for line in text.split("\n") if "gemm_fusion_dot" in line)
    assert "gemm_fusion_dot at me/train.py:24 (dot_general)" in row
    assert "2.00 MiB" in row


def test_a_compiled_baseline_is_said_to_be_one() -> None:
    found = _assemble(record(baseline_total_bytes=3000, baseline_compiled=True), MEMORY, OFFSETS, NO_HOST)
    assert found.baseline_total_bytes == 3000
    assert "without rematerialization (compiled)" in str(found)
    assert found.to_dict()["baseline"] == "compiled"
    predicted = _assemble(record(), MEMORY, OFFSETS, NO_HOST)
    assert "without rematerialization (predicted, may be far off)" in str(predicted)
    assert predicted.to_dict()["baseline"] == "predicted, may be far off"


def test_the_time_of_all_kernels_stands_beside_the_plain_programs() -> None:
    found = _assemble(record(baseline_cost_ns=2_000_000), MEMORY, OFFSETS, NO_HOST)
    assert (found.baseline_cost_ns, found.compiled_cost_ns) == (2_000_000, 1100)
    assert "all kernels as compiled: estimated 1.1 us, without rematerialization 2 ms (-99.94 %)" in str(
        found
    )
    assert "all kernels as compiled: estimated 1.1 us\n" in str(_assemble(record(), MEMORY, OFFSETS, NO_HOST))
    assert "all kernels" not in str(_assemble(record(hlo=None), MEMORY, OFFSETS, NO_HOST))


def test_changes_are_of_the_plain_programs_kernels_where_those_are_known() -> None:
    """The first stage's are of an estimate of them: of two programs the dearer had the smaller overhead."""
    found = _assemble(record(baseline_cost_ns=1000, baseline_energy_pj=0), MEMORY, OFFSETS, NO_HOST)
    assert found.overhead_ratio == pytest.approx(1100 / 1000 - 1)
    assert found.lower_bound_ratio <= found.overhead_ratio
    powered = stage("hlo", energy_pj=80, recompute_pj=4)
    found = _assemble(
        record(baseline_cost_ns=1000, baseline_energy_pj=70, hlo=powered), MEMORY, OFFSETS, NO_HOST
    )
    assert found.energy_ratio == pytest.approx(84 / 70 - 1)


def test_an_untouched_program_is_optimal() -> None:
    idle = {"changed": False, "recompute_ns": 0, "recomputed": ()}
    found = _assemble(
        record(jaxpr=stage("jaxpr", **idle), hlo=stage("hlo", **idle)), MEMORY, OFFSETS, HostUse()
    )
    assert found.status is Status.OPTIMAL
    assert found.overhead_ratio == 0
    assert "recomputed: nothing, the program keeps its budget as it is" in str(found)


def test_a_rewritten_program_is_not_said_to_be_as_it_was() -> None:
    rewritten = stage("jaxpr", recomputed=(), recompute_ns=0, status=Status.UNKNOWN)
    found = _assemble(record(jaxpr=rewritten, hlo=None), MEMORY, OFFSETS, NO_HOST)
    assert found.changed
    assert found.status is Status.FEASIBLE
    assert "as it is" not in str(found)
    assert "but the program was rewritten for the budget" in str(found)


def test_the_text_groups_what_is_recomputed() -> None:
    many = tuple(Recomputed(op=f"op{i % 20}", source="", nbytes=i, cost_ns=1, stage="hlo") for i in range(60))
    text = str(_assemble(record(hlo=stage("hlo", recomputed=many)), MEMORY, OFFSETS, NO_HOST))
    assert "b/model.py:3 (f)" in text
    assert "a/b/model.py" not in text
    assert "op19" in text
    assert "9 more" in text
    widths = {len(line) for line in text.split("\n") if line.startswith("| ")}
    assert len(widths) == 2


def step_and_specs() -> tuple[object, tuple[object, object]]:
    """A training step with Adam, and what it takes."""
    problem = small_mlp()
    params, batch = problem.specs()
    return adam_step(problem.loss), (jax.eval_shape(adam_init, params), batch)


def test_a_report_states_what_xla_counted() -> None:
    step, specs = step_and_specs()
    jitted = jax.jit(coop.remat(step, budget=0.7), donate_argnums=0)
    compiled = jitted.lower(*specs).compile()
    found = coop.report(compiled)
    memory = aot.memory(compiled)
    data = found.to_dict()
    assert set(data) >= KEYS
    assert set(data["offsets"]) == OFFSET_KEYS
    json.dumps(data)
    assert found.compiled_total_bytes == memory.total_bytes <= found.budget_bytes
    assert found.baseline_compiled
    plain = aot.memory(jax.jit(step, donate_argnums=0).lower(*specs).compile())
    assert found.baseline_total_bytes == pytest.approx(plain.total_bytes, rel=0.01)
    assert found.budget_bytes == int(0.7 * found.baseline_total_bytes)
    assert found.recomputed
    assert found.overhead_ratio > 0
    assert str(memory.total_bytes) in str(found)


def test_plan_answers_for_an_absent_gpu(h200: str) -> None:
    step, specs = step_and_specs()
    plain = aot.memory(aot.lower_for(jax.jit(step, donate_argnums=0), specs, device=h200).compile())
    budget = int(0.8 * plain.total_bytes)
    found = coop.plan(step, *specs, budget=budget, device=h200, donate_argnums=0)
    assert found.device_name == h200
    assert found.budget_bytes == budget
    assert found.compiled_total_bytes <= budget


def test_minimum_budget_is_met_and_less_is_not() -> None:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x), strict=True)]

    specs = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 3, jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    least = coop.minimum_budget(step, *specs, donate_argnums=0, max_compiles=3)
    assert least.failed_bytes < least.least_bytes
    assert least.compiles <= 3
    fixed = least.argument_bytes + least.output_bytes - least.alias_bytes
    assert fixed < least.least_bytes
    again = coop.plan(step, *specs, budget=least.least_bytes, donate_argnums=0)
    assert again.compiled_total_bytes <= least.least_bytes
    with pytest.raises(coop.InfeasibleBudgetError):
        coop.plan(step, *specs, budget=least.failed_bytes, donate_argnums=0)
    assert str(least.least_bytes) in str(least)
    assert json.dumps(least.to_dict())


def test_the_least_budget_is_looked_for_from_what_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs 1000 is foreseen to need 1100. A refusal takes longest: the middle between what is met and
    arguments alone was asked for, and one of four layers took eleven minutes."""
    asked = list[int]()

    def planned(fn: object, *, budget: int, device: None) -> SimpleNamespace:
        asked.append(budget)
        if budget < 1000:
            raise coop.InfeasibleBudgetError(
                budget_bytes=budget, least_bytes=1100, proved=False, argument_bytes=100, output_bytes=0,
                alias_bytes=0,
            )  # fmt: skip
        sizes = {"argument_bytes": 100, "output_bytes": 0, "alias_bytes": 0}
        return SimpleNamespace(budget_bytes=budget, compiled_total_bytes=min(budget, 1090), **sizes)

    monkeypatch.setattr(planning, "plan", planned)
    least = coop.minimum_budget(abs)
    assert asked == [1, 1100, 1069, 1027, 943, 985]
    assert (least.least_bytes, least.failed_bytes, least.compiles) == (1027, 985, 6)


def test_constants_are_told_apart() -> None:
    held = jax.random.normal(jax.random.key(0), (256, 256))

    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ held) @ jnp.cos(held)

    x = jnp.ones((2, 256))
    told = coop.report(jax.jit(coop.remat(f, budget="8MiB")).lower(x).compile())
    assert "  constants" in str(told)
    parts = told.argument_bytes + told.output_bytes - told.alias_bytes + told.temp_bytes
    assert told.compiled_total_bytes - parts >= held.nbytes
    with pytest.raises(coop.InfeasibleBudgetError, match="closes over") as refused:
        jax.jit(coop.remat(f, budget=held.nbytes // 2)).lower(x).compile()
    assert refused.value.constant_bytes == told.compiled_total_bytes - parts
    assert refused.value.fixed_bytes > refused.value.budget_bytes


def test_other_programs_have_no_report() -> None:
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    with pytest.raises(coop.UnsupportedError, match=r"no function that `coop.remat` decorates"):
        coop.report(compiled)
    with pytest.raises(coop.UnsupportedError, match="needs a compiled program"):
        coop.report(jnp.sin)


def test_addresses_in_words() -> None:
    assert str(OFFSETS) == (
        "addresses: 9 of 9 temporaries where predicted; packing takes 40 B over what is alive at once, "
        "30 B more than the best that was found"
    )
    assert str(replace(OFFSETS, pin_reason="it sorts")).endswith("; not pinned: it sorts")
    assert "predicted" not in str(replace(OFFSETS, buffers=None, equal=None))
    pinned = replace(OFFSETS, pinned=True, saved_temp_bytes=64, live_temp_bytes=790)
    assert str(pinned) == "addresses: pinned, 64 B saved; 0 B over what is alive at once"
    unknown = Offsets(predicted_temp_bytes=8, compiled_temp_bytes=8, pinned=False, pin_reason=None)
    assert str(unknown).startswith("addresses: not known")
    assert set(unknown.to_dict()) < OFFSET_KEYS


def test_the_report_knows_the_addresses_of_every_temporary() -> None:
    step, specs = step_and_specs()
    jitted = jax.jit(coop.remat(step, budget=0.7), donate_argnums=0)
    compiled = jitted.lower(*specs).compile()
    offsets = coop.report(compiled).offsets
    assert offsets.buffers == offsets.equal != 0
    assert offsets.pinned is False
    pinned = coop.report(coop.pin(compiled))
    if pinned.offsets.pinned:
        assert pinned.compiled_total_bytes < aot.memory(compiled).total_bytes
    else:
        assert "as good as" in str(pinned.offsets.pin_reason)


def test_a_report_is_never_silently_over(monkeypatch: pytest.MonkeyPatch) -> None:
    step, specs = step_and_specs()
    compiled = jax.jit(coop.remat(step, budget="1GiB")).lower(*specs).compile()
    assert coop.report(compiled).status is Status.OPTIMAL
    monkeypatch.setattr(mark, "record_of", lambda _: record(budget_bytes=1000))
    with pytest.raises(coop.BudgetExceededError, match="over its budget of 1000 B"):
        coop.report(compiled)
