"""A U-Net that denoises images: residual blocks with group norm, self-attention where the image is small.

After Ho et al. (2020) at the sizes of its LSUN model, without dropout. What goes across lives long.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.layers import (
    attend,
    conv,
    dense,
    dense_weights,
    filters,
    group_norm,
    keys_of,
    scale_bias,
)  # fmt: skip
from benchmarks.models.model import Blocks, Model, Net

ATTEND_BELOW = 17


def residual(w: dict[str, Any], x: jax.Array, time: jax.Array) -> jax.Array:
    """Two convolutions and the time; attention where the image is small."""
    h = conv(w["conv1"], jax.nn.silu(group_norm(w["norm1"], x)))
    h = h + dense(w["time"], jax.nn.silu(time))[:, None, None]
    h = conv(w["conv2"], jax.nn.silu(group_norm(w["norm2"], h)))
    x = h + (conv(w["skip"], x) if "skip" in w else x)
    if "attention" not in w:
        return x
    a = w["attention"]
    flat = group_norm(a["norm"], x).reshape(x.shape[0], 1, -1, x.shape[-1])
    q, k, v = jnp.split(dense(a["qkv"], flat), 3, axis=-1)
    return x + dense(a["out"], attend(q, k, v)).reshape(x.shape)


def time_embedding(steps: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of the noise level."""
    angle = steps[:, None] * 10_000.0 ** -(jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def net(
    blocks: Blocks, *, channels: int, levels: tuple[int, ...], depth: int, image: int, batch: int,
    dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; `levels` are the multiples of `channels` of each resolution."""
    widths = [channels * m for m in levels]

    def init(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)

        def block(inputs: int, outputs: int, size: int) -> dict[str, Any]:
            w = {
                "norm1": scale_bias(inputs),
                "conv1": filters(next(keys), 3, inputs, outputs),
                "time": dense_weights(next(keys), channels, outputs),
                "norm2": scale_bias(outputs),
                "conv2": filters(next(keys), 3, outputs, outputs),
            }
            if inputs != outputs:
                w["skip"] = filters(next(keys), 1, inputs, outputs)
            if size < ATTEND_BELOW:
                qkv, out = (dense_weights(next(keys), outputs, n * outputs) for n in (3, 1))
                w["attention"] = {"norm": scale_bias(outputs), "qkv": qkv, "out": out}
            return w

        down, up, kept, width = [], [], [channels], channels
        for i, wide in enumerate(widths):
            down.append([block(width if j == 0 else wide, wide, image >> i) for j in range(depth)])
            kept += [wide] * depth
            width = wide
        middle = block(width, width, 1)
        for i, wide in reversed(list(enumerate(widths))):
            up.append(
                [block((width if j == 0 else wide) + kept.pop(), wide, image >> i) for j in range(depth)]
            )
            width = wide
        return {
            "first": filters(next(keys), 3, 3, channels),
            "down": down,
            "middle": middle,
            "up": up,
            "norm": scale_bias(width),
            "last": filters(next(keys), 3, width, 3),
        }

    def batch_of(key: jax.Array) -> dict[str, Any]:
        noise, clean = jax.random.normal(key, (2, batch, image, image, 3))
        return {"clean": clean, "noise": noise, "step": jax.random.uniform(key, (batch,)) * 1000}

    def loss(params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        one = blocks.wrap(residual)
        signal = jnp.cos(data["step"] / 1000 * jnp.pi / 2)[:, None, None, None]
        x = signal * data["clean"] + jnp.sqrt(1 - signal**2) * data["noise"]
        time = time_embedding(data["step"], channels).astype(dtype)
        x, kept = conv(params["first"], x.astype(dtype)), []
        for i, level in enumerate(params["down"]):
            x = x if i == 0 else _halved(x)
            for w in level:
                x = one(w, x, time)
                kept.append(x)
        x = one(params["middle"], x, time)
        for i, level in enumerate(params["up"]):
            x = x if i == 0 else _doubled(x)
            for w in level:
                x = one(w, jnp.concatenate([x, kept.pop()], axis=-1), time)
        found = conv(params["last"], jax.nn.silu(group_norm(params["norm"], x)))
        return jnp.square(found.astype(jnp.float32) - data["noise"]).mean()

    return Net(init=init, batch=batch_of, loss=loss)


def _halved(x: jax.Array) -> jax.Array:
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def _doubled(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


MODELS = (
    Model(
        name="unet",
        source="written here, after Ho et al. 2020",
        net=net,
        sizes={
            "cpu": {"channels": 16, "levels": (1, 2), "depth": 1, "image": 32, "batch": 8},
            "h200": {"channels": 128, "levels": (1, 1, 2, 2, 4, 4), "depth": 2, "image": 256, "batch": 16}
            | {"dtype": "bfloat16"},
        },
    ),
)
