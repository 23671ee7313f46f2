"""The driver of the planners: what `plan`, `least_peak` and `frontier` do.

A budget is first tried from the program as it is: candidates in several styles, each a series of minimum
cuts. Where they miss it, or end far above the bound, levels below the budget are tried, too, and their plans
relaxed. These levels are levels of a frontier that belongs to the program and not to the budget, and below
them lies the program's deepest plan: budgets that are near each other see the same plans, so that more
bytes hardly ever cost more time, and what one budget was found to need is enough for the next. A
large-neighbourhood search ends it.

Invariant: whatever is returned is a valid sequence of steps; the status says what is known about it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from itertools import pairwise

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.offsets.sweep import MOST_ITEMS
from passes.planners.bounds import Bound, least_bytes
from passes.planners.candidate import Candidate, WorkLimit, rank
from passes.planners.config import PlannerConfig
from passes.planners.cut import Style, deepen, descend, lower_to, relax
from passes.planners.greedy import evict_one_by_one
from passes.planners.neighbourhood import alike, improve
from passes.planners.placing import end_of, walks, windows, with_offsets, with_room
from passes.planners.proof import is_impossible
from passes.planners.rebuild import rebuild
from passes.planners.schedule import Schedule

PORTFOLIO = (
    Style(tilt_ratio=0.1),
    Style(tilt_ratio=0.1, filled=False, fitting=False),
    Style(stages=4, filled=False, fitting=False),
    Style(reserve_ratio=0.06),
    Style(tilt_ratio=-0.3, filled=False),
    Style(stages=3, tilt_ratio=0.1, fitting=False),
    Style(tilt_ratio=0.1, below_ratio=0.04),
    Style(stages=4),
    Style(reserve_ratio=0.1, filled=False, fitting=False),
    Style(stages=2),
    Style(stages=12, tilt_ratio=0.1),
    Style(stages=6, filled=False),
    Style(stages=4, reserve_ratio=0.1),
    Style(reserve_ratio=0.2),
)
LOW_STYLES = (
    Style(tilt_ratio=0.1),
    Style(reserve_ratio=0.06),
    Style(stages=4, tilt_ratio=0.1),
    Style(tilt_ratio=-0.3, fitting=False),
)
NEAR_RATIO = 0.004
FIRST_LIMITS = 3
TOTAL_LIMITS = 5
LEVEL_RATIO = 0.9
NEAR_LEVELS = (0, 1)
FAR_LEVELS = (0, 1, 3, 7, 15)
GREEDY_UNITS_PER_OP = 1000
RESTARTS = 3
TIGHTER_RATIOS = (0.995, 0.985, 0.97, 0.95, 0.92, 0.88)
FIRST_TIGHTER_LIMITS, TIGHTER_LIMITS = 2.0, 0.6
SMALL_OPS = 200
WALKS_LIMITS = 0.5
ROOM_LIMITS = 7.0
NEAR_PLACED = 0.004
WINDOWS_LIMITS = 0.25
DEEPEST_LIMITS = 1.0
REBUILD_LIMITS = 2.0
IMPROVE_LIMITS, LARGE_IMPROVE_LIMITS = 3.0, 2.0
DOWN_LIMITS = 2.0
ROUNDING_NS = 1e-3
NEAR_OVERHEAD = 0.0004
NEAR_BOUND = 0.02
# Where one step of the search takes long, the last 0.18 points above the bound are not looked for.
LARGE_OPS = 400
LARGE_NEAR_OVERHEAD = 0.0018
HUGE_OPS = 2000
PROOF_STATES = 2000
STATE_UNITS = 25


class Search:
    """One program's planning: the graph, the schedule without recomputes, and the bounds, made once."""

    def __init__(self, program: Program, config: PlannerConfig) -> None:
        self.config = config
        self.graph = Graph.of(program)
        schedule = Schedule(self.graph, range(len(program.ops)))
        self.start = Candidate.of(schedule)
        self.working_set_bytes = least_bytes(self.graph, schedule)
        self.effort = 1.0
        self.impossible_bytes = self.working_set_bytes - 1
        self._clocks: list[WorkLimit] = []
        self._deepest: Candidate | None = None
        self._bound: Bound | None = None
        self._kinds: list[int] | None = None

    @property
    def kinds(self) -> list[int]:
        """Which ops look alike."""
        if self._kinds is None:
            self._kinds = alike(self.graph)
        return self._kinds

    def bound_ratio(self, budget_bytes: int) -> float:
        """The cut bound, 0.0 where it is not wanted or nothing fits the budget."""
        if not self.config.bound or budget_bytes >= self.start.peak_bytes:
            return 0.0
        if self._bound is None:
            self._bound = Bound(self.graph, self.config.moments(len(self.graph.cost_ns)))
        return self._bound.ratio(budget_bytes)

    def is_impossible(self, budget_bytes: int) -> bool:
        """True if it is proved that no sequence keeps the budget."""
        if budget_bytes > self.impossible_bytes:
            clock = self.work()
            states = min(PROOF_STATES, (clock.limit - clock.done) // STATE_UNITS)
            clock.done += states * STATE_UNITS
            if states and is_impossible(self.graph, budget_bytes, states):
                self.impossible_bytes = budget_bytes
        return budget_bytes <= self.impossible_bytes

    def work(self, limits: float = 1.0) -> WorkLimit:
        """A fresh clock, of what all clocks together may still use."""
        limit = self.config.units(len(self.graph.cost_ns)) * self.effort
        left = TOTAL_LIMITS * limit - self.done
        self._clocks.append(WorkLimit(int(max(0.0, min(limits * limit, left)))))
        return self._clocks[-1]

    def _own_work(self, limits: float) -> WorkLimit:
        """A fresh clock of its own, whatever was used before."""
        self._clocks.append(WorkLimit(int(limits * self.config.units(len(self.graph.cost_ns)) * self.effort)))
        return self._clocks[-1]

    @property
    def done(self) -> int:
        """The work of all clocks."""
        return sum(clock.done for clock in self._clocks)

    def again(self) -> None:
        """Forget what was used: another budget begins."""
        self._clocks.clear()

    def best(self, budget_bytes: int, known: Sequence[Candidate] = ()) -> Candidate:
        """The cheapest sequence within the budget, or the one of lowest peak.

        Args:
            known: sequences to start from besides the schedule without recomputes.
        """
        if self.start.peak_bytes <= budget_bytes:
            return self.start
        best = min((self.start, *known), key=lambda d: rank(d, budget_bytes))
        if self.config.planner == "window":
            return windows(self.graph, self.config.planner, budget_bytes, best, self.work())
        return self._cuts(budget_bytes, best)

    def placed(self, found: Candidate, budget_bytes: int) -> tuple[Candidate, int]:
        """A sequence with the offsets of its copies, planned with room until they fit; also their heap."""
        tried = [with_offsets(self.graph, found, budget_bytes)]
        if end_of(self.graph, tried[0]) > budget_bytes >= self.working_set_bytes:
            self.effort /= 3
            if found.peak_bytes <= budget_bytes:
                tried += self._with_room(found, budget_bytes)
            if self.config.planner == "auto":
                tried += walks(self.graph, budget_bytes, self._own_work(WALKS_LIMITS))
        ends = [(end_of(self.graph, d), d) for d in tried]
        fitting = [e for e in ends if e[0] <= budget_bytes]
        end, best = min(fitting, key=lambda e: e[1].cost_ns) if fitting else min(ends, key=lambda e: e[0])
        return best, end

    def _with_room(self, found: Candidate, budget_bytes: int) -> list[Candidate]:
        """Placed sequences: with a little room everywhere, with room where packing got stuck, with more."""
        if self.config.planner == "window":
            return []
        near_ns = found.cost_ns + int(NEAR_PLACED * self.start.cost_ns)
        tried: list[Candidate] = []
        if len(found.steps) <= MOST_ITEMS:
            work = self._own_work(FIRST_TIGHTER_LIMITS)
            tried.append(self._tighter(found, budget_bytes, TIGHTER_RATIOS[0], work))
            if self._least_ns(tried, budget_bytes) <= near_ns:
                return tried
        work = self._own_work(ROOM_LIMITS)
        roomy = with_room(self.graph, self.start, found, budget_bytes, work)
        tried += [] if roomy is None else [roomy]
        for ratio in TIGHTER_RATIOS[1:]:
            least_ns = self._least_ns(tried, budget_bytes)
            if least_ns <= near_ns:
                break
            tighter = self._tighter(found, budget_bytes, ratio, self._own_work(TIGHTER_LIMITS))
            tried.append(tighter)
            if tighter.cost_ns >= least_ns or end_of(self.graph, tighter) <= budget_bytes:
                break
        return tried

    def _least_ns(self, placed: Sequence[Candidate], budget_bytes: int) -> float:
        """The cost of the cheapest of some placed sequences that fits, infinite if none does."""
        fitting = (d.cost_ns for d in placed if end_of(self.graph, d) <= budget_bytes)
        return min(fitting, default=math.inf)

    def _tighter(self, found: Candidate, budget_bytes: int, ratio: float, work: WorkLimit) -> Candidate:
        """A sequence for a share of the budget, or near it, with offsets."""
        target_bytes = int(budget_bytes * ratio)
        lower = lower_to(self.graph, found.steps, target_bytes, work)
        lower = improve(self.graph, lower, target_bytes, self.start.cost_ns, work, self.kinds)
        return with_offsets(self.graph, lower, budget_bytes)

    def deepest(self) -> Candidate:
        """The sequence of lowest peak that is found; it does not depend on any budget."""
        if self._deepest is None:
            target_bytes = self.working_set_bytes
            work = self._own_work(DEEPEST_LIMITS)
            tried = [self.start, *self._attempts(target_bytes, work)]
            best = min(tried, key=lambda d: rank(d, target_bytes))
            if best.peak_bytes > target_bytes:
                best = deepen(self.graph, best, target_bytes, self._own_work(DEEPEST_LIMITS / 3))
                work = self._own_work(DEEPEST_LIMITS)
                best = self._lowest(target_bytes, best, work)
            self._deepest = self._improved(target_bytes, best, tried, work)
        return self._deepest

    def _cuts(self, budget_bytes: int, best: Candidate) -> Candidate:
        """Cuts to the budget, to levels below it where they miss it or cost much, and a search around."""
        if budget_bytes < self.working_set_bytes:
            return min(best, self.deepest(), key=lambda d: rank(d, budget_bytes))
        # On a large program walks take longer than all else, and cuts mostly end near the bound.
        walks_first = len(self.graph.cost_ns) <= SMALL_OPS
        if walks_first:
            best = self._walked(budget_bytes, best)
        work = self.work()
        tried = [best]
        if self.start.peak_bytes > best.peak_bytes > budget_bytes:
            tried.append(lower_to(self.graph, best.steps, budget_bytes, work))
        tried += self._attempts(budget_bytes, work)
        best = min(tried, key=lambda d: rank(d, budget_bytes))
        if not walks_first and not self._is_near(best, budget_bytes):
            best = self._walked(budget_bytes, best)
            tried.append(best)
        if best.peak_bytes > budget_bytes and not self.is_impossible(budget_bytes):
            tried += self._from_levels(budget_bytes, FAR_LEVELS, self.work(1 / 2))
            best = min(tried, key=lambda d: rank(d, budget_bytes))
        elif not self._is_near(best, budget_bytes):
            tried += self._from_levels(budget_bytes, NEAR_LEVELS, self.work(1 / 3))
        if best.peak_bytes > budget_bytes and not self.is_impossible(budget_bytes):
            down = self.work(DOWN_LIMITS)
            tried.append(improve(self.graph, best, budget_bytes, self.start.cost_ns, down, self.kinds))
            best = min(tried, key=lambda d: rank(d, budget_bytes))
        if best.peak_bytes > budget_bytes:
            tried.append(relax(self.graph, self.deepest(), budget_bytes))
        best = min(tried, key=lambda d: rank(d, budget_bytes))
        if best.peak_bytes > budget_bytes and not self.is_impossible(budget_bytes):
            tried.append(rebuild(self.graph, best, budget_bytes, self._own_work(REBUILD_LIMITS)))
        best = min(tried, key=lambda d: rank(d, budget_bytes))
        if best.peak_bytes > budget_bytes:
            return best
        n_ops = len(self.graph.cost_ns)
        if not self.config.quick and n_ops < HUGE_OPS:
            work = self.work(IMPROVE_LIMITS if n_ops < LARGE_OPS else LARGE_IMPROVE_LIMITS)
        return self._improved(budget_bytes, best, tried, work if work.left else self.work(1 / 3))

    def _walked(self, budget_bytes: int, best: Candidate) -> Candidate:
        """The better of a sequence and a few walks over the pool."""
        if self.config.planner != "auto":
            return best
        return windows(self.graph, "auto", budget_bytes, best, self.work(WINDOWS_LIMITS))

    def _improved(
        self, target_bytes: int, best: Candidate, tried: list[Candidate], work: WorkLimit
    ) -> Candidate:
        """A search around the best candidates."""
        floor_ns = self._floor_ns(target_bytes)
        others = sorted((d for d in tried if d.steps != best.steps), key=lambda d: rank(d, target_bytes))
        for seed, start in enumerate((best, *others[:RESTARTS])):
            if self._is_near(best, target_bytes):
                break
            found = improve(self.graph, start, target_bytes, floor_ns, work, self.kinds, seed)
            best = min(best, found, key=lambda d: rank(d, target_bytes))
        return best

    def _from_levels(self, budget_bytes: int, levels: tuple[int, ...], work: WorkLimit) -> list[Candidate]:
        """Candidates to levels below the budget, and up to it again; stops at the first that keeps it.

        Level `k` leaves `LEVEL_RATIO ** k` of the bytes between the working set and the program's own peak.
        """
        whole_bytes = max(1, self.start.peak_bytes - self.working_set_bytes)
        room_ratio = max(budget_bytes - self.working_set_bytes, 0) / whole_bytes
        top = math.floor(math.log(room_ratio) / math.log(LEVEL_RATIO)) + 1 if room_ratio > 0 else 0
        found: list[Candidate] = []
        for k in levels if room_ratio > 0 else ():
            level_bytes = self.working_set_bytes + int(whole_bytes * LEVEL_RATIO ** (top + k))
            for style in LOW_STYLES:
                if work.left:
                    lowered = descend(self.graph, self.start, level_bytes, work, style)
                    found.append(relax(self.graph, lowered, budget_bytes))
                    if found[-1].peak_bytes <= budget_bytes:
                        break
            if levels is FAR_LEVELS and found and found[-1].peak_bytes <= budget_bytes:
                break
        return found

    def _lowest(self, target_bytes: int, best: Candidate, work: WorkLimit) -> Candidate:
        """Bisect for the lowest level that a candidate from the start, or from the best so far, reaches."""
        low_bytes = target_bytes
        while best.peak_bytes - low_bytes > NEAR_RATIO * best.peak_bytes and work.left:
            level_bytes = (best.peak_bytes + low_bytes) // 2
            tried = [best]
            for style in LOW_STYLES:
                if tried[-1].peak_bytes > level_bytes and work.left:
                    tried.append(descend(self.graph, self.start, level_bytes, work, style))
            if tried[-1].peak_bytes > level_bytes:
                tried.append(lower_to(self.graph, best.steps, level_bytes, work))
            best = min(tried, key=lambda d: d.peak_bytes)
            if best.peak_bytes > level_bytes:
                low_bytes = level_bytes
        return best

    def _attempts(self, target_bytes: int, work: WorkLimit) -> list[Candidate]:
        """Candidates in several styles until the work limit; the first one may take more."""
        found: list[Candidate] = []
        for style in PORTFOLIO:
            part = WorkLimit(work.limit // 3 if found else FIRST_LIMITS * work.limit)
            found.append(descend(self.graph, self.start, target_bytes, part, style))
            work.done += part.done
            best = min(found, key=lambda d: rank(d, target_bytes))
            if not work.left or self._is_near(best, target_bytes):
                return found
        if GREEDY_UNITS_PER_OP * len(self.graph.cost_ns) <= work.limit - work.done:
            part = WorkLimit((work.limit - work.done) // 2)
            found.append(evict_one_by_one(self.graph, self.start, target_bytes, part))
            work.done += part.done
        return found

    def _is_near(self, found: Candidate, budget_bytes: int) -> bool:
        """True if a sequence keeps the budget and is cheap enough."""
        return found.peak_bytes <= budget_bytes and found.cost_ns <= self._floor_ns(budget_bytes)

    def _floor_ns(self, budget_bytes: int) -> int:
        """Cheap enough: a little above what no sequence within the budget can cost less than.

        The bound is found at one moment only if none is wanted.
        """
        if self._bound is None:
            moments = self.config.moments(len(self.graph.cost_ns)) if self.config.bound else 1
            self._bound = Bound(self.graph, moments)
        bound_ratio = self._bound.ratio(budget_bytes)
        near_ratio = NEAR_OVERHEAD + NEAR_BOUND * bound_ratio
        if len(self.graph.cost_ns) >= LARGE_OPS:
            near_ratio = max(near_ratio, LARGE_NEAR_OVERHEAD)
        return _at_least_ns(self.start.cost_ns, bound_ratio + near_ratio)

    def plan(self, found: Candidate, budget_bytes: int, seconds: float, planner: str) -> Plan:
        """A plan of what was found, with its bound and status."""
        lower_bound_ratio = self.bound_ratio(budget_bytes) if budget_bytes >= self.working_set_bytes else 0.0
        base_ns = self.start.cost_ns
        overhead_ratio = (found.cost_ns - base_ns) / base_ns if base_ns else 0.0
        if found.peak_bytes > budget_bytes:
            proved = self.is_impossible(budget_bytes)
            status = Status.INFEASIBLE if proved else Status.UNKNOWN
        elif found.cost_ns <= _at_least_ns(base_ns, lower_bound_ratio):
            status = Status.OPTIMAL
        else:
            status = Status.FEASIBLE
        return Plan(
            steps=tuple(OpId(op) for op in found.steps),
            peak_bytes=found.peak_bytes,
            budget_bytes=budget_bytes,
            overhead_ratio=overhead_ratio,
            lower_bound_ratio=lower_bound_ratio,
            status=status,
            planner=planner,
            seconds=seconds,
            offsets=found.offsets,
        )


def _at_least_ns(base_ns: int, lower_bound_ratio: float) -> int:
    """What every sequence costs at least; costs are integers, so the bound may be rounded up."""
    return base_ns + math.ceil(base_ns * lower_bound_ratio - ROUNDING_NS)


def plan(program: Program, budget_bytes: int, config: PlannerConfig | None = None) -> Plan:
    """Plan `program` for a peak of at most `budget_bytes`.

    Returns:
        A plan that keeps the budget, `status.found`; else the plan of lowest peak that was found, with
        status INFEASIBLE if the budget is below the working-set bound and UNKNOWN if nothing is proved.
    """
    begin = time.perf_counter()
    search = Search(program, config or PlannerConfig())
    found = search.best(budget_bytes)
    if not search.config.placed:
        return _timed(search.plan(found, budget_bytes, 0.0, search.config.planner), begin)
    found, heap_bytes = search.placed(found, budget_bytes)
    made = search.plan(found, budget_bytes, 0.0, search.config.planner)
    misses = made.status.found and heap_bytes > budget_bytes
    return _timed(made, begin, Status.UNKNOWN if misses else None)


def least_peak(program: Program, config: PlannerConfig | None = None) -> Plan:
    """The plan of lowest peak that was found; OPTIMAL if its peak is the working-set bound.

    The plan's budget is its own peak.
    """
    begin = time.perf_counter()
    search = Search(program, config or PlannerConfig())
    found = search.deepest()
    made = search.plan(found, found.peak_bytes, 0.0, search.config.planner)
    proved = search.is_impossible(found.peak_bytes - 1)
    return _timed(made, begin, Status.OPTIMAL if proved else Status.FEASIBLE)


def frontier(
    program: Program, budgets_bytes: Sequence[int], config: PlannerConfig | None = None
) -> tuple[Plan, ...]:
    """One plan for each budget, in the order given; a larger budget's plan never costs more.

    The work limit is shared out over the budgets. Each plan's `seconds` are those of the whole call.
    """
    begin = time.perf_counter()
    search = Search(program, config or PlannerConfig())
    levels = sorted(set(budgets_bytes))
    search.effort = 2.0 / max(2, len(levels))
    found: dict[int, Candidate] = {}
    known: tuple[Candidate, ...] = ()
    for budget_bytes in reversed(levels):
        search.again()
        known = (search.best(budget_bytes, known),)
        found[budget_bytes] = known[0]
    for small, large in pairwise(levels):
        relaxed = relax(search.graph, found[small], large)
        found[large] = min(found[large], relaxed, key=lambda d: rank(d, large))
    plans = tuple(search.plan(found[b], b, 0.0, search.config.planner) for b in budgets_bytes)
    return tuple(_timed(p, begin) for p in plans)


def _timed(made: Plan, begin: float, status: Status | None = None) -> Plan:
    seconds = time.perf_counter() - begin
    return dataclasses.replace(made, seconds=seconds, status=status or made.status)
