"""Constants that several kernels of a library would read from memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr

from coop_jax import aot, remat
from passes.jaxpr import compat
from passes.jaxpr.own_constants import with_own_constants, with_own_zeros

LAYOUT = ("NHWC", "HWIO", "NHWC")
SPEC = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def scaled(x: Any) -> Any:
    """Two sums of what is doubled, and a third."""
    return (2 * jnp.sin(x)).sum(0), (2 * jnp.cos(x)).sum(0), (3 * jnp.tanh(x)).sum(0)


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_each_kernel_has_its_own_of_a_shared_constant_alone():
    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(lambda x: scaled(jnp.sqrt(x)))(SPEC))
    own = with_own_constants(jaxpr)
    check_jaxpr(own)
    barriers = [eqn for eqn in own.eqns if eqn.primitive.name == "optimization_barrier"]
    assert [len(eqn.invars) for eqn in barriers] == [2, 2], "each of two twos waits for what its kernel reads"
    assert with_own_constants(own) is own
    x = jnp.linspace(0, 1, SPEC.size).reshape(SPEC.shape)
    for a, b in zip(
        *(compat.evaluate(compat.close_jaxpr(each, []), [x]) for each in (jaxpr, own)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_bodies_of_loops_too():
    def looped(x: Any) -> Any:
        return lax.scan(lambda h, _: (h + sum(scaled(h)), None), x, None, 4)[0]

    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(looped)(SPEC))
    own = with_own_constants(jaxpr)
    check_jaxpr(own)
    (body,) = compat.inner_jaxprs(own.eqns[-1])
    assert names(body).count("optimization_barrier") == 2


def test_what_is_shared_with_no_library_kernel_stays_as_it_is():
    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(lambda x: (2 * jnp.sin(x), 2 * jnp.cos(x)))(SPEC))
    assert with_own_constants(jaxpr) is jaxpr


def kernels_that_read_constants(compiled: Any) -> list[str]:
    """Kernels of the library with an operand that is a constant, written out whole."""
    text = compiled.as_text()
    constants = re.findall(r"(%wrapped_broadcast[.\d]*) = \S+ fusion\(%constant", text)
    called = re.findall(r"(%ynn_fusion[.\d]*) = \S+ fusion\(([^)]*)\)", text)
    return [name for name, operands in called if {*operands.split(", ")} & {*constants}]


def test_variances_of_layers_leave_no_constants_in_memory():
    def normed(h: Any) -> Any:
        mean = h.mean((0, 1), keepdims=True)
        return jax.nn.relu((h - mean) * lax.rsqrt(jnp.square(h - mean).mean((0, 1), keepdims=True) + 1e-5))

    def layer(h: Any, w: Any) -> Any:
        return jnp.concatenate([h, normed(normed(h) @ w) @ w[:64, :32]], -1)

    def loss(ws: Any, x: Any, layer: Callable[..., Any] = layer) -> Any:
        for w in ws:
            x = layer(x, w)
        return (x**2).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    args = [jax.random.normal(key, (128 + 32 * k, 64)) / 8 for k, key in enumerate(keys)]
    x = jax.random.normal(jax.random.key(1), (8, 64, 128))
    plain = jax.jit(jax.grad(loss)).lower(args, x).compile()
    memory = aot.memory(plain)
    budget = memory.fixed_bytes + int(0.4 * memory.temp_bytes)
    whole = jax.jit(remat(jax.grad(loss), budget=budget)).lower(args, x).compile()
    parts = jax.jit(jax.grad(remat(loss, budget=budget))).lower(args, x).compile()
    for limited in (whole, parts):
        assert aot.memory(limited).total_bytes <= budget
        assert not kernels_that_read_constants(limited)
        for a, b in zip(limited(args, x), plain(args, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def pooled(x: Any, padding: str) -> Any:
    """A maximum, or a minimum, over windows of what is rectified."""
    most = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    least = lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 1, 1), padding)
    return jnp.sum(jnp.sin(most)) + jnp.sum(jnp.sin(least))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_gradients_of_maxima_over_windows_go_into_zeros_of_their_own(padding: str):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 8, 3)), jnp.float32)
    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(jax.grad(lambda x: pooled(x, padding)))(x))
    own = with_own_zeros(jaxpr)
    check_jaxpr(own)
    assert names(jaxpr).count("select_and_scatter_add") == names(own).count("select_and_scatter") == 2
    assert with_own_zeros(own) is own
    expected, found = (compat.evaluate(compat.close_jaxpr(each, []), [x])[0] for each in (jaxpr, own))
    np.testing.assert_array_equal(found, expected)


def test_no_zeros_wait_for_the_gradient_of_a_maximum_over_windows(h200: str):
    """XLA wrote 49 MiB of zeros before all else, for a rectifier, its gradient and what is scattered."""

    def loss(ws: Any, x: Any) -> Any:
        first, *others = ws
        y = jax.nn.relu(lax.conv_general_dilated(x, first, (1, 1), "SAME", dimension_numbers=LAYOUT))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for w in others:
            y = jnp.tanh(lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=LAYOUT))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    spec = jax.ShapeDtypeStruct
    ws = [spec((3, 3, 64, 64), jnp.bfloat16)] * 6
    specs = ws, spec((64, 112, 112, 64), jnp.bfloat16)
    plain = aot.lower_for(jax.jit(jax.grad(loss)), specs, device=h200).compile()
    budget = int(aot.memory(plain).total_bytes * 0.8)
    compiled = aot.lower_for(jax.jit(remat(jax.grad(loss), budget=budget)), specs, device=h200).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert len(re.findall(r" = bf16\[64,112,112,64\]\S* (?:broadcast|fusion)\(\)", entry)) <= 1
