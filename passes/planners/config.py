"""How hard the planners try. Limits are counts of work, never wall clock: plans must not depend on load."""

from __future__ import annotations

from dataclasses import dataclass

PLANNERS = ("auto", "window", "cut")
UNITS_PER_OP = 100
LEAST_UNITS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """What to plan with.

    Attributes:
        planner: "auto" (the cheaper of both), "window" or "cut".
        work_limit: how much work a search may do, in units of about a microsecond; None scales with the
            program (about 0.2 s, and 100 us an op from 2000 ops on). Where the first search misses the
            budget, up to `passes.planners.search.TOTAL_LIMITS` times as much is done in all.
        placed: whether the budget is for the plan placed by best fit, holes included, instead of its live
            bytes; the plan then carries offsets.
        bound: whether to prove a lower bound on the overhead beside the plan.
        bound_moments: at how many moments of the program to look for the bound.
    """

    planner: str = "auto"
    work_limit: int | None = None
    placed: bool = False
    bound: bool = True
    bound_moments: int = 8

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise ValueError(f"unknown planner {self.planner!r}; choose one of {', '.join(PLANNERS)}")
        if self.work_limit is not None and self.work_limit < 0:
            raise ValueError(f"`work_limit` is {self.work_limit}; it must not be negative")
        if self.bound_moments < 1:
            raise ValueError(f"`bound_moments` is {self.bound_moments}; it must be at least 1")

    def units(self, n_ops: int) -> int:
        """The work limit for a program of `n_ops` ops."""
        return max(LEAST_UNITS, UNITS_PER_OP * n_ops) if self.work_limit is None else self.work_limit
