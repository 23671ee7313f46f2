"""Find a plan whose emitted module keeps the budget in XLA's own heap, and the host's in the host's.

Live bytes are not the heap: packing leaves holes, and temporaries that XLA kept inside results may no longer
fit there. So every plan is written and its heap predicted; what does not fit is planned again, tighter by
the excess. Where the planners find nothing from above, the plan of lowest peak is relaxed from below: its
recomputes are taken out, costliest first, while the prediction keeps the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.emit import emit
from passes.hlo.heap import HeapPrediction, packing_saves, predict_assigned
from passes.hlo.lift import LiftedModule
from passes.hlo.steer import steered
from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.objective import Price
from passes.planners import PlannerConfig, least_peak, plan, working_set_bytes
from passes.planners.paging.energy import time_ns, with_energy
from passes.planners.schedule import HOLE, Schedule, reverse_delete
from passes.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """How often a plan is written and its heap predicted; set by `benchmarks.promise`.

    Attributes:
        most_rounds: from above, each tighter by what the one before was over.
        most_relaxed: of the lowest plan with fewer recomputes.
        most_lowest: of the lowest plan, while values come into the heap that were in results.
        retry_parts: into how many parts the work is divided of which a plan after the first gets one.
        displaced_rounds: in which values that come into the heap are planned for; later only where the excess
            halves, since what their recomputes displace in turn would be found one layer after the other.
        even_rounds: that tighten by the excess itself; each one after them by twice as much.
        paged_levels: of the lowest peak, for which pages are planned besides. Where all that can go
            goes, what comes back lies in the way of others: a little more is packed into less.
    """

    most_rounds: int = 7
    most_relaxed: int = 4
    most_lowest: int = 4
    retry_parts: int = 3
    displaced_rounds: int = 2
    even_rounds: int = 2
    paged_levels: tuple[float, ...] = (1.02, 1.05, 1.1)


CONFIG = FitConfig()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A plan, the module that runs it, and what XLA will allocate for that.

    Attributes:
        view: of the module.
        needed_bytes: the program's total: as XLA packs it, or as it is after pinning if that will follow.
        displaced: values that XLA kept inside results before, and that now need room in the heap.
        unsteered_bytes: where its packing was steered, the least total of a plan that was not; else None.
    """

    plan: Plan
    view: graph.Module
    prediction: HeapPrediction
    needed_bytes: int
    displaced: frozenset[int]
    unsteered_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One module, its budget, and how to plan it.

    Attributes:
        host_bytes: what the module may keep on the host in all; paging is off where `config` says so.
        pinned: True if the temporaries will be packed anew after the compile, so that XLA's packing
            does not count.
    """

    lifted: LiftedModule
    budget_bytes: int
    config: PlannerConfig
    host_bytes: int = 0
    pinned: bool = False

    @property
    def fixed_bytes(self) -> int:
        """What no plan removes: everything that is not a temporary."""
        return self.lifted.prediction.total_bytes - self.lifted.prediction.temp_bytes

    def bound_bytes(self, program: Program) -> int:
        """No plan of `program` needs less: what must be there, and with pages what one op holds alone."""
        if self.config.host_bytes:
            return max(Graph.of(program).local_bytes, default=0)
        return working_set_bytes(program)

    def for_retries(self) -> PlannerConfig:
        """A part of the work, and no second proof."""
        units = self.config.units(len(self.lifted.program.ops))
        return replace(self.config, work_limit=units // CONFIG.retry_parts, bound=False)

    def write(self, made: Plan) -> Written:
        """Emit a plan and predict its heap."""
        view = emit(self.lifted, made.steps, made.pages)
        assigner = self.lifted.assigner.on(view)
        prediction = predict_assigned(assigner)
        saved = packing_saves(assigner) if self.pinned else 0
        return Written(
            plan=made, view=view, prediction=prediction,
            needed_bytes=prediction.total_bytes - saved, displaced=self._displaced(assigner),
        )  # fmt: skip

    def steered(self, written: Written) -> Written:
        """The same plan, packed tighter where XLA can be made to; else as it is."""
        if self.pinned or self.lifted.assigner.backend.heap != "in time order":
            return written
        module = steered(self.lifted.assigner.on(written.view))
        if module is None:
            return written
        view = graph.read(module)
        prediction = predict_assigned(self.lifted.assigner.on(view))
        found = replace(written, view=view, prediction=prediction, needed_bytes=prediction.total_bytes)
        return min(written, found, key=lambda w: w.needed_bytes)

    def excess_bytes(self, written: Written) -> int:
        """By how much a module breaks the budget."""
        return max(0, written.needed_bytes - self.budget_bytes)

    def host_excess_bytes(self, written: Written) -> int:
        """By how much a module with pages breaks the host's budget: holes between what waits there."""
        return max(0, written.prediction.host_bytes - self.host_bytes) if written.plan.pages else 0

    def price(self, written: Written) -> Price:
        """What to compare a plan by."""
        program = self.lifted.program
        made = with_energy(program, written.plan, self.config.link)
        return self.config.objective.price(
            cost_ns=time_ns(program, made), energy_pj=made.energy_pj, base_ns=program.cost_ns
        )

    def size(self, written: Written) -> tuple[bool, int]:
        """To compare plans by where none keeps the budgets."""
        return self.host_excess_bytes(written) > 0, written.needed_bytes

    def is_over(self, written: Written) -> bool:
        """True if a module breaks one of both budgets."""
        return bool(self.excess_bytes(written) or self.host_excess_bytes(written))

    def _displaced(self, after: Assigner) -> frozenset[int]:
        heap = {after.flow.values[v].home for group in after.heap for v in after.flow.classes[group]}
        before = self.lifted.assigner
        inside = set(before.heap)
        return frozenset(
            v
            for v in self.lifted.values
            if before.flow.class_of[v] not in inside and before.flow.values[v].home in heap
        )

    def program_with(self, displaced: frozenset[int]) -> Program:
        """The program in which displaced values have their bytes."""
        program = self.lifted.program
        values = self.lifted.assigner.flow.values
        buffers = tuple(
            replace(b, nbytes=values[v].nbytes) if v in displaced else b
            for b, v in zip(program.buffers, self.lifted.values, strict=True)
        )
        return replace(program, buffers=buffers)


