"""Equinox: modules with functions and numbers among their leaves, in steps, losses and methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop

eqx = pytest.importorskip("equinox", reason="needs equinox: pip install -e '.[examples]'")

LARGE = functools.partial(coop.remat, budget="1GiB")
X = jax.random.normal(jax.random.key(0), (16, 8))
Decorator = Callable[[Any], Any]


def undecorated(fn: Any) -> Any:
    return fn


class Net(eqx.Module):
    """Its leaves are arrays, an activation, a number and a flag."""

    mlp: Any
    dropout: Any

    def __init__(self, depth: int = 1, activation: Any = jnp.tanh, rate: float = 0.0) -> None:
        self.mlp = eqx.nn.MLP(8, 8, 8, depth, activation=activation, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: Any, key: Any = None) -> Any:
        return self.dropout(jax.vmap(self.mlp)(x), key=key)

    @LARGE
    def loss(self, x: Any, key: Any = None) -> Any:
        return loss(self, x, key)


def loss(model: Any, x: Any, key: Any = None) -> Any:
    return ((model(x, key) - x) ** 2).mean()


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a is b or a == b


def train(compiler: Decorator, whole: Decorator, part: Decorator, model: Any, x: Any) -> Any:
    """The model after three steps, the losses, and the moments."""

    def step(model: Any, moments: Any, x: Any, key: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(part(loss))(model, x, key)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return eqx.apply_updates(model, jax.tree.map(lambda m: -0.1 * m, moments)), moments, value

    run, losses = compiler(whole(step)), []
    moments = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    for key in jax.random.split(jax.random.key(1), 3):
        model, moments, value = run(model, moments, x, key)
        losses.append(value)
    return model, losses, moments


@functools.cache
def trained() -> Any:
    return train(eqx.filter_jit, undecorated, undecorated, Net(rate=0.2), X)


@pytest.mark.parametrize("where", ["step", "loss"])
def test_steps_and_losses_train_as_undecorated(where: str) -> None:
    whole, part = (LARGE if where == name else undecorated for name in ("step", "loss"))
    same(train(eqx.filter_jit, whole, part, Net(rate=0.2), X), trained())


def test_steps_train_without_a_jit_around() -> None:
    same(train(undecorated, LARGE, undecorated, Net(rate=0.2), X), trained())
    same(train(undecorated, functools.partial(LARGE, pin=True), LARGE, Net(rate=0.2), X), trained())


def test_steps_train_as_undecorated_where_values_are_recomputed() -> None:
    x = jax.random.normal(jax.random.key(1), (1024, 8))
    tight = functools.partial(coop.remat, budget="300KiB")
    found = train(eqx.filter_jit, tight, undecorated, Net(8), x)
    same(found, train(eqx.filter_jit, undecorated, undecorated, Net(8), x))
    grad = eqx.filter_jit(tight(lambda model, x: eqx.filter_value_and_grad(loss)(model, x)))
    assert coop.report(grad.lower(Net(8), x).compile()).recomputed


def test_methods_and_modules_may_be_decorated() -> None:
    model = Net()
    wanted = loss(model, X)
    same([model.loss(X), eqx.filter_jit(Net.loss)(model, X)], [wanted, wanted])
    same([LARGE(model)(X), LARGE(model.__call__)(X)], [model(X), model(X)])
    same(eqx.filter_grad(lambda model: model.loss(X))(model), eqx.filter_grad(loss)(model, X))
    same(LARGE(eqx.filter_value_and_grad(loss))(model, X), eqx.filter_value_and_grad(loss)(model, X))


def test_another_function_in_a_module_is_another_program_and_an_equal_one_is_not() -> None:
    traced = []

    @LARGE
    def f(model: Any, x: Any) -> Any:
        traced.append(model.mlp.activation)
        return model(x)

    models = [Net(), Net(activation=jnp.sin), eqx.tree_at(lambda m: m.mlp.layers[0].bias, Net(), jnp.ones(8))]
    for model in [*models, *models, eqx.nn.inference_mode(models[0])]:
        same(f(model, X), model(X))
    assert len(traced) == 3


def test_modules_are_batched_and_keep_state() -> None:
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 3))
    apply = lambda model, x: jax.vmap(model)(x)  # noqa: E731
    axes = (eqx.if_array(0), None)
    same(
        eqx.filter_vmap(LARGE(apply), in_axes=axes)(models, X),
        eqx.filter_vmap(apply, in_axes=axes)(models, X),
    )
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "rows", mode="batch")

    def normed(model: Any, state: Any, x: Any) -> Any:
        y, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="rows")(x, state)
        return (y**3).mean(), state

    run, plain = (eqx.filter_value_and_grad(f, has_aux=True) for f in (LARGE(normed), normed))
    (found, wanted) = run(norm, state, X), plain(norm, state, X)
    same(found[0][0], wanted[0][0])
    same(jax.tree.leaves(found), jax.tree.leaves(wanted))
