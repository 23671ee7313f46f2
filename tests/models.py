"""Small sizes of the example models: compiled in seconds, large batches so that activations dominate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from examples.models import ConvConfig, GPTConfig, LSTMConfig, MLPConfig, Problem, convnet, gpt, lstm, mlp


def small_gpt() -> Problem:
    """Two layers, 64 wide."""
    return gpt.problem(GPTConfig(layers=2, width=64, heads=2, seq=64, batch=16, vocab=64))


def small_mlp() -> Problem:
    """Eight narrow layers on a large batch: activations dominate."""
    return mlp.problem(MLPConfig(layers=8, width=64, batch=2048, classes=16))


def small_conv() -> Problem:
    """Two stages of two convolutions with batch norm."""
    return convnet.problem(ConvConfig(stages=2, depth=2, channels=8, image=32, batch=32))


def small_lstm() -> Problem:
    """Six unrolled time steps."""
    return lstm.problem(LSTMConfig(steps=6, width=32, batch=1024))


SMALL = {"gpt": small_gpt, "mlp": small_mlp, "conv": small_conv, "lstm": small_lstm}


def chain_loss(params: list[Any], x: Any) -> Any:
    """A chain of gated square layers: every activation is as large as the batch."""
    h = x
    for w in params:
        h = jnp.tanh(h @ w) * jax.nn.gelu(h)
    return jnp.mean(h**2)


def chain_step(params: list[Any], x: Any) -> Any:
    """One step of gradient candidate on `chain_loss`."""
    value, gradients = jax.value_and_grad(chain_loss)(params, x)
    return value, [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]