def fit(task: Task) -> Written:
    """The first plan whose predicted total keeps the budget, else the lowest that does not depend on it.

    A second call with the total of a plan that did not keep its budget keeps that one: what is reported as
    least can be asked for.
    """
    program, displaced = task.lifted.program, frozenset[int]()
    config = task.config
    target = task.budget_bytes - task.fixed_bytes
    bound_ratio = 0.0
    tried: list[Written] = []
    tightened = 0
    for _ in range(CONFIG.most_rounds):
        if target < task.bound_bytes(program):
            break
        written = task.write(plan(program, target, config))
        bound_ratio = max(bound_ratio, written.plan.lower_bound_ratio)
        excess = task.excess_bytes(written)
        if not task.is_over(written):
            return _with_bound(written, bound_ratio)
        tried.append(written)
        if written.plan.peak_bytes > target:
            break
        config = _with_less_host(task.for_retries(), config.host_bytes - task.host_excess_bytes(written))
        nearer = len(tried) <= CONFIG.displaced_rounds or 2 * excess <= task.excess_bytes(tried[-2])
        if nearer and not written.displaced <= displaced:
            displaced |= written.displaced
            program = task.program_with(displaced)
            peak = simulate(program, written.plan.steps, written.plan.pages).peak_bytes
            excess = max(0, excess - max(0, peak - written.plan.peak_bytes))
        else:
            tightened += 1
        target = min(target, written.plan.peak_bytes) - (excess << max(0, tightened - CONFIG.even_rounds))
    program, least = lowest(task)
    over = task.is_over(least)
    found = _packed(task, [*tried, least]) if over else _from_below(task, program, least)
    return _with_bound(found, bound_ratio)


def _packed(task: Task, tried: list[Written]) -> Written:
    """The cheapest of the plans whose packing alone is over the budget, packed tighter, else the last one:
    the others depend on the budget, and what is reported as the least must be met when that is asked for."""
    least = tried[-1]
    unsteered_bytes = least.needed_bytes
    for written in sorted(tried, key=task.price):
        found = replace(task.steered(written), unsteered_bytes=unsteered_bytes)
        if not task.is_over(found):
            return found
        if written is tried[-1]:
            least = min(least, found, key=task.size)
    return least


def _with_less_host(config: PlannerConfig, host_bytes: int) -> PlannerConfig:
    return replace(config, host_bytes=max(0, host_bytes))


def _with_bound(written: Written, bound_ratio: float) -> Written:
    """What is proved for the whole budget holds for every tighter one."""
    return replace(written, plan=replace(written.plan, lower_bound_ratio=bound_ratio))


def lowest(task: Task) -> tuple[Program, Written]:
    """The plan of lowest total that is found whatever the budget is, and the program that it is for."""
    program, displaced = task.lifted.program, frozenset[int]()
    tried: list[tuple[Program, Written]] = []
    config = task.for_retries()
    for _ in range(CONFIG.most_lowest):
        written = task.write(least_peak(program, config))
        tried.append((program, written))
        less = config.host_bytes - task.host_excess_bytes(written)
        if written.displaced <= displaced and less == config.host_bytes:
            break
        config = _with_less_host(config, less)
        displaced |= written.displaced
        program = task.program_with(displaced)
    program, written = tried[-1]
    if written.plan.pages:
        levels = [int(level * written.plan.peak_bytes) for level in CONFIG.paged_levels]
        tried += [(program, task.write(plan(program, level, config))) for level in levels]
    return min(tried, key=lambda one: task.size(one[1]))


def _from_below(task: Task, program: Program, best: Written) -> Written:
    """`best`, which keeps the budget, with as few recomputes as that allows; a plan with pages as it is."""
    least = best.plan
    if least.pages:
        return best
    low, limit = least.peak_bytes, task.budget_bytes - task.fixed_bytes
    high = limit
    for _ in range(CONFIG.most_relaxed):
        if limit <= low:
            break
        written = task.write(_relaxed(program, least, limit))
        if task.excess_bytes(written):
            high = limit
        else:
            best, low = written, limit
        limit = (low + high) // 2
    return best


def _relaxed(program: Program, least: Plan, limit_bytes: int) -> Plan:
    """`least` without the recomputes that `limit_bytes` makes needless."""
    schedule = Schedule(Graph.of(program), least.steps)
    reverse_delete(schedule, limit_bytes)
    steps = tuple(OpId(op) for op in schedule.steps if op != HOLE)
    timeline = simulate(program, steps)
    return replace(
        least, steps=steps, peak_bytes=timeline.peak_bytes, budget_bytes=limit_bytes, status=Status.FEASIBLE,
        overhead_ratio=timeline.overhead_ratio, lower_bound_ratio=0.0, offsets=(),
    )  # fmt: skip
