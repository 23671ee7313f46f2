"""Flax NNX: objects that a decorated function updates in place are afterwards what they are undecorated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop

nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install -e '.[examples]'")
optax = pytest.importorskip("optax", reason="needs optax: pip install -e '.[examples]'")

LARGE = functools.partial(coop.remat, budget="1GiB")
TIGHT = functools.partial(coop.remat, budget="290KiB")
X = jax.random.normal(jax.random.key(0), (16, 8))
Decorator = Callable[[Any], Any]


def undecorated(fn: Any) -> Any:
    return fn


class Net(nnx.Module):
    """Layers, statistics and random numbers: all that a forward pass updates."""

    def __init__(self, layers: int = 1, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(layers)])
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(self.dropout(x))

    @LARGE
    def loss(self, x: Any) -> Any:
        return loss(self, x)


def loss(model: Any, x: Any) -> Any:
    return ((model(x) - x) ** 3).mean()


def values(*objects: Any) -> list[Any]:
    """All arrays of some objects, the counters and keys of their random streams among them."""
    leaves = [
        x[...] if isinstance(x, jax.Ref) else x for x in jax.tree.leaves([nnx.state(o) for o in objects])
    ]
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def train(compiler: Decorator, whole: Decorator, part: Decorator, model: Any, x: Any) -> list[Any]:
    """Losses of three steps and all state after them."""
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(part(loss))(model, x)
        optimizer.update(model, grads)
        return value

    run = compiler(whole(step))
    losses = [run(model, optimizer, x) for _ in range(3)]
    assert len({float(value) for value in losses}) == 3
    return [losses, values(model, optimizer)]


@functools.cache
def trained() -> list[Any]:
    return train(nnx.jit, undecorated, undecorated, Net(rate=0.3), X)


@pytest.mark.parametrize("where", ["step", "loss"])
def test_updates_of_a_step_and_of_a_loss_are_carried_out(where: str) -> None:
    whole, part = (LARGE if where == name else undecorated for name in ("step", "loss"))
    same(train(nnx.jit, whole, part, Net(rate=0.3), X), trained())


def test_updates_are_carried_out_without_a_jit_around() -> None:
    same(train(undecorated, LARGE, LARGE, Net(rate=0.3), X), trained())


@pytest.mark.parametrize("where", ["step", "loss"])
def test_updates_are_carried_out_where_values_are_recomputed(where: str) -> None:
    whole, part = (TIGHT if where == name else undecorated for name in ("step", "loss"))
    x = jax.random.normal(jax.random.key(1), (1024, 8))
    programs = []

    def compiler(step: Any) -> Any:
        jitted = nnx.jit(step)

        def run(*args: Any) -> Any:
            if not programs:
                programs.append(jitted.lower(*args).compile())
            return programs[0](*args)

        return run

    found = train(compiler, whole, part, Net(6), x)
    same(found, train(nnx.jit, undecorated, undecorated, Net(6), x))
    assert coop.report(programs[0]).changed


@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}], ids=["tree", "no updates"])
def test_the_other_modes_of_nnx_carry_updates_out(mode: dict[str, bool]) -> None:
    def losses(whole: Decorator, part: Decorator) -> list[Any]:
        model = Net()
        model.dropout = nnx.Dropout(0.0)  # these modes differentiate all state, and counters cannot be

        def step(model: Any, x: Any) -> Any:
            value, grads = nnx.value_and_grad(part(loss), **mode)(model, x)
            params, slopes = nnx.state(model, nnx.Param), nnx.state(grads, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, params, slopes))
            return value

        run = nnx.jit(whole(step), **mode)
        return [[run(model, X) for _ in range(3)], values(model)]

    wanted = losses(undecorated, undecorated)
    same(losses(LARGE, undecorated), wanted)
    same(losses(undecorated, LARGE), wanted)


def test_shared_objects_keep_their_identity() -> None:
    def step(holder: Any, model: Any, x: Any) -> Any:
        assert holder.model is model
        value, grads = nnx.value_and_grad(loss)(model, x)
        holder.update(grads)
        model.again = model.norm
        return value

    def run(decorate: Decorator) -> list[Any]:
        model = Net()
        norm, holder = model.norm, nnx.ModelAndOptimizer(model, optax.sgd(1e-2))
        found = [nnx.jit(decorate(step))(holder, model, X) for _ in range(2)]
        assert holder.model is model
        assert model.again is model.norm is norm
        return [found, values(model)]

    same(run(LARGE), run(undecorated))


def test_new_and_removed_parts_and_results_are_carried_out() -> None:
    model = Net()

    def grow(model: Any, x: Any) -> Any:
        model.seen = nnx.Variable(2 * x)
        model.tag = "grown"
        del model.norm
        return model, nnx.Param(x)

    same_model, made = nnx.jit(LARGE(grow))(model, jnp.arange(3.0))
    assert same_model is model
    assert (model.tag, hasattr(model, "norm"), type(made)) == ("grown", False, nnx.Param)
    np.testing.assert_array_equal(model.seen[...], [0, 2, 4])


@pytest.mark.parametrize("transform", ["scan", "vmap", "layers"])
def test_updates_are_carried_out_of_loops_and_batches(transform: str) -> None:
    def run(decorate: Decorator) -> list[Any]:
        stacked = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 3)
        )
        model = Net()
        if transform == "scan":
            body = nnx.scan(
                lambda m, x: (m, decorate(loss)(m, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
            )
            return [body(model, jnp.stack([X, 2 * X]))[1], values(model)]

        def shift(layer: Any, x: Any) -> Any:
            layer.bias[...] += x.mean()
            return layer(x)

        if transform == "vmap":
            return [nnx.vmap(decorate(shift), in_axes=(0, None))(stacked, X), values(stacked)]
        through = nnx.scan(decorate(shift), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        found = nnx.value_and_grad(lambda layers, x: (through(layers, x) ** 2).mean())(stacked, X)
        return [found[0], jax.tree.leaves(found[1]), values(stacked)]

    same(run(LARGE), run(undecorated))


def test_methods_and_modules_may_be_decorated() -> None:
    one, two = Net(), Net()
    call, bound = LARGE(one), LARGE(one.__call__)
    found = [one.loss(X), nnx.jit(Net.loss)(one, X), call(X), call(X), bound(X)]
    same([found, values(one)], [[loss(two, X), loss(two, X), two(X), two(X), two(X)], values(two)])


def test_functions_of_objects_are_traced_once() -> None:
    traced = []

    @LARGE
    def f(parts: Any, *, x: Any) -> Any:
        traced.append(1)
        return loss(parts["model"][0], x)

    for model in (Net(), Net()):
        f({"model": [model]}, x=X)
        f({"model": [model]}, x=X)
    assert len(traced) == 1


def test_what_is_only_read_is_no_result_and_may_come_from_outside_of_the_gradient() -> None:
    model = Net()
    model.eval()
    found = jax.grad(lambda x: LARGE(loss)(model, x))(X)
    same(found, jax.grad(lambda x: loss(model, x))(X))
    graph, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state: LARGE(loss)(nnx.merge(graph, state), X))(state)
    (eqn,) = (e for e in jaxpr.eqns if "coop_remat" in str(e))
    assert len(eqn.outvars) == 1


@pytest.mark.parametrize("compiler", [jax.jit, undecorated], ids=["jax.jit", "eager"])
def test_functions_of_split_state_work(compiler: Decorator) -> None:
    def run(decorate: Decorator) -> list[Any]:
        graph, state = nnx.split(Net())

        def step(state: Any, x: Any) -> Any:
            model = nnx.merge(graph, state, copy=True)
            return loss(model, x), nnx.state(model)

        step = compiler(decorate(step))
        return [step(step(state, X)[1], X)[0]]

    same(run(LARGE), run(undecorated))


def test_references_in_variables_are_written() -> None:
    def run(decorate: Decorator) -> list[Any]:
        with nnx.var_defaults(ref=True):
            model = Net()
        return [[nnx.jit(decorate(loss))(model, X), decorate(loss)(model, X)], values(model)]

    same(run(LARGE), run(undecorated))


def test_pinned_programs_carry_updates_out() -> None:
    def run(decorate: Decorator) -> list[Any]:
        model = Net()
        return [[decorate(loss)(model, X) for _ in range(2)], values(model)]

    pinned = functools.cache(functools.partial(coop.remat, budget="1GiB", pin=True))
    same(run(pinned), run(undecorated))


def test_dicts_beside_modules_may_not_be_changed() -> None:
    def f(model: Any, batch: Any) -> Any:
        batch["y"] = 2 * batch["x"]
        return loss(model, batch["y"])

    with pytest.raises(coop.ArgumentError, match="changes `batch` in place"):
        LARGE(f)(Net(), {"x": X})
