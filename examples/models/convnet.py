"""A small convolutional network with batch norm that classifies images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from examples.models.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """Sizes of a convolutional network: `stages` of `depth` convolutions, the image halved after each."""

    stages: int = 2
    depth: int = 3
    channels: int = 16
    image: int = 32
    batch: int = 16
    classes: int = 10
    dtype: str = "float32"


def init(config: ConvConfig, key: jax.Array) -> dict[str, Any]:
    """Random weights."""
    keys = iter(jax.random.split(key, config.stages * config.depth + 1))
    layers, inputs = [], 3
    for stage in range(config.stages):
        outputs = config.channels * 2**stage
        for _ in range(config.depth):
            w = jax.random.normal(next(keys), (3, 3, inputs, outputs)) * (2 / (9 * inputs)) ** 0.5
            layers.append(
                {
                    "w": w.astype(config.dtype),
                    "scale": jnp.ones(outputs, config.dtype),
                    "bias": jnp.zeros(outputs, config.dtype),
                }
            )
            inputs = outputs
    head = jax.random.normal(next(keys), (inputs, config.classes)) * inputs**-0.5
    return {"layers": layers, "head": head.astype(config.dtype)}


def _conv_norm_relu(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x - mean).mean((0, 1, 2))
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["bias"])


def loss(config: ConvConfig, params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy, batch norm in training mode."""
    x = batch["image"]
    for i, layer in enumerate(params["layers"]):
        x = _conv_norm_relu(layer, x)
        if (i + 1) % config.depth == 0:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    scores = x.mean((1, 2)) @ params["head"]
    picked = jnp.take_along_axis(scores, batch["label"][:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(scores, axis=-1) - picked).mean()


def _batch(config: ConvConfig, key: jax.Array) -> dict[str, jax.Array]:
    data, labels = jax.random.split(key)
    shape = (config.batch, config.image, config.image, 3)
    return {
        "image": jax.random.normal(data, shape).astype(config.dtype),
        "label": jax.random.randint(labels, (config.batch,), 0, config.classes),
    }


def problem(config: ConvConfig) -> Problem:
    """This model as a `Problem`."""
    return Problem(
        name="conv",
        init=lambda key: init(config, key),
        batch=lambda key: _batch(config, key),
        loss=lambda params, batch: loss(config, params, batch),
    )
