"""Budgets that only XLA's packing of temporaries breaks: pin, recompute or refuse; the decorator pins."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import coop_jax as coop
from coop_jax import aot, mark, pinning
from coop_jax.registry import PinMode
from passes.cost import DEVICES
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.enforce import EnforceRequest, OnFragmentation, enforce
from passes.hlo.heap import packing_saves, predict_assigned

W, X = jnp.ones((64, 64)) / 64, jnp.linspace(-1, 1, 128 * 64).reshape(128, 64)


def branches(w: Any, x: Any) -> Any:
    """XLA keeps what one branch needs while the other runs."""
    y = jnp.tanh(x @ w)
    z = lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y @ w), lambda y: y * 2.0, y)
    return (jnp.tanh(z @ w) ** 2).mean()


GRAD = jax.value_and_grad(branches)


def pinned_total() -> tuple[int, int]:
    """Bytes of the plain program, and of the same program pinned."""
    plain = jax.jit(GRAD).lower(W, X).compile()
    return aot.memory(plain).total_bytes, aot.memory(coop.pin(plain)).total_bytes


def test_a_budget_that_only_pinning_reaches() -> None:
    plain_bytes, pinned_bytes = pinned_total()
    assert pinned_bytes < 0.9 * plain_bytes
    lowered = jax.jit(coop.remat(GRAD, budget=pinned_bytes, on_fragmentation="pin")).lower(W, X)
    with pytest.raises(coop.InfeasibleBudgetError):
        lowered.compile()  # nobody pins this one
    compiled = coop.pin(lowered)
    found = coop.report(compiled)
    assert found.compiled_total_bytes == pinned_bytes == found.budget_bytes
    assert found.offsets.pinned is True
    assert found.offsets.equal == found.offsets.buffers
    expected = jax.tree.leaves(jax.jit(GRAD)(W, X))
    for a, b in zip(jax.tree.leaves(compiled(W, X)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    less = jax.jit(coop.remat(GRAD, budget=pinned_bytes // 2, on_fragmentation="pin")).lower(W, X)
    with pytest.raises(coop.InfeasibleBudgetError):
        coop.pin(less)


def test_a_program_that_pinning_does_not_help_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiled once: without branches and loops pinning does no better than the best packing."""
    modes: list[PinMode] = []
    compiled_as = pinning._compiled_as
    monkeypatch.setattr(pinning, "_compiled_as", lambda mode, *a: modes.append(mode) or compiled_as(mode, *a))

    def chain(w: Any, x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    grad = jax.value_and_grad(chain)
    plain = aot.memory(jax.jit(grad).lower(W, X).compile()).total_bytes
    budget = int(0.85 * plain)
    compiled = coop.pin(jax.jit(coop.remat(grad, budget=budget, on_fragmentation="pin")).lower(W, X))
    assert coop.report(compiled).compiled_total_bytes <= budget
    assert coop.report(compiled).recomputed
    assert modes == [PinMode.KEEP]


def test_the_decorator_pins_what_it_compiles() -> None:
    step = coop.remat(GRAD, budget="1GiB", pin=True)
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiles.append(name))
    first = jax.tree.leaves(step(W, X))
    before = len([c for c in compiles if c.endswith("backend_compile_duration")])
    again = jax.tree.leaves(step(W, X))
    assert len([c for c in compiles if c.endswith("backend_compile_duration")]) == before > 0
    assert same_bits(first, again)
    assert same_bits(first, jax.tree.leaves(jax.jit(GRAD)(W, X)))
    assert float(step(2.0 * W, X[:64])[0]) != float(first[0])
    # Inside a transformation it is a part of what is traced.
    doubled = jax.vmap(lambda w: step(w, X)[0])(jnp.stack([W, 2 * W]))
    np.testing.assert_allclose(doubled[0], first[0], rtol=1e-5)
    compiled = jax.jit(step).lower(W, X).compile()
    offsets = coop.report(compiled).offsets
    assert offsets.pinned is False
    assert "give the program to coop.pin" in str(offsets.pin_reason)
    assert coop.report(coop.pin(compiled)).offsets.pinned is True


def same_bits(first: list[Any], second: list[Any]) -> bool:
    """Bitwise equality."""
    pairs = zip(first, second, strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_options_are_checked() -> None:
    with pytest.raises(coop.UnsupportedError, match="'recompute', 'pin', 'error'"):
        coop.remat(GRAD, budget="1GiB", on_fragmentation="other")


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention."""
    score = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), q @ jnp.swapaxes(k, -1, -2), -1e9)
    return jax.nn.softmax(score) @ v


def twice(w: Any, q: Any, k: Any, v: Any) -> Any:
    """Two attentions, the second on what the first gave: XLA's best fit leaves a hole in its gradient."""
    return (attention(q @ w, k, attention(k, q @ w, v)) ** 2).mean()


HEAD = h.spec(4, 64, 32)
FRAGMENTED = h.Example(name="attention", fn=jax.grad(twice), args=(h.spec(32, 32), HEAD, HEAD, HEAD))


def request(budget: int, mode: OnFragmentation) -> EnforceRequest:
    """What is asked of the enforcing stage."""
    return EnforceRequest(
        budget_bytes=budget, device=DEVICES["cpu"], platform="cpu", on_fragmentation=mode,
        old_rules=h.OLD_RULES,
    )  # fmt: skip


def test_where_packing_breaks_the_budget_the_user_decides() -> None:
    data, compiled = h.scheduled(FRAGMENTED)
    assigner = Assigner(graph.read(proto.parse(data)), "cpu", old_rules=h.OLD_RULES)
    total, saved = predict_assigned(assigner).total_bytes, packing_saves(assigner)
    assert total == h.totals(compiled)["total"]
    assert saved > 0.1 * h.totals(compiled)["temp"]
    budget = total - saved

    same, outcome = enforce(data, request(budget, "pin"))
    assert same is data
    assert not outcome.changed
    assert outcome.status.found
    assert outcome.needs_pinning
    assert outcome.planned_total_bytes == budget
    assert aot.memory(coop.pin(compiled)).total_bytes <= budget

    same, outcome = enforce(data, request(budget, "error"))
    assert same is data
    assert not outcome.status.found
    error = coop.InfeasibleBudgetError.from_outcome(outcome)
    assert error.least_bytes == total
    assert "only XLA's packing of the temporaries breaks the budget" in str(error)

    changed, outcome = enforce(data, request(budget, "recompute"))
    assert outcome.changed == (changed is not data) == outcome.status.found
    assert not outcome.needs_pinning


def test_the_mark_says_what_was_asked() -> None:
    lowered = jax.jit(coop.remat(GRAD, budget="1GiB", pin=True, on_fragmentation="error")).lower(W, X)
    record = mark.record_of_lowered(lowered)
    assert record is not None
    assert (record.pin, record.on_fragmentation) == (True, "error")
    assert mark.record_of(lowered.compile()) is not None
    plain = jax.jit(GRAD).lower(W, X)
    assert mark.record_of_lowered(plain) is None
    assert pinning.outcome_of(coop.pin(plain)) is not None
