"""`coop.explain`, `coop.pareto` and the difference of reports, on a small program."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax import aot, plain
from coop_jax.host_use import HostUse
from coop_jax.screen import WIDTH, as_plain, shortened, sparkline
from passes.checked import InputError

SPEC = jax.ShapeDtypeStruct
WS, X = [SPEC((32, 32), jnp.float32)] * 14, SPEC((1024, 32), jnp.float32)


def loss(ws: Any, x: Any, wrap: Any = lambda f: f) -> Any:
    layer = wrap(lambda x, w: jnp.tanh(x @ w))
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def step(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def by_hand(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(functools.partial(loss, wrap=jax.checkpoint))(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


@functools.cache
def explained() -> coop.Explanation:
    return coop.explain(step, WS, X)


@functools.cache
def curve() -> coop.Pareto:
    return coop.pareto(step, WS[:5], X, budgets=3, rivals={"checkpoint": by_hand})


def half_of(found: coop.Explanation) -> coop.Report:
    assert found.recompute is not None
    assert found.recompute.half is not None
    return found.recompute.half


def test_explain_says_what_could_be_had() -> None:
    found = explained()
    total = aot.memory(jax.jit(step).lower(WS, X).compile()).total_bytes
    assert found.memory.total_bytes == total
    (donation,) = found.donations
    assert (donation.argnum, donation.nbytes) == (0, 14 * 32 * 32 * 4)
    assert found.recompute is not None
    assert found.recompute.half is not None
    assert found.recompute.half.compiled_total_bytes <= total // 2
    assert found.recompute.least_bytes is not None
    assert found.recompute.least_bytes < total
    assert found.paging is None
    text = str(found)
    assert "by donating argument 0" in text
    assert "by recomputing, half of it" in text
    assert "by recomputing, the least budget" in text
    assert "by paging: nothing, since nothing is paged on cpu" in text
    assert max(map(len, text.split("\n"))) <= WIDTH
    data = json.loads(json.dumps(found.to_dict()))
    assert data["donations"] == [{"argnum": 0, "nbytes": 57344}]
    assert data["recompute"]["least_bytes"] == found.recompute.least_bytes
    assert data["paging"] is None


@pytest.mark.parametrize("budgets", [0, -2])
def test_no_number_of_budgets_is_refused(budgets: int) -> None:
    with pytest.raises(coop.BudgetError, match="at least 1"):
        coop.pareto(step, WS[:2], X, budgets=budgets)


def test_the_least_that_is_named_is_met() -> None:
    found = explained().recompute
    assert found is not None
    assert found.least_bytes is not None
    assert coop.plan(step, WS, X, budget=found.least_bytes).compiled_total_bytes <= found.least_bytes


def test_explain_asks_with_the_hosts_memory_where_values_can_be_paged(
    h200: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer costs to find is measured elsewhere; here it is a refusal."""
    asked: list[tuple[int, int]] = []

    def refused(*_: Any, budget: int, host: int | None, **__: Any) -> Any:
        asked.append((budget, host or 0))
        raise coop.InfeasibleBudgetError(
            budget_bytes=budget, least_bytes=700 if host else 900, proved=False, argument_bytes=0,
            output_bytes=0, alias_bytes=0,
        )  # fmt: skip

    monkeypatch.setattr(plain, "compile_within", refused)
    found = coop.explain(step, WS[:2], X, device=h200)
    total = found.memory.total_bytes
    half, milder = total // 2, 3 * total // 4
    assert [budget for budget, _ in asked] == [half, milder, half, milder]
    assert [host > 0 for _, host in asked] == [False, False, True, True]
    text = str(found)
    assert "by recomputing, the least budget: 900 B" in text
    assert "by paging, too (host=), the least budget: 700 B" in text
    assert max(map(len, text.split("\n"))) <= WIDTH


def test_what_waits_on_the_host_is_said_beside_what_it_costs() -> None:
    found = explained()
    paged = dataclasses.replace(
        half_of(found), host=HostUse(budget_bytes=1 << 30, compiled_bytes=5 << 20, planned_bytes=5 << 20)
    )
    paging = coop.BudgetRange(least_bytes=1000, least_proved=True, half_refused="no plan", milder=paged)
    shown = dataclasses.replace(found, paging=paging)
    text = " ".join(str(shown).split())
    assert "by paging, too (host=), half of it: no plan" in text
    assert "by paging, too (host=), three quarters of it, " in text
    assert "by estimate; 5.00 MiB wait there (compiled)" in text
    assert "by paging, too (host=), the least budget: 1000 B (planned in XLA's schedule; proved)" in text
    assert "wait there" in shown._repr_html_()
    assert shown.to_dict()["paging"]["milder"]["host"]["compiled_bytes"] == 5 << 20


def test_what_is_donated_already_is_not_advised() -> None:
    found = coop.explain(step, WS, X, donate_argnums=0, budgets=False)
    assert found.donations == ()
    assert found.recompute is None
    assert "what could be had" not in str(found)


