"""The six stages of `passes.pipeline`: their order, what goes into each, and what comes out."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import check_jaxpr

import coop_jax as coop
from coop_jax import aot
from coop_jax.record import read_attributes
from coop_jax.replacing import signature
from passes import pipeline
from passes.counts import MemoryBytes, Verdict, check
from passes.hlo import proto
from passes.interpreter import on_deep_stack, uncollected
from passes.ir import Program
from passes.simulate import simulate
from passes.validate import validate
from tests.models import chain_loss, chain_step

NAMES = tuple(stage.__name__ for stage in pipeline.STAGES)
W = [0.2 * jax.random.normal(jax.random.key(i), (32, 32)) for i in range(6)]
X = jax.random.normal(jax.random.key(9), (256, 32))


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


def avals(closed: Any) -> Any:
    return closed.in_avals, closed.out_avals


def prepared(asked: tuple[Any, ...], work: Any) -> None:
    check_jaxpr(work.jaxpr)


def lifted(asked: tuple[Any, ...], made: Any) -> None:
    check_jaxpr(asked[0])
    assert Program.from_json(made.program.to_json()).ops == made.program.ops  # well formed


def planned(asked: tuple[Any, ...], made: Any) -> None:
    candidate = made.candidate
    check_jaxpr(candidate.emitted)
    if candidate.plan is not None:
        validate(candidate.lifted.program, candidate.plan)
        assert simulate(candidate.lifted.program, candidate.steps).peak_bytes == candidate.plan.peak_bytes
    assert made.outcome.changed == candidate.changed


def emitted(asked: tuple[Any, ...], made: Any) -> None:
    work, choice, _ = asked
    if not choice.outcome.changed:
        assert made is work.source
    elif isinstance(made, tuple):
        (forward, backward), (first, second) = made, work.source
        assert forward.in_avals == first.in_avals
        assert backward.out_avals == second.out_avals
        list(map(check_jaxpr, (forward.jaxpr, backward.jaxpr)))
    else:
        assert avals(made) == avals(work.source)
        check_jaxpr(made.jaxpr)


def enforced(asked: tuple[Any, ...], made: Any) -> None:
    (before, request), (after, outcome) = asked, made
    assert proto.parse(before).HasField("schedule")
    assert read_attributes(after) == read_attributes(before)
    assert signature(after) == signature(before)
    if outcome.status.found:
        assert outcome.planned_total_bytes <= request.budget_bytes


def checked(asked: tuple[Any, ...], verdict: Verdict) -> None:
    budget, counted = asked
    assert (verdict is Verdict.KEPT) == (counted.total <= budget.total)


CHECKS: dict[str, Callable[[tuple[Any, ...], Any], None]] = dict(
    zip(NAMES, (prepared, lifted, planned, emitted, enforced, checked), strict=True)
)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stages that ran, each with what went in and came out checked."""
    ran: list[str] = []

    def watched(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*asked: Any) -> Any:
            made = stage(*asked)
            CHECKS[name](asked, made)
            ran.append(name)
            return made

        return run

    for name in NAMES:
        monkeypatch.setattr(pipeline, name, watched(name, getattr(pipeline, name)))
    parts = pipeline.prepare_parts
    monkeypatch.setattr(pipeline, "prepare_parts", lambda *asked: watched("prepare", parts)(*asked))
    return ran


PROGRAMS = {
    "a step": (chain_step, W, lambda budget: coop.remat(chain_step, budget=budget)),
    "parts": (
        jax.value_and_grad(chain_loss), W,
        lambda budget: jax.value_and_grad(coop.remat(chain_loss, budget=budget)),
    ),
    "a scan": (
        jax.grad(scanned), jnp.stack(W), lambda budget: coop.remat(jax.grad(scanned), budget=budget),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_through_the_stages_in_their_order(name: str, walked: list[str]) -> None:
    plain, w, decorated = PROGRAMS[name]
    total = aot.memory(jax.jit(plain).lower(w, X).compile()).total_bytes
    compiled = jax.jit(decorated(int(0.9 * total))).lower(w, X).compile()
    assert aot.memory(compiled).total_bytes <= int(0.9 * total)
    assert walked[:5] == list(NAMES[:5])
    assert walked[-1] == NAMES[-1]


def test_a_program_that_fits_goes_there_once_and_stays_as_it_is(walked: list[str]) -> None:
    jax.jit(coop.remat(chain_step, budget="1GiB")).lower(W, X).compile()
    assert walked == list(NAMES)


def test_the_check_knows_both_memories() -> None:
    budget = MemoryBytes(total=10, host=5)
    assert check(budget, MemoryBytes(total=10, host=5)) is Verdict.KEPT
    assert check(budget, MemoryBytes(total=11, host=5)) is Verdict.OVER
    assert check(budget, MemoryBytes(total=11, host=6)) is Verdict.OVER_ON_HOST
    assert check(MemoryBytes(total=10), MemoryBytes(total=10, host=6)) is Verdict.KEPT


def test_the_collector_of_cycles_is_as_it_was_after_a_stage():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_function_on_a_deep_stack_may_be_called_at_any_depth():
    def faults(work: Callable[[], None], depth: int) -> int:
        if depth:
            return faults(work, depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def work() -> None:
        for _ in range(1000):
            bool_of(0)

    def bool_of(n: int) -> bool:
        return n > 0

    if max(faults(work, depth) for depth in range(300)) < 1000:
        pytest.skip("this Python keeps a chunk for the next call")
    assert max(faults(on_deep_stack(work), depth) for depth in range(300)) < 100
