"""Every transformation of a decorated function gives the numbers of the plain one.

Each case runs with a plan that saves the arguments alone and recomputes everything else, some with the
planner's own plan, which changes nothing because the budget is large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coop_jax.lowering
from coop_jax import lowering, pairs
from coop_jax.budget import Budget
from coop_jax.remat import remat
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.pipeline import plan_joint

KEY = jax.random.key(7)
W = jax.random.normal(KEY, (4, 4)) * 0.5
X = jax.random.normal(jax.random.fold_in(KEY, 1), (3, 4))
V = jax.random.normal(jax.random.fold_in(KEY, 2), (4, 4))


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) * jnp.sin(x)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(layer(w, layer(w, layer(w, x))) ** 2)


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3.0 * jnp.cos(x) * ct,))


def many(w: Any, x: Any) -> dict[str, Any]:
    """Several outs: one without a gradient, one of integers, one that is an argument."""
    h = layer(w, x)
    return {"h": h, "index": jnp.argmax(h, axis=-1), "stopped": lax.stop_gradient(h), "x": x, "sum": h.sum()}


def looped(w: Any, x: Any) -> Any:
    out, _ = lax.scan(lambda h, _: (layer(w, h), None), x, None, length=3)
    return lax.cond(out.sum() > 0, jnp.sin, jnp.cos, out).sum()


def random(w: Any, x: Any, key: Any) -> Any:
    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), layer(w, x), 0.0) ** 2)


def indexed(w: Any, x: Any, rows: Any) -> Any:
    return (layer(w, x)[rows] ** 2).sum()


def with_aux(w: Any, x: Any) -> Any:
    value = loss(w, x)
    return value, {"norm": jnp.linalg.norm(w), "count": jnp.asarray(3), "h": layer(w, x)}


WITH_OWN_PLAN = (
    "grad", "grad under jit", "grad of both", "aux", "keys", "grad of grad", "vmap of grad", "scan around",
    "control flow inside", "checkpoint inside", "custom_vjp inside", "jvp of grad",
)  # fmt: skip

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]

CASES: dict[str, Callable[[Decorate], Any]] = {
    "value": lambda d: d(loss)(W, X),
    "value under jit": lambda d: jax.jit(d(many))(W, X),
    "grad": lambda d: jax.grad(d(loss))(W, X),
    "grad under jit": lambda d: jax.jit(jax.grad(d(loss)))(W, X),
    "grad of both": lambda d: jax.jit(jax.value_and_grad(d(loss), argnums=(0, 1)))(W, X),
    "grad of a jitted one": lambda d: jax.grad(jax.jit(d(loss)))(W, X),
    "grad of the second": lambda d: jax.jit(jax.grad(d(loss), argnums=1))(W, X),
    "grad of one of many": lambda d: jax.grad(lambda w: d(many)(w, X)["sum"])(W),
    "grad of another of many": lambda d: jax.grad(lambda w: (d(many)(w, X)["h"] ** 2).sum())(W),
    "grad through all of many": lambda d: jax.jit(
        jax.grad(lambda w, x: sum(v.astype(float).sum() for v in d(many)(w, x).values()), argnums=(0, 1))
    )(W, X),
    "grad of nothing": lambda d: jax.grad(lambda w: d(many)(w, X)["stopped"].sum())(W),
    "aux": lambda d: jax.jit(jax.value_and_grad(d(with_aux), has_aux=True))(W, X),
    "aux eager": lambda d: jax.value_and_grad(d(with_aux), has_aux=True)(W, X),
    "gradient of aux, too": lambda d: jax.grad(
        lambda w: sum(map(jnp.sum, jax.tree.leaves(d(with_aux)(w, X))))
    )(W),
    "keyword arguments": lambda d: jax.grad(lambda w: d(loss)(w, x=X))(W),
    "integers": lambda d: jax.jit(jax.grad(d(indexed)))(W, X, jnp.array([0, 2])),
    "integers, float0": lambda d: jax.grad(d(indexed), argnums=(0, 1, 2), allow_int=True)(
        W, X, jnp.array([0, 2])
    )[:2],
    "keys": lambda d: jax.jit(jax.grad(d(random)))(W, X, KEY),
    "closed over": lambda d: jax.jit(jax.grad(lambda w: d(lambda x: loss(w, x))(X)))(W),
    "constants": lambda d: jax.jit(
        jax.grad(d(lambda w: loss(w, jax.jit(lambda: jnp.asarray(np.eye(3, 4)))())))
    )(W),
    "jvp": lambda d: jax.jvp(d(loss), (W, X), (V, X)),
    "jvp under jit": lambda d: jax.jit(lambda w, v: jax.jvp(lambda w: d(many)(w, X)["h"], (w,), (v,)))(W, V),
    "linearize": lambda d: jax.linearize(d(loss), W, X)[1](V, X),
    "vjp": lambda d: jax.vjp(d(lambda w, x: (layer(w, x), w * 2)), W, X)[1]((X, V)),
    "grad of grad": lambda d: jax.jit(jax.grad(lambda w: jax.grad(d(loss))(w, X).sum()))(W),
    "grad of grad eager": lambda d: jax.grad(lambda w: jax.grad(d(loss))(w, X).sum())(W),
    "decorated twice": lambda d: jax.grad(d(lambda w: jax.grad(d(loss))(w, X).sum()))(W),
    "hessian": lambda d: jax.jit(jax.hessian(lambda w: d(loss)(w * jnp.ones((4, 4)), X)))(W[0]),
    "jvp of grad": lambda d: jax.jvp(jax.grad(d(loss)), (W, X), (V, X)),
    "grad of jvp": lambda d: jax.grad(lambda w: jax.jvp(d(loss), (w, X), (V, X))[1])(W),
    "jacrev": lambda d: jax.jacrev(lambda w: d(layer)(w, X))(W),
    "jacfwd": lambda d: jax.jacfwd(lambda w: d(layer)(w, X))(W),
    "vmap": lambda d: jax.vmap(d(loss), in_axes=(None, 0))(W, X[:, None]),
    "vmap of grad": lambda d: jax.jit(jax.vmap(jax.grad(d(loss)), in_axes=(None, 0)))(W, X[:, None]),
    "grad of vmap": lambda d: jax.grad(lambda w: jax.vmap(d(loss), in_axes=(None, 0))(w, X[:, None]).sum())(
        W
    ),
    "vmap inside": lambda d: jax.jit(jax.grad(d(lambda w: jax.vmap(lambda x: loss(w, x))(X[:, None]).sum())))(
        W
    ),
    "vmap of jvp": lambda d: jax.vmap(lambda v: jax.jvp(d(loss), (W, X), (v, X))[1])(jnp.stack([V, W])),
    "vmap of linearize": lambda d: jax.vmap(lambda v: jax.linearize(lambda w: d(loss)(w, X), W)[1](v))(
        V[None]
    ),
    "named axis": lambda d: jax.vmap(
        jax.grad(d(lambda w, x: loss(w, x - lax.pmean(x, "rows")))), in_axes=(None, 0), axis_name="rows"
    )(W, X[:, None]),
    "scan around": lambda d: jax.jit(
        jax.grad(lambda w: lax.scan(lambda h, _: (d(layer)(w, h), d(loss)(w, h)), X, None, length=3)[1].sum())
    )(W),
    "while around": lambda d: lax.fori_loop(0, 3, lambda _, h: d(layer)(W, h), X),
    "cond around": lambda d: jax.grad(lambda w: lax.cond(True, d(loss), lambda w, x: 0.0, w, X))(W),
    "control flow inside": lambda d: jax.jit(jax.value_and_grad(d(looped)))(W, X),
    "checkpoint around": lambda d: jax.jit(jax.grad(jax.checkpoint(d(loss))))(W, X),
    "checkpoint around, dots saved": lambda d: jax.jit(
        jax.grad(jax.checkpoint(d(loss), policy=jax.checkpoint_policies.dots_saveable))
    )(W, X),
    "checkpoint inside": lambda d: jax.jit(jax.grad(d(lambda w, x: jax.checkpoint(loss)(w, layer(w, x)))))(
        W, X
    ),
    "custom_vjp inside": lambda d: jax.jit(jax.grad(d(lambda w: scaled(loss(w, X)))))(W),
    "custom_jvp inside": lambda d: jax.grad(d(lambda w: jax.nn.relu(layer(w, X)).sum()))(W),
    "grad inside": lambda d: jax.jit(d(lambda w, x: w - jax.grad(loss)(w, x)))(W, X),
    "linear_transpose": lambda d: jax.linear_transpose(d(lambda w: X @ w), W)(X),
}


def everything_recomputed(forward: Any, backward: Any, n_outs: int, request: JaxprRequest) -> Any:
    """A plan that saves the arguments alone; backward runs the whole of forward behind a barrier."""
    outcome = plan_joint(forward, backward, n_outs, request)[1]
    n_args = len(forward.in_avals)

    def only_outs(*args: Any) -> list[Any]:
        return [*compat.evaluate(forward, args)[:n_outs], *args]

    def recompute(*values: Any) -> list[Any]:
        args = lax.optimization_barrier(list(values[:n_args]))
        residuals = compat.evaluate(forward, args)[n_outs:]
        return compat.evaluate(backward, [*residuals, *values[n_args:]])

    n_residuals = len(forward.out_avals) - n_outs
    cotangents = backward.in_avals[n_residuals:]
    parts = (
        compat.trace(only_outs, forward.in_avals),
        compat.trace(recompute, [*forward.in_avals, *cotangents]),
    )
    return parts, outcome


@functools.cache
def plain_result(case: str) -> Any:
    return CASES[case](lambda f: f)


def equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_transformation_keeps_the_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coop_jax.lowering, "plan_joint", everything_recomputed)
    equal(CASES[case](lambda f: remat(f, budget="1TiB")), plain_result(case))


@pytest.mark.parametrize("case", WITH_OWN_PLAN)
def test_the_planners_own_plan_keeps_the_numbers(case: str) -> None:
    equal(CASES[case](lambda f: remat(f, budget="1TiB")), plain_result(case))


def test_saved_values_that_exist_already_are_not_saved_again() -> None:
    """The pair's forward part returns no argument and no out a second time."""
    jaxpr = jax.make_jaxpr(layer)(W, X)
    pair = pairs.make_pair(jaxpr, (True, True), lowering.RematConfig(budget=Budget.of("1TiB")))
    outs = pair.forward.jaxpr.outvars
    assert len({id(v) for v in outs}) == len(outs)
    assert not {id(v) for v in pair.forward.jaxpr.invars} & {id(v) for v in outs}
    n_available = len(outs) + len(pair.forward.in_avals)
    assert all(0 <= i < n_available for i in pair.saved)
    assert len(pair.saved) == len(pair.backward.in_avals) - len(pair.forward.in_avals) - 1


def test_aux_has_no_part_in_the_backward_program() -> None:
    jaxpr = jax.make_jaxpr(lambda w, x: jax.tree.leaves(with_aux(w, x)))(W, X)
    pair = pairs.make_pair(jaxpr, (True, False), lowering.RematConfig(budget=Budget.of("1TiB")))
    assert pair.cotangents == (True, False, False, False)
    assert pair.tangents_out == (True, False, True, True)
    assert len(pair.backward.out_avals) == 1
