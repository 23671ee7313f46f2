"""Swin transformer (Liu et al. 2021): attention in windows, every second layer's windows shifted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.layers import (
    attend,
    conv,
    cross_entropy,
    dense,
    dense_weights,
    filters,
    image_batch,
    keys_of,
    layer_norm,
    scale_bias,
)  # fmt: skip
from benchmarks.models.model import Blocks, Model, Net


def windows(x: jax.Array, size: int) -> jax.Array:
    """[batch, h, w, c] -> [batch * windows, size * size, c]."""
    n, h, w, c = x.shape
    split = x.reshape(n, h // size, size, w // size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return split.reshape(-1, size * size, c)


def joined(x: jax.Array, size: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `windows`."""
    n, h, w, c = shape
    split = x.reshape(n, h // size, w // size, size, size, c).transpose(0, 1, 3, 2, 4, 5)
    return split.reshape(shape)


def shift_mask(height: int, size: int, shift: int) -> np.ndarray:
    """[windows, 1, places, places]: which places of a shifted window were neighbours in the image."""
    band = np.zeros(height, np.int32)
    band[-size:-shift], band[-shift:] = 1, 2
    region = (band[:, None] * 3 + band[None, :]).reshape(height // size, size, height // size, size)
    region = region.transpose(0, 2, 1, 3).reshape(-1, size * size)
    return (region[:, None, :] == region[:, :, None])[:, None]


def layer(w: dict[str, Any], x: jax.Array, heads: int, size: int, shift: int) -> jax.Array:
    """One layer; x is [batch, h, w, width]."""
    shape, width = x.shape, x.shape[-1]
    h = layer_norm(w["norm1"], x)
    h = windows(jnp.roll(h, (-shift, -shift), (1, 2)) if shift else h, size)
    qkv = dense(w["qkv"], h).reshape(*h.shape[:2], 3, heads, width // heads)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    mask = None
    if shift:
        mask = jnp.asarray(np.tile(shift_mask(shape[1], size, shift), (shape[0], 1, 1, 1)))
    mixed = attend(q, k, v, mask).transpose(0, 2, 1, 3).reshape(h.shape)
    mixed = joined(dense(w["out"], mixed), size, shape)
    x = x + (jnp.roll(mixed, (shift, shift), (1, 2)) if shift else mixed)
    return x + dense(w["down"], jax.nn.gelu(dense(w["up"], layer_norm(w["norm2"], x))))


def merged(w: dict[str, Any], x: jax.Array) -> jax.Array:
    """Four places become one of twice the width."""
    n, h, wide, c = x.shape
    x = (
        x.reshape(n, h // 2, 2, wide // 2, 2, c)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(n, h // 2, wide // 2, 4 * c)
    )
    return dense(w["reduce"], layer_norm(w["norm"], x))


def net(
    blocks: Blocks, *, depths: tuple[int, ...], width: int, head: int, size: int, image: int, batch: int,
    classes: int, dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; `head` is the width of a head, `size` that of a window."""

    def init(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)

        def one(d: int) -> dict[str, Any]:
            shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
            made = {name: dense_weights(next(keys), *s) for name, s in shapes.items()}
            return made | {"norm1": scale_bias(d), "norm2": scale_bias(d)}

        stages, d = [], width
        for i, depth in enumerate(depths):
            stage: dict[str, Any] = {"layers": [one(d) for _ in range(depth)]}
            if i + 1 < len(depths):
                stage["merge"] = {
                    "norm": scale_bias(4 * d),
                    "reduce": dense_weights(next(keys), 4 * d, 2 * d),
                }
                d *= 2
            stages.append(stage)
        patch = filters(next(keys), 4, 3, width)
        return {"patch": patch, "stages": stages, "head": dense_weights(next(keys), d, classes)}

    def loss(params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        x = conv(params["patch"], data["image"].astype(dtype), stride=4)
        for stage in params["stages"]:
            for i, w in enumerate(stage["layers"]):
                shift = size // 2 if i % 2 and x.shape[1] > size else 0
                heads = x.shape[-1] // head
                x = blocks.wrap(lambda w, x, heads=heads, shift=shift: layer(w, x, heads, size, shift))(w, x)
            x = merged(stage["merge"], x) if "merge" in stage else x
        return cross_entropy(dense(params["head"], x.mean((1, 2))), data["label"])

    return Net(init=init, batch=image_batch(batch, image, classes), loss=loss)


MODELS = (
    Model(
        name="swin",
        source="written here, after Liu et al. 2021 (Swin-T)",
        net=net,
        sizes={
            "cpu": {"depths": (2, 2), "width": 48, "head": 16, "size": 4, "image": 64, "batch": 8}
            | {"classes": 10},
            "h200": {"depths": (2, 2, 6, 2), "width": 96, "head": 32, "size": 7, "image": 224, "batch": 128}
            | {"classes": 1000, "dtype": "bfloat16"},
        },
    ),
)
