"""Arguments of other kinds than arrays, and those that a function changes in place."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop

limited = functools.partial(coop.remat, budget="1TiB")
X = jnp.arange(1.0, 7.0).reshape(2, 3)


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


class Point(NamedTuple):
    x: Any
    y: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    w: Any
    name: str = dataclasses.field(default="s", metadata={"static": True})


class Color(enum.Enum):
    RED = 1


class Scale:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by


def affine(x: Any, *rest: Any, scale: Any = 1.0, **more: Any) -> Any:
    return x * scale + sum(rest) + sum(more.values())


TREES = {
    "namedtuple": (lambda p: Point(p.y, p.x * 2), Point(X, 3.0)),
    "dataclass": (lambda s: State(s.w * 2, s.name), State(X)),
    "none": (lambda t: {"a": t["a"] * 2, "b": t["b"]}, {"a": X, "b": None}),
    "ordered": (lambda d: type(d)((k, v + 1) for k, v in d.items()), collections.OrderedDict(b=X, a=1)),
    "numpy": (lambda t: [v * 2 for v in t], [np.ones(3, np.int8), np.float32(2), 3, 2.5, True, 1j]),
    "key": (lambda k: (jax.random.bits(k), k), jax.random.key(0)),
    "partial": (lambda f: f(3.0), jax.tree_util.Partial(affine, X)),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_come_and_go_as_under_jit(name: str) -> None:
    function, tree = TREES[name]
    for found in (limited(function)(tree), jax.jit(limited(function))(tree)):
        wanted = jax.jit(function)(tree)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            assert bool(jnp.all(a == b))


CALLABLES = {
    "partial": functools.partial(affine, scale=2.0),
    "Partial": jax.tree_util.Partial(affine, scale=2.0),
    "jitted": jax.jit(functools.partial(affine, scale=2.0)),
    "object": Scale(2.0),
    "method": Scale(2.0).__call__,
    "ufunc": jnp.square,
    "custom": jax.nn.relu6,
}


@pytest.mark.parametrize("name", CALLABLES)
def test_whatever_can_be_called_can_be_decorated(name: str) -> None:
    function = CALLABLES[name]
    same(limited(function)(X), function(X))
    same(jax.grad(lambda x: limited(function)(x).sum())(X), jax.grad(lambda x: function(x).sum())(X))


def test_arguments_are_passed_in_every_way() -> None:
    same(
        limited(affine)(X, 1.0, np.ones(3), scale=3, a=X, b=2), affine(X, 1.0, np.ones(3), scale=3, a=X, b=2)
    )
    named = limited(lambda x, n, /, *, f, **more: f(x**n) + more["k"], static_argnums=1, static_argnames="k")
    same(named(X, 2, f=jnp.sin, k=1), jnp.sin(X**2) + 1)
    same(jax.grad(lambda x: named(x, 2, f=jnp.sin, k=1).sum())(X), jnp.cos(X**2) * 2 * X)
    last = limited(lambda x, f, n=2: f(x) * range(9)[n], static_argnums=-1)
    same(last(X, jnp.sin), jnp.sin(X) * 2)
    same(last(X, jnp.sin, 3), jnp.sin(X) * 3)
    with pytest.raises(ValueError, match="nobody"):
        limited(lambda x: x, static_argnames="nobody")


def test_leaves_that_are_no_arrays_are_part_of_the_program() -> None:
    traced = []

    @limited
    def f(x: Any, act: Any, **options: Any) -> Any:
        traced.append(act)
        assert options == {
            "mode": ("a", {"b": "c"}),
            "color": Color.RED,
            "dtype": np.dtype("f4"),
            "kind": jnp.float32,
        }
        return act(x)

    options: dict[str, Any] = {
        "mode": ("a", {"b": "c"}), "color": Color.RED, "dtype": np.dtype("f4"), "kind": jnp.float32,
    }  # fmt: skip
    for act in (jnp.sin, jnp.cos, jnp.sin, jnp.cos):
        same(f(X, act, **{**options, "mode": ("a", {"b": "c"})}), act(X))
        same(jax.jit(lambda x, act=act: f(x, act, **options))(X), act(X))
    assert traced == [jnp.sin, jnp.cos]


def test_static_numbers_are_told_apart() -> None:
    f = limited(lambda x, n: x * (type(n) is int) + np.copysign(2.0, n), static_argnums=1)
    same(
        [f(X, 1), f(X, 1.0), f(X, True), f(X, 0.0), f(X, -0.0)],
        [X + 2, 0 * X + 2, 0 * X + 2, 0 * X + 2, 0 * X - 2],
    )


def test_results_that_are_no_arrays_come_back() -> None:
    found = limited(lambda x: {"y": x * 2, "act": jnp.sin, "name": "n", "set": {1}})(X)
    assert (found["act"], found["name"], found["set"]) == (jnp.sin, "n", {1})
    same(found["y"], X * 2)


def test_a_leaf_that_cannot_be_static_is_named() -> None:
    with pytest.raises(coop.ArgumentError, match=r"`batch\['names'\]` is a ndarray of dtype <U1"):
        limited(lambda batch: batch["x"])({"x": X, "names": np.array(["a"])})
    with pytest.raises(coop.ArgumentError, match=r"`rest\[0\]` is a set"):
        limited(lambda x, *rest: x)(X, {1})


class Trainer:
    """A plain class: no pytree, compared by identity."""

    def __init__(self, w: Any) -> None:
        self.w, self.inner, self.calls = w, Scale(1.0), 0

    @limited
    def loss(self, x: Any) -> Any:
        self.calls += 1
        return (self.inner(x) * self.w).sum()

    @limited
    def leak(self, x: Any) -> Any:
        self.w = self.w * x.sum()
        return x


@dataclasses.dataclass
class Config:
    w: Any
    layers: list[Any] = dataclasses.field(default_factory=list)

    @limited
    def loss(self, x: Any) -> Any:
        return (self.w * x).sum() + len(self.layers)


def test_methods_see_what_their_object_holds_now() -> None:
    trainer, bound = Trainer(2.0), limited(Trainer(2.0).loss)
    same([trainer.loss(X), bound(X)], [2 * X.sum(), 2 * X.sum()])
    assert trainer.calls == 1
    for w in (jnp.float32(3), np.float32(4)):
        trainer.w = w
        same(trainer.loss(X), w * X.sum())
    trainer.inner.by = 2.0
    same([trainer.loss(X), jax.jit(trainer.loss)(X)], [8 * X.sum(), 8 * X.sum()])
    same(jax.grad(lambda w: Trainer(w).loss(X))(2.0), X.sum())
    for w in (1.0, 2.0):
        same(jax.jit(lambda w: Trainer(w).loss(X))(w), w * X.sum())
    scale = Scale(2.0)
    called = limited(scale)
    same(called(X), 2 * X)
    scale.by = 3.0
    same(called(X), 3 * X)
    config = Config(jnp.float32(2))
    same(config.loss(X), 2 * X.sum())
    config.layers.append("one")
    same(config.loss(X), 2 * X.sum() + 1)


class Holder:
    """Holds what may be changed in place."""

    __slots__ = ("__private", "held")

    def __init__(self, held: Any) -> None:
        self.held, self.__private = held, 1.0

    def set_private(self, value: float) -> None:
        self.__private = value

    @limited
    def first(self, x: Any) -> Any:
        held = self.held
        for _ in range(8):
            if isinstance(held, dict):
                held = held["a"]
            elif isinstance(held, Scale):
                held = held.by
            elif isinstance(held, functools.partial):
                held = held.args[0]
            elif hasattr(held, "__len__"):
                held = len(held) if isinstance(held, set) else held[0]
        return x * float(held) * self.__private


class Row(list[Any]):
    by: float


def deep(depth: int) -> list[Any]:
    return [deep(depth - 1)] if depth else [2.0]


def innermost(held: list[Any]) -> list[Any]:
    return innermost(held[0]) if isinstance(held[0], list) else held


def set_first(held: Any) -> None:
    held[0] = 5.0


HELD = {
    "a NumPy array": (np.ones(3) * 2, set_first, 5),
    "an array of arrays": (np.array([np.ones(2), None], dtype=object), lambda a: set_first(a[0]), 5),
    "a set": ({1.0}, lambda held: held.add(2.0), 2),
    "a deque": (collections.deque([2.0]), set_first, 5),
    "an ordered dict": (collections.OrderedDict(a=2.0), lambda held: held.update(a=5.0), 5),
    "a list of a class": (Row([2.0]), set_first, 5),
    "an attribute of a list": (Row([Scale(2.0)]), lambda held: setattr(held[0], "by", 5.0), 5),
    "what a partial is given": (functools.partial(print, [2.0]), lambda held: set_first(held.args[0]), 5),
    "deep lists": (deep(6), lambda held: set_first(innermost(held)), 5),
    "many values": ([2.0] * 20_000, set_first, 5),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_changed_in_place_is_seen(name: str) -> None:
    held, change, expected = HELD[name]
    holder = Holder(held)
    before = holder.first(X)
    change(held)
    after = holder.first(X)
    same(after, X * expected)
    assert not np.array_equal(after, before)
    holder.set_private(3.0)
    same(holder.first(X), X * expected * 3)


def test_what_is_made_to_be_looked_at_is_not_taken_for_something_else() -> None:
    """Attributes come as a dict that is gone when the next one comes, often at the same address."""
    rows = [Row() for _ in range(20)]
    for i, row in enumerate(rows):
        row.by = float(i)

    class Sum:
        def __init__(self) -> None:
            self.rows = rows

        @limited
        def scaled(self, x: Any) -> Any:
            return x * sum(row.by for row in self.rows)

    total, expected = Sum(), float(sum(range(20)))
    for row in rows:
        same(total.scaled(X), X * expected)
        row.by += 1
        expected += 1


def test_what_is_not_changed_is_not_traced_again() -> None:
    traced = []

    class Loop:
        def __init__(self) -> None:
            self.me, self.rows, self.log = self, [np.ones(2), {"a": {3}}], logging.getLogger("loop")
            self.rows.append(self.rows)

        @limited
        def scaled(self, x: Any) -> Any:
            traced.append(self)
            return x * self.me.rows[0][0]

    loop = Loop()
    for _ in range(3):
        same(loop.scaled(X), X)
    assert len(traced) == 1
    loop.rows[0] = loop.rows[0].copy()
    same(loop.scaled(X), X)
    assert len(traced) == 1


@jax.tree_util.register_pytree_node_class
class Box:
    """A pytree that may be changed in place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, aux: None, leaves: tuple[Any]) -> Box:
        return cls(*leaves)


