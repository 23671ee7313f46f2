"""What budgets cost, as data: the points of `coop.pareto`, which pictures and pages draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One budget that was compiled for.

    Attributes:
        budget_bytes: what was asked for.
        total_bytes: XLA's count of what was compiled; None if the budget was refused.
        cost_ns: estimated time of all its kernels; None if it was refused.
        overhead_ratio: that over the plain program's, less one: what the budget costs.
        lower_bound_ratio: no plan of the planned program recomputes less (0.0: nothing proved).
        refused: the first line of the refusal, "" if there was none.
    """

    budget_bytes: int
    total_bytes: int | None = None
    cost_ns: int | None = None
    overhead_ratio: float | None = None
    lower_bound_ratio: float = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another way to write the same program, compiled without a budget."""

    name: str
    total_bytes: int
    cost_ns: int
    overhead_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Overhead against budget. Bytes are XLA's; costs are estimates, not measured times.

    Attributes:
        points: smallest budget first.
        least_bytes: the least budget that a refusal named or that was compiled within; None if not known.
        plain_bytes, plain_ns: the program without a budget.
        rivals: other ways to write it.
        device_name: the cost model.
    """

    points: tuple[ParetoPoint, ...]
    least_bytes: int | None
    plain_bytes: int
    plain_ns: int
    rivals: tuple[Rival, ...]
    device_name: str
