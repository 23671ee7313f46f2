"""Calls, rules, control flow, effects and references inside and around a decorated function.

The plain function decides: every case gives its numbers. Sizes are tiny; `tests/test_autodiff.py` has the
transformations themselves and `tests/test_scan.py` the plans.
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
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from jax.experimental import pallas as pl

from coop_jax.remat import remat

KEY = jax.random.key(0)
WS = jax.random.normal(KEY, (6, 8, 8)) * 0.3
W = WS[0]
X = jax.random.normal(jax.random.fold_in(KEY, 1), (16, 8))

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]
policies = jax.checkpoint_policies


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) * jnp.sin(x)


def loss(w: Any, x: Any) -> Any:
    return layer(w, layer(w, x)).sum()


def scanned(ws: Any, x: Any, **options: Any) -> Any:
    return lax.scan(lambda h, w: (layer(w, h), None), x, ws, **options)[0].sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tripled(f: Any, x: Any) -> Any:
    return f(x)


tripled.defvjp(lambda f, x: (f(x), x), lambda f, x, g: (3 * g * f(x),))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def pushed(f: Any, x: Any) -> Any:
    return f(x)


pushed.defjvp(lambda f, p, t: (pushed(f, *p), 3 * t[0]))


@jax.custom_jvp
def host_sin(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


host_sin.defjvp(lambda p, t: (host_sin(*p), jnp.cos(p[0]) * t[0]))


@jax.custom_batching.custom_vmap
def batched_otherwise(x: Any) -> Any:
    return jnp.sin(x)


batched_otherwise.def_vmap(lambda n, batched, x: (jnp.cos(x), batched[0]))


def doubled_by_pallas(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def named(w: Any, x: Any) -> Any:
    return checkpoint_name(layer(w, checkpoint_name(layer(w, x), "h")), "k").sum()


def dropout(ws: Any, x: Any, key: Any) -> Any:
    def body(h: Any, wk: Any) -> Any:
        w, k = wk
        return jnp.where(jax.random.bernoulli(k, 0.5, h.shape), layer(w, h), 0.0), None

    return lax.scan(body, x, (ws, jax.random.split(key, len(ws))))[0].sum()


def cube_root(a: Any) -> Any:
    def newton(f: Any, y: Any) -> Any:
        del f
        return lax.fori_loop(0, 20, lambda _, y: y - (y**3 - a) / (3 * y * y), y)

    return lax.custom_root(lambda y: y**3 - a, 1.0, newton, lambda g, y: y / g(1.0))


def with_ref(w: Any, x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = layer(w, ref[...])
    ref[...] = layer(w, ref[...])
    return ref[...].sum()


def with_ref_in_scan(ws: Any, x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(x))

    def body(h: Any, w: Any) -> Any:
        ref[...] = ref[...] + h
        return layer(w, h), None

    return lax.scan(body, x, ws)[0].sum(), ref[...]


def with_outer_ref(d: Decorate) -> Any:
    ref = jax.new_ref(X)

    def f(x: Any) -> Any:
        ref[...] = ref[...] + x
        return ref[...].sum()

    return jax.jit(d(f))(X), ref[...]


def with_ref_as_argument(d: Decorate) -> Any:
    def f(ref: Any, x: Any) -> Any:
        ref[...] = ref[...] * x
        return ref[...].sum()

    ref = jax.new_ref(X)
    return jax.jit(lambda x: d(f)(ref, x))(X), ref[...]


def switched(ws: Any, x: Any, i: Any) -> Any:
    branches = [lambda: loss(ws[0], x), lambda: jnp.exp(x @ ws[1]).sum(), lambda: jnp.zeros(())]
    return lax.switch(i, branches)


def looped(ws: Any, x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, layer(ws[0], c[1])), (0, x))[1]


def binomial(f: Any, n: int, wrap: Any) -> Any:
    """`f` applied `n` times, `wrap` around every half of it."""
    if n == 1:
        return f
    first, second = binomial(f, n // 2, wrap), binomial(f, n - n // 2, wrap)
    return wrap(lambda x: second(first(x)))


def step(ws: Any, x: Any) -> Any:
    return ws - 0.1 * jax.grad(scanned)(ws, x)


def checked(x: Any) -> Any:
    checkify.check(jnp.all(x < 1), "too large: {}", x.max())
    return loss(W, x)


def compiled_grad(f: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(jax.value_and_grad(f))(*args)


CASES: dict[str, Callable[[Decorate], Any]] = {
    # Derivative rules and calls.
    "custom_vjp with a function argument": lambda d: compiled_grad(d(lambda x: tripled(jnp.sin, x).sum()), X),
    "custom_jvp with a function argument": lambda d: compiled_grad(d(lambda x: pushed(jnp.sin, x).sum()), X),
    "custom_jvp, forward mode": lambda d: jax.jvp(d(lambda x: pushed(jnp.sin, x)), (X,), (X,)),
    "custom_vjp in a scan": lambda d: compiled_grad(
        d(lambda ws, x: lax.scan(lambda h, w: (tripled(jnp.sin, h @ w), None), x, ws)[0].sum()), WS, X
    ),
    "custom_vmap": lambda d: jax.vmap(d(batched_otherwise))(X),
    "custom_root": lambda d: compiled_grad(d(cube_root), 8.0),
    "solve": lambda d: compiled_grad(d(lambda w: jnp.linalg.solve(w + 3 * jnp.eye(8), X.T).sum()), W),
    "named_call": lambda d: compiled_grad(d(lambda w, x: jax.named_call(loss, name="block")(w, x)), W, X),
    "jit with shardings inside": lambda d: compiled_grad(
        d(jax.jit(loss, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))), W, X
    ),
    "nested jit": lambda d: compiled_grad(
        d(jax.jit(lambda w, x: jax.jit(loss)(w, jax.jit(layer)(w, x)))), W, X
    ),
    "ffi": lambda d: jax.jit(d(lambda x: jnp.abs(jnp.linalg.qr(x)[1])))(X),
    "pallas": lambda d: jax.jit(d(lambda w, x: jax.grad(loss)(w, x) + doubled_by_pallas(w)))(W, X),
    "optimization_barrier": lambda d: compiled_grad(
        d(lambda w, x: loss(w, lax.optimization_barrier(layer(w, x)))), W, X
    ),
    "closure over an outer value": lambda d: jax.jit(
        lambda x: d(lambda: jax.lax.map(lambda w: loss(w, x), WS))()
    )(X),
    "nothing returned": lambda d: (d(lambda x: None)(X), d(lambda x: {"a": None, "b": ()})(X)),
    "empty arrays": lambda d: compiled_grad(d(lambda x: x.sum()), jnp.zeros((0, 4))),
    "python numbers": lambda d: (d(lambda x: (jnp.sin(x), 3.0))(2.0)[0], jax.grad(d(jnp.sin))(2.0)),
    "a function that takes nothing": lambda d: d(lambda: jnp.ones(3))(),
    "complex numbers": lambda d: compiled_grad(d(lambda x: jnp.abs(jnp.fft.fft(x + 1j * x)).sum()), X),
    "sorting": lambda d: compiled_grad(
        d(lambda x: (jnp.sort(x, axis=0) * jnp.arange(16.0)[:, None]).sum()), X
    ),
    # `jax.checkpoint` inside and around.
    "checkpoint that saves a name": lambda d: compiled_grad(
        d(jax.checkpoint(named, policy=policies.save_only_these_names("h"))), W, X
    ),
    "checkpoint that saves dots": lambda d: compiled_grad(
        d(jax.checkpoint(loss, policy=policies.dots_saveable)), W, X
    ),
    "checkpoint that moves to the host": lambda d: compiled_grad(
        d(
            jax.checkpoint(
                named,
                policy=policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=[],
                    names_which_can_be_offloaded=["h"],
                    offload_src="device",
                    offload_dst="pinned_host",
                ),
            )
        ),
        W,
        X,
    ),
    "checkpoint in checkpoint": lambda d: compiled_grad(d(binomial(jnp.sin, 4, jax.checkpoint)), X[0, 0]),
    "decorated in decorated": lambda d: compiled_grad(binomial(jnp.sin, 4, d), X[0, 0]),
    "vmap of grad of decorated in decorated": lambda d: jax.jit(
        jax.vmap(jax.grad(d(binomial(jnp.sin, 4, d))))
    )(X[0]),
    "checkpoint around": lambda d: compiled_grad(
        jax.checkpoint(d(named), policy=policies.save_only_these_names("h")), W, X
    ),
    "grad of grad through checkpoint": lambda d: jax.jit(
        jax.grad(lambda w: (jax.grad(d(jax.checkpoint(loss)))(w, X) ** 2).sum())
    )(W),
    # Control flow.
    "scan": lambda d: compiled_grad(d(scanned), WS, X),
    "scan, unrolled": lambda d: compiled_grad(d(functools.partial(scanned, unroll=2)), WS, X),
    "scan, reversed": lambda d: compiled_grad(d(functools.partial(scanned, reverse=True)), WS, X),
    "scan of checkpoint": lambda d: compiled_grad(
        d(lambda ws, x: lax.scan(jax.checkpoint(lambda h, w: (layer(w, h), h)), x, ws)[1].sum()), WS, X
    ),
    "scan of scan": lambda d: compiled_grad(
        d(lambda ws, x: lax.scan(lambda h, _: (h + scanned(ws, h), None), x, None, length=3)[0].sum()), WS, X
    ),
    "scan of a decorated step": lambda d: jax.jit(
        lambda ws: lax.scan(lambda ws, x: (d(step)(ws, x), None), ws, jnp.stack([X, X + 1]))[0]
    )(WS),
    "hessian of scan": lambda d: jax.jit(jax.hessian(lambda v: d(scanned)(WS * v[0], X * v[1])))(jnp.ones(2)),
    "grad of grad of scan": lambda d: jax.jit(jax.grad(lambda w: (jax.grad(d(scanned))(w, X) ** 2).sum()))(
        WS
    ),
    "vmap of grad of scan": lambda d: jax.jit(jax.vmap(jax.grad(d(scanned)), in_axes=(None, 0)))(
        WS, jnp.stack([X, X + 1])
    ),
    "jvp of scan": lambda d: jax.jvp(d(scanned), (WS, X), (WS, X)),
    "linearize scan": lambda d: jax.linearize(d(scanned), WS, X)[1](WS, X),
    "associative_scan": lambda d: compiled_grad(d(lambda ws: lax.associative_scan(jnp.matmul, ws).sum()), WS),
    "map": lambda d: compiled_grad(d(lambda ws, x: lax.map(lambda w: loss(w, x), ws).sum()), WS, X),
    "map in batches": lambda d: compiled_grad(
        d(lambda ws, x: lax.map(lambda w: loss(w, x), ws, batch_size=4).sum()), WS, X
    ),
    "cond": lambda d: compiled_grad(
        d(lambda w, x: lax.cond(x.sum() > 0, loss, lambda w, x: -loss(w, x), w, x)), W, X
    ),
    "switch": lambda d: compiled_grad(d(switched), WS, X, 1),
    "while": lambda d: jax.jit(d(looped))(WS, X),
    "while, forward mode": lambda d: jax.jvp(d(looped), (WS, X), (WS, X)),
    "fori": lambda d: compiled_grad(
        d(lambda ws, x: lax.fori_loop(0, 5, lambda i, h: layer(ws[i], h), x).sum()), WS, X
    ),
    "random bits in a scan": lambda d: compiled_grad(d(dropout), WS, X, KEY),
    # References.
    "reference inside": lambda d: jax.jit(d(with_ref))(W, X),
    "reference inside, gradient": lambda d: compiled_grad(d(with_ref), W, X),
    "reference in a scan": lambda d: jax.jit(d(with_ref_in_scan))(WS, X),
    "reference from outside": with_outer_ref,
    "reference as an argument": with_ref_as_argument,
    # The outside world.
    "donated": lambda d: jax.jit(d(step), donate_argnums=0)(WS + 0, X),
    "ahead of time": lambda d: jax.jit(jax.grad(d(scanned))).lower(WS, X).compile()(WS, X),
    "pure_callback": lambda d: compiled_grad(d(lambda w, x: host_sin(layer(w, x)).sum()), W, X),
    "checkify": lambda d: checkify.checkify(d(checked))(X / 10)[1],
    "two decorated": lambda d: compiled_grad(
        lambda w, x: d(lambda y: jnp.sin(y).sum())(d(layer)(w, x)), W, X
    ),
}


@functools.cache
def plain_result(case: str) -> Any:
    return CASES[case](lambda f: f)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_functions_numbers(case: str) -> None:
    found, expected = CASES[case](lambda f: remat(f, budget="1TiB")), plain_result(case)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", [lambda f: f, jax.value_and_grad, lambda f: jax.jit(jax.grad(f))])
def test_a_failed_check_is_reported(change: Any) -> None:
    error, _ = checkify.checkify(change(remat(checked, budget="1TiB")))(X + 10)
    with pytest.raises(checkify.JaxRuntimeError, match="too large"):
        error.throw()


@pytest.mark.parametrize("differentiated", [False, True])
def test_ordered_effects_happen_once_and_in_order(differentiated: bool) -> None:
    seen: list[float] = []

    def f(w: Any, x: Any) -> Any:
        io_callback(lambda: seen.append(1), None, ordered=True)
        y = layer(w, x)
        io_callback(lambda: seen.append(2), None, ordered=True)
        return y.sum()

    decorated = remat(f, budget="1TiB")
    jax.block_until_ready(jax.jit(jax.grad(decorated) if differentiated else decorated)(W, X))
    jax.effects_barrier()
    assert seen == [1, 2]


def test_effects_in_a_scan_happen_once_per_turn() -> None:
    seen: list[int] = []

    def f(ws: Any, x: Any) -> Any:
        def body(h: Any, wi: Any) -> Any:
            w, i = wi
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return layer(w, h), None

        return lax.scan(body, x, (ws, jnp.arange(6)))[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(remat(f, budget="1TiB")))(WS, X))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]


def sines(f: Callable[..., Any], *args: Any) -> int:
    """How many sines are computed by the program that XLA is given."""
    return jax.jit(f).lower(*args).as_text().count("stablehlo.sine")


def sine_chain(x: Any) -> Any:
    return jnp.sin(jnp.sin(jnp.sin(x))).sum()


@pytest.mark.parametrize(
    ("transform", "least"),
    [
        (lambda f: f, 3),
        (jax.grad, 2),
        (jax.value_and_grad, 3),
        (lambda f: lambda x: jax.jvp(f, (x,), (x,)), 3),
        (lambda f: lambda x: jax.vjp(f, x)[1](1.0), 2),
        (lambda f: jax.vmap(jax.grad(f)), 2),
        (lambda f: jax.grad(lambda x: 2 * f(x)), 2),
        (lambda f: jax.checkpoint(lambda x: f(x)), 3),
    ],
    ids=["value", "grad", "value_and_grad", "jvp", "vjp", "vmap of grad", "grad around", "checkpoint around"],
)
def test_nothing_is_computed_twice_without_need(transform: Any, least: int) -> None:
    """A large budget adds no work: the program has as many sines as the plain one after dead code is gone."""
    found = sines(transform(remat(sine_chain, budget="1TiB")), X)
    assert least <= found <= max(least, sines(transform(sine_chain), X))


def test_the_users_checkpoint_stays_a_checkpoint_in_a_plan() -> None:
    """What `jax.checkpoint` recomputes is not kept, whatever the planner does beside it."""
    ws = jnp.ones((8, 64, 64)) / 64
    x = jnp.ones((512, 64))

    def chain(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def temp_bytes(f: Callable[..., Any]) -> int:
        return int(jax.jit(f).lower(ws, x).compile().memory_analysis().temp_size_in_bytes)

    def by_halves(ws: Any, x: Any) -> Any:
        half = jax.checkpoint(lambda ws, x: lax.fori_loop(0, 1, lambda _, x: x, chain_to(ws, x)))
        return half(ws[4:], half(ws[:4], x)).sum()

    def chain_to(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    gradient = jax.grad(by_halves)
    plain = temp_bytes(gradient)
    assert plain < temp_bytes(jax.grad(chain))
    memory = jax.jit(gradient).lower(ws, x).compile().memory_analysis()
    budget = memory.argument_size_in_bytes + memory.output_size_in_bytes + int(0.9 * plain)
    assert temp_bytes(remat(gradient, budget=budget)) <= int(0.9 * plain)
    np.testing.assert_allclose(
        jax.jit(remat(gradient, budget=budget))(ws, x), jax.jit(gradient)(ws, x), rtol=1e-5
    )
