"""The enforcing stage: hold a scheduled module to a byte budget, or say why that cannot be done.

The heap that XLA will build is predicted. If the module fits, its bytes go back as they came. Else what costs
nothing comes first: copies that nothing needs are taken out, and its kernels are put in a better order, those
of bodies of loops and of branches, too. Where that does not do, they are planned for what the budget leaves
for temporaries, the plan is written into the module, and the heap of THAT module is predicted
(`passes.hlo.fit`). Nothing is returned as changed unless its prediction keeps the budget.

Constants that XLA stores count with the temporaries in the outcome: no plan removes them, and the total
must be XLA's total.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from passes.backend import BACKENDS
from passes.cost import DeviceModel, mapping_ns
from passes.hlo import graph, proto
from passes.hlo.afterwards import as_xla_leaves_it
from passes.hlo.assign import Assigner
from passes.hlo.barriers import drop_barriers
from passes.hlo.called import ordered, tightened, tightest
from passes.hlo.copies import has_copies, without_copies
from passes.hlo.cost import computation_ns, computation_pj, computation_times_ns
from passes.hlo.emit import emit
from passes.hlo.fit import Task, Written, fit
from passes.hlo.heap import HeapPrediction, packing_saves, predict_assigned
from passes.hlo.labels import forced_values
from passes.hlo.lift import LiftedModule, lift
from passes.hlo.reorder import depth_first, reordered
from passes.interpreter import uncollected
from passes.ir import OpId, Status
from passes.liveness import Graph
from passes.objective import LEAST_TIME, Objective
from passes.outcome import Recomputed, StageOutcome, paged_by, recomputed_by
from passes.planners import PlannerConfig
from passes.planners.paging.pager import Host, Pager
from passes.recipe import Recipe

OnFragmentation = Literal["recompute", "pin", "error"]
LOOP_ROUNDS = 4
"""How often bodies of loops are planned, each time for as much less as the packing was over, before they are
planned for as little as can be."""
MISSED_RATIO = 1.25
"""How far a plan may miss the bytes that stay mapped on a CPU and be held to them; set by
`benchmarks.side_by_side`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnforceRequest:
    """What is asked of a module.

    Attributes:
        budget_bytes: arguments + outputs - aliased + temporaries must not exceed it.
        device: cost model.
        platform: decides XLA's rules of memory, see `passes.backend`.
        planner: one of `passes.planners.config.PLANNERS`.
        old_rules: True for jaxlib before 0.12: XLA's total counts the scalars of reducers, and
            asynchronous values live from their own instruction on.
        host_bytes: what may wait in the host's memory, a user's own offloading included; 0 for no paging.
        objective: what is least.
        on_fragmentation: what to do where the budget would be kept but for XLA's packing of temporaries:
            "recompute", "pin" (count the bytes as they will be after pinning) or "error".
        expected_bytes: of temporaries, for which the program was planned before XLA; None for one that was
            not, which is left alone if it fits. One that was planned loses the copies that nothing needs.
    """

    budget_bytes: int
    device: DeviceModel
    platform: str
    planner: str = "auto"
    old_rules: bool = False
    host_bytes: int = 0
    objective: Objective = LEAST_TIME
    on_fragmentation: OnFragmentation = "recompute"
    expected_bytes: int | None = None

    @property
    def pages(self) -> bool:
        """True if values may be sent to the host."""
        return self.host_bytes > 0 and BACKENDS[self.platform].pages


