"""What plans take the least of: time, or energy within a limit of time, as POET (ICML 2022) asks for it.

Every way to run a program has an estimated time and an estimated energy; an objective makes one price of
both, by which the planners, both stages and the search around them compare. Smaller is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from passes.ir import Program

OBJECTIVES = ("time", "energy")

# Later than the limit of time or not; then what the least is taken of. What is late is compared by its time.
Price = tuple[bool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is least.

    Attributes:
        least: one of `OBJECTIVES`.
        max_overhead: by which share of the program's time a plan of least energy may be slower; None for any.
    """

    least: str = "time"
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        if self.least not in OBJECTIVES:
            raise ValueError(f"`objective` is {self.least!r}; it is time or energy")
        if self.max_overhead is None:
            return
        share = isinstance(self.max_overhead, int | float) and 0 <= self.max_overhead < math.inf
        if not share or self.least == "time":
            raise ValueError(
                f"`max_overhead` is {self.max_overhead!r}; it is a share, for `objective` energy: 0.1 for "
                "plans that are at most a tenth slower. The least time has no other limit"
            )

    def limit_ns(self, base_ns: int) -> float:
        """What a program that takes `base_ns` may take."""
        return math.inf if self.max_overhead is None else base_ns * (1 + self.max_overhead + 1e-9)

    def price(self, *, cost_ns: int, energy_pj: int, base_ns: int) -> Price:
        """What to compare one way to run a program by.

        Args:
            base_ns: what the program takes without recomputes.
        """
        late = cost_ns > self.limit_ns(base_ns)
        return late, cost_ns if late or self.least == "time" else energy_pj

    def after(self, overhead_ratio: float) -> Objective:
        """What is left for the stages after one that has made the program slower by a share."""
        if self.max_overhead is None:
            return self
        return replace(self, max_overhead=max(0.0, (1 + self.max_overhead) / (1 + overhead_ratio) - 1))

    def of(self, program: Program) -> Objective:
        """The same for a program whose ops say their energy; else there is only time to weigh."""
        return self if program.energy_pj else LEAST_TIME

    def __str__(self) -> str:
        within = "" if self.max_overhead is None else f" within {self.max_overhead:.0%} more time"
        return f"least {self.least}{within}"


LEAST_TIME = Objective()
