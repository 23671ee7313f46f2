"""Levels looked at: those of ready policies, and where recomputes beside them cost least."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import check_jaxpr

from passes.jaxpr import structured
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.lift import lift
from passes.jaxpr.scans.emit import rewrite
from passes.jaxpr.scans.frontier import POLICIES, frontier, hand_levels
from passes.jaxpr.scans.levels import Levels, on_frontier
from passes.jaxpr.straight import as_it_is, search
from passes.jaxpr.structured import search_structured
from tests.test_scan import (
    CPU,
    GRADIENTS,
    WORTH_KEEPING,
    WS,
    X,
    layer,
    opened,
    plain,
    run,
    same,
    stack_bytes,
    steps,
)

DOTS, NO_BATCH, NOTHING = range(3)


@pytest.mark.parametrize("k", [DOTS, NO_BATCH, NOTHING])
def test_a_policys_level_stacks_what_jax_stacks_under_it(k: int) -> None:
    def by_hand(ws: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jax.checkpoint(layer, policy=POLICIES[k])(w, h), None

        return (lax.scan(body, x, ws)[0] ** 2).mean()

    jaxpr, _ = opened(jax.grad(plain), WS, X)
    level = hand_levels(jaxpr, CPU)[k]
    assert stack_bytes(rewrite(jaxpr, level)) == stack_bytes(opened(jax.grad(by_hand), WS, X)[0])


def test_what_a_policy_around_a_step_recomputes_is_stacked_inside_it() -> None:
    """As under `jax.checkpoint`: nothing inside a step is recomputed twice."""

    ws, x = WORTH_KEEPING
    jaxpr, _ = opened(jax.grad(steps), ws, jnp.stack([x] * 8))
    (choice,) = hand_levels(jaxpr, CPU)[NOTHING]
    (inside,) = choice.inner
    assert choice.recomputed
    assert not any(r.op == "dot_general" for r in inside.recomputed)


@pytest.mark.parametrize("name", ["two carries", "random bits", "layers of layers", "branches", "effects"])
def test_a_policys_level_computes_the_same(name: str) -> None:
    jaxpr, consts = opened(jax.value_and_grad(GRADIENTS[name], argnums=(0, 1)), WS, X)
    new = rewrite(jaxpr, hand_levels(jaxpr, CPU)[NO_BATCH])
    check_jaxpr(new)
    same(run(new, consts, WS, X), run(jaxpr, consts, WS, X))


def test_a_policy_is_taken_where_the_frontier_has_nothing_as_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    jaxpr, _ = opened(jax.grad(plain), *WORTH_KEEPING)
    ends = frontier(jaxpr, CPU)[:: len(frontier(jaxpr, CPU)) - 1]
    monkeypatch.setattr(structured, "on_frontier", lambda j, d, _: Levels(j, ends, d))
    by_hand = hand_levels(jaxpr, CPU)[DOTS]
    enough = as_it_is(lift(rewrite(jaxpr, by_hand), CPU, as_xla=True)).peak_bytes
    request = JaxprRequest(budget_bytes=enough, argument_bytes=0, output_bytes=0, alias_bytes=0, device=CPU)
    made = search_structured(lift(jaxpr, CPU, as_xla=True), request, 1.0, lambda body, nbytes, request: body)
    assert made.peak_bytes <= enough
    assert [c.stacked_bytes for c in made.scans] == [c.stacked_bytes for c in by_hand]


@pytest.mark.parametrize("ratio", [0.2, 0.28])
def test_recomputes_beside_scans_are_looked_for_on_the_level_of_their_least_bound(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    def net(ws: jax.Array, vs: jax.Array, x: jax.Array) -> jax.Array:
        for w, v in zip(ws, vs, strict=True):
            x, _ = lax.scan(lambda h, u: (layer(u, h), None), x, w)
            y = x
            for _ in range(3):
                y = jax.nn.gelu(jnp.tanh(y @ v[0]) @ v[1])
            x = x + y
        return (x**2).mean()

    searched = []

    def counted(*asked: Any, **how: Any) -> Candidate:
        searched.append(search(*asked, **how))
        return searched[-1]

    monkeypatch.setattr(structured, "search", counted)
    shapes = jnp.zeros((4, 3, 2, 64, 64)), jnp.zeros((4, 2, 64, 64)), jnp.zeros((256, 64))
    as_is = lift(opened(jax.grad(net), *shapes)[0], CPU, as_xla=True)
    budget_bytes = int(ratio * as_it_is(as_is).peak_bytes)
    request = JaxprRequest(
        budget_bytes=budget_bytes, argument_bytes=0, output_bytes=0, alias_bytes=0, device=CPU
    )
    made = search_structured(as_is, request, 1.0, lambda body, nbytes, request: body)
    n_searched = len(searched)
    levels = on_frontier(as_is.jaxpr, CPU, "time")
    every = [search(levels[k].lifted, request, 1.0, of_many=True) for k in range(len(levels))]
    within = [c.cost_ns for c in every if c.peak_bytes <= budget_bytes]
    assert made.peak_bytes <= budget_bytes
    assert made.cost_ns <= 1.002 * min(within)
    assert len(within) > n_searched


@pytest.mark.parametrize("peak_ratio", [1.02, 2.0])
def test_the_least_level_says_that_it_may_fit(peak_ratio: float) -> None:
    """It is compiled before it is given up; whoever chooses between searches must know."""
    jaxpr, _ = opened(jax.grad(plain), *WORTH_KEEPING)
    as_is = lift(jaxpr, CPU, as_xla=True)
    levels = on_frontier(jaxpr, CPU, "time")
    least = min(as_it_is(levels[k].lifted).peak_bytes for k in range(len(levels)))
    budget_bytes = int(least / peak_ratio)
    request = JaxprRequest(
        budget_bytes=budget_bytes, argument_bytes=0, output_bytes=0, alias_bytes=0, device=CPU
    )
    made = search_structured(as_is, request, 1.0, lambda body, nbytes, request: body)
    assert made.peak_bytes > budget_bytes
    assert (made.expected_bytes <= budget_bytes) == (peak_ratio < structured.CONFIG.unknown_ratio)


def test_what_has_no_pairs_has_no_level() -> None:
    jaxpr, _ = opened(plain, WS, X)
    assert hand_levels(jaxpr, CPU) == []


def test_a_program_without_scans_is_searched_down_to_its_least() -> None:
    def chosen(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w) ** 2, lambda: x * 2).mean()

    as_is = lift(opened(jax.grad(chosen), jnp.zeros((16, 16)), X)[0], CPU, as_xla=True)
    request = JaxprRequest(budget_bytes=1, argument_bytes=0, output_bytes=0, alias_bytes=0, device=CPU)
    made = search_structured(as_is, request, 1.0, lambda body, nbytes, request: body)
    assert 1 < made.peak_bytes <= as_it_is(as_is).peak_bytes
