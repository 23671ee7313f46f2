"""Loops that read what is made before them: it is made in their iterations where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr
from jax.scipy.sparse.linalg import cg

from coop_jax import aot
from coop_jax.remat import remat
from coop_jax.report import report
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.rewrite import consts_as_literals
from passes.jaxpr.scans.emit import rewrite
from passes.jaxpr.scans.frontier import frontier
from passes.jaxpr.scans.loops import find_loops
from passes.jaxpr.straight import as_it_is

CPU = DEVICES["cpu"]
KEY = jax.random.key(0)
WEIGHTS = [jax.random.normal(jax.random.fold_in(KEY, i), (64, 64)) / 8 for i in range(4)]
X = jax.random.normal(KEY, (128, 64))

Step = Callable[[Any, Any], Any]


def layer(w: Any, x: Any) -> Any:
    h = jax.nn.gelu(x @ w)
    return x + (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def products(layer: Step) -> Step:
    """(weights, x) -> the gradient, and what multiplies with the Hessian, residuals of all layers kept."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    return lambda ws, x: jax.linearize(lambda ws: jax.grad(loss)(ws, x), ws)


def newton(layer: Step) -> Step:
    """A step whose conjugate gradients are a `while` in a `custom_linear_solve`."""

    def step(ws: Any, x: Any) -> Any:
        g, times = products(layer)(ws, x)
        damped = lambda v: jax.tree.map(lambda a, b: a + 0.1 * b, times(v), v)  # noqa: E731
        v, _ = cg(damped, g, maxiter=5)
        return jax.tree.map(lambda a, b: a - b, ws, v)

    return step


def probed(layer: Step) -> Step:
    """The Hessian's trace by five probes, in a `scan`."""

    def step(ws: Any, x: Any) -> Any:
        g, times = products(layer)(ws, x)

        def probe(total: Any, key: Any) -> Any:
            v = jax.tree.map(lambda w: jax.random.normal(key, w.shape), ws)
            return total + sum(jnp.vdot(a, b) for a, b in zip(v, times(v), strict=True)), None

        return g, lax.scan(probe, 0.0, jax.random.split(KEY, 5))[0]

    return step


def opened(f: Step) -> Any:
    closed = inline_calls(jax.make_jaxpr(f)(WEIGHTS, X))
    return compat.without_dead_code(consts_as_literals(closed))


def close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("program", [newton, probed])
def test_what_jax_checkpoint_fits_into_is_kept_and_computes_the_same(program: Any) -> None:
    plain = jax.jit(program(layer)).lower(WEIGHTS, X).compile()
    budget = aot.memory(jax.jit(program(jax.checkpoint(layer))).lower(WEIGHTS, X).compile()).total_bytes
    assert budget < 0.7 * aot.memory(plain).total_bytes
    kept = jax.jit(remat(program(layer), budget=budget)).lower(WEIGHTS, X).compile()
    assert aot.memory(kept).total_bytes <= budget
    close(kept(WEIGHTS, X), plain(WEIGHTS, X))
    times = "5 iterations of a scan" if program is probed else "10 iterations of a loop (estimated)"
    assert any(times in r.op for r in report(kept).recomputed)


@pytest.mark.parametrize("program", [newton, probed])
def test_every_level_needs_less_and_computes_the_same(program: Any) -> None:
    jaxpr = opened(program(layer))
    levels = frontier(jaxpr, CPU)
    leaves = jax.tree.leaves((WEIGHTS, X))
    expected = compat.evaluate(compat.close_jaxpr(jaxpr, []), leaves)
    kept_bytes = [sum(choice.stacked_bytes for choice in level) for level in levels]
    assert kept_bytes == sorted(kept_bytes, reverse=True)
    assert kept_bytes[-1] == 0 < kept_bytes[0]
    for level in levels[:: len(levels) // 3]:
        new = rewrite(jaxpr, level)
        check_jaxpr(new)
        close(compat.evaluate(compat.close_jaxpr(new, []), leaves), expected)
    least = as_it_is(lift(rewrite(jaxpr, levels[-1]), CPU, as_xla=True))
    assert least.cost_ns > as_it_is(lift(jaxpr, CPU, as_xla=True)).cost_ns


def test_a_loop_that_carries_nothing_to_wait_for_is_left_alone() -> None:
    """XLA would take what is made in the body out of it again."""

    def count(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w[0])
        return lax.while_loop(lambda n: n < 9, lambda n: n + 1 + (h.sum() > n).astype(int), 0)

    jaxpr = opened(count)
    assert any(eqn.primitive.name == "while" for eqn in jaxpr.eqns)
    assert find_loops(jaxpr, ()) == []


def test_a_solver_inside_a_step_is_recomputed_as_under_checkpoint() -> None:
    """What it is given passes a `device_put` that names no device, which was taken for one that acts."""

    def simulated(around: Callable[[Any], Any]) -> Step:
        def loss(stiffness: Any, x: Any) -> Any:
            def step(x: Any, _: Any) -> Any:
                pull = lambda d: d + stiffness * jnp.tanh(d)  # noqa: E731
                d, _ = cg(lambda d: jax.jvp(pull, (x,), (d,))[1], jnp.sin(x), maxiter=4)
                return jnp.tanh(x + 0.1 * d), None

            return (lax.scan(around(step), x, None, length=24)[0] ** 2).mean()

        return jax.value_and_grad(loss)

    x = jax.random.normal(KEY, (128, 64))
    budget = aot.memory(jax.jit(simulated(jax.checkpoint)).lower(0.5, x).compile()).total_bytes
    plain = jax.jit(simulated(lambda step: step)).lower(0.5, x).compile()
    assert budget < 0.8 * aot.memory(plain).total_bytes
    kept = jax.jit(remat(simulated(lambda step: step), budget=budget)).lower(0.5, x).compile()
    assert aot.memory(kept).total_bytes <= budget
    close(kept(0.5, x), plain(0.5, x))


def test_what_goes_to_another_memory_or_device_still_acts() -> None:
    here = inline_calls(jax.make_jaxpr(lambda x: jax.device_put(x) + 1)(X))
    there = inline_calls(jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Host))(X))
    assert [eqn.primitive.name for eqn in here.eqns] == ["add"]
    assert [eqn.primitive.name for eqn in there.eqns] == ["device_put"]
