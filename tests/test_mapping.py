"""Temporaries that the system maps anew in every run (CPU): the time counts, and plans stay below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_jaxpr_stage import gradient, request_for

import coop_jax as coop
from coop_jax import aot
from passes.cost import DEVICES, DeviceModel, mapping_ns, maps_huge_pages
from passes.hlo.enforce import MISSED_RATIO, EnforceRequest, enforce
from passes.ir import Plan, Program
from passes.jaxpr import compat, stage, straight
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.less_mapped import with_less_mapped
from passes.jaxpr.straight import as_it_is, lift_as_xla
from passes.outcome import StageOutcome
from passes.pipeline import plan_program
from passes.planners import LAST_RESORTS, PlannerConfig

CPU = replace(DEVICES["cpu"], mapped_bytes_per_second=1e9)


def test_what_stays_mapped_costs_nothing() -> None:
    assert CPU.kept_bytes < 32 << 20
    assert mapping_ns(CPU, CPU.kept_bytes) == 0
    assert mapping_ns(CPU, 64 << 20) == 64 << 20
    assert mapping_ns(DEVICES["h200"], 64 << 30) == 0


@pytest.mark.parametrize(
    ("said", "tunables", "expected"),
    [
        ("[always] madvise never", "", True),
        ("always [madvise] never", "", False),
        ("always [madvise] never", "glibc.malloc.hugetlb=1", True),
        ("always madvise [never]", "glibc.malloc.hugetlb=1", False),
        (None, "", False),
    ],
)
def test_huge_pages_are_known_from_the_system(
    said: str | None, tunables: str, expected: bool, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    if said is not None:
        setting.write_text(said)
    assert maps_huge_pages(setting, {"GLIBC_TUNABLES": tunables}) == expected


def planned(ratio: float, device: DeviceModel) -> StageOutcome:
    """What the jaxpr stage makes of a small GPT's gradient for a share of its temporaries."""
    closed = gradient()
    before_bytes = plan_program(closed, request_for(closed, 1 << 40, "cpu"))[1].before_temp_bytes
    request = request_for(closed, int(ratio * before_bytes), "cpu")
    return plan_program(closed, replace(request, device=device))[1]


@pytest.mark.parametrize("ratio", [0.9, 0.7])
def test_a_plan_needs_less_than_its_budget_where_mapping_takes_longer(ratio: float) -> None:
    kept_bytes = planned(0.5, replace(CPU, kept_bytes=0)).planned_temp_bytes
    dear = planned(ratio, replace(CPU, kept_bytes=kept_bytes, mapped_bytes_per_second=1e8))
    assert dear.planned_temp_bytes <= kept_bytes
    assert dear.recompute_ns < 0
    # Nothing is recomputed for what hardly takes time.
    cheap = planned(ratio, replace(CPU, kept_bytes=kept_bytes, mapped_bytes_per_second=1e14))
    assert cheap.planned_temp_bytes > kept_bytes


def test_what_stays_mapped_is_worth_no_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_bytes = planned(0.5, replace(CPU, kept_bytes=0)).planned_temp_bytes
    asked: dict[int, frozenset[str]] = {}
    planner_of = straight.planner_of

    def noted(program: Program, config: PlannerConfig) -> Callable[[int], Plan]:
        planner = planner_of(program, config)

        def planned(budget_bytes: int) -> Plan:
            asked[budget_bytes] = config.without
            return planner(budget_bytes)

        return planned

    monkeypatch.setattr(straight, "planner_of", noted)
    planned(0.9, replace(CPU, kept_bytes=kept_bytes, mapped_bytes_per_second=1e10))
    assert asked[max(asked)] == frozenset()
    assert asked[min(asked)] == LAST_RESORTS