CHANGES = {
    "a dict": (lambda batch: batch.update(x=batch["x"] * 2), {"x": X}, r"`batch\['x'\]`"),
    "a removed key": (lambda batch: batch.pop("x"), {"x": X, "y": X}, "`batch`"),
    "a list": (lambda state: state.append(state[0]), [X], "`state`"),
    "a list inside": (lambda state: state["a"].clear(), {"a": [X]}, "`state`"),
    "a pytree": (lambda box: setattr(box, "value", box.value + 1), Box(X), "`box"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_changes_in_place_are_refused(outer: Any, name: str) -> None:
    function, argument, place = CHANGES[name]
    with pytest.raises(coop.ArgumentError, match=f"changes {place}.*Return the new value"):
        outer(limited(function))(argument)


def test_an_object_that_would_keep_a_tracer_is_refused() -> None:
    with pytest.raises(coop.ArgumentError, match=r"changes `self\.w` in place"):
        Trainer(2.0).leak(X)

    class Empty:
        @limited
        def leak(self, x: Any) -> Any:
            self.y = x * 2
            return x

    with pytest.raises(coop.ArgumentError, match=r"changes `self\.y` in place"):
        Empty().leak(X)


def test_pytrees_that_make_their_leaves_anew_are_not_taken_for_changed() -> None:
    class Fresh(Box):
        def tree_flatten(self) -> tuple[tuple[Any], None]:
            return (self.value * 1,), None

    jax.tree_util.register_pytree_node(Fresh, Fresh.tree_flatten, lambda aux, leaves: Fresh(*leaves))
    same(limited(lambda box: box.value + 1)(Fresh(X)), X + 1)


def test_pinned_programs_take_everything() -> None:
    pinned = coop.remat(affine, budget="1TiB", pin=True, static_argnames="scale")
    for scale in (2, 3, 2):
        same(pinned(X, np.ones(3), scale=scale), X * scale + 1)
    mixed = coop.remat(lambda f, x: {"y": f(x), "f": f}, budget="1TiB", pin=True)
    same(mixed(jnp.sin, X)["y"], jnp.sin(X))
    assert mixed(jnp.cos, X)["f"] is jnp.cos


def test_optax_states_and_optimizers_are_trees_of_arrays_and_functions() -> None:
    optax = pytest.importorskip("optax", reason="needs optax: pip install -e '.[examples]'")
    optimizer = optax.masked(optax.sgd(1e-2, momentum=0.9), {"w": True, "b": False})
    params = {"w": X, "b": X[0]}

    def step(optimizer: Any, params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    same(limited(step)(optimizer, params, state), step(optimizer, params, state))


def test_haiku_functions_are_functions() -> None:
    haiku = pytest.importorskip("haiku", reason="needs dm-haiku: pip install -e '.[test]'")
    net = haiku.transform_with_state(
        lambda x: haiku.BatchNorm(True, True, 0.9)(haiku.Linear(3)(x), True) + x[0]
    )
    params, state = jax.jit(net.init)(jax.random.key(0), X)

    def loss(params: Any, state: Any, key: Any, x: Any) -> Any:
        y, state = net.apply(params, state, key, x)
        return ((y - x) ** 2).mean(), state

    run, plain = (jax.jit(jax.value_and_grad(f, has_aux=True)) for f in (limited(loss), loss))
    same(run(params, state, jax.random.key(1), X), plain(params, state, jax.random.key(1), X))


def test_a_view_of_a_reference_is_taken_apart_as_jit_does() -> None:
    def doubled(view: Any) -> Any:
        view[...] = 2 * view[...]
        return view[...].sum()

    @jax.jit
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        return coop.remat(doubled, budget="1MiB")(ref.at[1:3]), ref[...]

    total, held = f(jnp.arange(4.0))
    assert float(total) == 6
    np.testing.assert_array_equal(held, [0, 2, 4, 3])
