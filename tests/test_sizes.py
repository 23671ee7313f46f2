"""Symbolic shapes: refused with a sentence, however they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from coop_jax.errors import UnsupportedError
from coop_jax.remat import remat


def loss(x: Any) -> Any:
    return jnp.sin(x).sum()


def closing(x: Any) -> Any:
    return remat(lambda y: y * loss(x), budget="1GiB")(2.0)


within = remat(loss, budget="1GiB")

WAYS: dict[str, Callable[[Any], Any]] = {
    "export": lambda x: export.export(jax.jit(within))(x),
    "export of a gradient": lambda x: export.export(jax.jit(jax.grad(within)))(x),
    "export of a batch": lambda x: export.export(jax.jit(jax.vmap(within)))(x),
    "export of gradients of a batch": lambda x: export.export(jax.jit(jax.vmap(jax.grad(within))))(x),
    "lower": lambda x: jax.jit(within).lower(x),
    "make_jaxpr": jax.make_jaxpr(within),
    "eval_shape": lambda x: jax.eval_shape(within, x),
    "closed over": jax.make_jaxpr(closing),
}


@pytest.fixture
def spec() -> Any:
    """Rows of four, how many is not known."""
    return jax.ShapeDtypeStruct((*export.symbolic_shape("rows"), 4), jnp.float32)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_symbolic_shapes_are_refused_with_what_to_do(way: Callable[[Any], Any], spec: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(.*rows.*\).*__wrapped__") as refused:
        way(spec)
    assert "no budget can be kept" in str(refused.value)


def test_the_undecorated_function_is_exported_with_symbolic_shapes(spec: Any) -> None:
    exported = export.export(jax.jit(within.__wrapped__))(spec)
    assert exported.call(jnp.zeros((3, 4))) == 0
