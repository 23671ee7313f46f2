"""An LSTM whose time steps are an unrolled Python loop."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from examples.models.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LSTMConfig:
    """Sizes of an LSTM."""

    steps: int = 16
    width: int = 128
    batch: int = 64
    dtype: str = "float32"


def init(config: LSTMConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Random weights."""
    d = config.width
    keys = jax.random.split(key, 3)
    return {
        "input": (jax.random.normal(keys[0], (d, 4 * d)) * d**-0.5).astype(config.dtype),
        "hidden": (jax.random.normal(keys[1], (d, 4 * d)) * d**-0.5).astype(config.dtype),
        "bias": jnp.zeros(4 * d, config.dtype),
        "head": (jax.random.normal(keys[2], (d, d)) * d**-0.5).astype(config.dtype),
    }


def loss(params: dict[str, jax.Array], sequence: jax.Array) -> jax.Array:
    """Mean squared error of predicting the next input; sequence is [steps + 1, batch, width]."""
    hidden = cell = jnp.zeros_like(sequence[0])
    total = jnp.zeros((), jnp.float32)
    for t in range(sequence.shape[0] - 1):
        gates = sequence[t] @ params["input"] + hidden @ params["hidden"] + params["bias"]
        enter, forget, leave, value = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(value)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        error = hidden @ params["head"] - sequence[t + 1]
        total = total + jnp.square(error.astype(jnp.float32)).mean()
    return total / (sequence.shape[0] - 1)


def problem(config: LSTMConfig) -> Problem:
    """This model as a `Problem`."""
    shape = (config.steps + 1, config.batch, config.width)
    return Problem(
        name="lstm",
        init=lambda key: init(config, key),
        batch=lambda key: jax.random.normal(key, shape).astype(config.dtype),
        loss=loss,
    )
