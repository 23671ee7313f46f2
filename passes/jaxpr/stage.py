"""The jaxpr stage: lift, decide whether the program fits, plan, emit, and judge what was emitted.

A candidate is judged by lifting what was emitted once more, as XLA will see it, so that the barriers and
the kernels they cost count. Recompute that XLA fuses into its readers can be cheaper than none, so
candidates of several depths are compared and the cheapest that fits is taken: the depths are the same
for every budget, hence a larger budget never takes a costlier one.

This stage is optimistic and never fails: the enforcing stage holds the line on XLA's own schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from passes.cost import DeviceModel
from passes.ir import OpId, Plan, Status
from passes.jaxpr import compat
from passes.jaxpr.emit import EmitConfig, Split, emit, emit_split
from passes.jaxpr.lift import LiftedJaxpr, lift
from passes.outcome import LiveValue, Recomputed, StageOutcome
from passes.planners import PlannerConfig, frontier
from passes.simulate import simulate

DEPTHS = tuple(0.94**k for k in range(40))
"""Budgets that candidates are planned for, as fractions of the peak without re-runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprRequest:
    """What the jaxpr stage is asked for. Byte counts are of the whole XLA program where known.

    Attributes:
        budget_bytes: the whole program's budget.
        argument_bytes, output_bytes, alias_bytes: storage of the whole program that no plan can shrink.
        device: cost model.
        planner: "auto", "window" or "cut".
        baseline_total_bytes: what the program needs without this stage, where that was compiled.
    """

    budget_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    device: DeviceModel
    planner: str = "auto"
    baseline_total_bytes: int | None = None

    @property
    def temp_budget_bytes(self) -> int:
        """What the budget leaves for temporaries; negative if arguments and results exceed it."""
        return self.budget_bytes - (self.argument_bytes + self.output_bytes - self.alias_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointResult:
    """forward: args -> (*outs, *saved). backward: (*saved, *cotangents) -> gradients. Both closed."""

    forward: Any
    backward: Any
    n_saved: int
    outcome: StageOutcome


def plan_program(closed_jaxpr: Any, request: JaxprRequest) -> tuple[Any, StageOutcome]:
    """Rewrite one whole program so that it needs less memory.

    Args:
        closed_jaxpr: calls inlined.

    Returns:
        The closed jaxpr to run (the same object if the program fits as it is) and what was done.
    """
    jaxpr, consts = compat.open_jaxpr(closed_jaxpr)
    jaxpr = compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    choice = _choose(jaxpr, request)
    if not choice.outcome.changed:
        return closed_jaxpr, choice.outcome
    return compat.close_jaxpr(choice.emitted, consts), choice.outcome


def plan_joint(forward: Any, backward: Any, n_outs: int, request: JaxprRequest) -> JointResult:
    """Plan a forward and a backward program as one.

    Args:
        forward: closed jaxpr, args -> (*outs, *residuals), calls inlined.
        backward: closed jaxpr, (*residuals, *cotangents) -> gradients, calls inlined.
        n_outs: how many of forward's results are outs.
    """
    joined = _join(forward, backward, n_outs)
    choice = _choose(joined.jaxpr, request)
    split = emit_split(
        choice.lifted,
        choice.steps,
        choice.config,
        n_arguments=joined.n_consts + joined.n_arguments,
        n_forward_results=n_outs,
    )
    forward_jaxpr = compat.rebuild(
        split.forward,
        eqns=split.forward.eqns,
        outvars=split.forward.outvars,
        constvars=split.forward.invars[: joined.n_consts],
        invars=split.forward.invars[joined.n_consts :],
    )
    return JointResult(
        forward=compat.close_jaxpr(forward_jaxpr, joined.consts),
        backward=compat.close_jaxpr(split.backward, []),
        n_saved=split.n_saved,
        outcome=choice.outcome,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    jaxpr: Any
    consts: list[Any]
    n_consts: int
    n_arguments: int


def _join(forward: Any, backward: Any, n_outs: int) -> _Joined:
    """One open jaxpr without constvars: (consts, args, cotangents) -> (outs, gradients)."""
    first, first_consts = compat.open_jaxpr(forward)
    second, second_consts = compat.open_jaxpr(backward)
    residuals = first.outvars[n_outs:]
    rename = dict(zip(second.invars[: len(residuals)], residuals, strict=True))
    cotangents = second.invars[len(residuals) :]
    eqns = [*first.eqns, *(compat.rename_inputs(eqn, rename) for eqn in second.eqns)]
    gradients = [compat.renamed(v, rename) for v in second.outvars]
    constvars = [*first.constvars, *second.constvars]
    jaxpr = compat.rebuild(
        first,
        eqns=eqns,
        outvars=[*first.outvars[:n_outs], *gradients],
        invars=[*constvars, *first.invars, *cotangents],
        constvars=[],
    )
    return _Joined(
        jaxpr=compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars)),
        consts=[*first_consts, *second_consts],
        n_consts=len(constvars),
        n_arguments=len(first.invars),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One way to run the program, and what XLA is expected to make of it."""

    steps: tuple[OpId, ...]
    config: EmitConfig
    emitted: Any
    peak_bytes: int
    cost_ns: int
    plan: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    lifted: LiftedJaxpr
    steps: tuple[OpId, ...]
    config: EmitConfig
    emitted: Any
    outcome: StageOutcome = field(repr=False)


def _choose(jaxpr: Any, request: JaxprRequest) -> _Choice:
    """Take the cheapest candidate that fits, or the smallest if none does."""
    started = time.perf_counter()
    as_is = lift(jaxpr, request.device, store_expensive=True)
    identity = tuple(op.id for op in as_is.program.ops)
    before = simulate(as_is.program, identity)
    if _fits_as_it_is(before.peak_bytes, request):
        candidate = _Candidate(
            steps=identity,
            config=EmitConfig(),
            emitted=jaxpr,
            peak_bytes=before.peak_bytes,
            cost_ns=as_is.program.cost_ns,
            plan=None,
        )
        lifted = as_is
    else:
        lifted = lift(jaxpr, request.device, store_expensive=False)
        candidate = _search(lifted, as_is, request)
    outcome = _outcome(lifted, as_is, candidate, before.peak_bytes, before.peak_step, request)
    return _Choice(
        lifted=lifted,
        steps=candidate.steps,
        config=candidate.config,
        emitted=candidate.emitted,
        outcome=_with_seconds(outcome, time.perf_counter() - started),
    )


def _fits_as_it_is(peak_bytes: int, request: JaxprRequest) -> bool:
    if request.baseline_total_bytes is not None:
        return request.baseline_total_bytes <= request.budget_bytes
    return peak_bytes <= request.temp_budget_bytes


def _search(lifted: LiftedJaxpr, as_is: LiftedJaxpr, request: JaxprRequest) -> _Candidate:
    """Judge candidates of growing depth; stop some depths after the first that fits."""
    program = lifted.program
    peak = simulate(program, tuple(op.id for op in program.ops)).peak_bytes
    shared = shared_by_xla(lifted, as_is)
    best: _Candidate | None = None
    for depth in DEPTHS:
        if depth * peak > max(request.temp_budget_bytes, 0) * 1.2:
            continue
        config = PlannerConfig(planner=request.planner, bound=False)
        (plan,) = frontier(program, [int(depth * peak)], config)
        for reach in (8, 0):
            candidate = judge(lifted, plan, EmitConfig(shared=shared, reach=reach), request.device)
            best = _better(best, candidate, request.temp_budget_bytes)
        if best is not None and best.peak_bytes <= request.temp_budget_bytes:
            break
        if not plan.status.found:
            break
    assert best is not None, "there is at least one depth"
    return best


def shared_by_xla(lifted: LiftedJaxpr, as_is: LiftedJaxpr) -> frozenset[int]:
    """Equations whose values XLA stores by itself though `lifted` computes them in every reader."""
    roots = {body[-1] for body in lifted.bodies}
    return frozenset(body[-1] for body in as_is.bodies if body[-1] not in roots)


def judge(lifted: LiftedJaxpr, plan: Plan, config: EmitConfig, device: DeviceModel) -> _Candidate:
    """Emit a plan and lift the result again, as XLA will see it."""
    emitted = emit(lifted, plan.steps, config)
    seen = lift(emitted, device, store_expensive=True).program
    return _Candidate(
        steps=plan.steps,
        config=config,
        emitted=emitted,
        peak_bytes=simulate(seen, tuple(op.id for op in seen.ops)).peak_bytes,
        cost_ns=seen.cost_ns,
        plan=plan,
    )


def _better(best: _Candidate | None, other: _Candidate, budget_bytes: int) -> _Candidate:
    """The cheaper of those that fit, else the smaller."""
    if best is None:
        return other
    fits = (best.peak_bytes <= budget_bytes, other.peak_bytes <= budget_bytes)
    if all(fits):
        return other if other.cost_ns < best.cost_ns else best
    if any(fits):
        return best if fits[0] else other
    return other if other.peak_bytes < best.peak_bytes else best