def test_what_a_jitted_function_donates_is_donated_in_every_compile() -> None:
    jitted = jax.jit(step, donate_argnums=0)
    nbytes = 4 * 32 * 32 * 4
    found = coop.explain(jitted, WS[:4], X, budgets=False)
    assert found.donations == ()
    assert found.memory.alias_bytes == nbytes
    assert coop.plan(jitted, WS[:4], X, budget="1GiB").alias_bytes == nbytes
    asked = coop.explain(jax.jit(step), WS[:4], X, donate_argnums=0, budgets=False)
    assert asked.memory.alias_bytes == nbytes
    curve = coop.pareto(jitted, WS[:4], X, budgets=["1GiB"], rivals={"the same": step})
    assert (curve.points[0].total_bytes, curve.rivals[0].total_bytes) == (curve.plain_bytes,) * 2


def test_pareto_has_the_wall_the_curve_and_the_rivals() -> None:
    found = curve()
    assert len(found.points) == 3
    assert found.least_bytes is not None
    assert [p.budget_bytes for p in found.points] == sorted(p.budget_bytes for p in found.points)
    assert min(p.budget_bytes for p in found.points if p.total_bytes is not None) == found.least_bytes
    middle_bytes = found.least_bytes + (found.plain_bytes - found.least_bytes) // 2
    assert found.points[-1].budget_bytes == middle_bytes, "what the plain program takes is known"
    assert all(p.total_bytes <= p.budget_bytes for p in found.points if p.total_bytes is not None)
    (rival,) = found.rivals
    assert rival.name == "checkpoint"
    assert rival.overhead_ratio > 0
    assert "checkpoint" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["plain_bytes"] == found.plain_bytes


def test_a_given_budget_that_was_met_with_room_is_not_called_the_least() -> None:
    found = coop.pareto(step, WS[:2], X, budgets=["1GiB"], rivals={})
    assert "found: 1.00 GiB (1073741824 B), met by a program of " in str(found)


def test_budgets_can_be_given_in_bytes_and_refusals_are_points() -> None:
    found = coop.pareto(step, WS[:2], X, budgets=[1000])
    (point,) = found.points
    assert point.total_bytes is None
    assert point.refused.startswith("no plan")
    assert "refused" in str(found)
    assert found.least_bytes is None


def test_two_reports_differ_in_what_is_recomputed() -> None:
    half = half_of(explained())
    roomy = coop.plan(step, WS, X, budget="1GiB")
    text = str(coop.difference(roomy, half))
    assert "what changed" in text
    assert "dot_general" in text or not half.recomputed
    assert max(map(len, text.split("\n"))) <= WIDTH
    same = coop.difference(half, json.loads(json.dumps(half.to_dict())))
    assert "recomputed  " not in str(same)
    assert coop.Report.from_dict(json.loads(json.dumps(half.to_dict()))) == half


def test_notebooks_get_html() -> None:
    half = half_of(explained())
    for shown in (explained(), curve(), half, coop.difference(half, half)):
        html = shown._repr_html_()
        assert html.startswith('<div class="coop">')
        assert html.count("<table>") == html.count("</table>") > 0


@pytest.mark.parametrize("ending", [".json", ".txt", ".html"])
def test_what_is_found_is_saved_by_its_ending(ending: str, tmp_path: Path) -> None:
    for found in (explained(), curve()):
        path = tmp_path / f"found{ending}"
        found.save(path)
        text = path.read_text(encoding="utf-8")
        assert len(text) > 200
        if ending == ".json":
            json.loads(text)
    with pytest.raises(coop.UnsupportedError, match=r"must end in one of .png"):
        explained().save(tmp_path / "found.doc")


def test_text_is_cut_in_the_middle_and_has_plain_characters_where_it_must() -> None:
    assert shortened("a" * 30 + "end", 12) == "aaa…aaaaaend"
    assert shortened("short", 12) == "short"
    assert len(sparkline(list(range(1000)), width=50)) == 50
    assert as_plain("█▁…", "ascii") == "#_~"
    assert as_plain("█", "utf-8") == "█"


def test_a_named_program_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    from coop_jax.programs import load

    path = tmp_path / "thing.py"
    path.write_text("import jax.numpy as jnp\nx = 3\ndef f(a): return a\ndef made(): return jnp.ones(3)\n")
    program = load(f"{path}:f", ["made", "bf16[2, 3]", "x"])
    assert program.specs[0].shape == (3,)
    assert (program.specs[1].shape, program.specs[1].dtype) == ((2, 3), jnp.bfloat16)
    assert program.specs[2] == 3
    wrong = [
        (f"{path}:x", []),
        (f"{path}:g", []),
        (f"{path}", []),
        ("no.such:f", []),
        (f"{tmp_path}/no.py:f", []),
    ]
    wrong += [(f"{path}:f", [spec]) for spec in ("q8[3]", "f32[3", "f")]
    for target, specs in wrong:
        with pytest.raises(InputError):
            load(target, specs)
