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
from jax.experimental import io_callback

from coop_jax import aot
from coop_jax.errors import UnsupportedError
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


@jax.custom_vjp
def with_decorated_rule(x: Any) -> Any:
    return jnp.sin(x)


with_decorated_rule.defvjp(
    lambda x: (kept(lambda x: doubled(x) * x)(x), x),
    lambda x, g: (kept(lambda x, g: 2 * rounded(x) * doubled(x) * g)(x, g),),
)


# Functions of a vector that have reverse mode alone, such that have every mode, and costly ones.
REVERSE: dict[str, Fn] = {
    "custom_vjp": lambda w: jnp.sum((rounded(w) * jnp.array([1.0, 2.0])) ** 3),
    "custom_vjp with symbolic zeros": lambda w: jnp.sum(symbolic(w, jnp.array([1.0, 2.0])) ** 2),
    "nondiff_argnums": lambda w: jnp.sum(applied(jnp.sin, w, 3.0) ** 2),
}
EVERY: dict[str, Fn] = {
    "custom_jvp": lambda w: jnp.sum(doubled(doubled(w)) * w),
    "a guarded square root": lambda w: jnp.sum(guarded(w * w * jnp.array([0.0, 2.0]))),
    "relu6": lambda w: jnp.sum(jax.nn.relu6(w * 0) * w * jnp.sin(w + 1)),
    "custom_jvp with symbolic zeros": lambda w: jnp.sum(half_symbolic(w, jnp.ones(2)) * w),
}
COSTLY: dict[str, Fn] = {
    "a rule for a loop": lambda w: jnp.sum(looped(w) ** 2),
    "custom_gradient": lambda w: jnp.sum(squared(w) * w),
    "rules in a scan": lambda w: in_scan(lambda h: doubled(h) * rounded(h))(w).sum(),
    "rules under jit, vmap and checkpoint": lambda w: jax.jit(
        jax.vmap(jax.checkpoint(lambda x: doubled(x) * rounded(x) * x))
    )(w).sum(),
    "custom_root": lambda w: jnp.sum(cube_root(w * w + 1)),
    "rules in a cond": lambda w: lax.cond(w.sum() < 9, lambda w: doubled(rounded(w)).sum(), jnp.sum, w * w),
    "decorated inside": lambda w: jnp.sum(kept(lambda x: doubled(x) * rounded(x))(jnp.sin(w)) ** 2),
    "decorated in a rule": lambda w: jnp.sum(with_decorated_rule(w) ** 3),
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
        "twice, under vmap": jax.vmap(jax.grad(with_value(f)))(jnp.stack([w, 2 * w])),
        "three times": jax.grad(lambda w: jnp.vdot(jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V))(w), V))(w),
        "around a scan": jax.grad(descended(f))(w),
    }


def forward_ways(f: Fn, w: Any) -> dict[str, Any]:
    return {
        "hessian": jax.hessian(f)(w),
        "reverse over forward": jax.grad(lambda w: jax.jvp(f, (w,), (V,))[1])(w),
        "linearized gradient": jax.linearize(jax.grad(f), w)[1](V),
        "forward over value and gradient": jax.jvp(with_value(f), (w,), (V,)),
    }


def twice(f: Fn, w: Any) -> dict[str, Any]:
    return {"twice": jax.grad(with_value(f))(w)}


def compared(ways: Any, decorated: Fn, plain: Fn) -> None:
    found, expected = (jax.jit(functools.partial(ways, f))(W) for f in (decorated, plain))
    for way in expected:
        for a, b in zip(jax.tree.leaves(found[way]), jax.tree.leaves(expected[way]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=way)


@pytest.mark.parametrize("case", REVERSE)
def test_reverse_mode_to_any_order(case: str) -> None:
    compared(reverse_ways, kept(REVERSE[case]), REVERSE[case])


@pytest.mark.parametrize("case", EVERY)
def test_every_mix_of_forward_and_reverse(case: str) -> None:
    compared(forward_ways, kept(EVERY[case]), EVERY[case])


@pytest.mark.parametrize("case", COSTLY)
def test_rules_in_calls_loops_and_other_rules(case: str) -> None:
    compared(twice, kept(COSTLY[case]), COSTLY[case])


@pytest.mark.parametrize(
    ("ways", "f"),
    [(twice, REVERSE["custom_vjp"]), (forward_ways, EVERY["custom_jvp"])],
    ids=["reverse", "forward"],
)
def test_with_a_plan_that_recomputes(ways: Any, f: Fn) -> None:
    compared(ways, recomputed(f), f)


def test_the_first_derivative_of_what_has_no_second() -> None:
    """JAX differentiates a rule with `optimize_remat` once."""
    f = lambda x: optimized(jnp.sin(x))  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(kept(f)))(0.3), jax.grad(f)(0.3), rtol=1e-6)


