"""What XLA made of candidates that it compiled, and what to expect of the others.

A candidate is known again by its recipe and its estimate. Of one that was not compiled, XLA is expected to
need as much more or less than estimated as of the one of its kind whose estimate is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.outcome import StageOutcome
from passes.recipe import Recipe, Scans

# A repair by the enforcing stage that costs no more of the program's time is as good as a better plan.
CHEAP_REPAIR_RATIO = 0.02
# Where XLA makes this much more of a plan than was planned, it is first left less freedom.
STRICT_RATIO = 1.5
# Every correction is at least so much stronger than the one before it.
STRONGER_RATIO = 1.05
# Estimates of all devices' bytes are told apart from one device's times their number.
SAME_RATIO = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate that was compiled.

    Attributes:
        recipe: how it was made.
        estimated_bytes: the jaxpr stage's estimate of its temporaries.
        temp_bytes: what XLA needs for them; what was asked for, if the enforcing stage repairs it cheaply.
    """

    recipe: Recipe
    estimated_bytes: int
    temp_bytes: int


def tried(trials: Sequence[Trial], recipe: Recipe, estimated_bytes: int) -> Trial | None:
    """The candidate with this recipe and estimate, if it was compiled."""
    alike = (m for m in trials if m.recipe == recipe)
    same = (m for m in alike if abs(m.estimated_bytes - estimated_bytes) <= SAME_RATIO * estimated_bytes)
    return next(same, None)


def expected_ratio(
    trials: Sequence[Trial], recipe: Recipe, estimated_bytes: int, prior_ratio: float = 1.0
) -> float:
    """XLA's bytes over an estimate: the nearest one's of the same recipe, `prior_ratio` if there is none."""
    alike = [m for m in trials if m.recipe == recipe]
    if not alike:
        return prior_ratio
    nearest = min(alike, key=lambda m: abs(math.log(max(m.estimated_bytes, 1) / max(estimated_bytes, 1))))
    return nearest.temp_bytes / max(nearest.estimated_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is known of XLA and one program when it is planned once more. Hashable.

    Attributes:
        bytes_ratio: XLA's bytes of temporaries over the jaxpr stage's estimate.
        strict: True to leave XLA no freedom to merge small dots or to reorder recomputes: every such kernel
            is behind a barrier of its own, which costs time and is for programs that do not fit without.
        trials: candidates with rewritten scans.
    """

    bytes_ratio: float = 1.0
    strict: bool = False
    trials: tuple[Trial, ...] = ()

    def after(self, planned: StageOutcome, verdict: StageOutcome) -> Calibration | None:
        """With what the enforcing stage said of a plan; None if no other plan follows from that."""
        if planned.recipe.scans is not Scans.NONE:
            return replace(self, trials=(*self.trials, _trial(planned, verdict)))
        if _is_cheaply_repaired(verdict):
            return None
        ratio = verdict.before_temp_bytes / max(planned.planned_temp_bytes, 1)
        if ratio > STRICT_RATIO and planned.changed and not self.strict:
            return replace(self, strict=True, bytes_ratio=1.0)
        return replace(self, bytes_ratio=max(ratio, STRONGER_RATIO * self.bytes_ratio))

    def of_parts(self, parts: int) -> Calibration:
        """What is known of one device's bytes, for all of them."""
        scaled = [
            replace(m, estimated_bytes=parts * m.estimated_bytes, temp_bytes=parts * m.temp_bytes)
            for m in self.trials
        ]
        return replace(self, trials=tuple(scaled))


UNCALIBRATED = Calibration()
"""Nothing is known: estimates are taken as they are."""
STRICT = Calibration(strict=True)
"""Nothing is known, and XLA is left no freedom."""


def _is_cheaply_repaired(verdict: StageOutcome) -> bool:
    return verdict.status.found and verdict.recompute_ns <= CHEAP_REPAIR_RATIO * verdict.cost_ns


def _trial(planned: StageOutcome, verdict: StageOutcome) -> Trial:
    budget = verdict.budget_bytes - verdict.fixed_bytes
    needed = verdict.before_temp_bytes
    return Trial(
        recipe=planned.recipe,
        estimated_bytes=planned.planned_temp_bytes,
        temp_bytes=min(needed, budget) if _is_cheaply_repaired(verdict) else needed,
    )
