"""A GPT in plain JAX: pre-layer-norm blocks, causal attention, GELU, weights in a dictionary.

The layers are an unrolled Python loop. `loss(..., wrap=jax.checkpoint)` wraps every block, which is
what JAX users do by hand today.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from examples.models.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT; `vocab` 256 is a byte-level model. The dtype is of weights and activations."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    seq: int = 128
    batch: int = 8
    vocab: int = 256
    dtype: str = "float32"


def init(config: GPTConfig, key: jax.Array) -> dict[str, Any]:
    """Random weights."""
    keys = iter(jax.random.split(key, 3 + 4 * config.layers))
    d, dtype = config.width, config.dtype

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        weights = jax.random.normal(next(keys), (rows, columns)) * scale / rows**0.5
        return weights.astype(dtype)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(d, dtype), "bias": jnp.zeros(d, dtype)}

    def block() -> dict[str, Any]:
        shrink = (2 * config.layers) ** -0.5
        return {
            "norm1": norm(),
            "qkv": {"w": matrix(d, 3 * d), "b": jnp.zeros(3 * d, dtype)},
            "proj": {"w": matrix(d, d, shrink), "b": jnp.zeros(d, dtype)},
            "norm2": norm(),
            "up": {"w": matrix(d, 4 * d), "b": jnp.zeros(4 * d, dtype)},
            "down": {"w": matrix(4 * d, d, shrink), "b": jnp.zeros(d, dtype)},
        }

    return {
        "embed": matrix(config.vocab, d, 0.02 * config.vocab**0.5),
        "position": matrix(config.seq, d, 0.02 * config.seq**0.5),
        "blocks": [block() for _ in range(config.layers)],
        "norm": norm(),
        "head": matrix(d, config.vocab),
    }


def dense(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x @ w + b."""
    return x @ weights["w"] + weights["b"]


def layer_norm(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layer norm with float32 statistics."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    normed = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normed.astype(x.dtype) * weights["scale"] + weights["bias"]


def attention(weights: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """Causal multi-head attention; x is [batch, seq, width]. The softmax is in float32."""
    batch, seq, width = x.shape
    qkv = dense(weights["qkv"], x).reshape(batch, seq, 3, heads, width // heads)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = (q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights_ = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = (weights_ @ v).transpose(0, 2, 1, 3).reshape(batch, seq, width)
    return dense(weights["proj"], mixed)


def block(weights: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """One pre-layer-norm transformer block."""
    x = x + attention(weights, layer_norm(weights["norm1"], x), heads)
    hidden = jax.nn.gelu(dense(weights["up"], layer_norm(weights["norm2"], x)))
    return x + dense(weights["down"], hidden)


def logits(
    config: GPTConfig, params: dict[str, Any], tokens: jax.Array, *, wrap: Callable[..., Any] | None = None
) -> jax.Array:
    """Next-token logits; tokens is [batch, seq]."""
    one = (wrap or (lambda f: f))(lambda weights, x: block(weights, x, config.heads))
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    for weights in params["blocks"]:
        x = one(weights, x)
    return layer_norm(params["norm"], x) @ params["head"]


def loss(
    config: GPTConfig, params: dict[str, Any], tokens: jax.Array, *, wrap: Callable[..., Any] | None = None
) -> jax.Array:
    """Mean cross entropy of the next token; tokens is [batch, seq + 1]."""
    scores = logits(config, params, tokens[:, :-1], wrap=wrap).astype(jnp.float32)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(scores, axis=-1) - picked).mean()


def problem(config: GPTConfig, *, wrap: Callable[..., Any] | None = None) -> Problem:
    """This model as a `Problem`."""
    return Problem(
        name="gpt",
        init=lambda key: init(config, key),
        batch=lambda key: jax.random.randint(key, (config.batch, config.seq + 1), 0, config.vocab, jnp.int32),
        loss=lambda params, tokens: loss(config, params, tokens, wrap=wrap),
    )
