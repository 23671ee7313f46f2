"""GPT-2, BERT-Large and ViT: the Flax classes of transformers 4.53 (version 5 has none).

They import and train with flax 0.12 and jax 0.12. Only BERT has an option of its own
(`gradient_checkpointing`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from transformers import (
    BertConfig,
    FlaxBertForMaskedLM,
    FlaxGPT2LMHeadModel,
    FlaxViTForImageClassification,
    GPT2Config,
    ViTConfig,
)
from transformers.models.bert.modeling_flax_bert import FlaxBertLayer
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2Block
from transformers.models.vit.modeling_flax_vit import FlaxViTLayer

from benchmarks.models.flax_blocks import call_with_blocks
from benchmarks.models.layers import cross_entropy, image_batch, next_token_loss, token_batch
from benchmarks.models.model import Blocks, Model, Net


def params_of(model: Any) -> Any:
    """key -> the parameters of a model of transformers that was made without any."""
    return lambda key: model.init_weights(key, model.input_shape)


def gpt2(blocks: Blocks, *, batch: int, seq: int, dtype: str = "float32", **sizes: Any) -> Net:
    """GPT-2 with dropout off."""
    config = GPT2Config(n_positions=seq, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    model = FlaxGPT2LMHeadModel(config, dtype=jnp.dtype(dtype), _do_init=False)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        found = call_with_blocks(blocks, FlaxGPT2Block, lambda: model(tokens, params=params, train=True))
        return next_token_loss(found.logits, tokens)

    return Net(init=params_of(model), batch=token_batch(batch, seq, config.vocab_size), loss=loss)


def bert(blocks: Blocks, *, batch: int, seq: int, dtype: str = "float32", **sizes: Any) -> Net:
    """BERT's masked language model, without dropout; every seventh token is masked and predicted."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(max_position_embeddings=seq, **off, **sizes)
    kind = jnp.dtype(dtype)
    model = FlaxBertForMaskedLM(
        config, (1, seq), dtype=kind, _do_init=False, gradient_checkpointing=blocks.own
    )
    masked = (jnp.arange(seq) % 7) == 3

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        shown = jnp.where(masked, 0, tokens)
        found = call_with_blocks(blocks, FlaxBertLayer, lambda: model(shown, params=params, train=True))
        return cross_entropy(found.logits, tokens)

    return Net(init=params_of(model), batch=token_batch(batch, seq, config.vocab_size), loss=loss)


def vit(
    blocks: Blocks, *, batch: int, image_size: int, classes: int, dtype: str = "float32", **sizes: Any
) -> Net:
    """A vision transformer that classifies."""
    config = ViTConfig(image_size=image_size, num_labels=classes, **sizes)
    shape = (1, image_size, image_size, 3)
    model = FlaxViTForImageClassification(config, shape, dtype=jnp.dtype(dtype), _do_init=False)

    def loss(params: Any, data: dict[str, jax.Array]) -> jax.Array:
        pixels = data["image"].transpose(0, 3, 1, 2)
        found = call_with_blocks(blocks, FlaxViTLayer, lambda: model(pixels, params=params, train=False))
        return cross_entropy(found.logits, data["label"])

    return Net(init=params_of(model), batch=image_batch(batch, image_size, classes), loss=loss)


SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
MODELS = (
    Model(
        name="gpt2",
        source="transformers, FlaxGPT2LMHeadModel (GPT-2 small)",
        net=gpt2,
        sizes={
            "cpu": {"n_layer": 5, "n_embd": 128, "n_head": 4, "vocab_size": 512, "batch": 8, "seq": 128},
            "h200": {
                "n_layer": 12,
                "n_embd": 768,
                "n_head": 12,
                "batch": 8,
                "seq": 1024,
                "dtype": "bfloat16",
            },
        },
    ),
    Model(
        name="bert_large",
        source="transformers, FlaxBertForMaskedLM (BERT-Large)",
        net=bert,
        own="gradient_checkpointing",
        sizes={
            "cpu": SMALL | {"vocab_size": 512, "batch": 8, "seq": 128},
            "h200": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
            | {"intermediate_size": 4096, "batch": 16, "seq": 512, "dtype": "bfloat16"},
        },
    ),
    Model(
        name="vit",
        source="transformers, FlaxViTForImageClassification (ViT-B/16)",
        net=vit,
        sizes={
            "cpu": SMALL | {"image_size": 64, "patch_size": 8, "classes": 10, "batch": 16},
            "h200": {"image_size": 224, "patch_size": 16, "classes": 1000, "batch": 128, "dtype": "bfloat16"},
        },
    ),
)
