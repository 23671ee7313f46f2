"""Gradients summed over microbatches, each microbatch through a scan over layers: bytes before and after.

    python -m examples.microbatches

A scan inside a scan. What the layers stack for their backward pass is there for one microbatch at a time;
the budget takes most of that away, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.compare import compare, show

MICROBATCHES = 4


def layer(w: Any, x: jax.Array) -> jax.Array:
    """A residual layer with a gate."""
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"]) * jax.nn.sigmoid(x)


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """Mean square of what comes out of the last layer."""
    return jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, weights)[0] ** 2)


def train_step(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient candidate on the mean gradient of all microbatches."""

    def add(total: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, rows)
        return jax.tree.map(jnp.add, total, grads), value

    zeros = jax.tree.map(jnp.zeros_like, weights)
    grads, values = lax.scan(add, zeros, x.reshape(MICROBATCHES, -1, x.shape[-1]))
    return jax.tree.map(lambda w, g: w - 0.1 / MICROBATCHES * g, weights, grads), values.mean()


def main() -> None:
    """Compile plainly and within three budgets, and print what each needs."""
    up, down, rows = jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": jax.random.normal(up, (8, 64, 128)) / 8,
        "down": jax.random.normal(down, (8, 128, 64)) / 12,
    }
    show(compare(train_step, weights, jax.random.normal(rows, (4096, 64))))


if __name__ == "__main__":
    main()
