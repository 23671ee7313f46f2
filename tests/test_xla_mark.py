"""The mark, the callback and the check: who is touched, what is said, and when a compile fails."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import coop_jax.lowering
from coop_jax import aot, callback, mark, module, registry
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError, UnsupportedError
from coop_jax.record import Record, read_attributes
from coop_jax.remat import remat
from passes import pipeline
from passes.jaxpr import compat
from tests.models import chain_loss as loss
from tests.models import chain_step as step

N, LAYERS = 64, 6
KEY = jax.random.key(0)
PARAMS = [jax.random.normal(jax.random.fold_in(KEY, i), (N, N)) * 0.2 for i in range(LAYERS)]
BATCH = jax.random.normal(KEY, (256, N))


def total_bytes(compiled: Any) -> int:
    return aot.memory(compiled).total_bytes


@pytest.fixture(scope="module")
def plain_step() -> Any:
    return jax.jit(step).lower(PARAMS, BATCH).compile()


@pytest.fixture(scope="module")
def plain_grad() -> Any:
    return jax.jit(jax.value_and_grad(loss)).lower(PARAMS, BATCH).compile()


def test_an_unmarked_program_passes_the_callback_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(pipeline, "enforce", lambda data, _: seen.append(data))
    callback.install("cpu")
    compiled = jax.jit(step).lower(PARAMS, BATCH).compile()
    assert seen == []
    assert mark.record_of(compiled) is None
    assert callback._callback(b"anything", "cpu") is None


def test_xla_schedules_a_program_once_whatever_budgets_it_is_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    function = remat(jax.value_and_grad(loss), budget="1GiB")

    def looked_at(scheduled: dict[str, bytes], budget_bytes: int) -> Any:
        lowered = module.with_own_module(jax.jit(function).lower(PARAMS, BATCH))
        record = mark.record_of_lowered(lowered)
        assert record is not None
        trial = mark.look(lowered, dataclasses.replace(record, budget_bytes=budget_bytes), scheduled)
        assert trial is not None
        return dataclasses.replace(trial.outcome, seconds=0.0), trial.module

    known: dict[str, bytes] = {}
    (large, _), fresh = looked_at(known, 1 << 30), looked_at({}, 900_000)
    assert large.status.found
    assert not fresh[0].status.found
    assert len(known) == 1
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("scheduled again"))
    small, (same, _) = looked_at(known, 900_000), looked_at(known, 1 << 30)
    assert small[0] == fresh[0]
    assert same == large
    assert len(known) == 1


def test_the_record_tells_what_was_asked_and_done(plain_step: Any) -> None:
    compiled = jax.jit(remat(step, budget=0.7, planner="cut")).lower(PARAMS, BATCH).compile()
    record = mark.record_of(compiled)
    assert record is not None
    assert record.baseline_total_bytes == total_bytes(plain_step)
    assert record.baseline_compiled
    assert record.budget_bytes == int(0.7 * total_bytes(plain_step))
    assert (record.planner, record.device_name) == ("cut", "cpu")
    assert record.jaxpr is not None
    assert record.hlo is not None
    assert record.hlo.budget_bytes == record.budget_bytes
    assert total_bytes(compiled) <= record.budget_bytes


def test_the_baseline_of_a_gradient_is_the_program_that_takes_it(plain_grad: Any) -> None:
    decorated = remat(loss, budget=0.7)
    for taken, plain in ((jax.value_and_grad(decorated), plain_grad), (jax.grad(decorated), None)):
        if plain is None:
            plain = jax.jit(jax.grad(loss)).lower(PARAMS, BATCH).compile()
        record = mark.record_of(jax.jit(taken).lower(PARAMS, BATCH).compile())
        assert record is not None
        assert record.baseline_compiled
        assert record.baseline_total_bytes == total_bytes(plain)


@pytest.mark.parametrize("share", [0.85, 0.65, 0.5])
def test_the_budget_holds_and_the_numbers_are_the_same(
    share: float, plain_step: Any, plain_grad: Any
) -> None:
    cases = (
        (jax.jit(remat(step, budget=share)), plain_step),
        (jax.jit(jax.value_and_grad(remat(loss, budget=share))), plain_grad),
    )
    for jitted, plain in cases:
        compiled = jitted.lower(PARAMS, BATCH).compile()
        assert total_bytes(compiled) <= int(share * total_bytes(plain))
        found, expected = compiled(PARAMS, BATCH), plain(PARAMS, BATCH)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_recompute_shows_in_the_program_only_under_pressure() -> None:
    def tanhs(budget: Any) -> int:
        jaxpr = jax.make_jaxpr(jax.value_and_grad(remat(loss, budget=budget)))(PARAMS, BATCH)
        return _count(jaxpr.jaxpr, "tanh")

    plain = _count(jax.make_jaxpr(jax.value_and_grad(loss))(PARAMS, BATCH).jaxpr, "tanh")
    assert tanhs("1TiB") == plain
    assert tanhs(0.45) > plain


def _count(jaxpr: Any, name: str) -> int:
    inner = sum(_count(j, name) for eqn in jaxpr.eqns for j in compat.inner_jaxprs(eqn))
    return inner + sum(eqn.primitive.name == name for eqn in jaxpr.eqns)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_arguments_over_budget_are_refused_when_lowered(wrap: Any) -> None:
    fixed = 4 * (2 * LAYERS * N * N + BATCH.size + 1)
    with pytest.raises(InfeasibleBudgetError, match="which no plan can remove") as caught:
        wrap(remat(step, budget=fixed // 2))(PARAMS, BATCH)
    assert caught.value.budget_bytes == fixed // 2
    assert caught.value.argument_bytes == 4 * (LAYERS * N * N + BATCH.size)
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes >= fixed


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("taken", [False, True], ids=["step", "grad"])
def test_an_impossible_budget_raises_the_class_itself(wrap: Any, taken: bool) -> None:
    fixed = 4 * (2 * LAYERS * N * N + BATCH.size + 1)
    budget = fixed + 2048 if not taken else 4 * BATCH.size + 4096
    function = jax.grad(remat(loss, budget=budget)) if taken else remat(step, budget=budget)
    with pytest.raises(InfeasibleBudgetError) as caught:
        wrap(function)(PARAMS, BATCH)
    assert caught.value.budget_bytes == budget
    # Outside jit a forward pass is compiled alone: that its arguments and results would fit is not enough.
    least = caught.value.least_bytes
    assert least is None if taken and wrap is not jax.jit else least is not None and least > budget
    assert "What would help" in str(caught.value)


def test_the_smallest_budget_of_a_program_counts(plain_step: Any) -> None:
    total = total_bytes(plain_step)
    large, small = 2 * total, 3 * total

    def both(params: list[Any], x: Any) -> Any:
        first = remat(loss, budget=small)(params, x)
        return first + remat(loss, budget=large)(params, x) + remat(loss, budget=small)(params, 2 * x)

    record = mark.record_of(jax.jit(both).lower(PARAMS, BATCH).compile())
    assert record is not None
    assert record.budget_bytes == large


@pytest.mark.parametrize("device", ["here", "h200"])
def test_a_program_over_its_budget_is_refused_after_the_compile(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The enforcing stage is made to promise too much; XLA's own count finds out."""
    where = None if device == "here" else request.getfixturevalue(device)
    fits = pipeline.enforce

    def promises(data: bytes, request: Any) -> Any:
        _, outcome = fits(data, dataclasses.replace(request, budget_bytes=1 << 40))
        return data, dataclasses.replace(outcome, budget_bytes=request.budget_bytes)

    monkeypatch.setattr(pipeline, "enforce", promises)
    monkeypatch.setattr(coop_jax.lowering, "plan_program", lambda jaxpr, r: (jaxpr, _keep(jaxpr, r)))
    budget = 4 * (2 * LAYERS * N * N + BATCH.size + 1) + 70_000
    with pytest.raises(BudgetExceededError, match="over its budget") as caught:
        aot.lower_for(remat(step, budget=budget), (PARAMS, BATCH), device=where).compile()
    assert caught.value.budget_bytes == budget
    assert caught.value.compiled_bytes > budget


