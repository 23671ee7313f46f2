"""`coop.remat` where `jax.checkpoint` stands: the same numbers, with its policies as much work as it does.

The questions are those of JAX's own tests of `jax.checkpoint`; docs/jax.md says where the answers differ, and
why.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.test_util import check_grads

from coop_jax.remat import remat
from passes.jaxpr import compat
from passes.jaxpr.rewrite import with_results

limited = functools.partial(remat, budget="1TiB")
policies = jax.checkpoint_policies
X5 = jnp.linspace(0.1, 1.0, 5)
W5 = jnp.linspace(-1.0, 1.0, 25).reshape(5, 5)
M2 = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)

Fn = Callable[..., Any]


def save_primitive(name: str) -> Fn:
    return lambda primitive, *_, **__: str(primitive) == name


def named_sine(x: Any) -> Any:
    return checkpoint_name(jnp.sin(x), "sin")


def thrice(dot: Fn) -> Fn:
    """Three dots, each followed by a sine."""

    def f(x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(dot(x))
        return x

    return f


def rows(w: Any, x: Any = X5) -> Any:
    for _ in range(3):
        x = jnp.sin(x @ w)
    return x


def in_scan(f: Fn, length: int = 2) -> Fn:
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=length)[0]


def in_cond(f: Fn) -> Fn:
    return lambda x: lax.cond(x.sum() > -jnp.inf, f, lambda x: x, x)


@jax.custom_jvp
def two_at_once(x: Any) -> Any:
    return jnp.sin(x)


@two_at_once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y, c = jax.jit(lambda: (jnp.sin(primals[0]), jnp.cos(primals[0])))()
    return y, c * tangents[0]


@jax.custom_jvp
def two_in_a_scan(x: Any) -> Any:
    return jnp.sin(x)


@two_in_a_scan.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y, c = in_scan(lambda xs: (jnp.sin(xs[0]), jnp.cos(xs[1])), 1)((primals[0], primals[0]))
    return y, c * tangents[0]


@jax.custom_vjp
def ruled(x: Any) -> Any:
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))


@jax.custom_jvp
def with_constant(x: Any) -> Any:
    return x * jnp.arange(5.0)


with_constant.defjvp(lambda p, t: (with_constant(*p), t[0] * jnp.arange(5.0)))


@jax.custom_jvp
def linear(x: Any) -> Any:
    return jnp.sum(x, axis=0)


linear.defjvp(lambda p, t: (linear(*p), linear(*t)))


def scaled_by_names(x: Any) -> Any:
    y, z, w = (checkpoint_name(jnp.multiply(2.0, 2.0), name) for name in "yzw")
    return x * y * z * w


SINES: dict[str, tuple[Fn, Any]] = {
    "two sines": (lambda x: jnp.sin(jnp.sin(x)), 2.0),
    "names around a square": (lambda x: named_sine(jax.jit(lambda x: x * x)(named_sine(x))), 1.0),
    "scan": (in_scan(jnp.sin, 3), 4.0),
    "scan that stacks": (
        lambda x: sum(lax.scan(lambda c, _: (jnp.sin(c), jnp.sin(c)), x, None, length=3)[1]), 3.0),
    "cond": (in_cond(lambda x: jnp.sin(jnp.sin(x))), 4.0),
    "jit inside a rule in a scan": (in_scan(two_at_once, 1), 4.0),
    "the same twice": (lambda x: in_scan(two_at_once, 1)(in_scan(two_at_once, 1)(x)), 4.0),
    "jit inside a rule in a cond": (in_cond(two_at_once), 4.0),
    "scan inside a rule in a scan": (in_scan(two_in_a_scan, 1), 4.0),
    "rule": (lambda x: ruled(ruled(x)), 3.0),
    "names that are constants": (scaled_by_names, 1.0),
}  # fmt: skip

DOTS: dict[str, tuple[Fn, Any]] = {
    "matrices": (thrice(lambda x: x @ x), M2),
    "a batch of matrices": (
        thrice(lambda x: jnp.einsum("nij,njk->nik", x, x)),
        jnp.stack([M2, M2 + 1, M2.T]),
    ),
    "under jit": (jax.jit(thrice(lambda x: x @ x)), M2),
    "rows": (rows, W5),
    "in a scan": (lambda w: in_scan(lambda x: rows(w, x))(X5), W5),
    "in a cond": (lambda w: lax.cond(w.sum() > -9, rows, lambda w: X5, w), W5),
    "with a rule": (lambda x: ruled(two_at_once(x @ x) @ x), M2),
}

POLICIES: dict[str, Any] = {
    "nothing": policies.nothing_saveable, "everything": policies.everything_saveable,
    "dots": policies.dots_saveable, "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "sin": policies.save_only_these_names("sin"), "cosines": save_primitive("cos"),
    "y": policies.save_only_these_names("y"), "no w": policies.save_any_names_but_these("w"),
}  # fmt: skip

WORK = [(case, policy) for case in SINES for policy in ("nothing", "cosines")]
WORK += [(case, policy) for case in DOTS for policy in ("nothing", "dots")]
WORK += [("a batch of matrices", "dots without batch"), ("names around a square", "sin")]
WORK += [("names that are constants", "y"), ("names that are constants", "no w"), ("two sines", "everything")]
# A scan's carry is stacked, and what a branch saved for its gradient is kept: less is recomputed.
LESS = ("scan", "the same twice")


def scalar(f: Fn) -> Fn:
    return lambda x: jnp.sum(f(x))


def work(f: Fn, x: Any) -> tuple[int, ...]:
    """How many sines, cosines and dots the program does that XLA is given, loops counted once."""
    text = jax.jit(f).lower(x).as_text()
    return tuple(text.count(f"stablehlo.{op} ") for op in ("sine", "cosine", "dot_general"))


@pytest.mark.parametrize(("case", "policy"), WORK)
def test_work_is_done_as_often_as_with_checkpoint(case: str, policy: str) -> None:
    (f, x), asked = {**SINES, **DOTS}[case], POLICIES[policy]
    outside = work(jax.value_and_grad(limited(scalar(f), policy=asked)), x)
    inside = work(limited(jax.value_and_grad(scalar(f)), policy=asked), x)
    theirs = work(jax.value_and_grad(jax.checkpoint(scalar(f), policy=asked)), x)
    assert inside == outside
    if any(word in case for word in LESS):
        plain = work(jax.value_and_grad(scalar(f)), x)
        assert all(a <= b <= c for a, b, c in zip(plain, outside, theirs, strict=True))
    else:
        assert outside == theirs


@pytest.mark.parametrize("case", [*SINES, *DOTS])
def test_second_derivatives_under_a_policy(case: str) -> None:
    f, x = {**SINES, **DOTS}[case]
    decorated = limited(f, policy=policies.dots_saveable)

    def twice(f: Fn) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jax.grad(scalar(f))(x)))))(x)

    for a, b in zip(jax.tree.leaves(twice(decorated)), jax.tree.leaves(twice(f)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", [linear, with_constant, in_scan(with_constant, 1), in_cond(with_constant)])
def test_linear_rules_and_constants(f: Fn) -> None:
    check_grads(limited(f, policy=policies.dots_saveable), (X5,), order=2, atol=0.05, rtol=0.05)


def test_a_function_and_what_linearize_makes_of_it() -> None:
    @limited
    def g(x: Any) -> Any:
        return lax.sin(lax.sin(x)), 3.0

    y, push = jax.linearize(lambda x: g(x)[0], 2.0)
    np.testing.assert_allclose(y, np.sin(np.sin(2.0)), rtol=1e-6)
    np.testing.assert_allclose(push(3.0), np.cos(np.sin(2.0)) * np.cos(2.0) * 3, rtol=1e-6)


def test_while_loops_are_linearized() -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]

    expected = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(3.0)
    for policy in (None, POLICIES["cosines"]):
        push = jax.linearize(limited(f, policy=policy), 3.0)[1]
        np.testing.assert_allclose(push(1.0), expected, rtol=1e-5)


def test_batches_along_any_axis() -> None:
    g = limited(lambda x: lax.sin(lax.sin(x)))
    x = jnp.arange(15.0).reshape(3, 5)
    np.testing.assert_allclose(jax.vmap(g, 1, 0)(x), np.sin(np.sin(x)).T, rtol=1e-6)
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jacobian(g)(X5), np.diag(np.cos(np.sin(X5)) * np.cos(X5)), atol=1e-6)


def test_second_derivatives_keep_the_decoration() -> None:
    for f in (lambda x: jnp.sin(jnp.sin(x)), lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)):
        g = limited(f)
        np.testing.assert_allclose(jax.grad(jax.grad(g))(0.3), jax.grad(jax.grad(f))(0.3), rtol=1e-5)
        assert "coop_remat" in str(jax.make_jaxpr(jax.grad(jax.grad(g)))(0.3))


def recursive(functions: list[Fn], wrap: Fn) -> Fn:
    """A chain of functions, the first half of every part of it wrapped."""
    if len(functions) <= 2:
        return lambda x: functions[0](functions[-1](x) if len(functions) == 2 else x)
    middle = len(functions) // 2
    first, second = recursive(functions[:middle], wrap), recursive(functions[middle:], wrap)
    return lambda x: first(wrap(second)(x))


@pytest.mark.parametrize("n", [4, 8])
def test_nesting_adds_no_work_where_there_is_room(n: int) -> None:
    """`jax.checkpoint` computes n sines and more again here whether that is needed or not."""
    f = recursive([jnp.sin] * n, limited)
    assert work(jax.value_and_grad(f), 0.5)[:2] == (n, n)


def test_no_more_flops_than_needed_for_a_constant() -> None:
    decorated = limited(lambda x, y: jnp.sin(x) * y)
    assert work(jax.grad(jax.jit(lambda x: decorated(2.0, x))), 3.0)[0] <= 1


def test_forward_programs_hold_no_barrier() -> None:
    g = limited(lambda x: lax.sin(lax.sin(x)), policy=policies.nothing_saveable)
    assert "barrier" not in jax.jit(g).lower(2.0).as_text()
    assert "barrier" in jax.jit(jax.grad(g)).lower(2.0).as_text()


def test_a_scan_over_constants_of_its_surroundings() -> None:
    def f(scale: Any, decorate: Any) -> Any:
        move = decorate(lambda r, i: (r + 0.001 * scale * r, jnp.array([0.0])))
        return lax.scan(move, jnp.ones((5, 3)), jnp.arange(2))[0][0, 0]

    np.testing.assert_allclose(jax.grad(f)(5.0, limited), jax.grad(f)(5.0, lambda f: f), rtol=1e-6)


def test_pytrees_defaults_and_static_counts_in_a_scan() -> None:
    @limited
    def step(state: Any, dt: Any = 0.5, c: Any = 1) -> Any:
        u, v = state
        v = v + c**2 * u * dt
        return u, v

    @functools.partial(jax.jit, static_argnums=1)
    def run(state: Any, count: int, dt: Any) -> Any:
        return lax.scan(lambda s, _: (step(s, dt), _), state, None, count)[0]

    u, v = run((X5, X5 * 0), 4, 1 / jnp.sqrt(2))
    np.testing.assert_allclose(v, 4 * X5 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_array_equal(u, X5)


def test_results_that_nothing_reads_and_calls_without_operands() -> None:
    assert jax.grad(limited(lambda x: jax.jit(lambda: (x, x))()[1]))(3.0) == 1.0
    assert jax.grad(limited(lambda x: jax.jit(lambda: 3.0)() * x))(3.0) == 3.0
    inner = limited(lambda x: jax.grad(lambda x: (x, x)[0])(x), policy=policies.dots_saveable)
    assert jax.grad(inner)(3.0) == 0.0
    stacked = limited(lambda c, xs: lax.scan(lambda c, x: (jnp.sin(c * x.sum()), c), c, xs))
    found = jax.grad(lambda c: stacked(c, W5)[0].sum())(X5)
    expected = jax.grad(lambda c: lax.scan(lambda c, x: (jnp.sin(c * x.sum()), c), c, W5)[0].sum())(X5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_einsum_and_products_under_jit() -> None:
    def f(w: Any, x: Any) -> Any:
        a = jnp.dot(x, w)
        b = jnp.einsum("btd,bTd->btT", a, a)
        return jnp.sum(jnp.einsum("btT,btd->btd", b, a))

    args = M2, jnp.ones((1, 3, 2))
    np.testing.assert_allclose(jax.grad(limited(f))(*args), jax.grad(f)(*args), rtol=1e-5)


def test_names_of_pytrees_and_in_batches() -> None:
    def f(x: Any) -> Any:
        return checkpoint_name({"a": x * 2.0}, "y")["a"] + 1.0

    decorated = limited(f, policy=POLICIES["y"])
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(decorated)(x), f(x))
    np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(decorated)(x).sum())(x), np.full((2, 3), 2.0))


def test_a_result_may_be_saved_as_well() -> None:
    @functools.partial(limited, policy=POLICIES["y"])
    def f(x: Any) -> Any:
        y = jax.jit(lambda: checkpoint_name(jnp.sin(x), "y"))()
        return y, y * y

    np.testing.assert_allclose(
        jax.grad(lambda x: f(x)[0] ** 2 + f(x)[1])(1.0), 4 * np.sin(1.0) * np.cos(1.0), rtol=1e-6
    )


def test_unused_results_are_no_work() -> None:
    both = limited(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    jaxpr = jax.make_jaxpr(lambda x, y: both(x, y))(1.0, 2.0)
    first, _ = compat.open_jaxpr(with_results(jaxpr, [0]))
    (eqn,) = compat.without_dead_code(first).eqns
    assert "coop_remat" in str(eqn)
    assert "cos" not in str(eqn)
    assert (len(eqn.invars), len(eqn.outvars)) == (1, 1)


def test_functions_are_traced_once_for_each_shape_and_static_value() -> None:
    traced = []

    @functools.partial(limited, static_argnums=1)
    def g(x: Any, positive: bool) -> Any:
        traced.append(positive)
        return lax.sin(x) if positive else lax.cos(x)

    for _ in range(3):
        g(2.0, True)
        g(2.0, False)
    assert traced == [True, False]


def test_pullbacks_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from coop_jax import lowering

    planned = []
    plan = lowering.plan_joint
    monkeypatch.setattr(lowering, "plan_joint", lambda *args: planned.append(1) or plan(*args))
    doubled = limited(jax.jit(lambda x: 2 * x))
    for _ in range(5):
        y, pull = jax.vjp(doubled, 1.0)
        assert (y, pull(1.0)[0]) == (2.0, 2.0)
    assert len(planned) == 1


def test_narrow_values_are_rounded_as_in_the_plain_function() -> None:
    """XLA may carry a bfloat16 value unrounded into the next kernel, decorated or not."""

    @jax.custom_vjp
    def widened(x: Any) -> Any:
        return x.astype("float32")

    widened.defvjp(lambda x: (widened(x), x), lambda x, g: ((x * g).astype("bfloat16"),))
    x = (1 + jnp.finfo("bfloat16").eps) * jnp.eye(2, dtype="bfloat16")

    def both(decorate: Any) -> Any:
        return jax.jit(lambda x: jax.vjp(decorate(lambda x: widened(x @ x)), x)[1](jnp.ones((2, 2))))(x)

    np.testing.assert_array_equal(*(both(d)[0].astype("float32") for d in (limited, lambda f: f)))


def test_gradients_may_be_accumulated_in_a_reference() -> None:
    f = limited(jnp.sin)
    _, pull = jax.vjp(f, 2.0)
    total = jax.new_ref(jnp.zeros(()))
    pull.with_refs(total)(1.0)
    np.testing.assert_allclose(total[...], jnp.cos(2.0), rtol=1e-6)


@pytest.mark.parametrize("static", [False, True])
def test_errors_show_the_users_line(static: bool) -> None:
    def f(x: Any, _: Any) -> Any:
        return x if x > 0 else jnp.sin(x)

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        limited(f, **({"static_argnums": 1} if static else {}))(3.0, 1.0)
    assert "x if x > 0" in str(error.getrepr())


def test_escaped_tracers_are_found() -> None:
    def f() -> None:
        seen = [jnp.zeros([])]

        def g() -> Any:
            seen[0] += 1
            return seen[0]

        limited(g)()
        limited(lambda: g())()

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(f)()


def test_static_values_must_be_hashable() -> None:
    f = limited(lambda x, scale: x * scale["by"], static_argnums=1)
    with pytest.raises(ValueError, match="hashable"):
        f(X5, {"by": 2.0})


def test_nothing_keeps_a_function_alive() -> None:
    def f(x: Any) -> Any:
        return jnp.sin(x)

    decorated = limited(f)
    jax.grad(decorated)(1.0)
    alive = weakref.ref(f)
    del f, decorated
    jax.clear_caches()
    gc.collect()
    assert alive() is None
