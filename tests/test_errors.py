"""Every public error by its text, and every error through text and back."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from coop_jax.errors import (
    BudgetError,
    BudgetExceededError,
    CoopError,
    InfeasibleBudgetError,
    UnsupportedError,
    error_from_text,
)
from passes.ir import Status
from passes.outcome import LiveValue, StageOutcome
from passes.recipe import Recipe

MIB = 2**20

OUTCOME = StageOutcome(
    stage="hlo",
    changed=False,
    budget_bytes=100 * MIB,
    argument_bytes=60 * MIB,
    output_bytes=30 * MIB,
    alias_bytes=10 * MIB,
    before_temp_bytes=400 * MIB,
    planned_temp_bytes=50 * MIB,
    cost_ns=10**6,
    recompute_ns=0,
    lower_bound_ratio=0.0,
    status=Status.UNKNOWN,
    recipe=Recipe(recompute="cut"),
    seconds=0.1,
    tightest=(
        LiveValue(op="dot.1", source="model.py:41 (attention)", nbytes=32 * MIB),
        LiveValue(op="fusion.7", source="", nbytes=8 * MIB),
    ),
    least_total_bytes=130 * MIB,
)


def test_an_infeasible_budget_says_everything_that_is_known() -> None:
    text = str(InfeasibleBudgetError.from_outcome(OUTCOME))
    assert text == (
        "no plan was found that keeps this program within its budget of 100.0 MiB (104857600 B).\n"
        "Least budget found: 130.0 MiB (136314880 B) (not proved: a smaller one may exist).\n"
        "Arguments 60.00 MiB (62914560 B) + outputs 30.00 MiB (31457280 B) - donated 10.00 MiB (10485760 B) "
        "= 80.00 MiB (83886080 B), which no plan can remove.\n"
        "Largest values alive at the tightest point:\n"
        "  32.00 MiB (33554432 B)  dot.1  at model.py:41 (attention)\n"
        "  8.00 MiB (8388608 B)  fusion.7\n"
        "What would help:\n"
        "  - a budget of 130.0 MiB (136314880 B), or a little more: the best program that was tried needs so "
        "much\n"
        "  - donate the arguments that the outputs replace, as in jax.jit(step, donate_argnums=0): saves "
        "up to 20.00 MiB (20971520 B)\n"
        "  - a smaller batch, or a shorter sequence, if the temporaries shrink with it: 50.00 MiB "
        "(52428800 B) of them are left\n"
        "(docs: errors/infeasible-budget)"
    )


def test_proved_and_not_found_are_different_words() -> None:
    proved = dataclasses.replace(OUTCOME, status=Status.INFEASIBLE, least_proved=True)
    text = str(InfeasibleBudgetError.from_outcome(proved))
    assert text.startswith("no plan can keep this program within its budget of 100.0 MiB")
    assert "Least feasible budget: 130.0 MiB (136314880 B) (proved)." in text
    assert "not proved" not in text
    unknown = dataclasses.replace(OUTCOME, least_total_bytes=None)
    assert "The least feasible budget is not known." in str(InfeasibleBudgetError.from_outcome(unknown))


def test_fully_donated_arguments_need_no_advice_to_donate() -> None:
    donated = dataclasses.replace(OUTCOME, alias_bytes=OUTCOME.output_bytes)
    assert "donate" not in "".join(InfeasibleBudgetError.from_outcome(donated).advice)


def advice_of(**changes: int | None) -> str:
    return "\n".join(InfeasibleBudgetError.from_outcome(dataclasses.replace(OUTCOME, **changes)).advice)


def test_advice_that_saves_next_to_nothing_is_left_out() -> None:
    gib = 2**30
    large = {"budget_bytes": 10 * gib, "argument_bytes": 8 * gib, "alias_bytes": 0}
    assert "donate" not in advice_of(**large, output_bytes=164, least_total_bytes=12 * gib)
    assert "up to 3.00 GiB" in advice_of(**large, output_bytes=3 * gib, least_total_bytes=12 * gib)
    assert "donate" in advice_of(**large, output_bytes=gib // 2, least_total_bytes=12 * gib)
    # The least budget is named in any case.
    assert "12.00 GiB" in advice_of(**large, output_bytes=164, least_total_bytes=12 * gib)


def test_a_smaller_batch_is_advised_where_temporaries_are_what_is_too_much() -> None:
    assert "a smaller batch" in advice_of(least_total_bytes=130 * MIB)
    fixed = {"argument_bytes": 1000 * MIB, "output_bytes": 0, "alias_bytes": 0}
    over = advice_of(**fixed, least_total_bytes=1001 * MIB)
    assert "a smaller batch" not in over
    assert "they alone are 900.0 MiB (943718400 B) over the budget" in over
    tiny = advice_of(**fixed, budget_bytes=1000 * MIB, least_total_bytes=1000 * MIB, planned_temp_bytes=0)
    assert "a smaller batch" not in tiny


def test_a_least_budget_that_nothing_was_compiled_for_is_called_an_estimate() -> None:
    text = str(InfeasibleBudgetError.from_outcome(dataclasses.replace(OUTCOME, stage="jaxpr")))
    assert "Least budget by estimate: 130.0 MiB (136314880 B) (nothing was compiled for it)." in text
    assert "is estimated to need so much" in text
    assert "was tried" not in text


def test_small_values_are_not_called_the_largest() -> None:
    values = [LiveValue(op=op, source="", nbytes=n) for op, n in (("a", MIB), ("b", MIB // 2), ("c", 4))]
    text = str(InfeasibleBudgetError.from_outcome(dataclasses.replace(OUTCOME, tightest=tuple(values))))
    assert "  512.0 KiB (524288 B)  b\n  and 1 more, 4 B together\n" in text


def test_many_values_are_summed_up() -> None:
    values = tuple(LiveValue(op=f"op{i}", source="", nbytes=MIB) for i in range(20))
    text = str(InfeasibleBudgetError.from_outcome(dataclasses.replace(OUTCOME, tightest=values)))
    assert "op7" in text
    assert "op8" not in text
    assert "and 12 more, 12.00 MiB (12582912 B) together" in text


def test_an_exceeded_budget_names_the_numbers() -> None:
    error = BudgetExceededError(budget_bytes=100 * MIB, compiled_bytes=101 * MIB)
    assert str(error).startswith(
        "the compiled program needs 101.0 MiB (105906176 B), which is 1.00 MiB (1048576 B) over its budget "
        "of 100.0 MiB (104857600 B)."
    )
    assert "please report this program" in str(error)
    again = BudgetExceededError(budget_bytes=100 * MIB, compiled_bytes=101 * MIB, held_bytes=99 * MIB)
    assert "Compile it again in this process: it is planned for 99.00 MiB (103809024 B) then" in str(again)


ERRORS = [
    CoopError("something"),
    BudgetError("budget '8g' is refused"),
    UnsupportedError('no "plugin" [here] {or there}\nsecond line'),
    BudgetExceededError(budget_bytes=5, compiled_bytes=6, held_bytes=4),
    InfeasibleBudgetError.from_outcome(OUTCOME),
    InfeasibleBudgetError.from_outcome(dataclasses.replace(OUTCOME, least_total_bytes=None, tightest=())),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_as_text(error: CoopError) -> None:
    wrapped = f"INTERNAL: RuntimeError: {error.to_text()}\n\nAt:\n  xla.py(3): callback]"
    for again in (error_from_text(wrapped), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.fields() == error.fields()


def test_a_note_that_somebody_added_is_no_field() -> None:
    error = BudgetExceededError(budget_bytes=10, compiled_bytes=11)
    error.add_note("while tracing")
    assert error_from_text(error.to_text()) is not None


def test_the_last_error_in_a_text_wins() -> None:
    text = ERRORS[0].to_text() + ERRORS[1].to_text()
    assert type(error_from_text(text)) is BudgetError


@pytest.mark.parametrize(
    "text",
    [
        "",
        "RESOURCE_EXHAUSTED: out of memory",
        "[coop-error ",
        "[coop-error {}]",
        '[coop-error {"kind": "Other"}]',
        '[coop-error {"kind": "BudgetExceededError"}]',
        "[coop-error []]",
        "[coop-error 3]",
    ],
)
def test_other_texts_are_no_errors_of_ours(text: str) -> None:
    assert error_from_text(text) is None


def test_every_error_is_a_coop_error() -> None:
    for error in ERRORS:
        assert isinstance(error, CoopError)
