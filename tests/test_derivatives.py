"""Derivatives of a decorated function to any order are those of the plain one, with the rules that are in it.

Rules here are not what the bodies' derivatives are, so that a rule that gets lost is seen. Each function is
differentiated in every way by one program; the plan of the second parameter recomputes all that it may.
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

from coop_jax.remat import remat

W = jnp.array([0.3, -0.7])
V = jnp.array([1.0, -2.0])

Fn = Callable[..., Any]


def kept(f: Fn) -> Fn:
    return remat(f, budget="1TiB")


def recomputed(f: Fn) -> Fn:
    return remat(f, budget="1TiB", policy=jax.checkpoint_policies.nothing_saveable)


@jax.custom_vjp
def rounded(x: Any) -> Any:
    """Straight through: rounding with the derivative of the identity."""
    return jnp.round(8 * x) / 8


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return jnp.sin(x)


doubled.defjvp(lambda p, t: (doubled(*p), 2 * jnp.cos(p[0]) * t[0]))


@jax.custom_jvp
def guarded(x: Any) -> Any:
    return jnp.sqrt(x)


@guarded.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return guarded(x), t * jnp.where(x > 0, 0.5 / jnp.where(x > 0, guarded(x), 1.0), 0.0)


@jax.custom_vjp
def looped(x: Any) -> Any:
    """Cannot be differentiated in reverse mode but by its rule, like an ODE's solution."""
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


looped.defvjp(lambda x: (looped(x), x), lambda x, g: (looped(x) * g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(f: Fn, x: Any, times: float) -> Any:
    return times * f(x)


applied.defvjp(lambda f, x, k: (applied(f, x, k), x), lambda f, k, x, g: (k * g * f(x),))


@jax.custom_vjp
def symbolic(x: Any, y: Any) -> Any:
    return x * y


def _symbolic_backward(saved: Any, g: Any) -> Any:
    return 3 * g * saved[1], 2 * g * saved[0]


symbolic.defvjp(lambda x, y: (x.value * y.value, (x.value, y.value)), _symbolic_backward, symbolic_zeros=True)


@jax.custom_jvp
def half_symbolic(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


def _half_symbolic_rule(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    assert type(dy) is jax.custom_derivatives.SymbolicZero
    return half_symbolic(x, y), 3 * jnp.cos(x) * y * dx


half_symbolic.defjvp(_half_symbolic_rule, symbolic_zeros=True)


@jax.custom_gradient
def squared(x: Any) -> Any:
    return x**2, lambda g: g * jnp.sin(x) * 4


@jax.custom_vjp
def optimized(x: Any) -> Any:
    return 2 * jnp.sin(x)


optimized.defvjp(lambda x: (2 * jnp.sin(x), jnp.cos(x)), lambda c, g: (5 * c * g,), optimize_remat=True)


def cube_root(a: Any) -> Any:
    def newton(_: Any, y: Any) -> Any:
        return lax.fori_loop(0, 9, lambda _, y: y - (y**3 - a) / (3 * y * y), y)

    return lax.custom_root(lambda y: y**3 - a, jnp.ones_like(a), newton, lambda g, y: y / g(jnp.ones_like(y)))


def in_scan(f: Fn) -> Fn:
    return lambda x: lax.scan(lambda h, _: (f(h) + x, f(h)), x, None, length=2)[1].sum()


def wrapped_rule(decorate: Fn) -> Fn:
    """A rule whose both halves are decorated functions with rules in them."""

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defvjp(
        lambda x: (decorate(lambda x: doubled(x) * x)(x), x),
        lambda x, g: (decorate(lambda x, g: 2 * rounded(x) * doubled(x) * g)(x, g),),
    )
    return f


# Functions of a vector that have reverse mode alone, and such that have every mode.
REVERSE: dict[str, Fn] = {
    "custom_vjp": lambda w: jnp.sum((rounded(w) * jnp.array([1.0, 2.0])) ** 3),
    "a rule for a loop": lambda w: jnp.sum(looped(w) ** 2),
    "nondiff_argnums": lambda w: jnp.sum(applied(jnp.sin, w, 3.0) ** 2),
    "custom_vjp with symbolic zeros": lambda w: jnp.sum(symbolic(w, jnp.array([1.0, 2.0])) ** 2),
    "custom_gradient": lambda w: jnp.sum(squared(w) * w),
    "rules in a scan": lambda w: in_scan(lambda h: doubled(h) * rounded(h))(w).sum(),
    "rules under jit, vmap and checkpoint": lambda w: jax.jit(
        jax.vmap(jax.checkpoint(lambda x: doubled(x) * rounded(x) * x))
    )(w).sum(),
}
EVERY: dict[str, Fn] = {
    "custom_jvp": lambda w: jnp.sum(doubled(doubled(w)) * w),
    "a guarded square root": lambda w: jnp.sum(guarded(w * w * jnp.array([0.0, 2.0]))),
    "relu6": lambda w: jnp.sum(jax.nn.relu6(w * 0) * w * jnp.sin(w + 1)),
    "custom_jvp with symbolic zeros": lambda w: jnp.sum(half_symbolic(w, jnp.ones(2)) * w),
    "custom_root": lambda w: jnp.sum(cube_root(w * w + 1)),
    "custom_jvp in a scan and a cond": lambda w: lax.cond(
        w.sum() < 9, lambda w: in_scan(doubled)(w).sum(), jnp.sum, w
    ),
    "logsumexp and a norm": lambda w: jax.nn.logsumexp(w * w) + jnp.linalg.norm(w) * jax.nn.silu(w).sum(),
}


def with_value(f: Fn) -> Fn:
    """A scalar of a function's value and gradient."""

    def g(w: Any) -> Any:
        value, gradient = jax.value_and_grad(f)(w)
        return value * jnp.vdot(gradient, V)

    return g


def descended(f: Fn) -> Fn:
    """Two steps down, as in meta-learning."""
    return lambda w: lax.scan(lambda h, _: (h - 0.1 * jax.grad(f)(h), f(h)), w, None, length=2)[1].sum()


def reverse_ways(f: Fn, w: Any) -> dict[str, Any]:
    return {
        "twice": jax.grad(with_value(f))(w),
        "three times": jax.grad(lambda w: jnp.vdot(jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V))(w), V))(w),
        "around vmap": jax.grad(lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, w * w])).sum())(w),
        "around a scan": jax.grad(descended(f))(w),
        "vmap around": jax.vmap(jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V)))(jnp.stack([w, 2 * w])),
    }


