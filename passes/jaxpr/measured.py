"""What XLA made of candidates that were tried out, and what to expect of the others.

A candidate is known again by its planner and its estimate. Of one that was not tried, XLA is expected to
need as much more or less than estimated as of the one of its kind whose estimate is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate that was tried out.

    Attributes:
        planner: its planner, as in `StageOutcome`.
        estimated_bytes: the jaxpr stage's estimate of its temporaries.
        temp_bytes: what XLA needs for them; what was asked for, if the enforcing stage can repair it.
    """

    planner: str
    estimated_bytes: int
    temp_bytes: int


def tried(measured: Sequence[Measured], planner: str, estimated_bytes: int) -> Measured | None:
    """The candidate with this planner and estimate, if it was tried out."""
    same = (m for m in measured if (m.planner, m.estimated_bytes) == (planner, estimated_bytes))
    return next(same, None)


def expected_ratio(
    measured: Sequence[Measured], planner: str, estimated_bytes: int, prior_ratio: float = 1.0
) -> float:
    """XLA's bytes over an estimate: the nearest one's of the same planner, `prior_ratio` if there is none."""
    alike = [m for m in measured if m.planner == planner]
    if not alike:
        return prior_ratio
    nearest = min(alike, key=lambda m: abs(math.log(max(m.estimated_bytes, 1) / max(estimated_bytes, 1))))
    return nearest.temp_bytes / max(nearest.estimated_bytes, 1)
