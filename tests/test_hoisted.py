"""What XLA computes in front of a `while` that does not change it is planned there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import cg

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.hoisted import hoisted
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift_seen
from passes.jaxpr.rewrite import bodies_of
from passes.jaxpr.stage import prepare
from passes.jaxpr.straight import as_it_is

W = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
X = jnp.full((8, 8), 0.1)
CPU = DEVICES["cpu"]


def loop(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`x = change(w, x)` until the sum of its squares is large, or for four times."""

    def run(w: Any, x: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, change(w, state[1])

        return lax.while_loop(lambda s: (s[0] < 4) & (jnp.sum(s[1] ** 2) < 1e3), body, (0, x))[1]

    return run


def parts(change: Callable[[Any, Any], Any], device: str) -> tuple[list[str], list[str]]:
    """Names of the equations in front of a loop and in its body, checked to give the same values."""
    run = loop(change)
    closed = inline_calls(jax.make_jaxpr(run)(W, X))
    jaxpr, consts = compat.open_jaxpr(closed)
    after = hoisted(jaxpr, DEVICES[device])
    assert (after is jaxpr) == (len(after.eqns) == len(jaxpr.eqns))
    (found,) = compat.evaluate(compat.close_jaxpr(after, consts), [W, X])
    np.testing.assert_array_equal(found, run(W, X))
    *front, inner = after.eqns
    (body,) = bodies_of(inner)
    return [e.primitive.name for e in front], [e.primitive.name for e in compat.open_jaxpr(body)[0].eqns]


@pytest.mark.parametrize(("device", "moves"), [("cpu", True), ("v5e", True), ("h200", False)])
def test_what_no_iteration_changes_is_in_front_where_xla_moves_it(device: str, moves: bool) -> None:
    front, body = parts(lambda w, x: x + jnp.tanh(w @ w) * x, device)
    assert front == (["dot_general", "tanh"] if moves else [])
    assert ("tanh" in body) != moves
    assert "mul" in body


@pytest.mark.parametrize(("device", "moves"), [("cpu", True), ("v5e", False)])
def test_a_tpu_keeps_in_the_body_what_is_larger_than_what_it_reads(device: str, moves: bool) -> None:
    front, _ = parts(lambda w, x: x + jnp.sum(jnp.tanh(w[:, None] * w[None]) * x[..., None], -1) / 99, device)
    assert ("tanh" in front) == moves


STAY = {
    "a broadcast": lambda w, x: x + w[0][None] * x,
    "a mask": lambda w, x: jnp.where(lax.iota(jnp.int32, 8)[:, None] > lax.iota(jnp.int32, 8), x, x * 1.1),
    "a loop": lambda w, x: x + lax.while_loop(lambda v: v.sum() < 9, lambda v: v * v + 1, w) * x / 999,
    "random bits": lambda w, x: x + jax.random.normal(jax.random.key(0), x.shape),
}


@pytest.mark.parametrize("name", STAY)
def test_what_xla_leaves_in_the_body_stays(name: str) -> None:
    assert parts(STAY[name], "cpu")[0] == []


def test_a_carried_value_may_be_what_is_moved() -> None:
    assert parts(lambda w, x: jnp.tanh(w), "cpu")[0] == ["tanh"]


def newton(ws: Any, x: Any) -> Any:
    """A step whose conjugate gradients take the derivative of the gradient in each iteration."""

    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = jnp.tanh(h @ w) + h
        return jnp.mean(h**2)

    def times(v: Any) -> Any:
        return jax.tree.map(lambda a, b: a + 0.1 * b, jax.jvp(jax.grad(loss), (ws,), (v,))[1], v)

    return jax.tree.map(lambda w, d: w - d, ws, cg(times, jax.grad(loss)(ws), maxiter=5)[0])


def test_the_memory_of_such_a_solver_is_not_taken_for_less() -> None:
    specs = [h.spec(64, 64)] * 6, h.spec(2048, 64)
    made = aot.memory(jax.jit(newton).lower(*specs).compile())
    work = prepare(inline_calls(jax.make_jaxpr(newton)(*specs)))
    lifted = lift_seen(work.jaxpr, CPU)
    assert as_it_is(lifted).peak_bytes >= 0.95 * made.temp_bytes