def _keep(jaxpr: Any, request: Any) -> Any:
    from passes.pipeline import plan_program

    return plan_program(jaxpr, dataclasses.replace(request, budget_bytes=1 << 40))[1]


def test_attributes_are_read_without_parsing_the_module(plain_step: Any) -> None:
    data = plain_step.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    assert read_attributes(data) == {}
    marked = jax.jit(remat(step, budget="1TiB")).lower(PARAMS, BATCH).compile()
    data = marked.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    assert sorted(read_attributes(data)) == ["coop.facts", "coop.record"]


def test_compiles_in_several_threads_keep_their_records_apart() -> None:
    found: dict[int, Any] = {}

    def compile_one(width: int) -> None:
        decorated = remat(lambda x: jnp.tanh(x @ x.T).sum(), budget=10**7 + width)
        found[width] = mark.record_of(jax.jit(decorated).lower(jnp.ones((width, width))).compile())

    threads = [threading.Thread(target=compile_one, args=(w,)) for w in (8, 16, 24, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {w: r.budget_bytes for w, r in found.items()} == {w: 10**7 + w for w in (8, 16, 24, 32)}
    assert all(r.hlo.budget_bytes == r.budget_bytes for r in found.values())


def test_a_program_from_the_compilation_cache_is_checked_again() -> None:
    """What the cache returns was not seen by the callback in this process; it is asked for its size."""
    compiled = jax.jit(remat(step, budget="1TiB")).lower(PARAMS, BATCH).compile()
    record = mark.record_of(compiled)
    assert record is not None
    small = dataclasses.replace(record, budget_bytes=total_bytes(compiled) - 1)
    registry.REGISTRY.update(small, record=small)
    with pytest.raises(BudgetExceededError) as caught:
        callback._check(compiled.runtime_executable())
    assert caught.value.compiled_bytes == total_bytes(compiled)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    """JAX's compilation cache, on."""
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    keys = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = [getattr(jax.config, key) for key in keys]
    for key, value in zip(keys, (str(tmp_path), 0.0, 0), strict=True):
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield
    for key, value in zip(keys, before, strict=True):
        jax.config.update(key, value)
    compilation_cache.reset_cache()


def test_a_program_that_only_the_check_refuses_is_refused_at_every_try(
    cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then JAX has put it into its cache, which asks neither the rule nor the callback again."""
    monkeypatch.setattr(coop_jax.lowering, "OtherWays", lambda **_: None)

    def scanned(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=4)[0]

    arguments = (PARAMS[0], BATCH)
    budget = total_bytes(jax.jit(scanned).lower(*arguments).compile()) - 1
    jitted = jax.jit(remat(scanned, budget=budget))
    for _ in range(3):
        with pytest.raises(InfeasibleBudgetError) as caught:
            jitted(*arguments)
        assert caught.value.budget_bytes == budget
    # As in another process, which knows nothing but the program and its mark.
    forgetful = registry.Registry()
    forgetful.first_use("cpu")  # XLA calls back already; a second callback would stay for later tests
    for users in (callback, mark, registry):
        monkeypatch.setattr(users, "REGISTRY", forgetful)
    jax.clear_caches()
    with pytest.raises(InfeasibleBudgetError) as caught:
        jitted.lower(*arguments).compile()
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > budget


@pytest.mark.parametrize("at", [1, 2], ids=["in the compile", "in a trial"])
def test_an_interrupt_in_the_callback_comes_out_as_one(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    enforce = pipeline.enforce

    def interrupted(data: bytes, request: Any) -> Any:
        calls.append(data)
        if len(calls) == at:
            raise KeyboardInterrupt
        return enforce(data, request)

    monkeypatch.setattr(pipeline, "enforce", interrupted)
    refused = 4 * (2 * LAYERS * N * N + BATCH.size + 1) + 100_000  # other plans are looked at first
    with pytest.raises(KeyboardInterrupt):
        jax.jit(remat(step, budget=refused)).lower(PARAMS, BATCH).compile()
    assert len(calls) == at


def test_exporting_a_decorated_function_is_refused_and_its_call_may_be_decorated() -> None:
    pytest.importorskip("flatbuffers")
    from jax import export

    with pytest.raises(UnsupportedError, match=r"remat\(exported\.call"):
        export.export(jax.jit(remat(step, budget="1GiB")))(PARAMS, BATCH)
    exported = export.deserialize(export.export(jax.jit(step))(PARAMS, BATCH).serialize())
    total = total_bytes(jax.jit(exported.call).lower(PARAMS, BATCH).compile())
    kept = jax.jit(remat(exported.call, budget=int(0.97 * total))).lower(PARAMS, BATCH).compile()
    assert total_bytes(kept) <= int(0.97 * total)


def test_what_is_remembered_of_programs_is_bounded() -> None:
    known = registry.Registry()
    record = Record(budget="", budget_bytes=1, planner="auto", device_name="cpu")
    for n in range(registry.MOST_RECORDS + 10):
        made = dataclasses.replace(record, id=str(n))
        known.update(made, record=made)
        known.update(made, alternatives=object())
    assert known.record("0") is None
    assert known.record(str(registry.MOST_RECORDS + 9)) is not None
    assert len(known._states) == registry.MOST_RECORDS
    offering = [state for state in known._states.values() if state.alternatives is not None]
    assert len(offering) == registry.MOST_ALTERNATIVES


_CACHED = """
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
from coop_jax import mark
from coop_jax.record import Record, read_attributes
from coop_jax.remat import remat
def f(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).sum()
compiled = jax.jit(jax.grad(remat(f, budget="1GiB"))).lower(jnp.ones((8, 8)), jnp.ones((4, 8))).compile()
record = mark.record_of(compiled)
hit = any(h.endswith("/cache_hits") for h in hits)
print(hit, record.id, record.budget_bytes, record.jaxpr.planned_temp_bytes)
"""


def test_a_program_from_the_compilation_cache_still_has_its_record(tmp_path: Path) -> None:
    code = _CACHED.format(folder=str(tmp_path))
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert [run[0] for run in runs] == ["False", "True"]
    assert runs[0][1:] == runs[1][1:]
