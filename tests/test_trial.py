"""Settling on a plan for a small program: what is asked next after each trial, and what is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coop_jax import trial
from coop_jax.trial import Attempt, settle
from passes.cost import DEVICES
from passes.ir import Status
from passes.jaxpr.measured import Measured, expected_ratio
from passes.jaxpr.stage import JaxprRequest
from passes.outcome import StageOutcome

REQUEST = JaxprRequest(
    budget_bytes=1000, argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["cpu"]
)
PLANNED = StageOutcome(
    stage="jaxpr",
    changed=True,
    budget_bytes=1000,
    argument_bytes=0,
    output_bytes=0,
    alias_bytes=0,
    before_temp_bytes=4000,
    planned_temp_bytes=1000,
    cost_ns=100,
    recompute_ns=0,
    lower_bound_ratio=0.0,
    status=Status.FEASIBLE,
    planner="auto",
    seconds=0.0,
    recomputed=(),
    tightest=(),
    least_total_bytes=None,
)


def settled(
    monkeypatch: pytest.MonkeyPatch,
    verdict_of: Callable[[JaxprRequest], StageOutcome | None],
    planned_of: Callable[[JaxprRequest], StageOutcome] = lambda r: replace(
        PLANNED, recompute_ns=int(100 * r.bytes_ratio)
    ),
) -> tuple[JaxprRequest, list[JaxprRequest]]:
    """The request whose program was taken, and all requests in order."""
    asked: list[JaxprRequest] = []

    def attempt(request: JaxprRequest) -> Attempt:
        asked.append(request)
        program = SimpleNamespace(effects=(), request=request)
        return Attempt(made=request, outcome=planned_of(request), trace=lambda: program)

    def try_out(program: Any, *_: Any) -> StageOutcome | None:
        return verdict_of(program.request)

    monkeypatch.setattr(trial, "try_out", try_out)
    made, _ = settle(attempt, REQUEST, record=None, device=None)  # type: ignore[arg-type]
    return made, asked


def needing(nbytes: int, cost_ns: int = 100) -> StageOutcome:
    """A verdict: XLA made `nbytes` of temporaries of it, more than the budget cannot be repaired."""
    status = Status.FEASIBLE if nbytes <= 1000 else Status.UNKNOWN
    return replace(PLANNED, stage="hlo", before_temp_bytes=nbytes, cost_ns=cost_ns, status=status)


def test_a_program_that_fits_is_taken_at_once(monkeypatch: pytest.MonkeyPatch):
    taken, asked = settled(monkeypatch, lambda _: needing(900))
    assert asked == [REQUEST]
    assert taken is asked[0]


def test_a_program_a_little_too_large_is_asked_for_with_fewer_bytes(monkeypatch: pytest.MonkeyPatch):
    taken, asked = settled(monkeypatch, lambda r: needing(int(1200 / r.bytes_ratio)))
    assert [(r.strict, r.bytes_ratio) for r in asked] == [(False, 1.0), (False, 1.2)]
    assert taken is asked[1]


def test_xla_is_left_less_freedom_where_it_makes_something_else_of_the_plan(monkeypatch: pytest.MonkeyPatch):
    taken, asked = settled(monkeypatch, lambda r: needing(900 if r.strict else 2000))
    assert [r.strict for r in asked] == [False, True]
    assert taken is asked[1]


def test_a_program_as_it_is_that_turns_out_too_large_is_first_planned(monkeypatch: pytest.MonkeyPatch):
    def planned(request: JaxprRequest) -> StageOutcome:
        return replace(PLANNED, changed=request.bytes_ratio > 1)

    taken, asked = settled(monkeypatch, lambda r: needing(900 if r.bytes_ratio > 1 else 2000), planned)
    assert [(r.strict, r.bytes_ratio) for r in asked] == [(False, 1.0), (False, 2.0)]
    assert taken is asked[1]


def test_the_cheapest_that_fits_is_taken_though_it_was_not_the_last(monkeypatch: pytest.MonkeyPatch):
    repaired = replace(needing(900, cost_ns=100), recompute_ns=50)
    verdicts = {1.0: repaired, 1.05: needing(800, cost_ns=300)}
    taken, asked = settled(monkeypatch, lambda r: verdicts[r.bytes_ratio])
    assert len(asked) == 2
    assert taken is asked[0]


def test_what_comes_nearest_is_taken_if_nothing_fits(monkeypatch: pytest.MonkeyPatch):
    sizes = iter([1400, 1200, 1300, 1350, 1400, 1400, 1400])
    taken, asked = settled(monkeypatch, lambda _: needing(next(sizes)))
    assert len(asked) == trial.MAX_TRIALS + len(trial.PARTS_OF_CORRECTION)
    assert taken is asked[1]


def test_the_same_plan_is_not_tried_twice(monkeypatch: pytest.MonkeyPatch):
    tried: list[float] = []

    def verdict(request: JaxprRequest) -> StageOutcome:
        tried.append(request.bytes_ratio)
        return needing(1200)

    settled(monkeypatch, verdict, planned_of=lambda _: PLANNED)
    assert tried == [1.0]


def test_milder_plans_are_tried_before_a_budget_is_given_up(monkeypatch: pytest.MonkeyPatch):
    taken, asked = settled(monkeypatch, lambda r: needing(900 if 1.1 < r.bytes_ratio < 1.3 else 1440))
    assert [round(r.bytes_ratio, 2) for r in asked[-1:]] == [1.2]
    assert taken is asked[-1]


def rung(request: JaxprRequest, sizes: list[int], cost_ns: list[int]) -> StageOutcome:
    """A stage with rungs of estimated `sizes` and costs: the cheapest one that is expected to fit."""
    known = {m.estimated_bytes: m.temp_bytes for m in request.measured}

    def rank(k: int) -> tuple[bool, int]:
        ratio = expected_ratio(request.measured, "scan", sizes[k])
        over = known.get(sizes[k], ratio * sizes[k]) > 1000
        return over, sizes[k] if over else cost_ns[k]

    return replace(PLANNED, planner="scan", planned_temp_bytes=sizes[min(range(len(sizes)), key=rank)])


def test_rungs_of_scans_are_tried_until_the_best_was_measured(monkeypatch: pytest.MonkeyPatch):
    sizes, costs, real = [1300, 1000, 950, 700], [10, 11, 12, 20], [1400, 1100, 990, 800]
    monkeypatch.setattr(trial, "_is_short", lambda _: True)
    taken, asked = settled(
        monkeypatch,
        lambda r: needing(real[sizes.index(rung(r, sizes, costs).planned_temp_bytes)]),
        lambda r: rung(r, sizes, costs),
    )
    tried = [(m.estimated_bytes, m.temp_bytes) for m in asked[-1].measured]
    assert tried == [(1000, 1100), (700, 800)]
    assert taken is asked[1]


def test_an_estimate_is_corrected_by_the_nearest_of_its_kind():
    measured = (
        Measured(planner="scan", estimated_bytes=100, temp_bytes=110),
        Measured(planner="scan", estimated_bytes=1000, temp_bytes=900),
    )
    assert expected_ratio(measured, "scan", 120) == 1.1
    assert expected_ratio(measured, "scan", 800) == 0.9
    assert expected_ratio(measured, "scan segments", 800, 1.5) == 1.5
