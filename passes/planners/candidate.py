"""What the search holds in its hands: a candidate, all candidates for one budget, and how much work is left.

Invariant: every candidate is a valid sequence of steps, so whichever of them is best may be returned at any
time. Work is counted, not timed: a plan must not depend on the machine or on its load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from passes.planners.schedule import Schedule


@dataclass(slots=True)
class WorkLimit:
    """A deterministic clock: work done so far against a limit, in units of about a microsecond."""

    limit: int
    done: int = 0

    @property
    def left(self) -> bool:
        """True while the limit has not been reached."""
        return self.done < self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence of steps that may become the plan.

    Attributes:
        steps: ops in the order in which they run, recomputes among them.
        peak_bytes: its peak of live bytes.
        cost_ns: cost of all its steps.
        offsets: where every step's outputs lie, if it is placed.
    """

    steps: tuple[int, ...]
    peak_bytes: int
    cost_ns: int
    offsets: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, schedule: Schedule) -> Candidate:
        """What a schedule is now."""
        return cls(steps=tuple(schedule.compact()), peak_bytes=schedule.peak_bytes, cost_ns=schedule.cost_ns)


def rank(candidate: Candidate, budget_bytes: int) -> tuple[bool, int, int]:
    """Within the budget by cost, else by peak; smaller is better."""
    over = candidate.peak_bytes > budget_bytes
    by_peak = (over, candidate.peak_bytes, candidate.cost_ns)
    return by_peak if over else (over, candidate.cost_ns, candidate.peak_bytes)


class CandidatePool:
    """All candidates for one budget, in the order in which they were found.

    Attributes:
        budget_bytes: what they are for.
        first: the one that was there first.
        best: the one of lowest rank; of equals the first.
    """

    def __init__(self, budget_bytes: int, first: Candidate) -> None:
        self.budget_bytes = budget_bytes
        self.first = self.best = first
        self._found = [first]

    def rank(self, candidate: Candidate) -> tuple[bool, int, int]:
        """Whether it is over the budget, then what it costs, or by how much it is over; smaller is better."""
        return rank(candidate, self.budget_bytes)

    @property
    def least_ns(self) -> float:
        """The cost of the best candidate, infinite if it does not keep the budget."""
        return math.inf if self.rank(self.best)[0] else self.best.cost_ns

    @property
    def keeps_budget(self) -> bool:
        """Whether the best candidate does."""
        return self.least_ns < math.inf

    def offer(self, candidates: Iterable[Candidate]) -> None:
        """Add candidates; they may be made one by one, with `best` up to date each time."""
        for candidate in candidates:
            self._found.append(candidate)
            self.best = min(self.best, candidate, key=self.rank)

    def others(self, most: int) -> list[Candidate]:
        """The best of those with other steps than the best one."""
        return sorted((c for c in self._found if c.steps != self.best.steps), key=self.rank)[:most]
