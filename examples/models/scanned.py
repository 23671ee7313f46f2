"""The GPT of `examples.models.gpt` with its blocks in a `lax.scan`, as large models are written.

The program's size does not depend on the number of layers. What the backward pass needs of every layer
is stacked by the scan, where XLA's own rematerialization cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import gpt
from examples.models.gpt import GPTConfig
from examples.models.problem import Problem


def init(config: GPTConfig, key: jax.Array) -> dict[str, Any]:
    """Random weights; those of the blocks are stacked."""
    params = gpt.init(config, key)
    return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"])}


def loss(
    config: GPTConfig, params: dict[str, Any], tokens: jax.Array, *, wrap: Callable[..., Any] | None = None
) -> jax.Array:
    """Mean cross entropy of the next token; tokens is [batch, seq + 1]. `wrap` goes around every block."""
    one = (wrap or (lambda f: f))(lambda x, weights: gpt.block(weights, x, config.heads))
    x = params["embed"][tokens[:, :-1]] + params["position"][: tokens.shape[1] - 1]
    x, _ = jax.lax.scan(lambda x, weights: (one(x, weights), None), x, params["blocks"])
    scores = (gpt.layer_norm(params["norm"], x) @ params["head"]).astype(jnp.float32)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(scores, axis=-1) - picked).mean()


def problem(config: GPTConfig, *, wrap: Callable[..., Any] | None = None) -> Problem:
    """This model as a `Problem`."""
    return Problem(
        name="scanned gpt",
        init=lambda key: init(config, key),
        batch=gpt.problem(config).batch,
        loss=lambda params, tokens: loss(config, params, tokens, wrap=wrap),
    )