def test_forward_mode_is_refused_where_jax_refuses_it() -> None:
    for f in (rounded, kept(rounded)):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(jax.grad(lambda x, f=f: f(x) ** 2), (1.0,), (1.0,))


@jax.custom_vjp
def counted(ref: Any, x: Any) -> Any:
    """A sine whose backward rule counts in `ref`."""
    return jnp.sin(x)


def _counted_backward(saved: Any, g: Any) -> Any:
    ref, x = saved
    ref[...] = ref[...] + 1
    return None, 2 * g * jnp.cos(x)


counted.defvjp(lambda ref, x: (jnp.sin(x), (ref, x)), _counted_backward)


@jax.custom_vjp
def stashed(ref: Any, x: Any) -> Any:
    """The identity, whose backward rule keeps the cotangent."""
    return x


def _stashed_backward(ref: Any, g: Any) -> Any:
    ref[...] = g
    return None, g


stashed.defvjp(lambda ref, x: (x, ref), _stashed_backward)


def doubled_and_counted(ref: Any, x: Any) -> Any:
    """Reads and writes `ref` forward and backward."""
    ref[...] = ref[...] * 2 + 1
    y = counted(ref, x) * ref[...]
    ref[...] = ref[...] * 3
    return y * x


def scanned_with_reference(decorate: Fn, ref: Any, x: Any) -> Any:
    body = decorate(lambda ref, h, w: jnp.sin(counted(ref, h * w)))
    return lax.scan(lambda h, w: (body(ref, h, w), None), x, jnp.arange(1.0, 4.0))[0]


def second(f: Fn) -> Fn:
    return jax.grad(lambda ref, x: jax.grad(f, 1)(ref, x), 1)


