"""The exact planner: solve a coarse 0-1 program, see where its answer breaks the budget, refine there.

Every model is a relaxation of the next, so their optima rise; the first answer that keeps the budget is
optimal among all plans. Where only the order of the recomputes of one slot breaks it, that slot is ordered
(each op at most once, in schedule order): what is proved from then on holds for such plans only, and the
lower bound stays where it was. Where that proves nothing in its part of the limit, the best plan is improved
a few slots at a time. Never returns worse than the hint, the search's plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.planners.bounds import at_least_ns, working_set_bytes
from passes.planners.candidate import Candidate
from passes.planners.exact.expand import breaks, hint_of, steps_of
from passes.planners.exact.frame import Frame, unit_bytes
from passes.planners.exact.limits import Clock, ExactConfig
from passes.planners.exact.retention import Retention, build
from passes.planners.exact.slots import improve
from passes.planners.schedule import Schedule, reverse_delete
from passes.simulate import simulate_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSearchConfig:
    """How fine models are; set by the rows "exact" of `benchmarks.planners`.

    Attributes:
        units: the budget in units of the first model.
        finer: how many times as many the next one has.
        search_ratio: what is left of the limit for neighbourhoods, where there is a plan to begin with.
    """

    units: int = 10**6
    finer: int = 64
    search_ratio: float = 0.5


CONFIG = ExactSearchConfig()


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known about one problem so far."""

    steps: list[int]
    cost_ns: int | None
    bound_ns: int
    ordered_bound_ns: int
    proved_infeasible: bool = False

    @property
    def proved_ns(self) -> int:
        """No plan that is looked for costs less."""
        return max(self.bound_ns, self.ordered_bound_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the solver said about one model; costs are of the recomputes alone."""

    status: Status
    bound_ns: int
    recompute: frozenset[tuple[int, int]] = frozenset()
    kept: frozenset[tuple[int, int]] = frozenset()


def solve_exact(program: Program, budget_bytes: int, hint: Plan, config: ExactConfig) -> Plan:
    """The cheapest plan within a budget, with a proof where the limit allows it.

    Args:
        hint: a plan of the same program for the same budget or a larger one; need not keep it. What it
            proves is believed.

    Returns:
        OPTIMAL: no plan costs less. FEASIBLE: within the budget, never costlier than a hint that keeps
        it. INFEASIBLE: proved. UNKNOWN: neither found nor proved; the steps are the hint's.
    """
    return solve_within(Graph.of(program), budget_bytes, hint, Clock(config))


def solve_within(graph: Graph, budget_bytes: int, hint: Plan, clock: Clock, keep: float = 0.0) -> Plan:
    """`solve_exact` for a part of a limit.

    Args:
        keep: how much of the clock's limit is not for this.
    """
    begin_s = clock.seconds
    known = _Known(steps=list(hint.steps), cost_ns=None, bound_ns=bound_ns(graph, hint), ordered_bound_ns=0)
    if hint.peak_bytes <= budget_bytes:
        known.cost_ns = _recompute_ns(graph, known.steps)
    impossible = hint.status is Status.INFEASIBLE and hint.budget_bytes >= budget_bytes
    known.proved_infeasible = impossible or working_set_bytes(graph.program) > budget_bytes
    if not known.proved_infeasible and known.cost_ns != 0:
        try:
            _search(graph, budget_bytes, known, clock, keep)
        except KeyboardInterrupt:
            clock.stop()
    return _plan(graph, budget_bytes, known, clock.seconds - begin_s)


def bound_ns(graph: Graph, made: Plan) -> int:
    """What a plan says that the recomputes of every plan cost at least."""
    base_ns = sum(graph.cost_ns)
    return max(0, at_least_ns(base_ns, made.lower_bound_ratio) - base_ns)


def _search(graph: Graph, budget_bytes: int, known: _Known, clock: Clock, keep: float) -> None:
    """Models from coarse to fine, then the best plan's neighbourhoods."""
    share = CONFIG.search_ratio * max(0.0, clock.left - keep) if known.cost_ns is not None else 0.0
    _Refinement(graph, budget_bytes, known, clock, keep + share).run()
    if known.cost_ns is not None and known.cost_ns > known.proved_ns:
        base_ns = sum(graph.cost_ns)
        start = Candidate.of(Schedule(graph, known.steps))
        better = improve(graph, budget_bytes, start, clock, base_ns + known.proved_ns, keep)
        known.steps, known.cost_ns = list(better.steps), better.cost_ns - base_ns


class _Refinement:
    """One problem's models, from coarse to fine."""

    def __init__(self, graph: Graph, budget_bytes: int, known: _Known, clock: Clock, keep: float) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.known = known
        self.clock = clock
        self.keep = keep
        self.units = CONFIG.units
        self.frame = Frame.of(graph, ())

    def run(self) -> None:
        """Refine until something is proved or the limit is reached."""
        steps: list[int] = list(range(len(self.graph.cost_ns)))
        while self.clock.left > self.keep and self._refine(steps):
            answer = self._solve()
            self._learn(answer)
            if not answer.status.found:
                return
            steps = steps_of(self.frame, answer.recompute, answer.kept)
            self._offer(steps)
            if self._is_done() or answer.status is not Status.OPTIMAL:
                return

    def _refine(self, steps: list[int]) -> bool:
        """A finer frame, or finer units; False if nothing is left to refine."""
        breakpoints, ordered = breaks(self.frame, steps, self.budget_bytes)
        if breakpoints or ordered:
            merged = tuple(sorted({*self.frame.breakpoints, *breakpoints}))
            self.frame = Frame.of(self.graph, merged, (*self.frame.ordered, *ordered))
            return True
        if unit_bytes(self.graph, self.budget_bytes, self.units) > unit_bytes(self.graph, 0, 1):
            self.units *= CONFIG.finer
            return True
        return False

    def _solve(self) -> _Answer:
        unit = unit_bytes(self.graph, self.budget_bytes, self.units)
        made = build(self.frame, self.budget_bytes, unit)
        known_ns = self.known.cost_ns
        if known_ns is not None:
            cost_ns = self.graph.cost_ns
            made.model.add(sum(cost_ns[op] * x for (_, op), x in made.recompute.items()) <= known_ns)
            _add_hint(made, self.known.steps)
        return self._ask(made)

    def _ask(self, made: Retention) -> _Answer:
        solver = cp_model.CpSolver()
        solver.parameters.linearization_level = 2
        solver.best_bound_callback = lambda bound: self._progress(bound)
        code = self.clock.solve(solver, made.model, keep=self.keep)
        bound_ns = int(-(-solver.best_objective_bound // 1)) if made.recompute else 0
        if code == cp_model.INFEASIBLE:
            return _Answer(status=Status.INFEASIBLE, bound_ns=0)
        if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Answer(status=Status.UNKNOWN, bound_ns=max(0, bound_ns))
        return _Answer(
            status=Status.OPTIMAL if code == cp_model.OPTIMAL else Status.FEASIBLE,
            bound_ns=max(0, bound_ns),
            recompute=frozenset(k for k, x in made.recompute.items() if solver.boolean_value(x)),
            kept=frozenset(k for k, x in made.kept.items() if solver.boolean_value(x)),
        )

    def _progress(self, bound_ns: float) -> None:
        base_ns = max(1, sum(self.graph.cost_ns))
        found_ns = self.known.cost_ns
        so_far = "no plan yet" if found_ns is None else f"plan {found_ns / base_ns:+.3%}"
        if self.frame.ordered:
            bound_ns = 0
        bound_ns = max(bound_ns, self.known.bound_ns)
        self.clock.say(f"{so_far}, bound {bound_ns / base_ns:+.3%}, {self.frame.n_blocks} blocks")

    def _learn(self, answer: _Answer) -> None:
        """Bounds for all plans while no slot is ordered; for ordered plans afterwards."""
        if self.frame.ordered:
            self.known.ordered_bound_ns = max(self.known.ordered_bound_ns, answer.bound_ns)
        elif answer.status is Status.INFEASIBLE:
            self.known.proved_infeasible = True
        else:
            self.known.bound_ns = max(self.known.bound_ns, answer.bound_ns)

    def _offer(self, steps: list[int]) -> None:
        """Take a sequence that keeps the budget and costs less than the best."""
        schedule = Schedule(self.graph, steps)
        if schedule.peak_bytes <= self.budget_bytes:
            reverse_delete(schedule, self.budget_bytes)
            cost_ns = schedule.cost_ns - sum(self.graph.cost_ns)
            if self.known.cost_ns is None or cost_ns < self.known.cost_ns:
                self.known.steps, self.known.cost_ns = schedule.compact(), cost_ns

    def _is_done(self) -> bool:
        return self.known.cost_ns is not None and self.known.cost_ns <= self.known.proved_ns


def _add_hint(made: Retention, steps: list[int]) -> None:
    """A known sequence as the place to start from."""
    recompute, kept = hint_of(made.frame, steps)
    for key, literal in made.recompute.items():
        made.model.add_hint(literal, key in recompute)
    for key, literal in made.kept.items():
        made.model.add_hint(literal, key in kept)


def _recompute_ns(graph: Graph, steps: list[int]) -> int:
    return sum(graph.cost_ns[op] for op in steps) - sum(graph.cost_ns)


def _plan(graph: Graph, budget_bytes: int, known: _Known, seconds: float) -> Plan:
    base_ns = sum(graph.cost_ns)
    cost_ns = _recompute_ns(graph, known.steps)
    if known.proved_infeasible:
        status = Status.INFEASIBLE
    elif known.cost_ns is None:
        status = Status.UNKNOWN
    else:
        status = Status.OPTIMAL if known.cost_ns <= known.bound_ns else Status.FEASIBLE
    bound_ns = min(known.bound_ns, cost_ns) if status.found else known.bound_ns
    return Plan(
        steps=tuple(OpId(op) for op in known.steps),
        peak_bytes=simulate_graph(graph, known.steps).peak_bytes,
        budget_bytes=budget_bytes,
        overhead_ratio=cost_ns / base_ns if base_ns else 0.0,
        lower_bound_ratio=0.0 if not base_ns or known.proved_infeasible else bound_ns / base_ns,
        status=status,
        planner="exact",
        seconds=seconds,
    )
