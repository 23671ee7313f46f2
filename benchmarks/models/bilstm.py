"""A stack of bidirectional LSTMs that tags every token of a sentence; each direction is a `lax.scan`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models.layers import cross_entropy, dense, dense_weights, keys_of, matrix
from benchmarks.models.model import Blocks, Model, Net


def direction(w: dict[str, Any], x: jax.Array, *, reverse: bool, blocks: Blocks) -> jax.Array:
    """One direction of one layer; x is [seq, batch, width], as is the result."""
    units = w["recurrent"].shape[0]
    inputs = dense(w["input"], x)

    def cell(carry: tuple[jax.Array, jax.Array], z: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(z + h @ w["recurrent"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[1], units))
    return lax.scan(blocks.wrap(cell), (zero, zero), inputs, reverse=reverse)[1]


def net(blocks: Blocks, *, layers: int, units: int, seq: int, batch: int, vocab: int, tags: int = 32) -> Net:
    """The model; its blocks are the cells."""

    def init(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)

        def one(inputs: int) -> dict[str, Any]:
            return {
                "input": dense_weights(next(keys), inputs, 4 * units),
                "recurrent": matrix(next(keys), units, 4 * units),
            }

        widths = [units] + [2 * units] * (layers - 1)
        return {
            "embed": matrix(next(keys), vocab, units),
            "layers": [{"forward": one(n), "backward": one(n)} for n in widths],
            "head": dense_weights(next(keys), 2 * units, tags),
        }

    def batch_of(key: jax.Array) -> dict[str, Any]:
        tokens = jax.random.randint(key, (seq, batch), 0, vocab)
        return {"tokens": tokens, "tags": tokens % tags}

    def loss(params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        x = params["embed"][data["tokens"]]
        for w in params["layers"]:
            ways = (("forward", False), ("backward", True))
            halves = [direction(w[name], x, reverse=back, blocks=blocks) for name, back in ways]
            x = jnp.concatenate(halves, axis=-1)
        return cross_entropy(dense(params["head"], x), data["tags"])

    return Net(init=init, batch=batch_of, loss=loss)


MODELS = (
    Model(
        name="bilstm",
        source="written here, after Graves & Schmidhuber 2005",
        net=net,
        sizes={
            "cpu": {"layers": 2, "units": 64, "seq": 64, "batch": 32, "vocab": 256},
            "h200": {"layers": 4, "units": 1024, "seq": 512, "batch": 64, "vocab": 32000},
        },
    ),
)
