"""DenseNet-121 (Huang et al. 2017): every layer reads all that came before it in its block.

Concatenations make the memory of such a net quadratic in its depth, which recomputing them takes back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.models.layers import (
    batch_norm,
    conv,
    cross_entropy,
    dense,
    dense_weights,
    filters,
    image_batch,
    keys_of,
    scale_bias,
)  # fmt: skip
from benchmarks.models.model import Blocks, Model, Net


def layer(w: dict[str, Any], x: jax.Array) -> jax.Array:
    """Norm, 1x1, norm, 3x3: `growth` new channels."""
    h = conv(w["conv1"], jax.nn.relu(batch_norm(w["norm1"], x)))
    return conv(w["conv2"], jax.nn.relu(batch_norm(w["norm2"], h)))


def pooled(x: jax.Array, size: int, kind: str) -> jax.Array:
    """Windows of `size`, every second place."""
    window, strides = (1, size, size, 1), (1, 2, 2, 1)
    if kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")
    return lax.reduce_window(x, 0.0, lax.add, window, strides, "SAME") / (size * size)


def net(
    blocks: Blocks, *, depths: tuple[int, ...], growth: int, image: int, batch: int, classes: int,
    dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; its blocks are the layers."""

    def init(key: jax.Array) -> dict[str, Any]:
        keys, width, dense_blocks = keys_of(key), 2 * growth, []
        stem = filters(next(keys), 7, 3, width)
        for i, depth in enumerate(depths):
            layers = []
            for _ in range(depth):
                layers.append(
                    {
                        "norm1": scale_bias(width),
                        "conv1": filters(next(keys), 1, width, 4 * growth),
                        "norm2": scale_bias(4 * growth),
                        "conv2": filters(next(keys), 3, 4 * growth, growth),
                    }
                )
                width += growth
            found: dict[str, Any] = {"layers": layers, "norm": scale_bias(width)}
            if i + 1 < len(depths):
                found["narrow"] = filters(next(keys), 1, width, width // 2)
                width //= 2
            dense_blocks.append(found)
        head = dense_weights(next(keys), width, classes)
        return {"stem": stem, "norm": scale_bias(2 * growth), "blocks": dense_blocks, "head": head}

    def loss(params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        one = blocks.wrap(layer)
        x = conv(params["stem"], data["image"].astype(dtype), stride=2)
        x = pooled(jax.nn.relu(batch_norm(params["norm"], x)), 3, "max")
        for w in params["blocks"]:
            for each in w["layers"]:
                x = jnp.concatenate([x, one(each, x)], axis=-1)
            x = jax.nn.relu(batch_norm(w["norm"], x))
            if "narrow" in w:
                x = pooled(conv(w["narrow"], x), 2, "mean")
        return cross_entropy(dense(params["head"], x.mean((1, 2))), data["label"])

    return Net(init=init, batch=image_batch(batch, image, classes), loss=loss)


MODELS = (
    Model(
        name="densenet121",
        source="written here, after Huang et al. 2017",
        net=net,
        optimizer=lambda: optax.sgd(0.1, momentum=0.9),
        sizes={
            "cpu": {"depths": (3, 4), "growth": 12, "image": 64, "batch": 8, "classes": 10},
            "h200": {"depths": (6, 12, 24, 16), "growth": 32, "image": 224, "batch": 128, "classes": 1000}
            | {"dtype": "bfloat16"},
        },
    ),
)
