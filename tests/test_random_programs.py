"""Random functions, transformed and within random budgets, against the undecorated ones.

`python -m tests.nightly` does the same with larger functions, as many as there is time for.
"""

from __future__ import annotations

from hypothesis import given, settings

import tests.strategies  # noqa: F401  (loads the profile without deadlines and with fixed seeds)
from tests.programs import Case, cases, check


@settings(max_examples=200)
@given(case=cases(depth=1, most=3))
def test_random_programs_keep_values_gradients_effects_and_budgets(case: Case) -> None:
    check(case)
