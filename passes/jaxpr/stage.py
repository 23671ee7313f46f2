"""The four stages before XLA (see `passes.pipeline`): prepare, lift, plan, emit.

They are optimistic and never fail: the enforcing stage holds the line on XLA's own schedule.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from passes.backend import BACKENDS, Backend
from passes.cost import DeviceModel
from passes.dump import dump
from passes.ir import Status
from passes.jaxpr import compat
from passes.jaxpr.bodies import has_control_flow
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr, Jaxpr
from passes.jaxpr.emit import emit_split
from passes.jaxpr.extremes import compared_whole
from passes.jaxpr.halves import Joined, Split, closed_halves, join
from passes.jaxpr.hands import Hands, as_written
from passes.jaxpr.less_mapped import run_ns, with_less_mapped
from passes.jaxpr.lift import lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.order import run_bytes
from passes.jaxpr.own_constants import with_own_constants, with_own_zeros
from passes.jaxpr.primitives import LOOPS
from passes.jaxpr.shards import Inside, enter
from passes.jaxpr.simplify import simplified
from passes.jaxpr.straight import as_it_is, fit_then_cost, lift_as_xla, search
from passes.jaxpr.structured import CONFIG as STRUCTURED
from passes.jaxpr.structured import search_structured
from passes.jaxpr.summed_products import without_small_matrices
from passes.listing import plan_text, program_text
from passes.objective import Objective
from passes.outcome import StageOutcome, tightest_values
from passes.planners import cut_bound
from passes.recipe import Recipe

Finish = Callable[[Jaxpr], Jaxpr]


class Work[Written](Protocol):
    """What is planned of a program, and how what is made of it is written in the program's place."""

    @property
    def jaxpr(self) -> Jaxpr:
        """The open jaxpr that is planned: dead code removed; the same object every time, so that requests
        share work."""

    @property
    def source(self) -> Written:
        """The program as it came, a closed jaxpr, or its parts."""

    def context(self) -> AbstractContextManager[None]:
        """What the jaxpr is lifted and planned in."""

    def written(self, made: Candidate, finish: Finish) -> Written:
        """As `source`, with a candidate that changes it, each of whose jaxprs goes through `finish`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Whole:
    source: ClosedJaxpr
    jaxpr: Jaxpr

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def written(self, made: Candidate, finish: Finish) -> ClosedJaxpr:
        return compat.close_jaxpr(finish(made.emitted), compat.open_jaxpr(self.source)[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _InShardMap:
    """The body of a `shard_map`, with the bytes of one device."""

    source: ClosedJaxpr
    inside: Inside
    jaxpr: Jaxpr

    def context(self) -> AbstractContextManager[None]:
        return compat.inside_shard_map(self.inside.eqn)

    def written(self, made: Candidate, finish: Finish) -> ClosedJaxpr:
        return compat.close_jaxpr(self._emitted(made, finish), compat.open_jaxpr(self.source)[1])

    def _emitted(self, made: Candidate, finish: Finish) -> Jaxpr:
        inside = self.inside
        with self.context():
            if inside.pair is None:
                return inside.written(finish(made.emitted))
            n_arguments = len(inside.jaxpr.eqns[inside.pair.place].invars)
            halves = _split(made, n_arguments, len(inside.pair.joint.kept), finish)
        return inside.written_in_two(halves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """A forward and a backward part as one program."""

    source: tuple[ClosedJaxpr, ClosedJaxpr]
    joined: Joined
    jaxpr: Jaxpr
    n_outs: int

    def context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def written(self, made: Candidate, finish: Finish) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        n_arguments = self.joined.n_consts + self.joined.n_arguments
        return closed_halves(self.joined, _split(made, n_arguments, self.n_outs, finish))


def _split(made: Candidate, n_arguments: int, n_forward_results: int, finish: Finish) -> Split:
    halves = emit_split(
        made.lifted, made.steps, made.config, n_arguments=n_arguments, n_forward_results=n_forward_results
    )
    return replace(halves, forward=finish(halves.forward), backward=finish(halves.backward))


def prepare(closed_jaxpr: ClosedJaxpr) -> Work[ClosedJaxpr]:
    """What is planned of a whole program, calls inlined."""
    if (inside := enter(closed_jaxpr)) is None:
        return _Whole(source=closed_jaxpr, jaxpr=_simplified(compat.open_jaxpr(closed_jaxpr)[0]))
    with compat.inside_shard_map(inside.eqn):
        return _InShardMap(source=closed_jaxpr, inside=inside, jaxpr=_simplified(inside.body))


def prepare_parts(
    forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int
) -> Work[tuple[ClosedJaxpr, ClosedJaxpr]]:
    """What is planned of a forward and a backward part, see `passes.pipeline.plan_joint`."""
    joined = _joined(forward, backward, n_outs)
    return _Parts(source=(forward, backward), joined=joined, jaxpr=_simplified(joined.jaxpr), n_outs=n_outs)


_joined = compat.cached_by_jaxpr(join)


@compat.cached_by_jaxpr
def _simplified(jaxpr: Jaxpr) -> Jaxpr:
    return simplified(compared_whole(compat.without_dead_code(jaxpr)))


def lift(jaxpr: Jaxpr, request: JaxprRequest) -> LiftedJaxpr:
    """An open jaxpr as XLA will see it: the program that is planned."""
    return lift_as_xla(jaxpr, request.device)


def emit[Written](work: Work[Written], planned: Planned, request: JaxprRequest) -> Written:
    """The program with what was planned; the very same objects where that changes nothing."""
    if not planned.outcome.changed:
        return work.source
    return work.written(planned.candidate, _finish(BACKENDS[request.device.platform]))


def _finish(backend: Backend) -> Finish:
    """What is done last to what is emitted."""
    if backend.fuses_greedily:
        return lambda jaxpr: with_own_constants(without_small_matrices(jaxpr))
    return with_own_zeros if backend.scatters_maxima else lambda jaxpr: jaxpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is taken, and what was done."""

    candidate: Candidate
    outcome: StageOutcome


