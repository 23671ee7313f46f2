"""Pairs of conds: what passes from the branches of one to those of a second one, kept or made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import check_jaxpr

from coop_jax import aot
from coop_jax.remat import remat
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.constraints import constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.scans.branches import find_cond_pairs
from passes.jaxpr.scans.choice import InBranches
from passes.jaxpr.scans.emit import rewrite
from passes.jaxpr.scans.frontier import frontier, hand_levels, segment_frontier
from passes.jaxpr.scans.pairs import with_open_pairs
from passes.jaxpr.scans.parts import between
from passes.jaxpr.straight import as_it_is, lift_as_xla
from passes.jaxpr.structured import search_structured
from passes.jaxpr.values import Constraints

KEY = jax.random.key(0)
L, N = 6, 16
WS = jax.random.normal(KEY, (L, N, N)) / 4
X = jax.random.normal(KEY, (64, N))
KINDS = jnp.arange(L) % 3


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


def elementwise(w: Any, x: Any) -> Any:
    return jnp.sin(jnp.sin(x) * x)


def dropout(w: Any, x: Any) -> Any:
    keys = jax.random.split(jax.random.key(w[0, 0].astype(int)), 2)
    return jax.nn.gelu(x @ w) * jax.random.bernoulli(keys[1], 0.9, x.shape)


def nothing(w: Any, x: Any) -> Any:
    return x


def mixed(ws: Any, x: Any, kinds: Any) -> Any:
    """A scanned model whose layers are of three kinds."""

    def layer(h: Any, w_and_kind: Any) -> Any:
        w, kind = w_and_kind
        return h + lax.switch(kind, [dense, elementwise, dropout], w, h), None

    return (lax.scan(layer, x, (ws, kinds))[0] ** 2).mean()


def in_line(ws: Any, x: Any, kinds: Any) -> Any:
    """Layers of which each runs or does not, beside which one of them is read for something else."""
    read = 0.0
    for w, kind in zip(ws, kinds, strict=True):
        x, h = lax.cond(kind > 0, lambda w, x: (dense(w, x), x @ w), lambda w, x: (x, x), w, x)
        read = read + (h**2).mean()
    return read + (x**2).mean()


def in_conds(ws: Any, x: Any, kinds: Any) -> Any:
    """Conds inside of conds, with a scan in the inner one."""

    def inner(x: Any) -> Any:
        return lax.cond(
            kinds[1] > 0, lambda x: lax.scan(lambda h, w: (dense(w, h), None), x, ws)[0], jnp.sin, x
        )

    return (lax.cond(kinds[2] > 0, inner, lambda x: x, x) ** 2).mean()


def read_twice(ws: Any, x: Any, kinds: Any) -> Any:
    """What one cond makes two others read, of which one passes it to nothing else."""
    index = (x[0, 0] > 0).astype(int)
    a, b = lax.switch(index, [lambda: (x, x), lambda: (x @ ws[0], x + 1)])
    both = lax.switch(index, [lambda: jnp.sin(a) - b, lambda: a + jnp.tanh(b)])
    return (both + lax.switch(index, [lambda: b, lambda: b * 2])).mean()


def under_checkpoint(ws: Any, x: Any, kinds: Any) -> Any:
    """A cond of which only the second half of a gradient reads something."""
    return jax.checkpoint(in_conds)(ws, x, kinds)


def opened(f: Callable[..., Any], *args: Any) -> tuple[compat.Jaxpr, list[Any]]:
    jaxpr, consts = compat.open_jaxpr(inline_calls(jax.make_jaxpr(f)(*args)))
    return with_open_pairs(compat.without_dead_code(jaxpr)), list(consts)


def with_one_index(jaxpr: compat.Jaxpr) -> compat.Jaxpr:
    """Both switches clamp their number; the second takes the first one's here: equal clamps may be one."""
    first, second = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    same = second.replace(invars=[first.invars[0], *second.invars[1:]])
    eqns = [same if e is second else e for e in jaxpr.eqns]
    return compat.rebuild(jaxpr, eqns=eqns, outvars=jaxpr.outvars)


