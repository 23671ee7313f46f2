"""What the nets written here share: initial weights, convolutions, norms, attention, losses, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, Any]


def keys_of(key: jax.Array) -> Iterator[jax.Array]:
    """As many keys as are asked for."""
    count = 0
    while True:
        yield jax.random.fold_in(key, count)
        count += 1


def matrix(key: jax.Array, *shape: int, fan_in: int | None = None, dtype: Any = jnp.float32) -> jax.Array:
    """Normal weights, scaled by the inputs of one output (the last axis but one, if it is not said)."""
    scale = (fan_in or shape[-2]) ** -0.5
    return (jax.random.normal(key, shape) * scale).astype(dtype)


def filters(key: jax.Array, size: int, inputs: int, outputs: int) -> jax.Array:
    """Weights of a square convolution, HWIO."""
    return matrix(key, size, size, inputs, outputs, fan_in=size * size * inputs)


def conv(w: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of NHWC by HWIO in the dtype of `x`, padded to the same size."""
    sizes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=sizes)


def scale_bias(width: int) -> Weights:
    """Weights of a norm."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def normed(x: jax.Array, axes: int | tuple[int, ...], epsilon: float = 1e-5) -> jax.Array:
    """`x` less its mean over its deviation, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    variance = jnp.square(wide - mean).mean(axes, keepdims=True)
    return (wide - mean) * lax.rsqrt(variance + epsilon)


def layer_norm(weights: Weights, x: jax.Array) -> jax.Array:
    """Over the last axis."""
    return (normed(x, -1) * weights["scale"] + weights["bias"]).astype(x.dtype)


def batch_norm(weights: Weights, x: jax.Array) -> jax.Array:
    """Over all axes but the last, with the batch's own statistics."""
    return (normed(x, (0, 1, 2)) * weights["scale"] + weights["bias"]).astype(x.dtype)


def group_norm(weights: Weights, x: jax.Array, groups: int = 8) -> jax.Array:
    """Over space and groups of channels; x is NHWC."""
    split = x.reshape(*x.shape[:3], groups, -1)
    return (normed(split, (1, 2, 4)).reshape(x.shape) * weights["scale"] + weights["bias"]).astype(x.dtype)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Over the last axis, without a mean."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def dense(weights: Weights, x: jax.Array) -> jax.Array:
    """x @ w + b in the dtype of `x`."""
    return x @ weights["w"].astype(x.dtype) + weights["b"].astype(x.dtype)


def dense_weights(key: jax.Array, inputs: int, outputs: int) -> Weights:
    """Weights of `dense`."""
    return {"w": matrix(key, inputs, outputs), "b": jnp.zeros(outputs)}


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Attention written out; [..., heads, positions, width] each, the softmax in float32."""
    scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over everything but the last axis, in float32."""
    wide = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(wide, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(wide, axis=-1) - picked).mean()


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Cross entropy of each position's next token; logits [batch, seq, vocab], tokens [batch, seq]."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def token_batch(batch: int, seq: int, vocab: int) -> Callable[[jax.Array], jax.Array]:
    """key -> tokens [batch, seq]."""
    return lambda key: jax.random.randint(key, (batch, seq), 0, vocab)


def image_batch(batch: int, image: int, classes: int, channels: int = 3) -> Callable[[jax.Array], Weights]:
    """key -> images NHWC and their labels."""

    def make(key: jax.Array) -> Weights:
        return {
            "image": jax.random.normal(key, (batch, image, image, channels)),
            "label": jax.random.randint(key, (batch,), 0, classes),
        }

    return make
