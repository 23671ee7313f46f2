"""What every example model looks like from outside, and training steps on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
Batch = Any
State = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model to train.

    Attributes:
        name: such as "gpt".
        init: key -> parameters.
        batch: key -> one batch of made-up data.
        loss: (parameters, batch) -> scalar.
    """

    name: str
    init: Callable[[jax.Array], Params]
    batch: Callable[[jax.Array], Batch]
    loss: Callable[[Params, Batch], jax.Array]

    def specs(self) -> tuple[Params, Batch]:
        """Shapes and dtypes of parameters and batch; computes nothing."""
        key = jax.random.key(0)
        return jax.eval_shape(self.init, key), jax.eval_shape(self.batch, key)


def adam_init(params: Params) -> State:
    """State of `adam_step`: parameters, both moments in float32, and the step count."""
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return {"params": params, "mean": zeros, "square": jax.tree.map(jnp.copy, zeros), "step": jnp.int32(0)}


def adam_step(loss: Callable[[Params, Batch], jax.Array], *, rate: float = 3e-4) -> Callable[..., Any]:
    """A whole training step with Adam, gradient inside: (state, batch) -> (state, loss)."""
    decay_mean, decay_square, tiny = 0.9, 0.95, 1e-8

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        count = state["step"] + 1
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        mean = jax.tree.map(lambda m, g: decay_mean * m + (1 - decay_mean) * g, state["mean"], grads)
        square = jax.tree.map(
            lambda s, g: decay_square * s + (1 - decay_square) * g * g, state["square"], grads
        )
        scale = rate * jnp.sqrt(1 - decay_square**count) / (1 - decay_mean**count)

        def update(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            return (p.astype(jnp.float32) - scale * m / (jnp.sqrt(s) + tiny)).astype(p.dtype)

        params = jax.tree.map(update, state["params"], mean, square)
        return {"params": params, "mean": mean, "square": square, "step": count}, value

    return step


def sgd_step(loss: Callable[[Params, Batch], jax.Array], *, rate: float = 1e-2) -> Callable[..., Any]:
    """A whole training step with gradient candidate, gradient inside: (params, batch) -> (params, loss)."""

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads), value

    return step
