"""XLA:CPU's kernels, as they are foreseen: its library's, and its own from the results to the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.stage import prepare

CPU = DEVICES["cpu"]
WIDE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
ROW = jax.ShapeDtypeStruct((256,), jnp.float32)


def seen(fn: Callable[..., Any], *specs: Any) -> LiftedJaxpr:
    return lift_seen(prepare(inline_calls(jax.make_jaxpr(fn)(*specs))).jaxpr, CPU)


def layer_norm(x: Any, w: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(variance + 1e-5)) @ w


def rms_norm(x: Any, w: Any) -> Any:
    return ((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)) @ w) ** 2


def perceptron(x: Any, w: Any, u: Any) -> Any:
    return jax.nn.gelu(x @ w) @ u


def gated(x: Any, w: Any, u: Any) -> Any:
    return jax.nn.silu(x @ w) * (x @ u)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


def transport(cost: Any, f: Any) -> Any:
    for _ in range(4):
        f = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        f = -jax.nn.logsumexp(f[None, :] - cost, axis=1)
    return f


CASES = [
    (layer_norm, WIDE, WIDE),
    (rms_norm, WIDE, WIDE),
    (perceptron, WIDE, WIDE, WIDE),
    (gated, WIDE, WIDE, WIDE),
    (attention, WIDE, WIDE, WIDE),
    (transport, WIDE, ROW),
]


@pytest.mark.parametrize(
    ("fn", "specs"), [(fn, specs) for fn, *specs in CASES], ids=lambda c: getattr(c, "__name__", "")
)
def test_time_of_a_gradient_is_that_of_the_kernels_that_xla_makes(fn: Callable[..., Any], specs: list[Any]):
    gradient = jax.grad(lambda *args: jnp.sum(fn(*args)))
    made_ns = aot.run_ns(jax.jit(gradient).lower(*specs).compile(), CPU)
    assert seen(gradient, *specs).program.cost_ns == pytest.approx(made_ns, rel=0.05)
