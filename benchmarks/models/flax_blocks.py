"""Flax modules of other packages, each block under `nn.remat` with a policy; nothing of theirs is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from benchmarks.models.model import Blocks


def call_with_blocks(blocks: Blocks, kind: type[nn.Module], call: Callable[[], Any]) -> Any:
    """`call()`, in which every module of class `kind` runs under `nn.remat` with the policy of `blocks`.

    Args:
        kind: its first argument is differentiated; all others are taken as they are.
    """
    if blocks.policy is None:
        return call()
    inside: list[nn.Module] = []

    def intercept(
        run: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        if inside or not isinstance(context.module, kind) or context.method_name != "__call__":
            return run(*args, **kwargs)

        def block(module: nn.Module, x: Any) -> Any:
            inside.append(module)
            try:
                return module(x, *args[1:], **kwargs)
            finally:
                inside.pop()

        return nn.remat(block, policy=blocks.policy)(context.module, args[0])

    with nn.intercept_methods(intercept):
        return call()
