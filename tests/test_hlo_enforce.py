"""The enforcing stage: XLA's own total keeps the budget, or the outcome says why not."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coop_jax.aot import run_ns
from passes.cost import DEVICES
from passes.hlo import fit, proto
from passes.hlo.enforce import EnforceRequest, enforce
from passes.hlo.fit import CONFIG as FIT
from passes.hlo.fit import Task, Written
from passes.ir import Plan, Program, Status
from passes.outcome import StageOutcome
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate


def _request(budget_bytes: int, platform: str = "cpu", planner: str = "auto") -> EnforceRequest:
    return EnforceRequest(
        budget_bytes=budget_bytes,
        device=h.MODEL[platform],
        platform=platform,
        planner=planner,
        old_rules=h.OLD_RULES,
    )


def _enforced(example: h.Example, request: EnforceRequest) -> tuple[Any, StageOutcome]:
    outcomes: list[StageOutcome] = []

    def transform(data: bytes) -> bytes:
        changed, outcome = enforce(data, request)
        outcomes.append(outcome)
        return changed

    compiled = h.compile_with(example, transform, request.platform)
    return compiled, outcomes[0]


def test_a_budget_that_is_met_changes_nothing() -> None:
    data, compiled = h.scheduled(h.example("mlp", "grad"))
    total = h.totals(compiled)["total"]
    same, outcome = enforce(data, _request(total))
    assert same is data
    assert not outcome.changed
    assert outcome.planned_total_bytes == total
    assert outcome.before_temp_bytes == outcome.planned_temp_bytes
    assert outcome.status == Status.OPTIMAL


@pytest.mark.parametrize("ratio", [0.9, 0.6, 0.4])
@pytest.mark.parametrize(("model", "kind"), [("gpt", "grad"), ("lstm", "donated"), ("conv", "grad")])
def test_budgets_are_kept_by_xlas_own_count(model: str, kind: str, ratio: float) -> None:
    example = h.example(model, kind)
    args = h.data_for(example)
    _, plain = h.scheduled(example)
    before = h.totals(plain)
    fixed = before["total"] - before["temp"]
    budget = fixed + int(ratio * before["temp"])
    compiled, outcome = _enforced(example, _request(budget))
    after = h.totals(compiled)
    if not outcome.status.found:
        assert outcome.least_total_bytes is not None
        assert outcome.least_total_bytes > budget
        assert after == before
        return
    assert after["total"] <= budget
    assert outcome.changed
    assert outcome.planned_total_bytes == after["total"]
    assert outcome.recompute_ns == run_ns(compiled, DEVICES["cpu"]) - outcome.cost_ns
    assert outcome.lower_bound_ratio * outcome.cost_ns <= outcome.recompute_ns
    for a, b in zip(h.run(plain, args), h.run(compiled, args), strict=True):
        np.testing.assert_array_max_ulp(a, b, maxulp=2)


def test_budgets_are_kept_on_h200(h200: str) -> None:
    example = h.example("mlp", "donated")
    _, plain = h.scheduled(example, "cuda")
    before = h.totals(plain)
    budget = before["total"] - before["temp"] // 4
    compiled, outcome = _enforced(example, _request(budget, "cuda"))
    assert outcome.status.found
    assert outcome.planned_total_bytes == h.totals(compiled)["total"] <= budget


@pytest.mark.parametrize("planner", ["auto", "cut", "window"])
def test_every_planner_can_be_asked_for(planner: str) -> None:
    data, compiled = h.scheduled(h.example("gpt", "grad"))
    found = h.totals(compiled)
    _, outcome = enforce(data, _request(found["total"] - found["temp"] // 5, planner=planner))
    assert outcome.status.found
    assert outcome.planner


def test_an_impossible_budget_is_refused_with_numbers() -> None:
    data, compiled = h.scheduled(h.example("gpt", "grad"))
    found = h.totals(compiled)
    same, outcome = enforce(data, _request(found["total"] - found["temp"]))
    assert same is data
    assert not outcome.changed
    assert outcome.status == Status.INFEASIBLE
    assert outcome.fixed_bytes < outcome.least_total_bytes < found["total"]
    assert outcome.tightest
    assert list(outcome.tightest) == sorted(outcome.tightest, key=lambda v: -v.nbytes)
    assert any("hlo_support.py:" in v.source for v in outcome.tightest)


@pytest.mark.parametrize("model", ["mlp", "lstm", "conv"])
def test_the_least_total_is_reached_when_it_is_asked_for(model: str) -> None:
    example = h.example(model, "grad")
    data, _ = h.scheduled(example)
    _, refused = enforce(data, _request(1))
    assert refused.least_total_bytes is not None
    compiled, outcome = _enforced(example, _request(refused.least_total_bytes))
    assert outcome.status.found
    assert h.totals(compiled)["total"] <= refused.least_total_bytes


@pytest.mark.parametrize(("model", "below"), [("mlp", 1), ("conv", 10_000)])
def test_the_least_total_does_not_depend_on_what_was_asked_for(h200: str, model: str, below: int) -> None:
    data, _ = h.scheduled(h.example(model, "donated"), "cuda")
    _, refused = enforce(data, _request(1, "cuda"))
    least = refused.least_total_bytes
    assert least is not None
    _, missed = enforce(data, _request(least - below, "cuda"))
    assert missed.status.found or missed.least_total_bytes == least
    changed, outcome = enforce(data, _request(least, "cuda"))
    assert outcome.status.found
    assert outcome.planned_total_bytes <= least
    assert h.predict(proto.parse(changed), "cuda").total_bytes == outcome.planned_total_bytes


@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_what_is_named_is_no_plan_that_depends_on_the_budget(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    data, _ = h.scheduled(h.example(model, "grad"))
    deepest = fit.least_peak

    def half_as_deep(program: Program, config: PlannerConfig) -> Plan:
        """A search for the lowest peak that ends early: plans for a budget go below it."""
        lowest = deepest(program, config)
        unplanned = simulate(program).peak_bytes
        return plan(program, (lowest.peak_bytes + unplanned) // 2, config)

    monkeypatch.setattr(fit, "least_peak", half_as_deep)
    least = enforce(data, _request(1))[1].least_total_bytes
    assert least is not None
    outcomes = [enforce(data, _request(int(ratio * least)))[1] for ratio in (0.75, 0.8, 0.85, 0.9, 0.95)]
    assert {o.least_total_bytes for o in outcomes if not o.status.found} == {least}
    assert enforce(data, _request(least))[1].status.found


def test_enforcing_is_deterministic() -> None:
    data, compiled = h.scheduled(h.example("conv", "grad"))
    budget = h.totals(compiled)["total"] - h.totals(compiled)["temp"] // 4
    first, second = enforce(data, _request(budget))[0], enforce(data, _request(budget))[0]
    assert first == second
    assert first != data


def test_values_displaced_layer_after_layer_are_not_counted_one_by_one(monkeypatch: Any) -> None:
    """Twelve plans were written for this budget: seven from above, then the lowest, and that relaxed."""
    width = 128

    def step(state: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            y = x
            for up, down in layers:
                y = y + jax.nn.gelu(y @ up) @ down
            return jnp.mean(y**2)

        layers, momenta = state
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(layers))
        return jax.tree.map(lambda w, m: w - 0.1 * m, layers, momenta), momenta

    layers = ((h.spec(width, 2 * width), h.spec(2 * width, width)),) * 12
    args = ((layers, layers), h.spec(2 * width, width))
    data, compiled = h.scheduled(h.Example(name="layers", fn=step, args=args, donate=(0,)))
    totals, written = h.totals(compiled), []
    write = Task.write

    def counted(task: Task, made: Plan) -> Written:
        written.append(made)
        return write(task, made)

    monkeypatch.setattr(Task, "write", counted)
    _, outcome = enforce(data, _request(totals["total"] - int(0.3 * totals["temp"])))
    assert outcome.status.found
    assert len(written) <= FIT.most_rounds
