"""The promise on small models: within budget by XLA's own count, or a refusal that holds.

The long version is benchmarks/promise.py.
"""

from __future__ import annotations

import pytest

from benchmarks.promise import FORMS, Case, cases
from tests.models import SMALL

FRACTIONS = {"cpu": [0.6], "h200": [0.7]}

# Floating-point sums may associate differently where XLA fuses recomputed values into other kernels.
TOLERANCE = 1e-5

# What every version must reach; a refusal below these is allowed, a refusal above is a failure.
MUST_REACH = {
    "cpu": {"gpt": 0.6, "mlp": 0.6, "conv": 0.6, "lstm": 0.6},
    "h200": {"gpt": 0.7, "mlp": 0.7, "conv": 0.7, "lstm": 0.7},
}


def check(case: Case) -> None:
    """One case keeps the promise."""
    if case.total_bytes is None:
        assert case.fraction < MUST_REACH[case.device][case.model], f"refused: {case}"
        assert case.least_bytes is not None
        assert case.budget_bytes < case.least_bytes <= case.plain_bytes
        assert case.least_bytes >= case.fixed_bytes
        return
    assert case.total_bytes <= case.budget_bytes
    assert case.budget_bytes < case.plain_bytes
    if case.difference is not None:
        assert case.difference <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "form"), [*((m, f) for m in ("gpt", "mlp") for f in FORMS), ("conv", "step"), ("lstm", "grad")]
)
def test_on_this_cpu(model: str, form: str) -> None:
    found = cases(SMALL[model](), form, "cpu", FRACTIONS["cpu"])
    assert [c.difference is None for c in found] == [c.total_bytes is None for c in found]
    for case in found:
        check(case)


@pytest.mark.parametrize(
    ("model", "form"), [("gpt", "grad"), ("mlp", "step"), ("conv", "step"), ("lstm", "grad")]
)
def test_on_an_absent_gpu(h200: str, model: str, form: str) -> None:
    for case in cases(SMALL[model](), form, h200, FRACTIONS[h200]):
        check(case)
