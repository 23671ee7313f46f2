"""What to say of a program that is over its budget, by a prediction or by XLA's count."""

from __future__ import annotations

import dataclasses
from typing import Any

from coop_jax.errors import BudgetExceededError, CoopError, InfeasibleBudgetError
from coop_jax.record import Record
from passes.backend import Backend
from passes.ir import Status
from passes.outcome import StageOutcome

# A prediction that is over the budget by no more is close.
SAFE_SIDE_RATIO = 1.15


def leave_to_check(outcome: StageOutcome, backend: Backend) -> bool:
    """True if XLA's own count should decide: the prediction errs on the safe side, and is close."""
    if 0 < outcome.host_budget_bytes < outcome.host_bytes:
        return False
    predicted = outcome.fixed_bytes + outcome.before_temp_bytes
    if backend.fast_bytes:
        close = predicted <= outcome.budget_bytes + backend.fast_bytes
    else:
        close = predicted <= outcome.budget_bytes * SAFE_SIDE_RATIO
    return close and outcome.status is Status.UNKNOWN


def of_the_program(outcome: StageOutcome) -> StageOutcome:
    """A proof about the kernels of one module says nothing about other ways to write the program."""
    if outcome.budget_bytes < outcome.fixed_bytes:
        return outcome
    return dataclasses.replace(outcome, status=Status.UNKNOWN, least_proved=False)


def named(refused: StageOutcome, budget_bytes: int, least_bytes: int | None) -> StageOutcome:
    """The refusal of a budget with the least one that is known to be met; None for what the stage names."""
    own = refused.least_total_bytes
    least = own if least_bytes is None else least_bytes
    proved = refused.least_proved and least == own
    sure = proved or refused.fixed_bytes > budget_bytes
    status = refused.status if sure else Status.UNKNOWN
    return dataclasses.replace(refused, least_total_bytes=least, least_proved=proved, status=status)


def over_budget(record: Record, total_bytes: int, held_bytes: int | None = None) -> CoopError:
    """What to say of a program that needs more than its budget by XLA's count.

    Args:
        held_bytes: what its next compile is held to; None for the budget.
    """
    if record.hlo is not None and not record.hlo.status.found:
        return InfeasibleBudgetError.from_outcome(of_the_program(record.hlo))
    return BudgetExceededError(
        budget_bytes=record.budget_bytes, compiled_bytes=total_bytes, held_bytes=held_bytes
    )


def refused_before(record: Record, memory: Any) -> InfeasibleBudgetError:
    """The refusal of a program that another process compiled, and put into the cache."""
    return InfeasibleBudgetError(
        budget_bytes=record.budget_bytes,
        least_bytes=int(memory.total_allocation_bytes),
        proved=False,
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        tightest=() if record.jaxpr is None else record.jaxpr.tightest,
        constraints=record.constraints,
    )