def chain() -> Any:
    """The gradient of sixteen layers, for which deep plans recompute much."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    return jax.make_jaxpr(jax.grad(loss))([h.spec(64, 64)] * 16, h.spec(1024, 64))


def test_a_milder_plan_is_not_judged_by_how_far_from_its_bound_a_deep_one_is() -> None:
    closed = chain()
    before_bytes = plan_program(closed, request_for(closed, 1 << 40, "cpu"))[1].before_temp_bytes
    device = replace(CPU, kept_bytes=before_bytes // 5, mapped_bytes_per_second=3e8)

    def planned(device: DeviceModel) -> StageOutcome:
        request = request_for(closed, int(0.45 * before_bytes), "cpu")
        return plan_program(closed, replace(request, device=device))[1]

    mild = planned(replace(device, mapped_bytes_per_second=None))
    assert planned(device).run_ns <= mild.run_ns + mapping_ns(device, mild.planned_temp_bytes)


@pytest.mark.parametrize(("hoped_ratio", "is_taken"), [(0.9, True), (None, False)])
def test_what_may_fit_is_not_passed_over_for_what_stays_mapped(
    hoped_ratio: float | None, is_taken: bool
) -> None:
    """nGPT in the bytes of its checkpoints: these were foreseen 2 % over them, and 3.6 % dearer kernels that
    need fewer bytes were taken instead (measured 1.10 of by hand, now 1.0)."""
    jaxpr = compat.open_jaxpr(chain())[0]
    as_is = lift_as_xla(jaxpr, CPU)
    here = as_it_is(as_is)
    request = JaxprRequest(
        budget_bytes=here.peak_bytes // 2, argument_bytes=0, output_bytes=0, alias_bytes=0,
        device=replace(CPU, kept_bytes=here.peak_bytes // 5, mapped_bytes_per_second=1e12),
    )  # fmt: skip
    hoped_bytes = None if hoped_ratio is None else int(hoped_ratio * request.budget_bytes)
    larger = replace(
        here, peak_bytes=int(1.02 * request.budget_bytes), hoped_bytes=hoped_bytes,
        cost_ns=int(1.5 * here.cost_ns),
    )  # fmt: skip
    fewer = replace(here, peak_bytes=request.kept_bytes, cost_ns=2 * here.cost_ns)

    def search(asked: JaxprRequest) -> Candidate:
        return larger if asked.budget_bytes == request.budget_bytes else fewer

    assert with_less_mapped(as_is, request, 1.0, search) is (larger if is_taken else fewer)


def test_bytes_that_a_plan_needs_no_more_than_end_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of few choices, such as of a scan's levels, may go far below what it is asked for."""
    before_bytes = planned(1, replace(CPU, kept_bytes=1 << 40)).before_temp_bytes
    searched, asked = stage._searched, []

    def coarse(as_is: Any, request: Any, scale: float, hands: Any) -> Any:
        asked.append(request.temp_budget_bytes)
        nbytes = min(request.temp_budget_bytes, int(0.45 * before_bytes))
        return searched(as_is, replace(request, budget_bytes=request.fixed_bytes + nbytes), scale, hands)

    monkeypatch.setattr(stage, "_searched", coarse)
    device = replace(CPU, kept_bytes=int(0.4 * before_bytes) // 2, mapped_bytes_per_second=1e9)
    planned(0.95, device)
    assert asked == [int(0.95 * before_bytes), device.kept_bytes]


@pytest.mark.parametrize(
    ("kept", "expected", "held"), [(0.9, 1, True), (0.9, None, False), (0.7, 1, False), (0.7, 0.7, True)],
    ids=["near", "not planned", "far", "planned for that"],
)  # fmt: skip
def test_a_plan_that_misses_is_held_to_what_stays_mapped(
    kept: float, expected: float | None, held: bool
) -> None:
    data, compiled = h.scheduled(h.example("gpt", "grad"))
    found = h.totals(compiled)
    kept_bytes = int(kept * found["temp"])
    device = replace(CPU, kept_bytes=kept_bytes, mapped_bytes_per_second=1e7)
    request = EnforceRequest(
        budget_bytes=found["total"], device=device, platform="cpu", old_rules=h.OLD_RULES,
        expected_bytes=None if expected is None else int(expected * found["temp"]),
    )  # fmt: skip
    same, outcome = enforce(data, request)
    assert outcome.budget_bytes == found["total"]
    assert (outcome.planned_temp_bytes <= kept_bytes) == outcome.changed == held
    assert (same is data) != held
    promised_ns = mapping_ns(device, int((expected or 1) * found["temp"]))
    assert promised_ns < outcome.cost_ns < promised_ns + mapping_ns(device, found["temp"])


def test_a_budget_below_what_stays_mapped_is_kept_or_refused() -> None:
    data, compiled = h.scheduled(h.example("gpt", "grad"))
    found = h.totals(compiled)
    fixed_bytes = found["total"] - found["temp"]
    device = replace(CPU, kept_bytes=int(0.9 * found["temp"]), mapped_bytes_per_second=1e7)
    for ratio in (0.8, 0.01):
        request = EnforceRequest(
            budget_bytes=fixed_bytes + int(ratio * found["temp"]), device=device, platform="cpu",
            old_rules=h.OLD_RULES, expected_bytes=1,
        )  # fmt: skip
        _, outcome = enforce(data, request)
        assert outcome.status.found == (ratio == 0.8)
        assert (
            (outcome.planned_total_bytes <= request.budget_bytes) == outcome.changed == outcome.status.found
        )


def test_what_an_order_alone_brings_below_what_stays_mapped_is_held_to_it() -> None:
    def branches(x: Any, w: Any) -> Any:
        return [jnp.tanh(jnp.tanh(jnp.tanh(x * k) @ w) @ w)[:8] @ w for k in range(1, 7)]

    args = h.spec(256, 256), h.spec(256, 256)
    data, compiled = h.scheduled(h.Example(name="branches", fn=branches, args=args))
    found = h.totals(compiled)
    kept_bytes = int(0.7 * found["temp"])
    request = EnforceRequest(
        budget_bytes=found["total"], device=replace(CPU, kept_bytes=kept_bytes), platform="cpu",
        old_rules=h.OLD_RULES, expected_bytes=found["temp"],
    )  # fmt: skip
    _, outcome = enforce(data, request)
    assert outcome.before_temp_bytes > MISSED_RATIO * kept_bytes
    assert outcome.planned_temp_bytes <= kept_bytes
    assert not outcome.recomputed


def test_a_step_whose_temporaries_can_stay_mapped_is_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", CPU)
    layers, rows, width = 12, 8192, 128

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * layers
    specs = weights, jax.ShapeDtypeStruct((rows, width), "float32")
    plain = jax.jit(jax.grad(loss)).lower(*specs).compile()
    before = aot.memory(plain)
    assert before.temp_bytes > CPU.kept_bytes
    budget = int(0.95 * before.total_bytes)
    made = jax.jit(jax.grad(coop.remat(loss, budget=budget))).lower(*specs).compile()
    assert aot.memory(made).temp_bytes <= CPU.kept_bytes
    assert aot.run_ns(made, CPU) < aot.run_ns(plain, CPU)
    overhead = coop.report(made).overhead_ratio
    assert "time to map temporaries, if more than 31.94 MiB" in str(coop.report(made))
    assert overhead is not None
    assert overhead < 0
    values = np.random.default_rng(0).standard_normal((layers, width, width), np.float32) / 16
    x = jnp.ones((rows, width))
    for a, b in zip(plain(list(values), x), made(list(values), x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    left = jax.jit(jax.grad(coop.remat(loss, budget=before.total_bytes))).lower(*specs).compile()
    assert aot.memory(left) == before  # what fits as it is is left as it is
