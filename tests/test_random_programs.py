"""Random functions, transformed and within random budgets, against the undecorated ones.

`python -m tests.nightly` does the same with larger functions, as many as there is time for.
"""

from __future__ import annotations

from hypothesis import given, settings

import tests.strategies  # noqa: F401  (loads the profile without deadlines and with fixed seeds)
from tests.judge import check
from tests.ways import Case, cases

FIRST_ORDER = (
    "value",
    "grad inside",
    "grad outside",
    "jvp",
    "vmap of grad",
    "has_aux",
    "donated step",
    "two functions",
)


@settings(max_examples=12)
@given(case=cases(depth=1, most=2, ways=FIRST_ORDER))
def test_random_programs_keep_values_gradients_effects_and_budgets(case: Case) -> None:
    check(case)