REFERENCES: dict[str, Callable[[Fn], Fn]] = {
    "gradient outside": lambda d: jax.grad(d(lambda ref, x: jnp.sin(stashed(ref, jnp.sin(x)))), 1),
    "gradient inside": lambda d: d(jax.grad(lambda ref, x: jnp.sin(stashed(ref, jnp.sin(x))), 1)),
    "closed over": lambda d: lambda ref, x: jax.grad(d(lambda x: jnp.sin(stashed(ref, x))))(x),
    "a scan inside": lambda d: jax.grad(d(functools.partial(scanned_with_reference, lambda f: f)), 1),
    "in a scan": lambda d: jax.grad(functools.partial(scanned_with_reference, d), 1),
    "twice": lambda d: second(d(lambda ref, x: jnp.sin(counted(ref, x)) * x)),
    "written forward and backward": lambda d: jax.grad(d(doubled_and_counted), 1),
    "written forward and backward, twice": lambda d: second(d(doubled_and_counted)),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_rules_may_write_into_references(case: str) -> None:
    results = []
    for decorate in (kept, lambda f: f):
        ref = jax.new_ref(jnp.float32(2.0))
        results.append((jax.jit(REFERENCES[case](decorate))(ref, 0.3), ref[...]))
    np.testing.assert_allclose(*results, rtol=1e-5)


@jax.custom_vjp
def logged(x: Any) -> Any:
    return jnp.sin(x)


logged.defvjp_with_logs(lambda x: (jnp.sin(x), x), lambda x, g: ((3 * g * jnp.cos(x),), {"g": g}))


def test_backward_rules_may_log() -> None:
    def logs_and_more(f: Fn) -> Any:
        def of_log(x: Any) -> Any:
            (gradient,), logs = jax.vjp(f, x)[1].with_logs(2.0)
            return gradient * logs["g"]

        pull = jax.vjp(f, 0.3)[1]
        return pull.with_logs(1.0), pull(1.0), jax.jit(jax.grad(of_log))(0.3)

    f = lambda x: jnp.sin(logged(jnp.sin(x)))  # noqa: E731
    found, expected = logs_and_more(kept(f)), logs_and_more(f)
    assert found[0][1].keys() == {"g"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_what_only_derivatives_need_takes_no_memory() -> None:
    """The backward part of a layer in a scan takes the layer's arguments; they are not stacked for that."""

    def layer(w: Any, h: Any) -> Any:
        return jnp.tanh(jnp.sin(jnp.tanh(h @ w)) @ w)

    def total_bytes(decorate: Fn) -> int:
        def loss(ws: Any, x: Any) -> Any:
            return lax.scan(lambda h, w: (decorate(layer)(w, h), None), x, ws)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((8, 16, 16)), jnp.ones((64, 16))).compile()
        return aot.memory(compiled).total_bytes

    assert total_bytes(kept) <= total_bytes(lambda f: f)


def test_derivatives_may_use_keys_again() -> None:
    """What computes a value anew is no second use to JAX's check of keys."""

    def noisy(x: Any, key: Any) -> Any:
        return jnp.sum(jnp.sin(x) * jax.random.normal(key, x.shape))

    def pushed(f: Fn) -> Any:
        return jax.jit(lambda key: jax.jvp(lambda w: jax.value_and_grad(f)(w, key), (W,), (V,)))

    with jax.debug_key_reuse(True):
        found, expected = (pushed(f)(jax.random.key(1)) for f in (kept(noisy), noisy))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_reference_takes_what_a_derivative_does_not_pass_through() -> None:
    def counted(ref: Any, w: Any) -> Any:
        ref[...] += jax.lax.stop_gradient(w).sum()
        return jnp.sum(jnp.sin(w) ** 2)

    w = jnp.array([0.3, -0.7, 1.1])
    found = []
    for function in (counted, remat(counted, budget="1TiB")):
        ref = jax.new_ref(jnp.float32(1.0))
        found.append((jax.grad(function, argnums=1)(ref, w), ref[...]))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    "taken",
    [
        lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (V,))[1],
        lambda f: jax.grad(lambda w: jax.jvp(f, (w,), (V,))[1]),
        jax.hessian,
    ],
    ids=["forward over reverse", "reverse over forward", "hessian"],
)
@pytest.mark.parametrize("within", [kept, recomputed])
def test_no_derivative_tells_python_anything_twice(taken: Any, within: Any) -> None:
    told: list[float] = []

    def tells(w: Any) -> Any:
        def turn(c: Any, _: Any) -> tuple[Any, None]:
            jax.debug.callback(lambda x: told.append(float(x)), jnp.round(lax.stop_gradient(c[0])) + 7)
            return jnp.sin(c) * c, None

        return lax.scan(turn, w, length=2)[0].sum()

    expected = jax.jit(taken(tells))(W)
    jax.effects_barrier()
    plain, told[:] = sorted(told), []
    found = jax.jit(taken(within(tells)))(W)
    jax.effects_barrier()
    assert sorted(told) == plain
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_python_gave_back_is_not_asked_for_again() -> None:
    def asks(w: Any) -> Any:
        scale = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), np.float32))
        return (scale * jnp.sin(w)).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(kept(asks)))(W), 3 * jnp.cos(W), rtol=1e-6)
    with pytest.raises(UnsupportedError, match=r"test_derivatives\.py.*outside of the decorated function"):
        jax.jit(jax.grad(lambda w: (jax.grad(kept(asks))(w) ** 2).sum()))(W)


def test_a_gradient_that_is_zero_needs_no_arguments() -> None:
    def counts(seen: Any, w: Any) -> Any:
        seen[...] = seen[...] + 1.0
        return jnp.sign(lax.stop_gradient(w)).sum()

    def step(f: Fn) -> Fn:
        def run(w: Any) -> Any:
            seen = jax.new_ref(0.0)
            return jax.grad(lambda w: f(seen, w))(w), seen[...]

        return run

    plain, within = (jax.jit(step(f)).lower(W).compile() for f in (counts, kept(counts)))
    assert aot.memory(within).argument_bytes == aot.memory(plain).argument_bytes == 0
    jax.tree.map(np.testing.assert_array_equal, within(W), plain(W))
