"""Jaxprs that are alike: one object for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.inline import flat_body
from passes.jaxpr.interned import interned
from passes.jaxpr.rewrite import renewed

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def jaxpr_of(function: Callable[..., Any], *specs: Any) -> Jaxpr:
    return compat.open_jaxpr(jax.make_jaxpr(function)(*specs or (X,)))[0]


def scaled(by: Any) -> Jaxpr:
    return jaxpr_of(lambda x: jnp.sin(x) * by)


def test_what_differs_in_variables_alone_is_one_object() -> None:
    first = scaled(2.0)
    again = renewed(first)
    assert again is not first
    assert interned(first) is first
    assert interned(again) is first


def test_bodies_are_alike_as_jaxprs_are() -> None:
    def in_a_loop(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x)

    bodies = [flat_body(jaxpr_of(in_a_loop).eqns[-1].params["jaxpr"]) for _ in range(2)]
    assert bodies[0] is bodies[1]


@pytest.mark.parametrize(
    "other",
    [
        lambda: scaled(3.0),
        lambda: scaled(np.arange(4, dtype=np.float32)),
        lambda: jaxpr_of(lambda x: jnp.sin(x) * 2.0),
        lambda: jaxpr_of(lambda x: 2.0 * jnp.cos(x)),
        lambda: jaxpr_of(lambda x: jnp.sin(x) * 2.0, jax.ShapeDtypeStruct((5,), jnp.float32)),
        lambda: jaxpr_of(lambda x: jax.jit(jnp.sin)(x) * 2.0),
    ],
    ids=["literal", "constant", "line", "operation", "shape", "call"],
)
def test_what_says_something_else_is_not_alike(other: Callable[[], Jaxpr]) -> None:
    first, second = interned(scaled(2.0)), other()
    assert interned(second) is second
    assert interned(first) is first
