"""Derivatives outside `jit`: forward and backward are programs of their own, and each keeps the budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop
from coop_jax import apart, lowering
from coop_jax.lowering import Planned
from passes.jaxpr.compat import ClosedJaxpr

LAYERS, WIDTH, BATCH = 6, 16, 512


def net(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def arguments() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[1:]], jax.random.normal(
        keys[0], (BATCH, WIDTH)
    )


def close(found: list[jax.Array], expected: list[jax.Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [220_000, 274_484, 400_000, "600kB", 1.0, 0.75, 0.5])
def test_a_gradient_outside_jit_keeps_a_budget(budget: int | str | float) -> None:
    """As one program 274480 B are enough, so the parts were left as they are at 400000, and need 503860."""
    ws, x = arguments()
    close(jax.grad(coop.remat(net, budget=budget))(ws, x), jax.grad(net)(ws, x))


def test_what_a_refusal_names_is_met_outside_jit() -> None:
    """Each refusal named what the next one refused: 240000, 274484, 432240, 502836."""
    ws, x = arguments()
    with pytest.raises(coop.InfeasibleBudgetError) as refused:
        jax.grad(coop.remat(net, budget=150_000))(ws, x)
    least_bytes = refused.value.least_bytes
    assert least_bytes is not None
    assert least_bytes < 220_000
    close(jax.grad(coop.remat(net, budget=least_bytes))(ws, x), jax.grad(net)(ws, x))


def test_a_gradient_of_a_jitted_function_is_refused_with_what_helps() -> None:
    """JAX traces it once for both: whether the parts will be programs of their own is not known then."""
    ws, x = arguments()
    limited = jax.jit(coop.remat(net, budget=330_000))
    with pytest.raises(coop.InfeasibleBudgetError, match=r"as in jax.jit\(jax.grad\(f\)\)"):
        jax.grad(limited)(ws, x)
    close(jax.jit(jax.grad(limited))(ws, x), jax.grad(net)(ws, x))


def test_only_what_is_run_apart_is_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[bool, Planned]]()
    plan_pair = lowering.plan_pair

    def planned(
        forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int, config: lowering.RematConfig
    ) -> tuple[apart.Parts, Planned]:
        parts, found = plan_pair(forward, backward, n_outs, config)
        made.append((config.apart, found))
        return parts, found

    monkeypatch.setattr(lowering, "plan_pair", planned)
    ws, x = arguments()
    limited = coop.remat(net, budget=400_000)
    jax.jit(jax.grad(limited)).lower(ws, x).compile()
    jax.grad(limited)(ws, x)
    assert [(is_apart, found.outcome.changed) for is_apart, found in made] == [(False, False), (True, True)]