def plan(as_is: LiftedJaxpr, request: JaxprRequest, by_hand: Callable[[], Hands] | None = None) -> Planned:
    """The shallowest candidate that fits, or the smallest if none does.

    Args:
        by_hand: gives the program's blocks under ready policies, which are candidates, too.
    """
    started = time.perf_counter()
    jaxpr = as_is.jaxpr
    before_bytes = _before_bytes(as_is, request)
    scale = _scale(before_bytes, request)
    fits = not request.policy and _fits_as_it_is(before_bytes, request)
    hands = None if fits or by_hand is None else by_hand()
    asked = None
    if hands is not None and request.policy:
        # XLA's own count decides, and what it misses by so little the enforcing stage makes up for.
        asked = hands.under(request.policy, int(STRUCTURED.known_ratio * scale * request.temp_budget_bytes))
    if asked is not None:
        candidate = as_written(asked, request.device)
    elif fits:
        has_no_other = not has_control_flow(jaxpr.eqns)
        candidate = replace(as_it_is(as_is), peak_bytes=before_bytes, unrivalled=has_no_other)
    else:
        candidate = with_less_mapped(
            as_is, request, scale, lambda asked: _searched(as_is, asked, scale, hands)
        )
        candidate = as_written(candidate, request.device)
    outcome = _outcome(as_is, before_bytes, candidate, request)
    if candidate.changed and not request.inside:
        outcome = replace(outcome, kernels_ns=_kernels_ns(as_is, before_bytes, request))
        if hands is not None and not request.policy:
            outcome = _beside_policies(outcome, hands, candidate, request)
    _dump(jaxpr, candidate, outcome)
    return Planned(candidate=candidate, outcome=replace(outcome, seconds=time.perf_counter() - started))


def _beside_policies(
    outcome: StageOutcome, hands: Hands, taken: Candidate, request: JaxprRequest
) -> StageOutcome:
    """With the cheapest of what is under ready policies, but for what is `taken`, and may keep the budget, if
    anything may."""
    known, unknown = STRUCTURED.known_ratio, STRUCTURED.unknown_ratio
    nbytes = request.temp_budget_bytes
    best = hands.cheapest(nbytes, int(known * nbytes), int(unknown * nbytes), than=taken)
    if best is None:
        return outcome
    return replace(outcome, policy=best.policy, policy_ns=best.run_ns)


def _before_bytes(as_is: LiftedJaxpr, request: JaxprRequest) -> int:
    """What XLA needs for a program as it is, in its own order. What is planned the enforcing stage puts in
    the program's order, where that needs less."""
    if not BACKENDS[request.device.platform].runs_branches_together:
        return as_it_is(as_is, request.fresh).peak_bytes
    return run_bytes(as_is, request.device, request.fresh)


def _unordered_bytes(candidate: Candidate, request: JaxprRequest, scale: float) -> int | None:
    """What XLA needs for a candidate in its own order; None where the enforcing stage will not leave that."""
    if not BACKENDS[request.device.platform].runs_branches_together or not candidate.changed:
        return None
    seen = candidate.foreseen or lift_seen(candidate.emitted, request.device)
    nbytes = run_bytes(seen, request.device, request.fresh)
    is_left = nbytes <= scale * request.temp_budget_bytes and not request.mapping_ns(nbytes)
    return nbytes if is_left else None


def _searched(as_is: LiftedJaxpr, request: JaxprRequest, scale: float, hands: Hands | None) -> Candidate:
    target_bytes = int(scale * request.temp_budget_bytes)
    ranked = partial(fit_then_cost, target_bytes=target_bytes)
    best_by_hand = None if hands is None else min(hands.whole, key=ranked, default=None)
    if has_control_flow(as_is.jaxpr.eqns):
        found = search_structured(as_is, request, scale, _body)
        found = found if best_by_hand is None else min(found, best_by_hand, key=ranked)
    else:
        found = search(as_is, request, scale, best_by_hand)
    promise = None if hands is None else hands.between(target_bytes)
    if hands is None or promise is None or promise.run_ns >= run_ns(found, request, scale):
        return found
    mixed = hands.under(promise.policy, target_bytes)
    return found if mixed is None else min(found, mixed, key=ranked)


