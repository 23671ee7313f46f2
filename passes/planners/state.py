"""What is known of one program while it is searched: its graph, its bounds, and the work that is left.

Strategies (`passes.planners.strategies`) read it; nothing in it depends on one budget but what it is asked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from passes.ir import Program
from passes.liveness import Graph
from passes.planners.bounds import Bound, at_least_ns, least_bytes
from passes.planners.candidate import Candidate, CandidatePool, WorkLimit
from passes.planners.config import PlannerConfig
from passes.planners.neighbourhood import alike
from passes.planners.proof import is_impossible
from passes.planners.schedule import Schedule
from passes.planners.segments import forward_end


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How far a search goes. A limit of 1 is `PlannerConfig.units`; ratios are shares of the base cost.

    Attributes:
        total_limits: of all that one budget may take, deepest plan and placing apart. `benchmarks.planners`:
            random_layered_250 at .6 needs it all.
        near_overhead, near_bound: a plan is near that is above the bound by no more than this, and this share
            of the bound. `benchmarks.gpt12`, `benchmarks.planners`: less costs time and gains nothing.
        large_ops, large_near_overhead: where one step of the search takes long, the last 0.18 points above
            the bound are not looked for. `benchmarks.scale`: a second instead of three.
        proof_states, op_states: how many states a proof of impossibility visits, and for one op.
        state_units: what each takes.
            `benchmarks.planners`: enough for the least budgets of the published graphs.
    """

    total_limits: float = 5.0
    near_overhead: float = 0.0004
    near_bound: float = 0.02
    large_ops: int = 400
    large_near_overhead: float = 0.0018
    proof_states: int = 2000
    op_states: int = 400
    state_units: int = 25


SEARCH = SearchConfig()


class SearchState:
    """One program's search: the graph, the schedule without recomputes, and the bounds, made once.

    Attributes:
        start: the schedule without recomputes.
        forward_end: see `passes.planners.segments`.
        working_set_bytes: no sequence's peak is lower.
        effort: what every limit is multiplied with.
        impossible_bytes: the largest budget that is proved to be kept by no sequence.
        deepest: the sequence of lowest peak that was found, once it has been looked for.
    """

    def __init__(self, program: Program, config: PlannerConfig) -> None:
        self.config = config
        self.graph = Graph.of(program)
        schedule = Schedule(self.graph, range(len(program.ops)))
        self.start = Candidate.of(schedule)
        self.forward_end = forward_end(schedule)
        self.working_set_bytes = least_bytes(self.graph, schedule)
        self.effort = 1.0
        self.impossible_bytes = self.working_set_bytes - 1
        self.deepest: Candidate | None = None
        self._clocks: list[WorkLimit] = []

    @property
    def n_ops(self) -> int:
        """Ops of the program."""
        return len(self.graph.cost_ns)

    @functools.cached_property
    def kinds(self) -> list[int]:
        """Which ops look alike."""
        return alike(self.graph)

    def work(self, limits: float) -> WorkLimit:
        """A fresh clock, of what all clocks together may still use."""
        left = SEARCH.total_limits * self._units() - self.done
        return self._clock(max(0.0, min(limits * self._units(), left)))

    def own_work(self, limits: float) -> WorkLimit:
        """A fresh clock of its own, whatever was used before."""
        return self._clock(limits * self._units())

    @property
    def done(self) -> int:
        """The work of all clocks."""
        return sum(clock.done for clock in self._clocks)

    def reset(self) -> None:
        """Forget what was used, and what was proved of a larger budget: another one begins."""
        self._clocks.clear()
        self.impossible_bytes = self.working_set_bytes - 1

    def _units(self) -> float:
        return self.config.units(self.n_ops) * self.effort

    def _clock(self, units: float) -> WorkLimit:
        self._clocks.append(WorkLimit(int(units)))
        return self._clocks[-1]

    def bound_ratio(self, budget_bytes: int) -> float:
        """The cut bound, 0.0 where it is not wanted or nothing fits the budget."""
        unwanted = not self.config.bound or budget_bytes >= self.start.peak_bytes
        return 0.0 if unwanted or budget_bytes < self.working_set_bytes else self._bound.ratio(budget_bytes)

    @functools.cached_property
    def _bound(self) -> Bound:
        """The cut bound, at one position only if none is wanted."""
        return Bound(self.graph, self.config.n_cuts(self.n_ops) if self.config.bound else 1)

    def bound_at(self, budget_bytes: int) -> float:
        """The cut bound, for the search itself."""
        return self._bound.ratio(budget_bytes)

    def floor_ns(self, budget_bytes: int, near_overhead: float = 0.0) -> int:
        """Cheap enough: a little above what no sequence within the budget can cost less than."""
        bound_ratio = self.bound_at(budget_bytes)
        near_ratio = max(near_overhead, SEARCH.near_overhead) + SEARCH.near_bound * bound_ratio
        if self.n_ops >= SEARCH.large_ops:
            near_ratio = max(near_ratio, SEARCH.large_near_overhead)
        return self.at_least_ns(bound_ratio + near_ratio)

    def at_least_ns(self, bound_ratio: float) -> int:
        """What every sequence costs at least."""
        return at_least_ns(self.start.cost_ns, bound_ratio)

    def is_near(self, pool: CandidatePool, near_overhead: float = 0.0) -> bool:
        """True if the best candidate keeps the budget and is cheap enough."""
        return pool.keeps_budget and pool.best.cost_ns <= self.floor_ns(pool.budget_bytes, near_overhead)

    def is_impossible(self, budget_bytes: int) -> bool:
        """True if it is proved that no sequence keeps the budget."""
        if budget_bytes > self.impossible_bytes:
            clock = self.work(1.0)
            states = min(SEARCH.proof_states, (clock.limit - clock.done) // SEARCH.state_units)
            clock.done += states * SEARCH.state_units
            if states and is_impossible(self.graph, budget_bytes, states, SEARCH.op_states):
                self.impossible_bytes = budget_bytes
        return budget_bytes <= self.impossible_bytes

    def is_shown_impossible(self, budget_bytes: int) -> bool:
        """The same, for what a plan says of itself; where no bound is wanted only if it is known already."""
        known = budget_bytes <= self.impossible_bytes
        return known or (self.config.bound and self.is_impossible(budget_bytes))