def passed_bytes(jaxpr: compat.Jaxpr) -> int:
    """What the conds of a program have as results, also of those in its scans."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            total += passed_bytes(compat.open_jaxpr(eqn.params["jaxpr"])[0])
        elif eqn.primitive.name == "cond":
            total += sum(compat.aval_nbytes(v.aval) for v in eqn.outvars)
    return total


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("f", [mixed, in_line, in_conds, read_twice, under_checkpoint])
def test_every_level_computes_the_same(f: Callable[..., Any], device: str) -> None:
    gradient = jax.value_and_grad(f, argnums=(0, 1))
    jaxpr, consts = opened(gradient, WS, X, KINDS)
    expected = jax.tree.leaves(gradient(WS, X, KINDS))
    levels = frontier(jaxpr, DEVICES[device])
    written = [rewrite(jaxpr, level) for level in levels]
    for new in written:
        check_jaxpr(new)
        found = compat.evaluate(compat.close_jaxpr(new, consts), [WS, X, KINDS])
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert passed_bytes(written[-1]) < passed_bytes(jaxpr)
    assert sum(site.stacked_bytes for site in levels[-1]) < sum(site.stacked_bytes for site in levels[0])


def test_no_branch_gives_up_alone_what_another_one_has_a_place_for() -> None:
    """A dot that only one branch ran again freed nothing: on such levels a gradient took 1.06 of by hand."""

    def layers(ws: Any, x: Any, kinds: Any) -> Any:
        def branch(act: Callable[[Any], Any]) -> Callable[..., Any]:
            return lambda w, x: x + act(jnp.sin(x) @ w) @ w.T

        for w, kind in zip(ws, kinds, strict=True):
            x = lax.cond(kind > 0, branch(jnp.tanh), branch(jax.nn.gelu), w, x)
        return (x**2).mean()

    ws, x = jax.random.normal(KEY, (4, 128, 512)), jax.random.normal(KEY, (1024, 128))
    levels = frontier(opened(jax.grad(layers), ws, x, KINDS[:4])[0], DEVICES["cpu"])
    again = [
        tuple(any(r.op == "dot_general" for r in branch.recomputed) for branch in site.branches)
        for level in levels
        for site in level
        if isinstance(site, InBranches)
    ]
    assert set(again) == {(False, False), (True, True)}


def test_between_two_levels_the_last_conds_are_on_the_higher_one() -> None:
    gradient = jax.value_and_grad(in_line, argnums=(0, 1))
    jaxpr, consts = opened(gradient, WS, X, KINDS)
    dots, _, nothing_kept = hand_levels(jaxpr, DEVICES["cpu"])
    assert len(dots) == L
    for share, n_higher in ((0.0, 0), (0.5, 3), (0.99, 5), (1.0, 6)):
        level = between(dots, nothing_kept, share)
        assert level == (*nothing_kept[: L - n_higher], *dots[L - n_higher :])
    found = compat.evaluate(
        compat.close_jaxpr(rewrite(jaxpr, between(dots, nothing_kept, 0.5)), consts), [WS, X, KINDS]
    )
    for a, b in zip(found, jax.tree.leaves(gradient(WS, X, KINDS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_program_of_conds_takes_the_bytes_between_two_policies() -> None:
    """All conds on one level of a frontier cost .989 of what they cost under the deeper policy."""
    ws, x = jax.random.normal(KEY, (L, 64, 64)), jax.random.normal(KEY, (4096, 64))
    jaxpr, _ = opened(jax.grad(in_line), ws, x, KINDS)
    device = DEVICES["h200"]
    high, _, low = (as_it_is(lift_as_xla(rewrite(jaxpr, k), device)) for k in hand_levels(jaxpr, device))
    budget_bytes = int(0.7 * high.peak_bytes + 0.3 * low.peak_bytes)
    request = JaxprRequest(
        budget_bytes=budget_bytes, argument_bytes=0, output_bytes=0, alias_bytes=0, device=device
    )
    as_is = lift(jaxpr, device, as_xla=True)
    made = search_structured(as_is, request, 1.0, lambda body, nbytes, request: body)
    assert made.peak_bytes <= budget_bytes
    assert high.cost_ns < made.cost_ns < 0.97 * low.cost_ns


def test_what_nobody_read_the_second_cond_may_read() -> None:
    def f(x: Any) -> Any:
        index = (x[0, 0] > 0).astype(int)
        a, _, _ = lax.switch(index, [lambda: (x @ x.T,) * 3, lambda: (jnp.sin(x @ x.T),) * 3])
        return lax.switch(index, [lambda: jnp.cos(a), lambda: a])

    jaxpr = with_one_index(compat.open_jaxpr(inline_calls(jax.make_jaxpr(f)(X)))[0])
    for level in frontier(jaxpr, DEVICES["h200"]):
        new = rewrite(jaxpr, level)
        check_jaxpr(new)
        (found,) = compat.evaluate(compat.close_jaxpr(new, []), [X])
        np.testing.assert_allclose(found, f(X), rtol=1e-5)


def test_scans_in_two_halves_of_conds_run_in_segments() -> None:
    def long(w: Any, x: Any) -> Any:
        def turns(x: Any) -> Any:
            return lax.scan(lambda h, _: (elementwise(w, dense(w, h)), None), x, None, length=36)[0]

        return jax.checkpoint(lambda x: lax.cond(x.sum() > 0, turns, jnp.tanh, x))(x).sum()

    jaxpr, consts = opened(jax.grad(long), WS[0], X)
    lowest = frontier(jaxpr, DEVICES["cpu"])[-1]
    fewest = segment_frontier(lowest, DEVICES["cpu"])[-1]
    assert fewest[0].stacked_bytes < 0.5 * lowest[0].stacked_bytes
    new = rewrite(jaxpr, fewest)
    check_jaxpr(new)
    (found,) = compat.evaluate(compat.close_jaxpr(new, consts), [WS[0], X])
    np.testing.assert_allclose(found, jax.grad(long)(WS[0], X), rtol=1e-4, atol=1e-5)


def test_bytes_fall_as_their_price_rises() -> None:
    jaxpr, _ = opened(jax.grad(mixed), WS, X, KINDS)
    nbytes = [sum(site.stacked_bytes for site in level) for level in frontier(jaxpr, DEVICES["h200"])]
    assert len(nbytes) > 1
    assert nbytes == sorted(nbytes, reverse=True)


def test_what_acts_in_a_branch_acts_once() -> None:
    seen: list[float] = []

    def acting(ws: Any, x: Any) -> Any:
        for w in ws:

            def branch(x: Any, w: Any = w) -> Any:
                jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
                return dense(w, jnp.sin(x))

            x = lax.cond(x[0, 0] < 9, branch, lambda x: x, x)
        return (x**2).mean()

    gradient = jax.grad(acting)
    expected, happened = gradient(WS, X), len(seen)
    jaxpr, consts = opened(gradient, WS, X)
    for level in frontier(jaxpr, DEVICES["cpu"]):
        seen.clear()
        (found,) = compat.evaluate(compat.close_jaxpr(rewrite(jaxpr, level), consts), [WS, X])
        jax.effects_barrier()
        assert len(seen) == happened == L
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert passed_bytes(rewrite(jaxpr, level)) < 0.5 * passed_bytes(jaxpr)


def test_what_a_branch_must_keep_is_kept() -> None:
    def named(w: Any, x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda: checkpoint_name(jnp.tanh(x @ w), "h").sum(), lambda: x.sum())

    closed = inline_calls(jax.make_jaxpr(jax.grad(named))(WS[0], X))
    held = compat.open_jaxpr(constrain_program(closed, Constraints(save=("h",))))[0]
    free = compat.open_jaxpr(closed)[0]
    kept, made = (passed_bytes(rewrite(j, frontier(j, DEVICES["cpu"])[-1])) for j in (held, free))
    assert kept >= X.nbytes > made


def test_conds_of_as_many_branches_only_are_pairs() -> None:
    def f(i: Any, x: Any) -> Any:
        y = lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x)
        return lax.switch(i, [jnp.exp, lambda y: y @ y], y)

    jaxpr = compat.open_jaxpr(jax.make_jaxpr(f)(1, jnp.ones((N, N))))[0]
    assert find_cond_pairs(with_one_index(jaxpr)) == []


def test_what_an_iteration_carries_is_not_there_for_its_second_half() -> None:
    # Of a wide state the field reads a narrow part, which is what is to be stacked: not the state.
    def field(w: Any, y: Any) -> Any:
        return jnp.tanh(jnp.tanh(y @ w) @ w.T)

    def stages(w: Any, x: Any, n: Any) -> Any:
        def stage(state: Any, i: Any) -> Any:
            y = state.sum(0)
            new = lax.cond(i < n, lambda y: field(w, y), jnp.zeros_like, y)
            return state.at[i].set(new), None

        return lax.scan(stage, jnp.zeros((7, *x.shape)).at[0].set(x), jnp.arange(1, 7))[0].sum()

    jaxpr, _ = opened(jax.grad(stages), WS[0], X, 5)
    assert sum(site.stacked_bytes for site in frontier(jaxpr, DEVICES["h200"])[-1]) <= 6 * X.nbytes + 1024


@pytest.mark.parametrize("device", [None, "h200"])
def test_layers_of_two_kinds_cost_no_more_than_by_hand(device: str | None) -> None:
    width, rows = 256, 2048
    ws = jax.ShapeDtypeStruct((4, width, width), jnp.float32)
    kinds = jax.ShapeDtypeStruct((4,), jnp.bool_)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def net(decorate: Callable[..., Any]) -> Callable[..., Any]:
        def layer(h: Any, w_and_kind: Any) -> Any:
            w, kind = w_and_kind
            wide = lax.cond(kind, lambda: jax.nn.gelu(h @ w) @ w, lambda: jnp.tanh(jnp.sin(h @ w)))
            return h + jax.nn.gelu(wide @ w), None

        def step(ws: Any, kinds: Any, x: Any) -> Any:
            return jax.grad(lambda ws: (lax.scan(decorate(layer), x, (ws, kinds))[0] ** 2).mean())(ws)

        return step

    def compiled(step: Callable[..., Any]) -> Any:
        return aot.lower_for(step, (ws, kinds, x), device=device).compile()

    hand = compiled(net(jax.checkpoint))
    budget = aot.memory(hand).total_bytes
    planned = compiled(remat(net(lambda layer: layer), budget=budget))
    assert aot.memory(planned).total_bytes <= budget
    cost = DEVICES[device or "cpu"]
    assert aot.run_ns(planned, cost) <= 1.03 * aot.run_ns(hand, cost)
