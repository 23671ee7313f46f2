"""The whole program asked for again: fractions of it, and budgets that only another plan keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coop_jax import aot, mark, relowering
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.remat import remat
from tests.models import chain_step

N, ROWS, TIMES = 16, 64, 4
KEY = jax.random.key(0)
WEIGHTS = [jax.random.normal(jax.random.fold_in(KEY, i), (N, N)) / 4 for i in range(3)]
BATCHES = jax.random.normal(KEY, (TIMES, ROWS, N))


def loss(ws: list[Any], x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def accumulated(f: Callable[..., Any]) -> Callable[..., Any]:
    def step(ws: list[Any], xs: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(f)(ws, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, ws), xs)[0]

    return step


def over_layers(f: Callable[..., Any]) -> Callable[..., Any]:
    def whole(ws: list[Any], xs: Any) -> Any:
        def through(w: Any) -> Any:
            h = jax.lax.scan(lambda h, w: (h - f([w], h) * h, None), xs[0], w)[0]
            return jnp.mean(h**2)

        return jax.grad(through)(jnp.stack(ws))

    return whole


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
    "grad of vmap": lambda f: jax.grad(lambda ws, xs: jax.vmap(f, in_axes=(None, 0))(ws, xs).sum()),
    "accumulation in a scan": accumulated,
    "scan over decorated layers": over_layers,
    "two decorated functions": lambda f: (
        lambda ws, xs: (jax.grad(f)(ws, xs[0]), jax.grad(lambda w: f(w, xs[1]) ** 2)(ws))
    ),
    "forward over reverse": lambda f: (
        lambda ws, xs: jax.jvp(lambda w: jax.grad(f)(w, xs[0]), (ws,), (ws,))[1]
    ),
    "jacrev": lambda f: lambda ws, xs: jax.jacrev(lambda w: f(w, xs[0]) * jnp.ones(3))(ws),
    "an optimizer around": lambda f: (
        lambda ws, xs: [w - 0.1 * jnp.tanh(g) for w, g in zip(ws, jax.grad(f)(ws, xs[0]), strict=True)]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fraction_is_of_the_whole_program_under_every_transformation(way: str) -> None:
    taken = WAYS[way]
    plain = jax.jit(taken(loss)).lower(WEIGHTS, BATCHES).compile()
    whole = jax.jit(taken(remat(loss, budget=1.0))).lower(WEIGHTS, BATCHES).compile()
    record = mark.record_of(whole)
    assert record is not None
    assert record.baseline_compiled
    assert record.budget_bytes == record.baseline_total_bytes == aot.memory(plain).total_bytes
    assert aot.memory(whole).total_bytes <= record.budget_bytes
    found, expected = whole(WEIGHTS, BATCHES), plain(WEIGHTS, BATCHES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def branching(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(jnp.sin(x)) * x.sum(), jnp.cos, x)


def test_one_is_met_by_the_programs_that_jax_makes_on_its_way() -> None:
    def linear(f: Callable[..., Any]) -> Any:
        return jax.linearize(f, BATCHES[0])[1](BATCHES[1])

    def second(f: Callable[..., Any]) -> Any:
        return jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(BATCHES[0])

    for taken in (linear, second):
        decorated = remat(jax.jit(branching), budget=1.0)
        np.testing.assert_allclose(taken(decorated), taken(jax.jit(branching)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["called", "lowered", "traced"])
def test_the_plain_program_is_found_however_the_program_is_compiled(how: str) -> None:
    plain = jax.jit(chain_step).lower(WEIGHTS, BATCHES[0]).compile()
    decorated = jax.jit(remat(chain_step, budget=1.0), donate_argnums=0)
    if how == "called":
        decorated(jax.tree.map(jnp.copy, WEIGHTS), BATCHES[0])
    elif how == "traced":
        decorated = decorated.trace(WEIGHTS, BATCHES[0])  # type: ignore[assignment]
    arguments = () if how == "traced" else (WEIGHTS, BATCHES[0])
    record = mark.record_of(decorated.lower(*arguments).compile())
    assert record is not None
    assert record.baseline_compiled
    assert aot.memory(plain).fixed_bytes > record.budget_bytes - aot.memory(plain).temp_bytes


def test_nothing_is_wished_for_outside_of_a_second_look() -> None:
    seen = []

    def watched(ws: list[Any], x: Any) -> Any:
        seen.append(relowering.wish())
        return loss(ws, x)

    jax.jit(jax.grad(remat(watched, budget=0.9))).lower(WEIGHTS, BATCHES[0]).compile()
    assert seen[0] is None
    assert any(wish is not None and wish.plain for wish in seen)
    assert relowering.wish() is None


def test_what_is_decorated_as_a_whole_is_traced_once_however_often_it_is_looked_at() -> None:
    traces = []

    def watched(ws: list[Any], x: Any) -> Any:
        traces.append(relowering.wish())
        return chain_step(ws, x)

    memory = aot.memory(jax.jit(chain_step).lower(WEIGHTS, BATCHES[0]).compile())
    with pytest.raises(InfeasibleBudgetError):
        jax.jit(remat(watched, budget=memory.fixed_bytes + 1)).lower(WEIGHTS, BATCHES[0]).compile()
    jax.jit(remat(watched, budget=0.9)).lower(WEIGHTS, BATCHES[0]).compile()
    assert len(traces) == 2


def test_what_a_refusal_names_is_met_when_asked_and_no_more_than_the_plain_program_needs() -> None:
    plain = jax.jit(chain_step).lower(WEIGHTS, BATCHES[0]).compile()
    memory = aot.memory(plain)
    budget = memory.fixed_bytes + memory.temp_bytes // 6
    with pytest.raises(InfeasibleBudgetError) as caught:
        jax.jit(remat(chain_step, budget=budget)).lower(WEIGHTS, BATCHES[0]).compile()
    least = caught.value.least_bytes
    assert least is not None
    assert budget < least < memory.total_bytes
    met = jax.jit(remat(chain_step, budget=least)).lower(WEIGHTS, BATCHES[0]).compile()
    assert aot.memory(met).total_bytes <= least
    one_less = jax.jit(remat(chain_step, budget=memory.total_bytes)).lower(WEIGHTS, BATCHES[0]).compile()
    assert aot.memory(one_less).total_bytes <= memory.total_bytes


@pytest.mark.parametrize("rows", [62, 63])  # what is known of one program is not known of the other
def test_however_little_is_asked_the_same_least_is_named(rows: int) -> None:
    x = BATCHES[0][:rows]

    def named(budget: int) -> int:
        with pytest.raises(InfeasibleBudgetError) as caught:
            jax.jit(remat(chain_step, budget=budget)).lower(WEIGHTS, x).compile()
        assert caught.value.least_bytes is not None
        return caught.value.least_bytes

    memory = aot.memory(jax.jit(chain_step).lower(WEIGHTS, x).compile())
    almost_nothing = {62: 1, 63: memory.fixed_bytes + 1}[rows]
    assert named(almost_nothing) == named(memory.fixed_bytes + memory.temp_bytes // 8)


def test_an_argument_that_nothing_reads_is_none_of_the_program() -> None:
    def reads_two(ws: list[Any], x: Any, labels: Any) -> Any:
        del labels
        return loss(ws, x)

    arguments = (WEIGHTS, BATCHES[0], jnp.arange(1000))
    plain = jax.jit(jax.grad(reads_two)).lower(*arguments).compile()
    whole = jax.jit(jax.grad(remat(reads_two, budget=1.0))).lower(*arguments).compile()
    assert aot.memory(whole).argument_bytes == aot.memory(plain).argument_bytes
    assert aot.memory(whole).total_bytes <= aot.memory(plain).total_bytes


def test_an_argument_that_no_gradient_depends_on_is_none_of_the_program() -> None:
    def shifted(ws: list[Any], x: Any, shift: Any) -> Any:
        return loss(ws, x) + jnp.tanh(shift).sum()

    arguments = (WEIGHTS, BATCHES[0], jnp.arange(1000.0))
    plain = jax.jit(jax.grad(shifted)).lower(*arguments).compile()
    whole = jax.jit(jax.grad(remat(shifted, budget=1.0))).lower(*arguments).compile()
    assert aot.memory(whole).argument_bytes == aot.memory(plain).argument_bytes
    assert aot.memory(whole).total_bytes <= aot.memory(plain).total_bytes
    second = jax.jit(jax.grad(lambda *a: (jax.grad(remat(shifted, budget=1.0))(*a)[0] ** 2).sum()))
    expected = jax.grad(lambda *a: (jax.grad(shifted)(*a)[0] ** 2).sum())(*arguments)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), second(*arguments), expected
    )


def test_one_is_met_by_programs_of_several_parts_outside_jit() -> None:
    def twice(x: Any) -> Any:
        return jnp.sin(jnp.sin(x))

    found = jax.grad(jax.grad(remat(twice, budget=1.0)))(3.0)
    np.testing.assert_allclose(found, jax.grad(jax.grad(twice))(3.0), rtol=1e-6)


def test_what_arguments_and_results_take_is_not_called_the_least_that_can_be_met() -> None:
    """Outside `jit` the forward pass is a program of its own, and what it keeps is among its results."""
    weights = [jnp.full((64, 64), 0.1 + i) for i in range(4)]

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    with pytest.raises(InfeasibleBudgetError) as refused:
        jax.grad(remat(loss, budget="100 KiB"))(weights, jnp.ones((128, 64)))
    error = refused.value
    assert error.fixed_bytes > error.budget_bytes
    assert not error.proved
    assert error.least_bytes is None
