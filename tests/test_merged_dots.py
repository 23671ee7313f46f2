"""Products of one array that XLA:GPU makes one: which, and that they are the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr

from coop_jax import aot
from passes.backend import CUDA
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import flat_body
from passes.jaxpr.merged_dots import with_merged_dots
from passes.jaxpr.straight import as_it_is, lift_as_xla


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def both(x: Any, a: Any, b: Any) -> Any:
    return jnp.tanh(x @ a), jnp.tanh(x @ b)


def heads(x: Any, a: Any, b: Any) -> Any:
    return tuple(jnp.tanh(jnp.einsum("bnd,dhe->bnhe", x, w)) for w in (a, b))


def batched(x: Any, a: Any, b: Any) -> Any:
    return tuple(jnp.tanh(jnp.einsum("bnd,bdf->bnf", x, w)) for w in (a, b))


def after(x: Any, a: Any, b: Any) -> Any:
    return jnp.tanh(x @ jnp.sin(x.T @ jnp.tanh(x @ a))) + x @ b


def swapped(x: Any, a: Any, b: Any) -> Any:
    return jnp.tanh(a @ x), jnp.tanh(b @ x)


CASES = {
    "projections": (both, (4, 512, 1024), (1024, 1024), (1024, 512)),
    "narrow": (both, (4096, 1024), (1024, 8), (1024, 1024)),
    "narrow both": (both, (4096, 1024), (1024, 16), (1024, 24)),
    "large": (both, (32768, 1024), (1024, 1024), (1024, 1024)),
    "large and small": (both, (32768, 1024), (1024, 1024), (1024, 128)),
    "just large": (both, (7680, 1024), (1024, 4096), (1024, 4096)),
    "nearly large": (both, (7168, 1024), (1024, 4096), (1024, 4096)),
    "large operands": (both, (5120, 4096), (4096, 4096), (4096, 4096)),
    "heads": (heads, (4, 512, 1024), (1024, 16, 64), (1024, 16, 64)),
    "batched": (batched, (4, 512, 512), (4, 512, 256), (4, 512, 256)),
    "second operand": (swapped, (1024, 1024), (2048, 1024), (4096, 1024)),
    "one follows from the other": (after, (4096, 1024), (1024, 1024), (1024, 1024)),
}


@pytest.mark.parametrize("case", CASES)
def test_xla_makes_one_of_as_many_products(h200: str, case: str) -> None:
    function, *shapes = CASES[case]
    specs = [spec(*shape) for shape in shapes]
    jaxpr = with_merged_dots(flat_body(jax.make_jaxpr(function)(*specs)), CUDA.merges_dots_bytes)
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    text = aot.lower_for(jax.jit(function), tuple(specs), device=h200).compile().as_text()
    assert len(found) == len(re.findall(r"= \S+ dot\(", text))


def small(case: str) -> tuple[Callable[..., Any], list[Any]]:
    function, *shapes = CASES[case]
    sizes = {32768: 24, 7680: 24, 7168: 24, 5120: 24, 4096: 16, 2048: 8, 1024: 64, 512: 64, 256: 64, 128: 64}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return function, [
        jax.random.normal(key, [sizes.get(n, n) for n in shape])
        for key, shape in zip(keys, shapes, strict=True)
    ]


@pytest.mark.parametrize("case", [name for name in CASES if name != "narrow"])
def test_one_product_is_the_same_numbers(case: str) -> None:
    function, values = small(case)

    def loss(*values: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*values)))

    jaxpr = flat_body(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*values))
    merged = with_merged_dots(jaxpr, 1 << 24)
    check_jaxpr(merged)
    n_before, n_after = (sum(eqn.primitive.name == "dot_general" for eqn in j.eqns) for j in (jaxpr, merged))
    assert n_after < n_before
    for j, k in zip(
        *(compat.evaluate(compat.close_jaxpr(j, []), values) for j in (jaxpr, merged)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(j), np.asarray(k), rtol=1e-4, atol=1e-5)


def test_groups_that_would_follow_from_each_other_stay_apart() -> None:
    """Each product of `x` leads to one of `y` that the other comes from: both pairs cannot be one."""

    def crossed(x: Any, y: Any, a: Any, b: Any) -> Any:
        first, second = jnp.sin(x @ a), jnp.sin(y @ b)
        return (y * jnp.sum(first)) @ a, (x * jnp.sum(second)) @ b, first, second

    values = [jnp.ones((8, 64)) * k for k in (1, 2)] + [jnp.ones((64, 64)) * k for k in (3, 4)]
    jaxpr = flat_body(jax.make_jaxpr(crossed)(*values))
    merged = with_merged_dots(jaxpr, 1 << 20)
    check_jaxpr(merged)
    assert len([eqn for eqn in merged.eqns if eqn.primitive.name == "dot_general"]) >= 3


def test_what_only_one_of_two_projections_needs_keeps_both_alive(h200: str) -> None:
    """A highway of gates: the plain program was predicted a quarter too small."""

    def loss(layers: Any, x: Any) -> Any:
        for gate, inner in layers:
            g = jax.nn.sigmoid(x @ gate)
            x = g * jnp.tanh(x @ inner) + (1 - g) * x
        return jnp.mean(x.astype(jnp.float32) ** 2)

    specs = [(spec(1024, 1024), spec(1024, 1024))] * 6, spec(16384, 1024)
    found = as_it_is(lift_as_xla(flat_body(jax.make_jaxpr(jax.grad(loss))(*specs)), DEVICES["h200"]))
    compiled = aot.lower_for(jax.jit(jax.grad(loss)), specs, device=h200).compile()
    assert found.peak_bytes == pytest.approx(aot.memory(compiled).temp_bytes, rel=0.05)
