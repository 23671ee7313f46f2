"""A vision transformer of Equinox's layers; `eqx.filter_checkpoint`, its option, takes policies, too."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.models.layers import cross_entropy, image_batch
from benchmarks.models.model import Blocks, Model, Net


class Block(eqx.Module):
    """Pre-norm attention and MLP over one image's patches."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.norm2 = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x is [patches, width]."""
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(lambda row: self.down(jax.nn.gelu(self.up(self.norm2(row)))))(x)


class ViT(eqx.Module):
    """Patches, blocks, the mean, a head."""

    patch: eqx.nn.Conv2d
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(
        self, *, width: int, layers: int, heads: int, size: int, image: int, classes: int, key: jax.Array
    ) -> None:
        keys = jax.random.split(key, layers + 3)
        self.patch = eqx.nn.Conv2d(3, width, size, size, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], ((image // size) ** 2, width))
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, classes, key=keys[2])

    def __call__(self, image: jax.Array, wrap: Blocks) -> jax.Array:
        """Logits of one image, CHW."""
        x = self.patch(image).reshape(self.position.shape[1], -1).T + self.position
        for block in self.blocks:
            x = wrap.wrap(lambda x, block=block: block(x), eqx.filter_checkpoint)(x)
        return self.head(self.norm(x.mean(0)))


def net(blocks: Blocks, *, batch: int, dtype: str = "float32", **sizes: Any) -> Net:
    """The model, mapped over a batch; its parameters are the arrays of the module."""

    def build(key: jax.Array) -> ViT:
        return ViT(**sizes, key=key)

    _, static = eqx.partition(eqx.filter_eval_shape(build, jax.random.key(0)), _is_array)

    def loss(params: Any, data: dict[str, jax.Array]) -> jax.Array:
        cast = jax.tree.map(lambda p: p.astype(dtype), params)
        model = eqx.combine(cast, static)
        images = data["image"].transpose(0, 3, 1, 2).astype(dtype)
        return cross_entropy(jax.vmap(lambda image: model(image, blocks))(images), data["label"])

    return Net(
        init=lambda key: eqx.filter(build(key), eqx.is_array),
        batch=image_batch(batch, sizes["image"], sizes["classes"]),
        loss=loss,
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct | jnp.ndarray)


MODELS = (
    Model(
        name="equinox_vit",
        source="equinox.nn",
        net=net,
        sizes={
            "cpu": {
                "width": 128,
                "layers": 5,
                "heads": 4,
                "size": 8,
                "image": 64,
                "classes": 10,
                "batch": 16,
            },
            "h200": {"width": 768, "layers": 12, "heads": 12, "size": 16, "image": 224, "classes": 1000}
            | {"batch": 128, "dtype": "bfloat16"},
        },
    ),
)
