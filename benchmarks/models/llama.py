"""Llama with its layers in a `lax.scan`: RMS norms, rotary positions, grouped queries, SwiGLU.

1B has the sizes of Llama 3.2 1B, 8B those of Llama 3.1 8B, over eight devices (see `model.spread`). Weights
and activations are bfloat16 on the GPU, and so are Adam's moments; attention is written out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models.layers import attend, keys_of, matrix, next_token_loss, rms_norm, token_batch
from benchmarks.models.model import Blocks, Model, Net


def rotary(x: jax.Array, base: float = 500_000.0) -> jax.Array:
    """Positions turned into angles; x is [batch, heads, seq, width]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] * base ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def layer(w: dict[str, Any], x: jax.Array, heads: int, groups: int) -> jax.Array:
    """One layer; x is [batch, seq, width]."""
    batch, seq, width = x.shape
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    hidden = rms_norm(w["norm1"], x)

    def split(name: str, count: int) -> jax.Array:
        return (hidden @ w[name]).reshape(batch, seq, count, -1).transpose(0, 2, 1, 3)

    q, k = rotary(split("q", heads)), rotary(split("k", groups))
    k, v = (jnp.repeat(a, heads // groups, axis=1) for a in (k, split("v", groups)))
    mixed = attend(q, k, v, causal).transpose(0, 2, 1, 3).reshape(batch, seq, width)
    x = x + mixed @ w["o"]
    hidden = rms_norm(w["norm2"], x)
    return x + (jax.nn.silu(hidden @ w["gate"]) * (hidden @ w["up"])) @ w["down"]


def net(
    blocks: Blocks, *, layers: int, width: int, inner: int, heads: int, groups: int, seq: int, batch: int,
    vocab: int, dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; each layer's weights stacked."""
    kv = width // heads * groups
    shapes = {
        "q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width),
        "gate": (width, inner), "up": (width, inner), "down": (inner, width),
    }  # fmt: skip

    def init(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)
        stacked = {name: matrix(next(keys), layers, *s, dtype=dtype) for name, s in shapes.items()}
        norms = {name: jnp.ones((layers, width), dtype) for name in ("norm1", "norm2")}
        return {
            "embed": matrix(next(keys), vocab, width, dtype=dtype),
            "layers": stacked | norms,
            "norm": jnp.ones(width, dtype),
            "head": matrix(next(keys), width, vocab, dtype=dtype),
        }

    def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
            return layer(w, x, heads, groups), None

        x, _ = lax.scan(blocks.wrap(body), params["embed"][tokens], params["layers"])
        return next_token_loss(rms_norm(params["norm"], x) @ params["head"], tokens)

    return Net(init=init, batch=token_batch(batch, seq, vocab), loss=loss)


SMALL = {
    "layers": 8, "width": 128, "inner": 384, "heads": 4, "groups": 2, "seq": 128, "batch": 8, "vocab": 512,
}  # fmt: skip
MODELS = (
    Model(
        name="llama_1b",
        source="written here, after Llama 3.2 1B",
        net=net,
        sizes={
            "cpu": SMALL,
            "h200": {"layers": 16, "width": 2048, "inner": 8192, "heads": 32, "groups": 8, "seq": 2048}
            | {"batch": 8, "vocab": 128256, "dtype": "bfloat16"},
        },
    ),
    Model(
        name="llama_8b",
        source="written here, after Llama 3.1 8B; FSDP over 8 devices",
        net=net,
        devices=8,
        sizes={
            "cpu": SMALL,
            "h200": {"layers": 32, "width": 4096, "inner": 14336, "heads": 32, "groups": 8, "seq": 4096}
            | {"batch": 16, "vocab": 128256, "dtype": "bfloat16"},
        },
    ),
)