def _dump(jaxpr: Jaxpr, candidate: Candidate, outcome: StageOutcome) -> None:
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
            "outcome.json": lambda: json.dumps(outcome.to_dict(), indent=1, default=str),
        },
    )


def _fits_as_it_is(peak_bytes: int, request: JaxprRequest) -> bool:
    if request.apart or request.calibration.strict or request.calibration.alike(Recipe()):
        return False  # that was looked at already
    if request.baseline_total_bytes is not None:
        return request.baseline_total_bytes <= request.budget_bytes
    return peak_bytes * request.calibration.ratio_as_it_is <= request.temp_budget_bytes


def _scale(peak_bytes: int, request: JaxprRequest) -> float:
    """Estimated over real bytes of temporaries, as far as these are known."""
    ratio = request.calibration.bytes_ratio
    if request.baseline_total_bytes is not None:
        ratio = max(ratio, (request.baseline_total_bytes - request.fixed_bytes) / max(peak_bytes, 1))
    return 1 / ratio


def _body(body: Jaxpr, excess_bytes: int, request: JaxprRequest) -> Jaxpr:
    """A body of control flow planned for so many bytes of temporaries less."""
    return _planned_body(body, excess_bytes, request.device, request.planner, request.objective)


@compat.cached_by_jaxpr
def _planned_body(
    body: Jaxpr, excess_bytes: int, device: DeviceModel, planner: str, objective: Objective
) -> Jaxpr:
    lifted = lift_as_xla(body, device := replace(device, in_body=True))
    inner = JaxprRequest(
        budget_bytes=max(as_it_is(lifted).peak_bytes - excess_bytes, 1),
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        device=device,
        planner=planner,
        objective=objective,
        inside=True,
    )
    made = plan(lifted, inner).candidate
    return made.emitted if made.changed else body


def _lower_bound_ratio(candidate: Candidate, cost_ns: int, recompute_ns: int) -> float:
    """The bound for what was planned, as a ratio of the program's cost as it is; 0.0 if nothing is proved.

    It is of the recompute alone, so never more than what the plan costs with the traffic that it saves.
    """
    if candidate.plan is None or candidate.scans or not candidate.plan.status.found:
        return 0.0
    program = candidate.lifted.program
    bound_ns = cut_bound(program, candidate.plan.budget_bytes, n_cuts=2) * program.cost_ns
    return max(0.0, min(bound_ns, recompute_ns)) / max(cost_ns, 1)


def _kernels_ns(as_is: LiftedJaxpr, before_bytes: int, request: JaxprRequest) -> int | None:
    """What the enforcing stage could make of the program as it is, at the least; None if nothing.

    It runs no loop again: XLA writes a loop's results over what the loop starts from.
    """
    limit_bytes = int(request.temp_budget_bytes * _scale(before_bytes, request))
    ops = tuple(
        replace(op, recomputable=op.recomputable and as_is.jaxpr.eqns[body[-1]].primitive.name not in LOOPS)
        for op, body in zip(as_is.program.ops, as_is.bodies, strict=True)
    )
    bound_ratio = cut_bound(replace(as_is.program, ops=ops), limit_bytes, n_cuts=2)
    if math.isinf(bound_ratio):
        return None
    own_ns = round(as_is.seen.cost_ns * (1 + bound_ratio))
    return own_ns + request.mapping_ns(min(request.temp_budget_bytes, before_bytes))


def _outcome(
    as_is: LiftedJaxpr, before_bytes: int, candidate: Candidate, request: JaxprRequest
) -> StageOutcome:
    program = candidate.lifted.program
    scale = _scale(before_bytes, request)
    cost_ns = as_is.seen.cost_ns + request.mapping_ns(round(before_bytes / scale))
    recompute_ns = run_ns(candidate, request, scale) - cost_ns
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
        unordered_temp_bytes=None if request.inside else _unordered_bytes(candidate, request, scale),
        cost_ns=cost_ns,
        recompute_ns=recompute_ns,
        energy_pj=as_is.seen.energy_pj,
        recompute_pj=candidate.energy_pj - as_is.seen.energy_pj,
        lower_bound_ratio=_lower_bound_ratio(candidate, cost_ns, recompute_ns),
        status=Status.FEASIBLE if fits else Status.UNKNOWN,
        recipe=candidate.recipe,
        seconds=0.0,
        recomputed=candidate.recomputed,
        paged=candidate.paged,
        unrivalled=candidate.unrivalled,
        holes_bytes=candidate.holes_bytes,
        tightest=tightest_values(program, candidate.steps),
        least_total_bytes=None if fits else request.fixed_bytes + candidate.peak_bytes,
    )
