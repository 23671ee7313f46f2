"""Functions that are decorated inside a program, as `jax.checkpoint` is used: the whole is planned where
their own plans do not keep the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop
from coop_jax import aot, call, lowering
from coop_jax.budget import Budget
from coop_jax.config import RematConfig
from coop_jax.digests import digest, unplanned_digest
from coop_jax.errors import InfeasibleBudgetError
from passes.cost import DEVICES
from passes.jaxpr.values import Constraints

LAYERS, ROWS, WIDTH = 6, 256, 64
KEY = jax.random.key(0)
WEIGHTS = jax.random.normal(KEY, (LAYERS, 2, WIDTH, WIDTH)) / 8
BATCH = jax.random.normal(KEY, (ROWS, WIDTH))
Decorator = Callable[..., Any]


def layer(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w[0])
    return x + jnp.tanh(jnp.sin(y) @ w[1])


def scanned(decorate: Decorator) -> Callable[..., Any]:
    one = decorate(layer)
    return lambda ws, x: jnp.mean(jax.lax.scan(lambda h, w: (one(h, w), None), x, ws)[0] ** 2)


def unrolled(decorate: Decorator) -> Callable[..., Any]:
    one = decorate(layer)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = one(x, w)
        return jnp.mean(x**2)

    return loss


def in_groups(decorate: Decorator) -> Callable[..., Any]:
    one = decorate(layer)

    def group(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (one(h, w), None), x, ws)[0], None

    def loss(ws: Any, x: Any) -> Any:
        grouped = ws.reshape(LAYERS // 3, 3, *ws.shape[1:])
        return jnp.mean(jax.lax.scan(group, x, grouped)[0] ** 2)

    return loss


LOSSES = {"scanned": scanned, "unrolled": unrolled}


def step_of(loss: Callable[..., Any]) -> Any:
    """A step of SGD, with the gradient taken outside of what is decorated."""

    def step(ws: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(ws, x)
        return ws - 0.1 * gradient, value

    return jax.jit(step, donate_argnums=0)


def compiled(decorate: Decorator, kind: str, device: str) -> Any:
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (WEIGHTS, BATCH)]
    if device != "cpu":
        specs = aot.sharded_specs(specs, aot.devices(device)[0])
    return step_of(LOSSES[kind](decorate)).lower(*specs).compile()


def run_ns(program: Any, device: str) -> int:
    return aot.run_cost(program, DEVICES[device])[0]


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("kind", LOSSES)
def test_decorated_layers_cost_no_more_than_jax_checkpoint_in_its_bytes(
    kind: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device != "cpu":
        request.getfixturevalue(device)
    for policy in (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.dots_saveable):
        by_hand = compiled(lambda f, p=policy: jax.checkpoint(f, policy=p), kind, device)
        budget = aot.memory(by_hand).total_bytes
        ours = compiled(lambda f, b=budget: coop.remat(f, budget=b), kind, device)
        assert coop.report(ours).compiled_total_bytes <= budget
        assert run_ns(ours, device) <= 1.01 * run_ns(by_hand, device)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_of_scans_in_a_scan_the_outer_one_keeps_what_the_inner_ones_start_their_iterations_from(
    device: str, request: pytest.FixtureRequest
) -> None:
    """Else each layer is run three times: 15 % more on the CPU, whatever bytes there are."""
    if device != "cpu":
        request.getfixturevalue(device)
    by_hand = step_of(in_groups(jax.checkpoint))
    whole = step_of(in_groups(lambda f: f)).__wrapped__
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (WEIGHTS, BATCH)]
    placed = aot.sharded_specs(specs, aot.devices(device)[0]) if device != "cpu" else specs
    compared = by_hand.lower(*placed).compile()
    budget = int(1.1 * aot.memory(compared).total_bytes)
    ours = jax.jit(coop.remat(whole, budget=budget), donate_argnums=0).lower(*placed).compile()
    assert run_ns(ours, device) <= run_ns(compared, device)


@pytest.mark.parametrize("kind", LOSSES)
def test_values_are_those_of_the_plain_program(kind: str) -> None:
    plain = compiled(lambda f: f, kind, "cpu")
    ours = compiled(lambda f: coop.remat(f, budget=0.5), kind, "cpu")
    report = coop.report(ours)
    assert report.whole
    assert "once more, as a whole" in str(report)
    for one, other in zip(ours(jnp.array(WEIGHTS), BATCH), plain(jnp.array(WEIGHTS), BATCH), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_no_second_trace_is_needed_where_nothing_is_planned_yet() -> None:
    """What `jax.jit(f).trace(...)` gives cannot be traced again."""
    traces = []

    def counted(decorate: Decorator) -> Callable[..., Any]:
        loss = scanned(decorate)
        return lambda ws, x: (traces.append(1), loss(ws, x))[1]

    traced = step_of(counted(lambda f: coop.remat(f, budget="1.2MiB"))).trace(WEIGHTS, BATCH)
    report = coop.report(traced.lower().compile())
    assert (report.whole, len(traces)) == (True, 1)


def test_what_keeps_its_budget_by_its_own_plan_is_not_planned_as_a_whole() -> None:
    def loss(ws: Any, x: Any) -> Any:
        return unrolled(lambda f: f)(ws, x)

    peak = coop.report(jax.jit(jax.grad(coop.remat(loss, budget="1GiB"))).lower(WEIGHTS, BATCH).compile())
    report = coop.report(
        jax.jit(jax.grad(coop.remat(loss, budget=int(0.7 * peak.compiled_total_bytes))))
        .lower(WEIGHTS, BATCH)
        .compile()
    )
    assert (peak.whole, report.whole, report.changed) == (False, False, True)


def test_a_refusal_names_what_the_whole_would_take() -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        compiled(lambda f: coop.remat(f, budget="250KiB"), "scanned", "cpu")
    assert refused.value.least_bytes is not None
    report = coop.report(
        compiled(lambda f: coop.remat(f, budget=refused.value.least_bytes), "scanned", "cpu")
    )
    assert report.compiled_total_bytes <= refused.value.least_bytes


def test_two_decorated_functions_that_ask_for_different_things_stay_apart() -> None:
    plain = RematConfig(budget=Budget.of("1GiB"), name="f")

    def program(other: RematConfig) -> Any:
        first, second = (
            jax.make_jaxpr(lambda x, c=c: call.bind(jax.make_jaxpr(jnp.sin)(x), c, [x]))(BATCH)
            for c in (plain, other)
        )
        both = jax.make_jaxpr(
            lambda x: (
                jax.core.eval_jaxpr(first.jaxpr, first.consts, x),
                jax.core.eval_jaxpr(second.jaxpr, second.consts, x),
            )
        )(BATCH)
        return both.jaxpr

    smaller = RematConfig(budget=Budget.of("1MiB"), name="g")
    assert call.as_one(program(smaller), plain) is not None
    for other in (
        RematConfig(budget=Budget.of("1GiB"), planner="dtr"),
        RematConfig(budget=Budget.of("1GiB", host="1GiB")),
        RematConfig(budget=Budget.of("1GiB"), constraints=Constraints(save=("h",))),
    ):
        assert call.as_one(program(other), plain) is None
        assert call.as_one(program(plain), other) is None


def lowered(loss: Callable[..., Any]) -> Any:
    return step_of(loss).lower(WEIGHTS, BATCH)


def test_a_program_is_not_taken_for_another_one_of_the_same_layers() -> None:
    """Both are lowered before one is compiled: what is looked at for the one is of the one."""

    def loss(decorate: Decorator, last: Callable[..., Any]) -> Callable[..., Any]:
        one = decorate(layer)

        def run(ws: Any, x: Any) -> Any:
            for w in ws:
                x = one(x, w)
            return jnp.mean(last(x) ** 2)

        return run

    def halved(x: Any) -> Any:
        return 0.5 * x

    def doubled(x: Any) -> Any:
        return 2.0 * x

    lasts = (halved, doubled)
    budget = aot.memory(lowered(loss(lambda f: f, halved)).compile()).total_bytes // 2
    decorated = [lowered(loss(lambda f: coop.remat(f, budget=budget), last)) for last in lasts]
    for program, last in zip(decorated, lasts, strict=True):
        ours, plain = program.compile(), lowered(loss(lambda f: f, last)).compile()
        assert coop.report(ours).whole
        for one, other in zip(ours(jnp.array(WEIGHTS), BATCH), plain(jnp.array(WEIGHTS), BATCH), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def with_a_dead_result(decorate: Decorator) -> Callable[..., Any]:
    """A loss of layers with one more result that nothing reads, and that alone reads an argument."""
    one = decorate(lambda x, w, unread: (layer(x, w), jnp.sin(unread)))

    def loss(ws: Any, x: Any, unread: Any) -> Any:
        for w in ws:
            x, _ = one(x, w, unread)
        return jnp.mean(jax.nn.relu(x) ** 2)

    return loss


def test_what_only_a_dead_result_reads_is_no_argument_of_the_program() -> None:
    def grads(decorate: Decorator, derivative: Any = jax.grad) -> Any:
        return jax.jit(derivative(with_a_dead_result(decorate)))

    given = WEIGHTS, BATCH, jnp.ones((100, 100))
    by_hand = grads(jax.checkpoint).lower(*given).compile()
    budget = aot.memory(by_hand).total_bytes
    ours = grads(lambda f: coop.remat(f, budget=budget)).lower(*given).compile()
    assert aot.memory(ours).argument_bytes == aot.memory(by_hand).argument_bytes
    assert coop.report(ours).compiled_total_bytes <= budget
    np.testing.assert_allclose(ours(*given), by_hand(*given), rtol=1e-5, atol=1e-7)

    def penalty(loss: Any) -> Any:
        return jax.grad(lambda ws, x, unread: jnp.sum(jax.jit(jax.grad(loss, 1))(ws, x, unread) ** 2))

    ours, plain = grads(lambda f: coop.remat(f, budget="1GiB"), penalty), grads(lambda f: f, penalty)
    np.testing.assert_allclose(ours(*given), plain(*given), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["layers", "loss"])
def test_a_function_that_each_trace_makes_another_program_of_keeps_its_first(kind: str) -> None:
    """It scales by how often it was traced: a plan that takes another trace would give other numbers."""
    traces = itertools.count(1)

    def loss(ws: Any, x: Any) -> Any:
        return next(traces) * unrolled(outer if kind == "layers" else lambda f: f)(ws, x)

    def outer(f: Any) -> Any:
        return coop.remat(f, budget=budget)

    budget = aot.memory(lowered(unrolled(lambda f: f)).compile()).total_bytes // 2
    try:
        ours = lowered(loss if kind == "layers" else outer(loss)).compile()
    except InfeasibleBudgetError:
        return
    plain = lowered(unrolled(lambda f: f)).compile()
    for one, other in zip(
        ours(jnp.array(WEIGHTS), BATCH)[1:], plain(jnp.array(WEIGHTS), BATCH)[1:], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_known_of_a_program_is_known_whatever_its_budget_and_of_no_other() -> None:
    def traced(times: int, width: float, budget: str) -> Any:
        def loss(ws: Any, x: Any) -> Any:
            for _ in range(times):
                x = width * scanned_once(ws, x)
            return jnp.mean(x**2)

        one = coop.remat(layer, budget=budget)
        scanned_once = lambda ws, x: jax.lax.scan(lambda h, w: (one(h, w), None), x, ws)[0]  # noqa: E731
        return jax.jit(jax.grad(loss)).trace(WEIGHTS, BATCH).jaxpr

    ample, tight, twice = traced(1, 1.0, "1GiB"), traced(1, 1.0, "300KiB"), traced(2, 1.0, "1GiB")
    assert unplanned_digest(ample) == unplanned_digest(tight) != unplanned_digest(twice)
    assert digest(ample) == digest(traced(1, 1.0, "1GiB"))
    assert len({digest(ample), digest(tight), digest(twice), digest(traced(1, 2.0, "1GiB"))}) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_a_whole_step_is_no_part_of_a_program_whatever_it_closes_over(
    monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """Its constants are no arguments of the program: as a part it was compiled once more, for nothing."""
    monkeypatch.setattr(lowering, "as_one", lambda *_: pytest.fail("the whole is what is decorated"))
    table = jax.random.normal(KEY, (ROWS, WIDTH))
    step = coop.remat(jax.value_and_grad(lambda ws, x: unrolled(lambda f: f)(ws, x + table)), budget="64MiB")
    assert jax.jit(jax.jit(step) if nested else step).lower(WEIGHTS, BATCH)