@uncollected()
def enforce(module_bytes: bytes, request: EnforceRequest) -> tuple[bytes, StageOutcome]:
    """Hold a scheduled module to `request.budget_bytes`.

    Args:
        module_bytes: a serialized HloModuleProto with a schedule, from XLA's POST_SCHEDULER stage.
        request: see `EnforceRequest`.

    Returns:
        The bytes to hand back to XLA and what was found. Unless the outcome says `changed` every kernel is
        as it was, in its place, and but for barriers (`passes.hlo.barriers`) the bytes are the same object;
        so too if the budget cannot be kept: then `outcome.status.found` is False.
    """
    begin = time.perf_counter()
    module = _read(module_bytes, request)
    returned, outcome = _held(module, request)
    kept_bytes, expected_bytes = request.device.kept_bytes, request.expected_bytes
    is_mapped = outcome.status.found and 0 < kept_bytes < outcome.planned_temp_bytes
    if is_mapped and expected_bytes is not None and _is_near(kept_bytes, expected_bytes, module, outcome):
        smaller = replace(request, budget_bytes=outcome.fixed_bytes + kept_bytes)
        other, mapped_less = _held(module, smaller)
        if mapped_less.status.found and mapped_less.run_ns < outcome.run_ns:
            returned, outcome = other, replace(mapped_less, budget_bytes=request.budget_bytes)
    return returned, replace(outcome, seconds=time.perf_counter() - begin)


def _is_near(kept_bytes: int, expected_bytes: int, module: _Scheduled, outcome: StageOutcome) -> bool:
    """True if a module was expected to need what stays mapped, or needs little more, as it was held or by its
    order alone; the order is made if need be."""
    most_bytes = MISSED_RATIO * kept_bytes
    if expected_bytes <= kept_bytes or outcome.planned_temp_bytes <= most_bytes:
        return True
    return module.depth_first.prediction.temp_bytes <= most_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scheduled:
    """A module as it came, but for barriers, and what is made of it for all budgets."""

    data: bytes
    view: graph.Module
    assigner: Assigner
    prediction: HeapPrediction
    device: DeviceModel

    @functools.cached_property
    def lifted(self) -> LiftedModule:
        platform = self.assigner.backend.name
        return lift(self.view, self.device, platform, assigner=self.assigner, prediction=self.prediction)

    @functools.cached_property
    def uncopied(self) -> LiftedModule:
        """Without the copies that nothing needs in XLA's order, if that is not packed worse."""
        own, backend = self.lifted, self.assigner.backend
        if backend.drops_copies or not has_copies(self.view):  # they are gone
            return own
        view = graph.read(proto.parse(proto.serialize(self.view.proto)))
        without = without_copies(view, backend, old_rules=self.assigner.old_rules)
        if without is view:
            return own
        assigner = Assigner(without, backend.name, old_rules=self.assigner.old_rules)
        made = lift(without, self.device, backend.name, assigner=assigner)
        return made if made.prediction.total_bytes <= own.prediction.total_bytes else own

    @functools.cached_property
    def depth_first(self) -> LiftedModule:
        """In the order of branches, where XLA runs them together and that needs less."""
        if not self.assigner.backend.runs_branches_together:
            return self.uncopied
        return _reordered(self.uncopied, self.device, depth_first)

    @functools.cached_property
    def moved(self) -> LiftedModule:
        """With what frees memory early, and what takes it late."""
        orders = dict.fromkeys((self.depth_first, self.uncopied))
        made = [_reordered(order, self.device, reordered) for order in orders]
        return ordered(min(made, key=lambda lifted: lifted.prediction.total_bytes), self.device)

    def within(self, budget_bytes: int) -> LiftedModule:
        """The module in the first of these orders that needs no more, and nothing mapped in every run; else
        in that which needs least."""
        found, kept_bytes = self.depth_first.prediction, self.device.kept_bytes
        fits = found.total_bytes <= budget_bytes and not 0 < kept_bytes < found.temp_bytes
        return self.depth_first if fits else self.moved


def _read(module_bytes: bytes, request: EnforceRequest) -> _Scheduled:
    module = proto.parse(module_bytes)
    if drop_barriers(module):
        module_bytes = proto.serialize(module)
    view = as_xla_leaves_it(graph.read(module), BACKENDS[request.platform], old_rules=request.old_rules)
    assigner = Assigner(view, request.platform, old_rules=request.old_rules)
    return _Scheduled(
        data=module_bytes, view=view, assigner=assigner, prediction=predict_assigned(assigner),
        device=request.device,
    )  # fmt: skip


