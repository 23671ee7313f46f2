"""A multi-layer perceptron that classifies vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from examples.models.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of a multi-layer perceptron."""

    layers: int = 6
    width: int = 256
    batch: int = 512
    classes: int = 16
    dtype: str = "float32"


def init(config: MLPConfig, key: jax.Array) -> list[dict[str, jax.Array]]:
    """Random weights, one dictionary a layer."""
    sizes = [config.width] * config.layers + [config.classes]
    weights = []
    for rows, columns, k in zip(sizes[:-1], sizes[1:], jax.random.split(key, config.layers), strict=True):
        w = (jax.random.normal(k, (rows, columns)) * (2 / rows) ** 0.5).astype(config.dtype)
        weights.append({"w": w, "b": jnp.zeros(columns, config.dtype)})
    return weights


def loss(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy."""
    x = batch["x"]
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    scores = x @ params[-1]["w"] + params[-1]["b"]
    picked = jnp.take_along_axis(scores, batch["label"][:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(scores, axis=-1) - picked).mean()


def _batch(config: MLPConfig, key: jax.Array) -> dict[str, Any]:
    data, labels = jax.random.split(key)
    return {
        "x": jax.random.normal(data, (config.batch, config.width)).astype(config.dtype),
        "label": jax.random.randint(labels, (config.batch,), 0, config.classes),
    }


def problem(config: MLPConfig) -> Problem:
    """This model as a `Problem`."""
    return Problem(name="mlp", init=lambda k: init(config, k), batch=lambda k: _batch(config, k), loss=loss)
