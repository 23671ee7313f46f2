"""Scans of higher derivatives, each of which reads stacks of several others: in pairs they compute the same,
and the bytes of `jax.checkpoint` are kept for less time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coop_jax as coop
from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr import compat, stage
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.rewrite import readers_of
from passes.jaxpr.scans.chains import in_pairs, recomputed_in
from passes.jaxpr.scans.pairs import find_pairs, with_open_pairs
from passes.jaxpr.straight import as_it_is, lift_as_xla

LAYERS, ROWS, WIDTH = 4, 128, 32


def _layer(x: Any, p: Any) -> tuple[Any, None]:
    return x + jnp.tanh(jax.nn.gelu(x @ p["up"]) @ p["down"]), None


def _loss(ps: Any, x: Any, layer: Any) -> Any:
    return (lax.scan(layer, x, ps)[0] ** 2).mean()


def _penalty(ps: Any, x: Any, layer: Any = _layer) -> Any:
    """A loss whose gradient is small, as of a critic (WGAN-GP) and of forces that are trained."""
    value, grad = jax.value_and_grad(_loss, argnums=1)(ps, x, layer)
    return value + (grad**2).sum() * x.size


def _along(ps: Any, x: Any, layer: Any = _layer) -> Any:
    """The gradient along a direction, whose gradient is a Hessian times it."""
    grad = jax.grad(_loss)(ps, x, layer)
    return sum(jnp.vdot(g, jnp.cos(p)) for g, p in zip(*map(jax.tree.leaves, (grad, ps)), strict=True))


def _epochs(ps: Any, x: Any, layer: Any = _layer) -> Any:
    """Steps of gradient penalties in a scan, differentiated within."""

    def step(ps: Any, x: Any) -> tuple[Any, None]:
        grads = jax.grad(_penalty)(ps, x, layer)
        return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads), None

    return lax.scan(step, ps, jnp.stack([x, 2 * x]))[0]["up"].sum()


def _tuned(ps: Any, x: Any, layer: Any = _layer) -> Any:
    """What steps in a scan come to, differentiated through all of them."""

    def step(ps: Any, x: Any) -> tuple[Any, None]:
        grads = jax.grad(_loss)(ps, x, layer)
        return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads), None

    return _loss(lax.scan(step, ps, jnp.stack([x, 2 * x]))[0], x, layer)


FUNCTIONS = {"penalty": _penalty, "along": _along, "tuned": _tuned}


def _args() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    ps = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) / WIDTH**0.5,
    }
    return ps, jax.random.normal(keys[2], (ROWS, WIDTH))


def _opened(fn: Any) -> Jaxpr:
    return with_open_pairs(stage.prepare(inline_calls(jax.make_jaxpr(fn)(*_args()))).jaxpr)


def _peak(jaxpr: Jaxpr) -> int:
    return as_it_is(lift_as_xla(jaxpr, DEVICES["cpu"])).peak_bytes


def _values(jaxpr: Jaxpr) -> list[Any]:
    closed = compat.close_jaxpr(jaxpr, [])
    return jax.jit(lambda *xs: compat.evaluate(closed, list(xs)))(*jax.tree.leaves(_args()))


@pytest.mark.parametrize("name", [*FUNCTIONS, "epochs"])
def test_scans_in_pairs_compute_the_same(name: str) -> None:
    before = _opened(jax.grad({**FUNCTIONS, "epochs": _epochs}[name]))
    after = in_pairs(before)
    assert after is not before
    for a, b in zip(_values(before), _values(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_each_scan_reads_the_stacks_of_one_other() -> None:
    before, after = (_opened(jax.grad(_penalty)), in_pairs(_opened(jax.grad(_penalty))))
    shared = [len(_shared(jaxpr)) for jaxpr in (before, after)]
    assert shared[0] > 5
    assert shared[1] <= 2, "what the first two carry is read by what makes their values again"
    assert len(find_pairs(after)) == 2


def test_what_a_scan_recomputes_of_others_is_said() -> None:
    found = recomputed_in(in_pairs(_opened(jax.grad(_penalty))), DEVICES["cpu"])
    dots = [r for r in found if r.op == f"dot_general in {LAYERS} iterations of a scan"]
    assert len(dots) >= 3, "of the layer's and of its gradient's four those whose results are read"
    assert all("_layer" in r.source for r in dots)
    assert recomputed_in(_opened(jax.grad(_penalty)), DEVICES["cpu"]) == ()


def _shared(jaxpr: Jaxpr) -> list[Any]:
    """Stacks that more than one scan reads."""
    readers = readers_of(jaxpr.eqns)
    stacks = [v for eqn in jaxpr.eqns if eqn.primitive.name == "scan" for v in eqn.outvars]
    return [v for v in stacks if len(set(readers.get(v, ()))) > 1]


def test_a_gradient_is_a_pair_as_it_is() -> None:
    jaxpr = _opened(jax.grad(_loss_of_layers))
    assert in_pairs(jaxpr) is jaxpr


def _loss_of_layers(ps: Any, x: Any) -> Any:
    return _loss(ps, x, _layer)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bytes_of_a_checkpoint_are_kept_for_less(name: str) -> None:
    """Two were refused, and what is tuned cost 1.06 of it."""
    step = jax.value_and_grad(FUNCTIONS[name])
    by_hand = jax.value_and_grad(lambda ps, x: FUNCTIONS[name](ps, x, jax.checkpoint(_layer)))
    args, model = _args(), aot.model_for("cpu", "cpu")
    rival = jax.jit(by_hand).lower(*args).compile()
    budget = aot.memory(rival).total_bytes
    kept = jax.jit(coop.remat(step, budget=budget)).lower(*args).compile()
    assert aot.memory(kept).total_bytes <= budget
    assert aot.run_ns(kept, model) <= aot.run_ns(rival, model)
    for a, b in zip(jax.tree.leaves(rival(*args)), jax.tree.leaves(kept(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_same_for_an_absent_h200(h200: str) -> None:
    args = jax.eval_shape(_args)
    rival = aot.lower_for(
        jax.value_and_grad(lambda ps, x: _penalty(ps, x, jax.checkpoint(_layer))), args, device=h200
    ).compile()
    budget = aot.memory(rival).total_bytes
    kept = aot.lower_for(coop.remat(jax.value_and_grad(_penalty), budget=budget), args, device=h200).compile()
    assert aot.memory(kept).total_bytes <= budget


def test_what_must_not_run_again_is_stacked() -> None:
    """Python is called once for each iteration of each scan."""
    calls: list[int] = []

    @jax.custom_jvp
    def logged(x: Any) -> Any:
        return jax.pure_callback(_log(calls), x, x, vmap_method="sequential")

    logged.defjvps(lambda t, ans, x: t * jnp.cos(ans))

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return logged(_layer(x, p)[0]), None

    before = _opened(jax.grad(lambda ps, x: _penalty(ps, x, layer)))
    after = in_pairs(before)
    assert after is not before
    counts = []
    for jaxpr in (before, after):
        calls.clear()
        jax.block_until_ready(_values(jaxpr))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def _log(calls: list[int]) -> Any:
    def log(x: Any) -> Any:
        calls.append(1)
        return np.sin(x)

    return log