def _held(module: _Scheduled, request: EnforceRequest) -> tuple[bytes, StageOutcome]:
    """As `enforce`, for the very budget. A program that was planned is compared with what was promised, what
    it was expected to have mapped included."""
    returned, outcome = _without_mapping(module, request)
    before_bytes, expected_bytes = outcome.before_temp_bytes, request.expected_bytes
    promised_bytes = before_bytes if expected_bytes is None else min(before_bytes, expected_bytes)
    before_ns, after_ns = (
        mapping_ns(request.device, nbytes) for nbytes in (promised_bytes, outcome.planned_temp_bytes)
    )
    cost_ns, recompute_ns = outcome.cost_ns + before_ns, outcome.recompute_ns + after_ns - before_ns
    return returned, replace(outcome, cost_ns=cost_ns, recompute_ns=recompute_ns)


def _without_mapping(module: _Scheduled, request: EnforceRequest) -> tuple[bytes, StageOutcome]:
    before, prediction = module.assigner, module.prediction
    if 0 < request.host_bytes < prediction.host_bytes:
        return module.data, _host_refusal(request, module)
    forced = forced_values(before.flow) if request.pages else frozenset()
    fits = prediction.total_bytes <= request.budget_bytes and not forced
    if fits and (request.expected_bytes is None or module.uncopied is module.lifted):
        return module.data, _unchanged(request, module)
    saved = 0 if request.on_fragmentation == "recompute" or fits or forced else packing_saves(before)
    if saved and prediction.total_bytes - saved <= request.budget_bytes:
        kept = _unchanged(request, module)
        pinned_temp_bytes = kept.planned_temp_bytes - saved
        if request.on_fragmentation == "pin":
            return module.data, replace(kept, planned_temp_bytes=pinned_temp_bytes, needs_pinning=True)
        least = prediction.total_bytes
        return module.data, replace(kept, status=Status.UNKNOWN, needs_pinning=True, least_total_bytes=least)
    # What the program brings from the host by itself is waited for without a plan, too.
    cost_ns = computation_ns(module.view, module.view.entry, request.device)
    energy_pj = computation_pj(module.view, module.view.entry, request.device)
    lifted = module.uncopied if fits else module.within(request.budget_bytes)
    if forced and prediction.host_bytes + (own := _forced_bytes(request, lifted)) > request.host_bytes:
        return module.data, _host_refusal(request, module, own)
    found = _found(request, lifted)
    shared = found.written.plan.pages and prediction.host_bytes
    if request.pages and not forced and (found.is_tightened or shared):
        # Recompute alone packs otherwise, so it may be given more bytes. And copies of the program's own, of
        # which plans know nothing, share the link with pages.
        found = min(found, _found(replace(request, host_bytes=0), lifted), key=_Found.rank)
    if found.is_over:
        returned, outcome = module.data, _refusal(request, found, prediction)
    else:
        outcome = _outcome(request, prediction, found.written.prediction, cost_ns, energy_pj)
        returned, outcome = proto.serialize(found.written.view.proto), _changed(request, outcome, found)
    ordered_bytes = lifted.prediction.temp_bytes + lifted.prediction.constant_bytes
    return returned, replace(outcome, ordered_temp_bytes=ordered_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A plan of a module, with the bodies of its loops planned where that was needed.

    Attributes:
        inside: what bodies of loops recompute.
        loops: whether they were planned.
    """

    request: EnforceRequest
    task: Task
    written: Written
    inside: tuple[Recomputed, ...]
    loops: bool

    @property
    def is_over(self) -> bool:
        """True if it breaks a budget."""
        return self.task.is_over(self.written)

    @property
    def is_tightened(self) -> bool:
        """True if the plan was made for fewer bytes than the budget leaves, or breaks it."""
        return self.is_over or self.written.plan.budget_bytes < self.task.budget_bytes - self.task.fixed_bytes

    def rank(self) -> tuple[int, ...]:
        """Within the budgets by price, else by bytes; smaller is better."""
        if self.is_over:
            return True, self.written.needed_bytes
        view, device = self.written.view, self.request.device
        cost_ns, energy_pj = (of(view, view.entry, device) for of in (computation_ns, computation_pj))
        base_ns = self.task.lifted.program.cost_ns
        return False, *self.request.objective.price(cost_ns=cost_ns, energy_pj=energy_pj, base_ns=base_ns)


def _found(request: EnforceRequest, lifted: LiftedModule) -> _Found:
    """The first plan that keeps the budgets, else the smallest."""
    task = _task(request, lifted)
    written, inside = fit(task), tuple[Recomputed, ...]()
    entry, lowest, loops = task, written, False
    limit_bytes, rounds = max(0, _limit_bytes(task, lowest)), 0
    while task.is_over(written):
        if (deeper := _with_loops(request, entry, lowest, limit_bytes)) is None:
            break
        before_bytes = written.needed_bytes
        (task, inside), loops, rounds = deeper, True, rounds + 1
        written = fit(task)
        if not limit_bytes:
            break
        # What is packed with other holes than were foreseen is planned tighter, while that helps.
        is_less = written.needed_bytes < before_bytes and rounds < LOOP_ROUNDS
        limit_bytes = max(0, limit_bytes - task.excess_bytes(written)) if is_less else 0
    return _Found(request=request, task=task, written=written, inside=inside, loops=loops)


def _changed(request: EnforceRequest, outcome: StageOutcome, found: _Found) -> StageOutcome:
    """The outcome of what was written."""
    task, written = found.task, found.written
    program, plan, cost_ns = task.lifted.program, written.plan, outcome.cost_ns
    kernels_ns, waiting_ns = computation_times_ns(written.view, written.view.entry, request.device)
    recompute_ns = kernels_ns + waiting_ns - cost_ns
    constant_bytes = task.lifted.prediction.constant_bytes
    return replace(
        outcome,
        changed=True,
        recompute_ns=recompute_ns,
        recompute_pj=computation_pj(written.view, written.view.entry, request.device) - outcome.energy_pj,
        # Proved for plans that recompute what they move.
        lower_bound_ratio=max(0.0, min(plan.lower_bound_ratio, recompute_ns / max(cost_ns, 1))),
        status=Status.FEASIBLE,
        recipe=Recipe(recompute=plan.planner),
        recomputed=found.inside + recomputed_by(program, plan.steps, "hlo"),
        paged=paged_by(program, plan.pages, "hlo"),
        waiting_ns=waiting_ns,
        planned_temp_bytes=written.needed_bytes - task.fixed_bytes + constant_bytes,
        needs_pinning=written.prediction.total_bytes > request.budget_bytes,
        unsteered_bytes=written.unsteered_bytes,
    )


def _reordered(
    lifted: LiftedModule, device: DeviceModel, new_order: Callable[[LiftedModule], tuple[OpId, ...] | None]
) -> LiftedModule:
    """The module in an order that keeps values for a shorter time, if that is not packed worse."""
    order = new_order(lifted)
    if order is None:
        return lifted
    view = emit(lifted, order)
    candidate = lift(view, device, lifted.platform, assigner=lifted.assigner.on(view))
    return candidate if candidate.prediction.total_bytes <= lifted.prediction.total_bytes else lifted


def _limit_bytes(task: Task, lowest: Written) -> int:
    """What live bytes may come to, if packing leaves the holes that it leaves in the plan of lowest total."""
    holes_bytes = max(0, lowest.prediction.temp_bytes - lowest.plan.peak_bytes)
    return task.budget_bytes - task.fixed_bytes - holes_bytes


def _with_loops(
    request: EnforceRequest, task: Task, lowest: Written, limit_bytes: int
) -> tuple[Task, tuple[Recomputed, ...]] | None:
    """The task with bodies of loops planned, and what they recompute; None if no loop is too large.

    Args:
        limit_bytes: what the live bytes should not exceed; 0 for bodies that need as little as they can, and
            so depend on no budget: what is then reported as the least is met when it is asked for.
    """
    tighter = tightened(task.lifted, lowest.plan, limit_bytes, request.device, task.for_retries())
    return None if tighter is None else (_task(request, tighter[0]), tighter[1])


def _task(request: EnforceRequest, lifted: LiftedModule) -> Task:
    """What is to be planned: with pages where there is a host budget and a link."""
    objective = request.objective.of(lifted.program)
    config = PlannerConfig(planner=request.planner, quick=True, objective=objective)
    if request.pages:
        config = replace(
            config,
            host_bytes=request.host_bytes - lifted.prediction.host_bytes,
            link=request.device.host_link,
            must_page=lifted.buffers_of(forced_values(lifted.assigner.flow)),
        )
    return Task(
        lifted=lifted,
        budget_bytes=request.budget_bytes,
        config=config,
        host_bytes=request.host_bytes,
        pinned=request.on_fragmentation == "pin",
    )


def _forced_bytes(request: EnforceRequest, lifted: LiftedModule) -> int:
    """What the values that a user forced there take on the host."""
    config, program_graph = _task(request, lifted).config, Graph.of(lifted.program)
    assert config.link is not None, "values are forced where there is a link"
    host = Host(link=config.link, nbytes=config.host_bytes, forced=config.must_page)
    return Pager(program_graph, range(len(program_graph.cost_ns)), host).forced_bytes()


def _host_refusal(request: EnforceRequest, module: _Scheduled, forced_bytes: int = 0) -> StageOutcome:
    """The outcome for a module that has more on the host, by the user's own offloading, than it may."""
    return replace(
        _unchanged(request, module), status=Status.INFEASIBLE, host_budget_bytes=request.host_bytes,
        host_bytes=module.prediction.host_bytes + forced_bytes,
    )  # fmt: skip


def _unchanged(request: EnforceRequest, module: _Scheduled) -> StageOutcome:
    view, prediction = module.view, module.prediction
    kernels_ns, waiting_ns = computation_times_ns(view, view.entry, request.device)
    energy_pj = computation_pj(view, view.entry, request.device)
    kept = _outcome(request, prediction, prediction, kernels_ns + waiting_ns, energy_pj)
    return replace(kept, waiting_ns=waiting_ns)


def _outcome(
    request: EnforceRequest,
    before: HeapPrediction,
    after: HeapPrediction,
    cost_ns: int,
    energy_pj: int,
) -> StageOutcome:
    return StageOutcome(
        stage="hlo", changed=False, budget_bytes=request.budget_bytes, argument_bytes=before.argument_bytes,
        output_bytes=before.output_bytes, alias_bytes=before.alias_bytes,
        before_temp_bytes=before.temp_bytes + before.constant_bytes,
        planned_temp_bytes=after.temp_bytes + after.constant_bytes,
        cost_ns=cost_ns, recompute_ns=0, lower_bound_ratio=0.0, status=Status.OPTIMAL,
        recipe=Recipe(recompute=request.planner), seconds=0.0,
        host_budget_bytes=request.host_bytes if request.pages else 0, host_bytes=after.host_bytes,
        energy_pj=energy_pj, constant_bytes=before.constant_bytes,
    )  # fmt: skip


def _refusal(request: EnforceRequest, found: _Found, before: HeapPrediction) -> StageOutcome:
    """The outcome for a budget that was not met; what was found is what a second call could be asked for.

    Where bodies of loops were planned nothing is proved: the bound takes a loop for one op.
    """
    task, least, loops = _task(request, found.task.lifted), found.written, found.loops
    program = task.lifted.program
    bound = task.fixed_bytes + task.bound_bytes(program)
    proved = not loops and bound > task.budget_bytes
    least_bytes = min(least.needed_bytes, before.total_bytes)
    unsteered_bytes = None if least.unsteered_bytes == least_bytes else least.unsteered_bytes
    outcome = _outcome(request, before, before, program.cost_ns, program.energy_pj)
    return replace(
        outcome,
        status=Status.INFEASIBLE if proved else Status.UNKNOWN,
        recipe=Recipe(recompute=least.plan.planner),
        tightest=tightest(found.task.lifted, least.plan.steps, request.device),
        least_total_bytes=least_bytes,
        least_proved=not loops and least_bytes <= bound,
        unsteered_bytes=unsteered_bytes,
    )
