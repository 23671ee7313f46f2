"""The least budget that a refusal names: what is met when it is asked for, in a process that knows nothing.

That is asked for, and ever less, until something is refused. Each of these requests would look at what the
refused one looked at already, for a smaller budget: XLA makes the same of a plan whatever it is held to, and
what the enforcing stage found to need the least of it is met when that is asked for (`passes.hlo.fit`). So a
plan that missed a budget is not looked at again for a larger one: it keeps that, or it misses it as before.

Less than what is known to be met is not asked for where no plan at all could keep the budget: each answer
takes as long as several compiles, and who asks for a byte wants a number that will do. Nor is anything where
nobody reads the name (`unnamed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from coop_jax.known import Known
from coop_jax.record import UNLIMITED_BYTES
from coop_jax.relowering import Variant, Wish
from coop_jax.tries import TRIES, hlo_of
from passes.outcome import StageOutcome

_NAMES: ContextVar[bool] = ContextVar("names", default=True)


@dataclass(slots=True, kw_only=True)
class Missed:
    """What missed a budget, and what it needs at least.

    Attributes:
        by_plan: by `tries.plan_key`.
        by_wish: by wishes that are planned as they are whatever the budget is.
    """

    by_plan: dict[Hashable, Variant] = field(default_factory=dict)
    by_wish: dict[Wish, Variant] = field(default_factory=dict)

    def add(self, asked: Wish, plan: Hashable, missed: Variant) -> None:
        """Remember what missed its budget."""
        if plan is not None:
            self.by_plan[plan] = missed
        if is_of_no_budget(asked):
            self.by_wish[_without_budget(asked)] = missed

    def of(self, asked: Wish) -> Variant | None:
        """What a wish came to, where that was planned for no budget; else None."""
        return self.by_wish.get(_without_budget(asked)) if is_of_no_budget(asked) else None

    def meets(self, budget_bytes: int) -> bool:
        """True if a budget is kept by what every request looks at in the end."""
        return any(is_met_by(missed, budget_bytes) for missed in self.by_wish.values())


@contextmanager
def unnamed() -> Iterator[None]:
    """In it refusals name no other least budget than the enforcing stage knows: the next one is chosen."""
    token = _NAMES.set(False)
    try:
        yield
    finally:
        _NAMES.reset(token)


def is_named() -> bool:
    """True where a refusal should name the least budget."""
    return _NAMES.get()


def is_of_no_budget(asked: Wish) -> bool:
    """True for a wish that is planned alike whatever budget it is held to, and that every request makes."""
    return asked.aim_bytes is None and not asked.policy and asked.budget_bytes != UNLIMITED_BYTES


def is_met_by(missed: Variant, budget_bytes: int) -> bool:
    """True if what missed a budget is known to keep a larger one."""
    least_bytes = hlo_of(missed).least_total_bytes
    return least_bytes is not None and least_bytes <= budget_bytes


def find(
    budget_bytes: int,
    refused: StageOutcome,
    *,
    least_above: Callable[[int], Known | None],
    answered_above: Callable[[int], int],
    is_met: Callable[[int, Known], bool],
    lower: bool = True,
) -> tuple[int | None, int]:
    """The least budget that is met when it is asked for, if one is found, and the largest refused below it.

    What is known was planned for other budgets: of ten small programs two refused in a fresh process what
    they had named.

    Args:
        budget_bytes: what was refused.
        least_above: what needs the least of all that is known to need more.
        answered_above: the least larger budget that was asked for, and kept.
        is_met: whether a budget is met, given what is known to need the least above the refused ones.
        lower: whether to ask for less than what is met.
    """
    refused_bytes = max(budget_bytes, refused.fixed_bytes - 1)
    met_bytes, most_bytes = None, UNLIMITED_BYTES
    for _ in range(TRIES.most_asked):
        least = least_above(refused_bytes)
        is_proved = refused.least_proved and least and least.sure_bytes == refused.least_total_bytes
        if least is None or is_proved or most_bytes <= refused_bytes:
            break
        asked_bytes = min(least.sure_bytes, most_bytes)
        if is_met(asked_bytes, least):
            met_bytes, most_bytes = asked_bytes, int(asked_bytes * TRIES.asked_ratio)
            if lower:
                continue
            break
        refused_bytes = asked_bytes
        most_bytes = min(int(asked_bytes / TRIES.asked_ratio), answered_above(asked_bytes))
        if met_bytes is not None:
            break
    return met_bytes, budget_bytes if met_bytes is None else refused_bytes


def _without_budget(asked: Wish) -> Wish:
    return dataclasses.replace(asked, budget_bytes=0)
