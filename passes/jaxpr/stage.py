"""The jaxpr stage: lift, decide whether the program fits, plan, emit, and evaluate what was emitted.

This stage is optimistic and never fails: the enforcing stage holds the line on XLA's own schedule.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from passes.cost import DeviceModel
from passes.dump import dump
from passes.ir import Status
from passes.jaxpr import compat
from passes.jaxpr.bodies import has_control_flow
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.emit import emit_split
from passes.jaxpr.halves import Joined, closed_halves, join
from passes.jaxpr.lift import lift
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.scans.choice import all_recomputed
from passes.jaxpr.shards import Inside, enter
from passes.jaxpr.simplify import scatter_in_place
from passes.jaxpr.straight import as_it_is, search
from passes.jaxpr.structured import search_structured
from passes.listing import plan_text, program_text
from passes.outcome import StageOutcome, recomputed_by, tightest_values
from passes.planners import cut_bound


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
        closed_jaxpr: calls inlined. Where its work is inside a `shard_map` its body is planned, and the
            request's bytes are those of one device.

    Returns:
        The closed jaxpr to run (the same object if the program fits as it is) and what was done.
    """
    if (inside := enter(closed_jaxpr)) is None:
        choice = _choose(_prepared(closed_jaxpr), request)
        emitted = choice.candidate.emitted
    else:
        with compat.inside_shard_map(inside.eqn):
            choice = _choose(_simplified(inside.body), request)
        emitted = _written(inside, choice.candidate)
    if not choice.outcome.changed:
        return closed_jaxpr, choice.outcome
    consts = compat.open_jaxpr(closed_jaxpr)[1]
    return compat.close_jaxpr(emitted, consts), choice.outcome


def _written(inside: Inside, made: Candidate) -> Any:
    """The program around a `shard_map` whose body was planned."""
    if inside.pair is None or not made.changed:
        return inside.written(made.emitted)
    n_arguments, n_kept = len(inside.jaxpr.eqns[inside.pair.place].invars), len(inside.pair.joint.kept)
    with compat.inside_shard_map(inside.eqn):
        halves = emit_split(
            made.lifted, made.steps, made.config, n_arguments=n_arguments, n_forward_results=n_kept
        )
    return inside.written_in_two(halves)


@compat.cached_by_jaxpr
def _prepared(closed_jaxpr: Any) -> Any:
    """The open jaxpr that is planned; the same object every time, so that requests share work."""
    return _simplified(compat.open_jaxpr(closed_jaxpr)[0])


@compat.cached_by_jaxpr
def _simplified(jaxpr: Any) -> Any:
    return scatter_in_place(compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars)))


def plan_joint(forward: Any, backward: Any, n_outs: int, request: JaxprRequest) -> JointResult:
    """Plan a forward and a backward program as one.

    Args:
        forward: closed jaxpr, args -> (*outs, *residuals), calls inlined.
        backward: closed jaxpr, (*residuals, *cotangents) -> gradients, calls inlined.
        n_outs: how many of forward's results are outs.
    """
    joined, jaxpr = _prepared_joint(forward, backward, n_outs)
    choice = _choose(jaxpr, request)
    if not choice.outcome.changed:
        n_saved = len(forward.out_avals) - n_outs
        return JointResult(forward=forward, backward=backward, n_saved=n_saved, outcome=choice.outcome)
    halves = emit_split(
        choice.candidate.lifted,
        choice.candidate.steps,
        choice.candidate.config,
        n_arguments=joined.n_consts + joined.n_arguments,
        n_forward_results=n_outs,
    )
    planned_forward, planned_backward = closed_halves(joined, halves)
    return JointResult(
        forward=planned_forward,
        backward=planned_backward,
        n_saved=halves.n_saved,
        outcome=choice.outcome,
    )


@compat.cached_by_jaxpr
def _prepared_joint(forward: Any, backward: Any, n_outs: int) -> tuple[Joined, Any]:
    """Both programs as one, and its open jaxpr that is planned."""
    joined = join(forward, backward, n_outs)
    return joined, _simplified(joined.jaxpr)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    candidate: Candidate
    outcome: StageOutcome


def _choose(jaxpr: Any, request: JaxprRequest) -> _Choice:
    """The shallowest candidate that fits, or the smallest if none does."""
    started = time.perf_counter()
    as_is = lift(jaxpr, request.device, as_xla=True)
    before_bytes = (candidate := as_it_is(as_is)).peak_bytes
    if not _fits_as_it_is(before_bytes, request):
        scale = _scale(before_bytes, request)
        if has_control_flow(jaxpr.eqns):
            candidate = search_structured(jaxpr, request, scale, _body)
        else:
            candidate = search(as_is, request, scale)
    outcome = _outcome(as_is, before_bytes, candidate, request)
    if candidate.changed and not request.inside:
        outcome = replace(outcome, kernels_ns=_kernels_ns(as_is, before_bytes, request))
    _dump(jaxpr, candidate, outcome)
    return _Choice(candidate=candidate, outcome=replace(outcome, seconds=time.perf_counter() - started))


