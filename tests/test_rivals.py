"""The rivals that `coop.pareto` finds by itself: natural blocks, as under policies of `jax.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax import aot
from coop_jax.rivals import natural_rivals
from passes.jaxpr import compat
from passes.jaxpr.blocks import POLICIES, find_blocks
from passes.jaxpr.inline import inline_calls

SPEC = jax.ShapeDtypeStruct
LAYERS, WIDTH, ROWS = 3, 32, 512
X = SPEC((ROWS, WIDTH), jnp.float32)
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
POLICY = {name: getattr(jax.checkpoint_policies, name) for name in POLICIES}


def layer(w: Any, x: jax.Array) -> jax.Array:
    """Two products, and what is elementwise around them."""
    h = jax.nn.gelu((x - x.mean(-1, keepdims=True)) @ w["up"])
    return x + jnp.tanh(h @ w["down"])


def weights(n: int) -> list[Any]:
    up, down = SPEC((WIDTH, 2 * WIDTH), jnp.float32), SPEC((2 * WIDTH, WIDTH), jnp.float32)
    return [{"up": up, "down": down}] * n


def unrolled(ws: Any, x: jax.Array, wrap: Wrap = lambda f: f) -> Any:
    """A gradient step over layers in a list, with something before and after them."""
    block = wrap(layer)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        x = jnp.sin(x)
        for w in ws:
            x = block(w, x)
        return jnp.mean(jax.nn.log_softmax(x) ** 2)

    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def scanned(ws: Any, x: jax.Array, wrap: Wrap = lambda f: f) -> Any:
    """The same over stacked layers."""
    block = wrap(layer)

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, ws)[0] ** 2)

    return jax.value_and_grad(loss)(ws, x)


STACKED = jax.tree.map(lambda s: SPEC((LAYERS, *s.shape), s.dtype), weights(1)[0])
STEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "3 blocks": (unrolled, (weights(LAYERS), X)),
    "a scan of 3": (scanned, (STACKED, X)),
}


def arguments(specs: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [jax.random.normal(k, s.shape) / 8 for k, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, values)


@pytest.mark.parametrize("name", STEPS)
def test_layers_are_found_and_need_what_they_need_under_checkpoint_and_compute_the_same(name: str) -> None:
    step, specs = STEPS[name]
    args = arguments(specs)
    rivals = natural_rivals(step, specs)
    assert list(rivals) == [f"{name}: {policy}" for policy in POLICIES]
    plain = jax.jit(step).lower(*specs).compile()
    wanted = jax.tree.leaves(plain(*args))
    for policy, rival in list(zip(POLICIES, rivals.values(), strict=True))[:2]:
        wrap = functools.partial(jax.checkpoint, policy=POLICY[policy])
        by_hand = jax.jit(functools.partial(step, wrap=wrap)).lower(*specs).compile()
        found = jax.jit(rival).lower(*specs).compile()
        hand_bytes, own_bytes, plain_bytes = (aot.memory(c).temp_bytes for c in (by_hand, found, plain))
        assert 0.75 * hand_bytes <= own_bytes <= 1.15 * hand_bytes
        assert own_bytes < plain_bytes
        for a, b in zip(wanted, jax.tree.leaves(found(*args)), strict=True):
            assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


def closed(fn: Callable[..., Any], *specs: Any) -> Any:
    return inline_calls(jax.make_jaxpr(fn)(*specs))


def test_blocks_begin_where_least_is_carried_on() -> None:
    found = find_blocks(compat.open_jaxpr(closed(unrolled, weights(LAYERS), X))[0])
    assert len(found.spans) == LAYERS
    eqns = closed(unrolled, weights(LAYERS), X).jaxpr.eqns
    names = [[eqns[i].primitive.name for i in span] for span in found.spans]
    assert all(name.count("dot_general") == 2 for name in names)
    assert [name[-1] for name in names] == ["add"] * LAYERS


def test_what_repeats_nothing_or_is_not_differentiated_has_no_rivals() -> None:
    assert natural_rivals(lambda x: jnp.tanh(x @ x.T), (X,)) == {}
    assert natural_rivals(jax.grad(lambda x: jnp.sin(x).sum()), (X,)) == {}
    assert natural_rivals(lambda ws, x: [layer(w, x) for w in ws], (weights(3), X)) == {}


def test_modules_and_objects_have_none() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install -e '.[examples]'")
    eqx = pytest.importorskip("equinox", reason="needs equinox: pip install -e '.[examples]'")
    x = jnp.ones((4, 4))
    assert natural_rivals(nnx.jit(lambda m, x: m(x).sum()), (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), x)) == {}
    model = eqx.nn.MLP(4, 4, 4, 3, key=jax.random.key(0))
    assert natural_rivals(eqx.filter_grad(lambda m, x: m(x).sum()), (model, x)) == {}


def test_pareto_shows_them_beside_its_curve() -> None:
    found = coop.pareto(scanned, STACKED, X, budgets=["1GiB"])
    assert [r.name for r in found.rivals] == [f"a scan of 3: {policy}" for policy in POLICIES]
    assert "nothing_saveable" in str(found)
    assert coop.pareto(lambda x: x + 1, X, budgets=["1GiB"]).rivals == ()
