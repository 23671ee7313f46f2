"""Plans that are run to see which is fastest: what is run, what is taken, what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop
from coop_jax import tuning
from coop_jax.tuning import made_up

BUDGET = 0.7
LAYERS = 6


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(weights: list[jax.Array], x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def arguments() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    return [jax.random.normal(k, (64, 64)) / 8 for k in keys[1:]], jax.random.normal(keys[0], (512, 64))


def slower_than_estimated(builds: Sequence[Any]) -> list[int]:
    """The dearer a program was estimated to be the faster it is; the cheapest is the first."""
    return [10**6 - k for k, _ in enumerate(builds)]


def test_the_fastest_program_is_taken_and_the_report_says_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "run_times", slower_than_estimated)
    weights, x = arguments()
    compiled = jax.jit(coop.remat(step, budget=BUDGET, tune=2)).lower(weights, x).compile()
    report = coop.report(compiled)
    assert len(report.timed) == 2
    assert report.timed[0].run_ns < report.timed[1].run_ns
    assert report.timed[0].estimated_ns > report.timed[1].estimated_ns
    assert report.compiled_cost_ns == report.timed[0].estimated_ns
    assert report.compiled_total_bytes == report.timed[0].total_bytes <= report.budget_bytes
    assert len(re.findall("^measured: ", str(report), re.MULTILINE)) == 2
    assert coop.Report.from_dict(report.to_dict()) == report
    for got, wanted in zip(
        jax.tree.leaves(compiled(weights, x)), jax.tree.leaves(step(weights, x)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_programs_are_run_though_their_arguments_are_donated() -> None:
    weights, x = arguments()
    tuned = jax.jit(coop.remat(step, budget=BUDGET, tune=2), donate_argnums=0)
    compiled = tuned.lower(weights, x).compile()
    assert all(t.run_ns > 0 for t in coop.report(compiled).timed)
    assert float(compiled(weights, x)[1]) > 0
    assert all(w.is_deleted() for w in weights)


def test_a_program_that_keeps_its_budget_as_it_is_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run_times", lambda _: pytest.fail("something was run"))
    assert coop.plan(step, *arguments(), budget=1.0, tune=2).timed == ()


def test_a_program_for_an_absent_device_is_not_tuned(h200: str) -> None:
    with pytest.raises(coop.UnsupportedError, match="is not here"):
        coop.plan(step, *arguments(), budget=BUDGET, device=h200, tune=2)


def test_a_program_that_calls_python_is_not_tuned() -> None:
    def prints(weights: list[jax.Array], x: jax.Array) -> Any:
        jax.debug.print("{}", x[0, 0])
        return step(weights, x)

    with pytest.raises(coop.UnsupportedError, match="act outside of it"):
        coop.plan(prints, *arguments(), budget=BUDGET, tune=2)


def test_how_many_programs_are_run_is_a_number() -> None:
    with pytest.raises(coop.UnsupportedError, match="a number, such as 3"):
        coop.remat(step, tune=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "key<fry>"])
def test_made_up_arguments_have_the_dtype_that_is_asked_for(dtype: str) -> None:
    like = jax.random.key(0) if dtype == "key<fry>" else jnp.zeros((), dtype)
    aval = jax.ShapeDtypeStruct((3, 2), like.dtype)
    value = made_up(aval, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert (value.shape, value.dtype) == ((3, 2), like.dtype)
    assert (
        bool(jnp.any(value != 0)) == jnp.issubdtype(like.dtype, jnp.inexact) if dtype != "key<fry>" else True
    )
