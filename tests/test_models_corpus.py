"""The programs of the corpus that need no package: whole steps, blocks under policies, rows and tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import models
from benchmarks.side_table import Comparison, bytes_off, compile_ratios, document, losses, measured_table
from benchmarks.timing import filled
from benchmarks.variants import Row, budgets_of

TINY: dict[str, dict[str, Any]] = {
    "bilstm": {"layers": 1, "units": 8, "seq": 5, "batch": 2, "vocab": 16},
    "llama_1b": {"layers": 2, "width": 16, "inner": 24, "heads": 4, "groups": 2, "seq": 8, "batch": 2}
    | {"vocab": 16},
    "gpt3_2.7b": {"layers": 1, "width": 16, "heads": 2, "seq": 8, "batch": 2, "vocab": 16},
    "swin": {"depths": (2, 1), "width": 8, "head": 4, "size": 2, "image": 16, "batch": 2, "classes": 4},
    "unet": {"channels": 8, "levels": (1, 2), "depth": 1, "image": 8, "batch": 2},
    "densenet121": {"depths": (1, 2), "growth": 4, "image": 16, "batch": 2, "classes": 4},
    "schnet": {"layers": 2, "width": 8, "radials": 4, "atoms": 12, "neighbors": 3},
    "pallas_scan": {"layers": 2, "width": 16, "heads": 2, "seq": 16, "batch": 1, "vocab": 16, "tile": 16}
    | {"scanned": True},
}


def tiny(name: str) -> models.Model:
    """A program of the corpus, so small that it compiles at once."""
    return dataclasses.replace(models.find(name), sizes={"tiny": TINY[name]})


def test_a_step_under_a_policy_is_the_plain_step() -> None:
    found = []
    for way in (models.PLAIN, "nothing_saveable"):
        made = models.program(tiny("bilstm"), "tiny", way)
        before = filled(made.specs())
        (params, _, _), value = jax.jit(made.step)(*before)
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, before[0][0])
        assert any(jax.tree.leaves(moved))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves((params, value))])
    for plain, policy in zip(*found, strict=True):
        assert np.isfinite(plain).all()
        np.testing.assert_allclose(plain, policy, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(TINY))
def test_blocks_are_checkpointed_where_a_policy_is_asked_for(name: str) -> None:
    def remats(way: str) -> int:
        made = models.program(tiny(name), "tiny", way)
        return str(jax.make_jaxpr(made.step)(*made.specs())).count("nothing_saveable")

    assert remats(models.PLAIN) == 0
    assert remats("nothing_saveable") > 0


def test_every_program_that_is_listed_names_a_file_and_an_unknown_one_is_an_error() -> None:
    assert len(models.names()) >= 14
    with pytest.raises(KeyError):
        models.find("alexnet")


MIB = 1 << 20
PLAIN = Row(name="plain", kind="plain", total_bytes=100 * MIB, cost_ns=1000, wall_s=2.0)
HAND = Row(name="nothing_saveable", kind="hand", total_bytes=40 * MIB, cost_ns=1200)


def asked(budget_mib: int, **facts: Any) -> Row:
    """A row of coop."""
    return Row(name="coop", kind="coop", budget_bytes=budget_mib * MIB, **facts)


def compared(*rows: Row) -> Comparison:
    """The rows of one program beside the plain one and a rival."""
    return Comparison(model="some", target="cpu", source="a test", rows=(PLAIN, HAND, *rows))


def test_budgets_are_the_rivals_bytes_and_fractions_of_the_plain_total() -> None:
    close = dataclasses.replace(HAND, name="dots_saveable", total_bytes=40 * MIB + 1000)
    useless = dataclasses.replace(HAND, name="own", total_bytes=100 * MIB)
    found = budgets_of([PLAIN, HAND, close, useless], (0.9, 0.4))
    assert found == [(90 * MIB, ()), (40 * MIB, ("nothing_saveable", "dots_saveable"))]


@pytest.mark.parametrize(
    ("ours", "lost"),
    [
        ({"total_bytes": 39 * MIB, "cost_ns": 1150}, False),
        ({"total_bytes": 39 * MIB, "cost_ns": 1211}, False),
        ({"total_bytes": 39 * MIB, "cost_ns": 1213}, True),
        ({"error": "refused"}, True),
    ],
)
def test_a_rival_is_lost_to_where_coop_is_refused_or_dearer_in_its_bytes(
    ours: dict[str, Any], lost: bool
) -> None:
    found = compared(asked(40, rivals=("nothing_saveable",), **ours))
    assert [loss.rival.name for loss in losses(found)] == (["nothing_saveable"] if lost else [])
    assert "nothing_saveable" in document([found])


def test_compile_ratios_leave_out_what_is_close_to_the_least_budget() -> None:
    rows = [
        asked(budget, total_bytes=total * MIB, cost_ns=1000, wall_s=wall)
        for budget, total, wall in ((60, 55, 3.0), (31, 30, 50.0))
    ]
    assert compile_ratios(compared(*rows)) == [1.5]


def test_a_plan_that_is_a_tenth_too_low_says_so() -> None:
    assert bytes_off(asked(50, total_bytes=50 * MIB, planned_bytes=45 * MIB)) == pytest.approx(-0.1)


def test_measured_steps_stand_beside_the_fastest_policy_that_fits_in_the_budget() -> None:
    assert measured_table([compared(asked(40, total_bytes=39 * MIB, rivals=("nothing_saveable",)))]) == ""
    hand = dataclasses.replace(HAND, step_ratio=0.9)
    slower = dataclasses.replace(HAND, name="dots_saveable", total_bytes=50 * MIB, step_ratio=0.95)
    ours = asked(50, total_bytes=45 * MIB, rivals=("dots_saveable",), step_ratio=0.7)
    found = Comparison(model="some", target="cpu", source="a test", rows=(PLAIN, hand, slower, ours))
    row = measured_table([found]).splitlines()[-1].replace(" ", "")
    assert row == "|somecpu|dots_saveable|0.95|0.90|0.70|"
