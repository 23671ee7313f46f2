"""Programs taken as straight lines: as they are, and planned to a depth at which they are expected to fit.

A candidate is evaluated by lifting what was emitted once more, as XLA will see it, so that what XLA stores by
itself counts. Even a plan without recomputes changes the program: values that XLA would store for the
backward pass are recomputed inside the kernels that read them there, which saves their bytes and their
traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.cost import DeviceModel
from passes.ir import OpId, Plan, Program
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.emit import EmitConfig, emit
from passes.jaxpr.freedom import emit_configs
from passes.jaxpr.lift import lift, lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightConfig:
    """The depths that are looked at; set by `benchmarks.gpt12`.

    Attributes:
        level_ratio: the bytes of a depth as a share of those of the one above it.
        most_candidates: how many plans are evaluated for one budget.
    """

    level_ratio: float = 0.97
    most_candidates: int = 8


CONFIG = StraightConfig()


def as_it_is(as_is: LiftedJaxpr) -> Candidate:
    """A program without recomputes."""
    seen = as_is.seen
    return Candidate(
        lifted=as_is,
        steps=_identity(as_is.program),
        config=EmitConfig(),
        emitted=as_is.jaxpr,
        peak_bytes=simulate(seen, _identity(seen)).peak_bytes,
        cost_ns=seen.cost_ns,
        energy_pj=seen.energy_pj,
    )


def search(as_is: LiftedJaxpr, request: JaxprRequest, scale: float) -> Candidate:
    """Evaluate candidates of growing depth until one fits `scale` times what the budget leaves.

    The depths are steps of a fixed frontier below the peak without recomputes, whatever the budget is, so
    that a larger budget takes the same level or a higher one. Where nothing can be run again, or held back,
    that is the program as it is.
    """
    target_bytes = max(int(request.temp_budget_bytes * scale), 1)
    free = lift(as_is.jaxpr, request.device, as_xla=False, rounded=request.calibration.rounded)
    found = [_descend(base, as_is, request, target_bytes) for base in (as_is, free)]
    best = min(found, key=lambda c: (max(c.peak_bytes, target_bytes), c.cost_ns))
    return as_it_is(as_is) if len(best.emitted.eqns) == len(as_is.jaxpr.eqns) else best


def _descend(base: LiftedJaxpr, as_is: LiftedJaxpr, request: JaxprRequest, target_bytes: int) -> Candidate:
    """The shallowest plan for a program that fits, or the smallest."""
    calibration, program = request.calibration, base.program
    peak_bytes = simulate(program, _identity(program)).peak_bytes
    config = PlannerConfig(
        planner=request.planner, bound=False, quick=True, objective=request.objective.of(program)
    )
    ways = emit_configs(base, as_is, request.device, strict=calibration.strict, deep=calibration.rounded)
    best: Candidate | None = None
    level = _levels_down(target_bytes / max(peak_bytes, 1))
    for _ in range(CONFIG.most_candidates):
        level_bytes = int(peak_bytes * CONFIG.level_ratio**level)
        made = plan(program, level_bytes, config)
        tried = [evaluate(base, made, way, request.device, rounded=calibration.rounded) for way in ways]
        candidate = min(tried, key=lambda c: (c.peak_bytes > target_bytes, c.cost_ns))
        if best is None or candidate.peak_bytes < best.peak_bytes:
            best = candidate
        if candidate.peak_bytes <= target_bytes or made.peak_bytes > level_bytes:
            break
        # What XLA is expected to need beyond the plan changes little from level to level.
        beyond_bytes = candidate.peak_bytes - made.peak_bytes
        level = max(level + 1, _levels_down(max(target_bytes - beyond_bytes, 1) / max(peak_bytes, 1)))
    assert best is not None, "at least one candidate is evaluated"
    return best


def _levels_down(ratio: float) -> int:
    """How many levels of the frontier lie between 1 and `ratio`, at least none."""
    return max(0, math.ceil(math.log(ratio) / math.log(CONFIG.level_ratio) - 1e-9))


def evaluate(
    lifted: LiftedJaxpr, made: Plan, config: EmitConfig, device: DeviceModel, *, rounded: bool = False
) -> Candidate:
    """Emit a plan and estimate what XLA will need for it.

    The plan assumes that XLA stores no value that it could compute in each reader; lifting what was emitted
    as XLA would by itself assumes that it stores all that it shares. The truth lies between, on
    a 12-layer GPT within 2 % of the middle at six depths.
    """
    emitted = emit(lifted, made.steps, config)
    # Nothing is merged across the barriers that recomputes wait behind.
    seen = lift_seen(emitted, device, rounded=rounded).program
    seen_bytes = simulate(seen, _identity(seen)).peak_bytes
    return Candidate(
        lifted=lifted,
        steps=made.steps,
        config=config,
        emitted=emitted,
        peak_bytes=(made.peak_bytes + max(seen_bytes, made.peak_bytes)) // 2,
        cost_ns=seen.cost_ns,
        energy_pj=seen.energy_pj,
        plan=made,
    )


def _identity(program: Program) -> tuple[OpId, ...]:
    return tuple(op.id for op in program.ops)