def forward_ways(f: Fn, w: Any) -> dict[str, Any]:
    return {
        "hessian": jax.hessian(f)(w),
        "reverse over forward": jax.grad(lambda w: jax.jvp(f, (w,), (V,))[1])(w),
        "linearized gradient": jax.linearize(jax.grad(f), w)[1](V),
        "forward over value and gradient": jax.jvp(with_value(f), (w,), (V,)),
        "three times": jax.grad(lambda w: jnp.vdot(jax.jvp(jax.grad(f), (w,), (V,))[1], V))(w),
    }


def compared(ways: Any, decorated: Fn, plain: Fn) -> None:
    found, expected = (jax.jit(functools.partial(ways, f))(W) for f in (decorated, plain))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected)) or plain is EVERY["relu6"]
    for way in expected:
        for a, b in zip(jax.tree.leaves(found[way]), jax.tree.leaves(expected[way]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=way)


@pytest.mark.parametrize("case", REVERSE)
def test_reverse_mode_to_any_order(case: str) -> None:
    compared(reverse_ways, kept(REVERSE[case]), REVERSE[case])


@pytest.mark.parametrize("case", EVERY)
def test_every_mix_of_forward_and_reverse(case: str) -> None:
    compared(forward_ways, kept(EVERY[case]), EVERY[case])


@pytest.mark.parametrize(
    ("ways", "f"),
    [(reverse_ways, REVERSE["custom_vjp"]), (forward_ways, EVERY["custom_jvp"])],
    ids=["reverse", "forward"],
)
def test_with_a_plan_that_recomputes(ways: Any, f: Fn) -> None:
    compared(ways, recomputed(f), f)


def test_forward_mode_is_refused_where_jax_refuses_it() -> None:
    for f in (rounded, kept(rounded)):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(jax.grad(lambda x, f=f: f(x) ** 2), (1.0,), (1.0,))
