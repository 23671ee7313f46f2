"""A language model in Flax: its layers in `nn.scan`, its blocks under `nn.remat` where that is asked for."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.layers import next_token_loss, token_batch
from benchmarks.models.model import Blocks, Model, Net


class Block(nn.Module):
    """Pre-norm attention and MLP; a scan's body: (x, nothing) -> (x, nothing)."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """One layer."""
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(h, mask=mask)
        h = nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(h)), None


class ScannedLM(nn.Module):
    """Embeddings, scanned blocks, a head that shares the embeddings."""

    vocab: int
    width: int
    layers: int
    heads: int
    dtype: Any
    blocks: Blocks

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits; tokens is [batch, seq]."""
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        position = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        block = Block
        if self.blocks.own or self.blocks.policy is not None:
            block = nn.remat(Block, policy=self.blocks.policy, prevent_cse=False)
        scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=self.layers)
        x = embed(tokens) + position.astype(self.dtype)
        x, _ = scanned(self.heads, self.dtype, name="layers")(x, None)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def net(blocks: Blocks, *, batch: int, seq: int, vocab: int, dtype: str = "float32", **sizes: Any) -> Net:
    """The model."""
    model = ScannedLM(vocab=vocab, dtype=jnp.dtype(dtype), blocks=blocks, **sizes)
    return Net(
        init=lambda key: model.init(key, jnp.zeros((1, seq), jnp.int32)),
        batch=token_batch(batch, seq, vocab),
        loss=lambda params, tokens: next_token_loss(model.apply(params, tokens), tokens),
    )


MODELS = (
    Model(
        name="flax_scan",
        source="flax, nn.scan over nn.remat",
        net=net,
        sizes={
            "cpu": {"width": 128, "layers": 8, "heads": 4, "vocab": 512, "batch": 8, "seq": 128},
            "h200": {"width": 1024, "layers": 24, "heads": 16, "vocab": 32000, "batch": 16, "seq": 1024}
            | {"dtype": "bfloat16"},
        },
    ),
)
