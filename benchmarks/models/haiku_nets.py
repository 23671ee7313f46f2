"""ResNet-50 and a stack of LSTMs from dm-haiku. Haiku's option is `hk.remat`, which takes policies, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.models.layers import cross_entropy, image_batch, next_token_loss
from benchmarks.models.model import Blocks, Model, Net


def call_with_blocks(blocks: Blocks, kind: type[hk.Module], call: Callable[[], Any]) -> Any:
    """`call()`, in which every module of class `kind` runs under `hk.remat` with the policy of `blocks`."""
    if blocks.policy is None:
        return call()

    def intercept(run: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        if not isinstance(context.module, kind) or context.method_name != "__call__":
            return run(*args, **kwargs)
        return hk.remat(lambda x: run(x, *args[1:], **kwargs), policy=blocks.policy)(args[0])

    with hk.intercept_methods(intercept):
        return call()


def resnet50(
    blocks: Blocks, *, image: int, batch: int, classes: int, dtype: str = "float32", **sizes: Any
) -> Net:
    """ResNet-50 with batch norm in training mode; its running averages are carried on."""

    def forward(images: jax.Array) -> jax.Array:
        net = hk.nets.ResNet50(classes, **sizes)
        x = images.astype(dtype)
        return call_with_blocks(blocks, hk.nets.ResNet.BlockV1, lambda: net(x, is_training=True))

    transformed = hk.without_apply_rng(hk.transform_with_state(forward))
    images = jnp.zeros((1, image, image, 3))

    def loss(params: Any, state: Any, data: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        logits, state = transformed.apply(params, state, data["image"])
        return cross_entropy(logits, data["label"]), state

    return Net(
        init=lambda key: transformed.init(key, images)[0],
        state=lambda key: transformed.init(key, images)[1],
        batch=image_batch(batch, image, classes),
        loss=loss,
    )


def lstm(blocks: Blocks, *, units: int, layers: int, seq: int, batch: int, vocab: int) -> Net:
    """Characters in, characters out; the scan of `hk.dynamic_unroll` over time."""

    def forward(tokens: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(units) for _ in range(layers)])
        x = hk.Embed(vocab, units)(tokens.T)

        def unroll() -> jax.Array:
            return hk.dynamic_unroll(core, x, core.initial_state(batch))[0]

        return hk.Linear(vocab)(call_with_cells(blocks, core, unroll)).swapaxes(0, 1)

    transformed = hk.without_apply_rng(hk.transform(forward))
    return Net(
        init=lambda key: transformed.init(key, jnp.zeros((batch, seq), jnp.int32)),
        batch=lambda key: jax.random.randint(key, (batch, seq), 0, vocab),
        loss=lambda params, tokens: next_token_loss(transformed.apply(params, tokens), tokens),
    )


def call_with_cells(blocks: Blocks, core: hk.RNNCore, unroll: Callable[[], Any]) -> Any:
    """`unroll()`, in which every step of `core` runs under `hk.remat` with the policy of `blocks`."""
    if blocks.policy is None:
        return unroll()

    def intercept(run: Callable[..., Any], args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        if context.module is not core or context.method_name != "__call__":
            return run(*args, **kwargs)
        return hk.remat(run, policy=blocks.policy)(*args, **kwargs)

    with hk.intercept_methods(intercept):
        return unroll()


MODELS = (
    Model(
        name="resnet50",
        source="dm-haiku, hk.nets.ResNet50",
        net=resnet50,
        optimizer=lambda: optax.sgd(0.1, momentum=0.9),
        sizes={
            "cpu": {"image": 64, "batch": 8, "classes": 10},
            "h200": {"image": 224, "batch": 256, "classes": 1000, "dtype": "bfloat16"},
        },
    ),
    Model(
        name="lstm",
        source="dm-haiku, hk.LSTM in hk.dynamic_unroll",
        net=lstm,
        sizes={
            "cpu": {"units": 128, "layers": 2, "seq": 64, "batch": 16, "vocab": 128},
            "h200": {"units": 1024, "layers": 2, "seq": 512, "batch": 64, "vocab": 256},
        },
    ),
)
