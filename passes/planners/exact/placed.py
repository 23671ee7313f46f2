"""Recompute and offsets together: a plan that fits its budget at addresses, without fragmentation.

The cheapest plan of all, placed or not, is solved for first. If its live ranges can be packed in the budget
(best fit, then the exact packers), it is the cheapest placed plan, too, and that is proved. If not, the
budget of the live bytes is lowered by what the packing lacks, until a plan can be packed. Recomputes and
offsets are then variables of one model, of all slots where that is small enough and of a few at a time:
first the cheapest plan is led into the budget, then the best placed one is improved. The bound stays that
of the first plan; the search's placed plan is always among them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph, live_ranges
from passes.offsets.placement import by_step, place_graph, range_groups
from passes.planners.candidate import Candidate
from passes.planners.config import PlannerConfig
from passes.planners.exact.axis import Axis
from passes.planners.exact.limits import Clock, ExactConfig
from passes.planners.exact.rectangles import pack
from passes.planners.exact.slots import heap_bytes, improve, lower, solve_slots
from passes.planners.exact.solve import bound_ns, solve_within
from passes.planners.search import plan
from passes.simulate import simulate_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class JointConfig:
    """How the limit is shared; set by the rows "exact" of `benchmarks.planners`.

    Attributes:
        most_budgets: how many budgets of live bytes are tried.
        first_parts: the first is lower by this part of what the packing lacks, each other by twice as much.
        first_keep: what the cheapest plan leaves of the limit to what comes after it.
        lowered_keep: what plans for lower budgets leave.
        placed_keep: what leading a plan into the budget leaves.
        packing_share: of the seconds that are left, for one packing.
        whole_share: of what is left, for one model of all slots.
        most_recomputes: that such a model offers.
    """

    most_budgets: int = 6
    first_parts: int = 4
    first_keep: float = 0.6
    lowered_keep: float = 0.45
    placed_keep: float = 0.3
    packing_share: float = 0.25
    whole_share: float = 0.5
    most_recomputes: int = 1000


CONFIG = JointConfig()


def solve_jointly(program: Program, budget_bytes: int, hint: Plan, config: ExactConfig) -> Plan:
    """The cheapest plan with offsets within a budget.

    Args:
        hint: the search's plan; one with offsets within the budget is kept if nothing is cheaper.

    Returns:
        A plan with offsets, OPTIMAL or FEASIBLE; or one without, INFEASIBLE, or UNKNOWN where no plan
        could be placed.
    """
    joint = _Joint(Graph.of(program), budget_bytes, hint, Clock(config))
    try:
        joint.run()
    except KeyboardInterrupt:
        joint.clock.stop()
    return joint.plan()


class _Joint:
    """One problem, and the best that is known of it.

    Attributes:
        first: the best plan for the budget's live bytes, with what is proved of it.
        best: the best placed plan; None while there is none.
    """

    def __init__(self, graph: Graph, budget_bytes: int, hint: Plan, clock: Clock) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.hint = hint
        self.clock = clock
        self.first = hint
        self.best: Candidate | None = None
        if hint.offsets:
            self._offer(_with(graph, hint, hint.offsets))

    def run(self) -> None:
        """From the cheap ways to the dear ones."""
        whole = self.clock.left
        self.first = solve_within(
            self.graph, self.budget_bytes, self.hint, self.clock, keep=CONFIG.first_keep * whole
        )
        if not self.first.status.found:
            return
        start = self._lower_budgets(keep=CONFIG.lowered_keep * whole)
        if self.best is None or start.cost_ns < self.best.cost_ns:
            keep, most_ns = CONFIG.placed_keep * whole, None if self.best is None else self.best.cost_ns - 1
            self._offer(lower(self.graph, self.budget_bytes, start, self.clock, most_ns=most_ns, keep=keep))
        if self._is_done() or self._solve_whole(self.best or start):
            return
        if self.best is not None:
            self._offer(improve(self.graph, self.budget_bytes, self.best, self.clock, self._floor_ns()))

    def plan(self) -> Plan:
        """What is known, as a plan."""
        if self.best is None:
            missed = Status.UNKNOWN if self.first.status.found else self.first.status
            return dataclasses.replace(self.first, status=missed, seconds=self.clock.seconds, offsets=())
        base_ns = sum(self.graph.cost_ns)
        floor_ns = min(self._floor_ns(), self.best.cost_ns)
        return Plan(
            steps=tuple(OpId(op) for op in self.best.steps),
            peak_bytes=simulate_graph(self.graph, self.best.steps).peak_bytes,
            budget_bytes=self.budget_bytes,
            overhead_ratio=(self.best.cost_ns - base_ns) / base_ns if base_ns else 0.0,
            lower_bound_ratio=(floor_ns - base_ns) / base_ns if base_ns else 0.0,
            status=Status.OPTIMAL if self._is_done() else Status.FEASIBLE,
            planner="exact",
            seconds=self.clock.seconds,
            offsets=self.best.offsets,
        )

    def _lower_budgets(self, keep: float) -> Candidate:
        """Cheapest plans for ever fewer live bytes, until one is packed; returns the first of them."""
        made, target_bytes = self.first, self.budget_bytes
        first = _with(self.graph, made, place_graph(self.graph, made.steps).offsets)
        for tries in range(CONFIG.most_budgets):
            placed = self._packed(made)
            self._offer(placed)
            if heap_bytes(self.graph, placed) <= self.budget_bytes:
                break
            lacking_bytes = heap_bytes(self.graph, placed) - self.budget_bytes
            target_bytes = min(target_bytes, made.peak_bytes) - -(
                -(lacking_bytes << tries) // CONFIG.first_parts
            )
            if self.clock.left <= keep:
                break
            hint = plan(self.graph.program, target_bytes, PlannerConfig(quick=True))
            share = (self.clock.left - keep) / 2
            made = solve_within(self.graph, target_bytes, hint, self.clock, keep + share)
            if not made.status.found:
                break
        return first

    def _packed(self, made: Plan) -> Candidate:
        """The plan with offsets, within the budget if the packers can do that."""
        placement = place_graph(self.graph, made.steps)
        placed = _with(self.graph, made, placement.offsets)
        if placement.heap_bytes <= self.budget_bytes:
            return placed
        group, items = range_groups(self.graph, made.steps, live_ranges(self.graph, made.steps))
        capacity_bytes = self.budget_bytes - self.graph.argument_bytes
        limit_s = None if self.clock.config.time_limit_s is None else CONFIG.packing_share * self.clock.left
        packed = pack(items, capacity_bytes, limit_s)
        if not packed.fits:
            return placed
        return dataclasses.replace(placed, offsets=by_step(self.graph, made.steps, group, packed.offsets))

    def _solve_whole(self, start: Candidate) -> bool:
        """One model of all slots, where it is small enough; True if it is solved."""
        slots = range(len(self.graph.cost_ns) + 1)
        most_ns = None if self.best is None else self.best.cost_ns
        axis = Axis.around(self.graph, start.steps, slots)
        if len(axis.steps) - len(self.graph.cost_ns) > CONFIG.most_recomputes:
            return False
        answer, is_solved = solve_slots(
            self.graph,
            self.budget_bytes,
            start,
            slots,
            self.clock,
            most_ns=most_ns,
            keep=(1 - CONFIG.whole_share) * self.clock.left,
        )
        if answer is not None:
            self._offer(answer)
        if is_solved:
            self.clock.say("no placed plan that recomputes ops in schedule order in every slot costs less")
        return is_solved

    def _offer(self, candidate: Candidate) -> None:
        """Take a placed plan that keeps the budget and costs less than the best."""
        keeps = heap_bytes(self.graph, candidate) <= self.budget_bytes
        if keeps and (self.best is None or candidate.cost_ns < self.best.cost_ns):
            self.best = candidate

    def _floor_ns(self) -> int:
        """No plan costs less."""
        return sum(self.graph.cost_ns) + bound_ns(self.graph, self.first)

    def _is_done(self) -> bool:
        return self.best is not None and self.best.cost_ns <= self._floor_ns()


def _with(graph: Graph, made: Plan, offsets: tuple[tuple[int, ...], ...]) -> Candidate:
    """A plan's steps at some offsets."""
    cost_ns = sum(graph.cost_ns[op] for op in made.steps)
    return Candidate(steps=made.steps, peak_bytes=made.peak_bytes, cost_ns=cost_ns, offsets=offsets)
