"""A transformer with the Pallas attention that JAX ships, its layers scanned or unrolled.

On the CPU the kernels are interpreted; for GPUs Triton compiles them.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax import lax

from benchmarks.models.layers import keys_of, layer_norm, matrix, next_token_loss, scale_bias, token_batch
from benchmarks.models.model import Blocks, Model, Net

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # JAX ships it, and recommends another package's.
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha


def layer(w: dict[str, Any], x: jax.Array, heads: int, tile: int, interpret: bool) -> jax.Array:
    """One layer; x is [batch, seq, width]."""
    batch, seq, width = x.shape
    qkv = (layer_norm(w["norm1"], x) @ w["qkv"]).reshape(batch, seq, 3, heads, width // heads)
    sizes = BlockSizes(*(6 * [tile]))
    scale = (width // heads) ** -0.5
    mixed = mha(
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], None, sm_scale=scale, causal=True, block_sizes=sizes,
        interpret=interpret,
    )  # fmt: skip
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(layer_norm(w["norm2"], x) @ w["up"]) @ w["down"]


def net(
    blocks: Blocks, *, scanned: bool, layers: int, width: int, heads: int, seq: int, batch: int, vocab: int,
    tile: int, interpret: bool = True, dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; `tile` is the side of a kernel's blocks."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
    shapes["down"] = (4 * width, width)

    def one(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)
        norms = {"norm1": scale_bias(width), "norm2": scale_bias(width)}
        return {name: matrix(next(keys), *shape) for name, shape in shapes.items()} | norms

    def init(key: jax.Array) -> dict[str, Any]:
        first, second, third = jax.random.split(key, 3)
        each = jax.random.split(first, layers)
        return {
            "embed": matrix(second, vocab, width),
            "layers": jax.vmap(one)(each) if scanned else [one(k) for k in each],
            "norm": scale_bias(width),
            "head": matrix(third, width, vocab),
        }

    def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        block = blocks.wrap(lambda x, w: layer(w, x, heads, tile, interpret))
        x = params["embed"][tokens]
        if scanned:
            x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = block(x, w)
        return next_token_loss(layer_norm(params["norm"], x) @ params["head"], tokens)

    return Net(init=init, batch=token_batch(batch, seq, vocab), loss=loss)


SMALL: dict[str, Any] = {
    "layers": 6, "width": 128, "heads": 2, "seq": 128, "batch": 4, "vocab": 256, "tile": 64,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "layers": 12, "width": 1024, "heads": 16, "seq": 2048, "batch": 8, "vocab": 32000, "tile": 64,
    "interpret": False, "dtype": "bfloat16",
}  # fmt: skip
MODELS = tuple(
    Model(
        name=f"pallas_{name}",
        source="jax.experimental.pallas.ops.gpu.attention.mha",
        net=net,
        sizes={
            "cpu": SMALL | {"scanned": name == "scan"},
            "h200": LARGE | {"scanned": name == "scan"},
        },
    )
    for name in ("scan", "unrolled")
)
