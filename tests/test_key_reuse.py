"""`jax_debug_key_reuse` sees into decorated functions, and reports no key that a plan uses again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coop_jax.remat import remat

X = jnp.ones((8, 8))
Loss = Callable[[Any, Any], Any]


def uniform(key: Any) -> Any:
    return jax.random.uniform(key, X.shape)


def twice(x: Any, key: Any) -> Any:
    return jnp.sum(jnp.sin(x * uniform(key)) + uniform(key))


def split(x: Any, key: Any) -> Any:
    first, second = jax.random.split(key)
    return jnp.sum(jnp.sin(x * uniform(first)) * uniform(second))


def unused(x: Any, key: Any) -> Any:
    del key
    return jnp.sum(x)


def decorated(f: Any) -> Any:
    return remat(f, budget="1TiB")


@pytest.fixture(autouse=True)
def looked_for() -> Iterator[None]:
    """Keys that are used twice are looked for."""
    with jax.debug_key_reuse(True):
        yield


WITHIN: dict[str, Callable[[Loss], Loss]] = {
    "jit": lambda f: jax.jit(decorated(f)),
    "outside jit": decorated,
    "gradient": lambda f: jax.jit(jax.grad(decorated(f))),
    "checkpoint inside": lambda f: jax.jit(jax.grad(decorated(jax.checkpoint(f)))),
    "batch": lambda f: jax.jit(lambda x, key: jax.vmap(decorated(f), (None, 0))(x, jax.random.split(key, 2))),
    "used after": lambda f: jax.jit(lambda x, key: decorated(f)(x, key) + uniform(key)),
    "used after, gradient": lambda f: jax.jit(lambda x, key: jax.grad(decorated(f))(x, key) + uniform(key)),
    "used before": lambda f: jax.jit(lambda x, key: uniform(key) + decorated(f)(x, key)),
    "used after, outside jit": lambda f: lambda x, key: decorated(f)(x, key) + uniform(key),
}
"""Programs around a loss."""


@pytest.mark.parametrize("way", WITHIN.values(), ids=WITHIN.keys())
def test_a_key_that_is_used_twice_inside_is_reported(way: Callable[[Loss], Loss]) -> None:
    with pytest.raises(jax.errors.KeyReuseError):
        way(twice)(X, jax.random.key(0))


@pytest.mark.parametrize("name", WITHIN)
def test_a_key_is_used_once_inside_and_may_not_be_used_outside(name: str) -> None:
    run = WITHIN[name](split)
    if not name.startswith("used"):
        run(X, jax.random.key(0))
        return
    with pytest.raises(jax.errors.KeyReuseError):
        run(X, jax.random.key(0))


@pytest.mark.parametrize("name", ["jit", "gradient", "used after", "used after, gradient", "used before"])
def test_a_key_that_is_not_used_inside_may_be_used_outside(name: str) -> None:
    WITHIN[name](unused)(X, jax.random.key(0))


def test_a_key_that_is_returned_is_used_once() -> None:
    def loss(x: Any, key: Any) -> tuple[Any, Any]:
        mine, others = jax.random.split(key)
        return jnp.sum(jnp.sin(x * uniform(mine))), others

    def step(x: Any, key: Any, times: int) -> Any:
        (value, key), gradient = jax.value_and_grad(decorated(loss), has_aux=True)(x, key)
        return gradient, value + sum(uniform(key) for _ in range(times))

    jax.jit(step, static_argnums=2)(X, jax.random.key(0), 1)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.jit(step, static_argnums=2)(X, jax.random.key(0), 2)


@pytest.mark.parametrize("inside", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_random_bits_that_a_plan_makes_again_are_not_reported(inside: Callable[[Loss], Loss]) -> None:
    policy = jax.checkpoint_policies.nothing_saveable
    run = jax.jit(jax.grad(remat(inside(split), budget="1TiB", policy=policy)))
    run(X, jax.random.key(0))


def test_the_plain_program_that_a_fraction_is_taken_of_is_not_reported() -> None:
    jax.jit(remat(jax.grad(jax.checkpoint(split)), budget=1.0)).lower(X, jax.random.key(0)).compile()
