"""Adam's moments in the host's memory: a step's bytes with them on the device, on the host, and in a budget.

    python -m examples.moments_on_host [DEVICE]

No GPU is needed: the step is compiled for one that is not here (h200 unless another is named).
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import coop_jax as coop
from coop_jax import aot

RATE, FIRST, SECOND, EPS = 1e-3, 0.9, 0.999, 1e-8


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """Mean square of what comes out of the last layer."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def adam(moments: Any, gradient: jax.Array, weight: jax.Array) -> tuple[Any, jax.Array]:
    """One layer's update (without the correction of the first steps)."""
    m, v = moments
    m, v = FIRST * m + (1 - FIRST) * gradient, SECOND * v + (1 - SECOND) * gradient**2
    return (m, v), weight - RATE * m / (jnp.sqrt(v) + EPS)


def on_device(weights: Any, moments: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    """A step with all moments on the device."""
    value, gradients = jax.value_and_grad(loss)(weights, x)
    made = [adam(*parts) for parts in zip(moments, gradients, weights, strict=True)]
    return [w for _, w in made], [m for m, _ in made], value


def on_host(weights: Any, moments: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    """The same step with the moments on the host: a layer's come when its gradient is there."""
    value, gradients = jax.value_and_grad(loss)(weights, x)
    moments, weights = coop.streamed(adam, moments, gradients, weights)
    return weights, moments, value


def specs(layers: int, width: int, rows: int) -> tuple[Any, Any, Any]:
    """Weights, moments and a batch, as shapes."""
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [weight] * layers, [(weight, weight)] * layers, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def main(
    device: str = "h200", layers: int = 16, width: int = 1024, rows: int = 2048
) -> tuple[int, coop.Report]:
    """Print what the three programs need.

    Args:
        device: a GPU or TPU that need not be here.
        layers, width, rows: sizes of the model and of a batch.

    Returns:
        The total with the moments on the device, and the report of the step within 0.8 of it.
    """
    weights, moments, x = specs(layers, width, rows)
    waiting = coop.on_host(moments)
    found = []
    for name, step, state in (("on the device", on_device, moments), ("on the host", on_host, waiting)):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        memory = aot.memory(aot.lower_for(jitted, (weights, state, x), device=device).compile())
        sys.stdout.write(f"moments {name}: {memory}; {memory.host_bytes / 2**20:.1f} MiB on the host\n")
        found.append(memory.total_bytes)
    budget = int(0.8 * found[0])
    report = coop.plan(on_host, weights, waiting, x, budget=budget, device=device, donate_argnums=(0, 1))
    sys.stdout.write(f"\n{report}\n")
    return found[0], report


if __name__ == "__main__":
    main(*sys.argv[1:2])
