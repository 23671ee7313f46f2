"""What XLA made of candidates that it compiled, and what to expect of the others.

All that is known are the candidates that were compiled. One with rewritten scans, or the program as it is, is
known again by its recipe and its estimate; of one that was not compiled XLA is expected to need as much more
or less than estimated as of the one of its recipe whose estimate is nearest. Of candidates whose scans are as
they were all count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from passes.outcome import StageOutcome
from passes.recipe import Recipe, Scans


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """What follows from what XLA made of a plan; set by `benchmarks.promise` for the H200.

    Attributes:
        cheap_repair_ratio: a repair by the enforcing stage that costs no more of the program's time is as
            good as a better plan; so is what a plan recomputes.
        too_deep_ratio: a plan of which XLA makes no more of what was planned, and of what it may take, is far
            deeper than need be: ResNet-50 on a v5e, .74, was planned for bytes that it has without a plan.
        strict_ratio: where XLA makes this much more of a plan than was planned, it is first left less
            freedom: LSTM steps, whose small dots it merges.
        stronger_ratio: every correction is at least so much stronger than the one before it.
        unrivalled_ratio: where XLA makes less of a plan than that share, others out of reach before may fit:
            what is known is trusted so much more than what is not (`passes.jaxpr.structured.CONFIG`).
        same_ratio: what estimates of all devices' bytes differ by from one device's times their number.
    """

    cheap_repair_ratio: float = 0.02
    too_deep_ratio: float = 0.9
    strict_ratio: float = 1.5
    stronger_ratio: float = 1.05
    unrivalled_ratio: float = 1.05 / 1.25
    same_ratio: float = 1e-3


CONFIG = CalibrationConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate that was compiled.

    Attributes:
        recipe: how it was made.
        estimated_bytes: the jaxpr stage's estimate of its temporaries.
        temp_bytes: what XLA needs for them; what was asked for, if the enforcing stage repairs it cheaply.
        is_too_deep: True if that is far less than planned, and than it might be.
        holes_bytes: what holes of XLA's heap would have added to the estimate, which does not count them.
    """

    recipe: Recipe
    estimated_bytes: int
    temp_bytes: int
    is_too_deep: bool = False
    holes_bytes: int = 0

    @property
    def counts_holes(self) -> bool:
        """True if the estimate is nearer to what XLA needs with holes than without."""
        missed_bytes = self.temp_bytes - self.estimated_bytes
        return abs(missed_bytes - self.holes_bytes) < abs(missed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is known of XLA and one program when it is planned once more. Hashable.

    Attributes:
        trials: what was compiled, in that order.
        starts_strict: True where the first plan is strict, too.
        rounded: True to count what products round in the bytes of that, see `passes.jaxpr.stored`.
        holes: True to count holes of a heap that is packed in the order of time.
    """

    trials: tuple[Trial, ...] = ()
    starts_strict: bool = False
    rounded: bool = False
    holes: bool = False

    @property
    def bytes_ratio(self) -> float:
        """XLA's bytes of temporaries over the jaxpr stage's estimate, where scans are as they were."""
        return self._as_they_were()[0]

    @property
    def ratio_as_it_is(self) -> float:
        """The same for the program as it is: as long as scans were rewritten in all that was compiled, of the
        largest of that."""
        if not self.trials or any(t.recipe.scans is Scans.NONE for t in self.trials):
            return self.bytes_ratio
        largest = max(self.trials, key=lambda t: t.estimated_bytes)
        return largest.temp_bytes / max(largest.estimated_bytes, 1)

    @property
    def strict(self) -> bool:
        """True to leave XLA no freedom to merge small dots or to reorder recomputes: every such kernel is
        behind a barrier of its own, which costs time and is for programs that do not fit without."""
        return self._as_they_were()[1]

    def _as_they_were(self) -> tuple[float, bool]:
        """What follows from candidates whose scans are as they were: each was asked for what the one before
        was too large by."""
        bytes_ratio, strict = 1.0, self.starts_strict
        for trial in self.trials:
            if trial.recipe.scans is Scans.NONE:
                ratio = trial.temp_bytes / max(trial.estimated_bytes, 1)
                if trial.is_too_deep or (trial.recipe == Recipe() and ratio):  # that was asked for nothing
                    bytes_ratio = ratio
                elif ratio > CONFIG.strict_ratio and trial.recipe.recompute is not None and not strict:
                    bytes_ratio, strict = 1.0, True
                else:
                    bytes_ratio = max(ratio, CONFIG.stronger_ratio * bytes_ratio)
        return bytes_ratio, strict

    def alike(self, recipe: Recipe) -> list[Trial]:
        """The candidates of a recipe that were compiled, if it is one of rewritten scans, or of nothing."""
        recognized = recipe.scans is not Scans.NONE or recipe == Recipe()
        return [t for t in self.trials if t.recipe == recipe and recognized]

    def tried(self, recipe: Recipe, estimated_bytes: int) -> Trial | None:
        """The candidate with this recipe and estimate, if it was compiled."""
        most = CONFIG.same_ratio * estimated_bytes
        return next((t for t in self.alike(recipe) if abs(t.estimated_bytes - estimated_bytes) <= most), None)

    def expected_ratio(self, recipe: Recipe, estimated_bytes: int, prior_ratio: float = 1.0) -> float:
        """XLA's bytes over an estimate: the nearest one's of the same recipe, `prior_ratio` if there is
        none."""

        def distance(trial: Trial) -> float:
            return abs(math.log(max(trial.estimated_bytes, 1) / max(estimated_bytes, 1)))

        nearest = min(self.alike(recipe), key=distance, default=None)
        return prior_ratio if nearest is None else nearest.temp_bytes / max(nearest.estimated_bytes, 1)

    def after(self, planned: StageOutcome, verdict: StageOutcome) -> Calibration | None:
        """With what the enforcing stage said of a plan; None if no other plan follows from that."""
        is_done = _is_cheaply_repaired(verdict) and not _is_too_deep(planned, verdict)
        if is_done and (not _has_other_scans(planned, verdict) or _is_unrivalled(planned, verdict)):
            return None
        trial = _trial(planned, verdict)
        if not self.holes and trial.counts_holes:
            return replace(self, trials=(), holes=True)
        return replace(self, trials=(*self.trials, trial))

    def of_parts(self, parts: int) -> Calibration:
        """What is known of one device's bytes, for all of them."""
        scaled = [
            replace(t, estimated_bytes=parts * t.estimated_bytes, temp_bytes=parts * t.temp_bytes)
            for t in self.trials
        ]
        return replace(self, trials=tuple(scaled))


UNCALIBRATED = Calibration()
"""Nothing is known: estimates are taken as they are."""
ROUNDED = Calibration(rounded=True)
"""Nothing is known but that XLA rounds the operands of products where they are made."""
STRICT = Calibration(starts_strict=True)
"""Nothing is known, and XLA is left no freedom."""


def _is_cheaply_repaired(verdict: StageOutcome) -> bool:
    return verdict.status.found and verdict.recompute_ns <= CONFIG.cheap_repair_ratio * verdict.cost_ns


def _has_other_scans(planned: StageOutcome, verdict: StageOutcome) -> bool:
    """True if scans were rewritten, or might have been: those of a program that was expected to keep its
    budget as it is, and does not, may cost less once they are."""
    is_first = not planned.changed and not planned.unrivalled and verdict.changed
    return planned.recipe.scans is not Scans.NONE or is_first


def _is_unrivalled(planned: StageOutcome, verdict: StageOutcome) -> bool:
    """True if no other plan is taken for what XLA makes of one."""
    least_bytes = CONFIG.unrivalled_ratio * planned.planned_temp_bytes
    return planned.unrivalled and verdict.before_temp_bytes >= least_bytes


def _is_too_deep(planned: StageOutcome, verdict: StageOutcome) -> bool:
    """True if a plan costs time, and XLA makes far less of it than was planned, and than it may take."""
    most_bytes = min(planned.planned_temp_bytes, verdict.budget_bytes - verdict.fixed_bytes)
    is_dear = planned.recompute_ns > CONFIG.cheap_repair_ratio * planned.cost_ns
    is_small = verdict.before_temp_bytes <= CONFIG.too_deep_ratio * most_bytes
    return planned.changed and verdict.status.found and is_dear and is_small


def _trial(planned: StageOutcome, verdict: StageOutcome) -> Trial:
    budget = verdict.budget_bytes - verdict.fixed_bytes
    needed = verdict.needed_temp_bytes
    return Trial(
        recipe=planned.recipe,
        estimated_bytes=planned.planned_temp_bytes,
        temp_bytes=min(needed, budget) if _is_cheaply_repaired(verdict) else needed,
        is_too_deep=_is_too_deep(planned, verdict),
        holes_bytes=planned.holes_bytes,
    )
