"""Llama as penzai builds it, its layers unrolled; penzai has no option of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants import llamalike_common

from benchmarks.models.layers import next_token_loss, token_batch
from benchmarks.models.model import Blocks, Model, Net


@pz.pytree_dataclass
class Wrapped(pz.nn.Layer):
    """A layer whose call is under `wrap`."""

    inner: Any
    wrap: Callable[..., Any] = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, x: Any, /, **side: Any) -> Any:
        """The layer's result."""
        return self.wrap(lambda inner, x: inner(x, **side))(self.inner, x)


def net(
    blocks: Blocks, *, layers: int, width: int, inner: int, heads: int, groups: int, seq: int, batch: int,
    vocab: int, dtype: str = "float32",
) -> Net:  # fmt: skip
    """The model; its parameters are the values that penzai takes out of it."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=groups, query_head_multiplier=heads // groups, embedding_dim=width,
        projection_dim=width // heads, mlp_hidden_dim=inner, num_decoder_blocks=layers, vocab_size=vocab,
        mlp_variant="swiglu", tie_embedder_and_logits=False, parameter_dtype=jnp.dtype(dtype),
        activation_dtype=jnp.dtype(dtype),
    )  # fmt: skip

    def build(key: jax.Array | None) -> tuple[Any, Any]:
        model = llamalike_common.build_llamalike_transformer(config, init_base_rng=key)
        return pz.unbind_params(model, freeze=True)

    # Without a key penzai makes the structure and no values.
    structure, _ = build(None)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = pz.bind_variables(structure, params)
        if blocks.policy is not None:
            found = model.select().at_instances_of(model_parts.TransformerBlock)
            model = found.apply(lambda block: Wrapped(block, blocks.wrap))
        named = pz.nx.wrap(tokens).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(seq)).tag("seq")
        logits = model(named, token_positions=positions)
        return next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), tokens)

    return Net(init=lambda key: build(key)[1], batch=token_batch(batch, seq, vocab), loss=loss)


MODELS = (
    Model(
        name="penzai_llama",
        source="penzai, llamalike_common.build_llamalike_transformer (TinyLlama 1.1B's sizes)",
        net=net,
        sizes={
            "cpu": {"layers": 4, "width": 128, "inner": 384, "heads": 4, "groups": 2, "seq": 128}
            | {"batch": 8, "vocab": 512},
            "h200": {"layers": 22, "width": 2048, "inner": 5632, "heads": 32, "groups": 4, "seq": 2048}
            | {"batch": 4, "vocab": 32000, "dtype": "bfloat16"},
        },
    ),
)