def _dump(jaxpr: Any, candidate: Candidate, outcome: StageOutcome) -> None:
    """Write what was made of a program, if someone asked for it."""
    program, plan_made = candidate.lifted.program, candidate.plan
    dump(
        "jaxpr",
        {
            "jaxpr.txt": lambda: str(jaxpr),
            "program.txt": lambda: program_text(program),
            "program.json": program.to_json,
            "plan.txt": lambda: "as it is\n" if plan_made is None else plan_text(plan_made, program),
            "emitted.txt": lambda: str(candidate.emitted),
            "outcome.json": lambda: json.dumps(asdict(outcome), indent=1, default=str),
        },
    )


def _fits_as_it_is(peak_bytes: int, request: JaxprRequest) -> bool:
    if request.calibration.strict:
        return False
    if request.baseline_total_bytes is not None:
        return request.baseline_total_bytes <= request.budget_bytes
    return peak_bytes * request.calibration.bytes_ratio <= request.temp_budget_bytes


def _scale(peak_bytes: int, request: JaxprRequest) -> float:
    """Estimated over real bytes of temporaries, where XLA is known to need more than estimated."""
    ratio = request.calibration.bytes_ratio
    if request.baseline_total_bytes is not None:
        ratio = max(ratio, (request.baseline_total_bytes - request.fixed_bytes) / max(peak_bytes, 1))
    return 1 / max(ratio, 1.0)


def _body(body: Any, nbytes: int, request: JaxprRequest) -> Any:
    """A body of control flow planned for some bytes of temporaries."""
    return _planned_body(body, nbytes, request.device, request.planner)


@compat.cached_by_jaxpr
def _planned_body(body: Any, nbytes: int, device: DeviceModel, planner: str) -> Any:
    inner = JaxprRequest(
        budget_bytes=nbytes,
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        device=device,
        planner=planner,
        inside=True,
    )
    return _choose(body, inner).candidate.emitted


def _lower_bound_ratio(candidate: Candidate, cost_ns: int, recompute_ns: int) -> float:
    """The bound for what was planned, as a ratio of the program's cost as it is; 0.0 if nothing is proved.

    It is of the recompute alone, so never more than what the plan costs with the traffic that it saves.
    """
    if candidate.plan is None or candidate.scans or not candidate.plan.status.found:
        return 0.0
    program = candidate.lifted.program
    bound_ns = cut_bound(program, candidate.plan.budget_bytes, moments=2) * program.cost_ns
    return max(0.0, min(bound_ns, recompute_ns)) / max(cost_ns, 1)


def _kernels_ns(as_is: LiftedJaxpr, before_bytes: int, request: JaxprRequest) -> int | None:
    """What the enforcing stage could make of the program as it is, at the least; None if nothing."""
    limit_bytes = int(request.temp_budget_bytes * _scale(before_bytes, request))
    bound_ratio = cut_bound(as_is.program, limit_bytes, moments=2)
    return None if math.isinf(bound_ratio) else round(as_is.program.cost_ns * (1 + bound_ratio))


def _outcome(
    as_is: LiftedJaxpr, before_bytes: int, candidate: Candidate, request: JaxprRequest
) -> StageOutcome:
    program = candidate.lifted.program
    inside = tuple(r for choice in candidate.scans for r in all_recomputed(choice))
    recomputed = inside + recomputed_by(program, candidate.steps, "jaxpr")
    recompute_ns = candidate.cost_ns - as_is.program.cost_ns
    fits = candidate.peak_bytes <= request.temp_budget_bytes or not candidate.changed
    return StageOutcome(
        stage="jaxpr",
        changed=candidate.changed,
        budget_bytes=request.budget_bytes,
        argument_bytes=request.argument_bytes,
        output_bytes=request.output_bytes,
        alias_bytes=request.alias_bytes,
        before_temp_bytes=before_bytes,
        planned_temp_bytes=candidate.peak_bytes,
        cost_ns=as_is.program.cost_ns,
        recompute_ns=recompute_ns,
        lower_bound_ratio=_lower_bound_ratio(candidate, as_is.program.cost_ns, recompute_ns),
        status=Status.FEASIBLE if fits else Status.UNKNOWN,
        planner=candidate.planner,
        seconds=0.0,
        recomputed=recomputed,
        tightest=tightest_values(program, candidate.steps),
        least_total_bytes=None if fits else request.fixed_bytes + candidate.peak_bytes,
    )
