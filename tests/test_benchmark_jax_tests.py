"""How the outcomes of JAX's own tests are sorted, and that the shim takes the place of `jax.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jax_tests import (
    ALWAYS_MET,
    DOCUMENTED,
    INTERNALS,
    OURS,
    PASSES,
    PLAIN_TOO,
    REFUSED,
    RULES,
    Outcome,
    Runner,
    sort,
)

ROOT = Path(__file__).resolve().parent.parent
PASSED = Outcome(outcome="passed", decorated=1)
REFUSAL = Outcome(outcome="failed", error="InfeasibleBudgetError", message="budget 64 B")
WRONG = Outcome(
    outcome="failed",
    error="AssertionError",
    message="Not equal to tolerance rtol=1e-06",
    statement="self.assertAllClose(res, expected)",
)
TEXT = Outcome(
    outcome="failed",
    error="AssertionError",
    message="0 != 2",
    statement="self.assertEqual(jaxpr_text.count(' sin '), 2)",
)
COUNTS = Outcome(outcome="failed", error="AssertionError", message="0 != 1", statement="len(sin_calls)")
OFFLOADS = Outcome(
    outcome="failed",
    error="ConstraintError",
    message="policy: it offloads values to the host",
    statement="f(x)",
)
MODULE = """
import unittest

import jax

class SmallTest(unittest.TestCase):
  def test_remat_has_a_budget(self):
    self.assertIn("coop_remat", str(jax.make_jaxpr(jax.remat(lambda x: x * 2))(1.0)))

  def test_remat_is_called_as_checkpoint_is(self):
    self.assertEqual(jax.checkpoint(lambda n, x: n * x, static_argnums=0, prevent_cse=False)(2, 3.0), 7.0)

  def test_of_something_else(self):
    self.fail()
"""


@pytest.mark.parametrize(
    ("found", "plain", "again", "kind"),
    [
        (PASSED, PASSED, None, PASSES),
        (WRONG, WRONG, None, PLAIN_TOO),
        (WRONG, PASSED, None, OURS),
        (TEXT, PASSED, None, INTERNALS),
        (COUNTS, PASSED, None, DOCUMENTED),
        (OFFLOADS, PASSED, None, OURS),
        (REFUSAL, PASSED, PASSED, REFUSED),
        (REFUSAL, PASSED, REFUSAL, OURS),
        (REFUSAL, PASSED, WRONG, OURS),
        (REFUSAL, PASSED, None, OURS),
        (Outcome(), PASSED, None, OURS),
    ],
)
def test_only_what_is_explained_is_not_ours(
    found: Outcome, plain: Outcome, again: Outcome | None, kind: str
) -> None:
    assert sort("a_test.py::T::test_remat", found, plain, again)[0] == kind


def test_every_explanation_is_a_row_of_the_documentation() -> None:
    rows = [line for line in (ROOT / "docs" / "jax.md").read_text().splitlines() if line.startswith("| ")]
    assert [rule.row for rule in RULES if not any(line.startswith(f"| {rule.row}") for line in rows)] == []


def test_the_shim_takes_the_place_of_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "small_test.py").write_text(MODULE)
    (tmp_path / "out").mkdir()
    runner = Runner(tests=tmp_path, results=tmp_path / "out", timeout_s=120, jobs=1)
    found = runner.run(ALWAYS_MET, {"small_test.py": None})
    outcomes = {test.rsplit("::", 1)[1]: (o.outcome, o.decorated, o.error) for test, o in found.items()}
    assert outcomes == {
        "test_remat_has_a_budget": ("passed", 1, ""),
        "test_remat_is_called_as_checkpoint_is": ("failed", 1, "AssertionError"),
    }
