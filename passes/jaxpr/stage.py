"""Jaxpr stage: lift, plan, emit. (Interface first; identity until the lift lands.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.cost import DeviceModel
from passes.ir import Status
from passes.outcome import StageOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprRequest:
    """What the jaxpr stage is asked for. Byte counts are of the whole XLA program where known.

    Attributes:
        budget_bytes: the whole program's budget.
        argument_bytes, output_bytes, alias_bytes: storage of the whole program that no plan can shrink.
        device: cost model.
        planner: "auto", "window" or "cut".
    """

    budget_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    device: DeviceModel
    planner: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointResult:
    """forward: args -> (*outs, *saved). backward: (*saved, *cotangents) -> gradients."""

    forward: Any
    backward: Any
    n_saved: int
    outcome: StageOutcome


def _identity_outcome(request: JaxprRequest) -> StageOutcome:
    return StageOutcome(
        stage="jaxpr", changed=False, budget_bytes=request.budget_bytes,
        argument_bytes=request.argument_bytes, output_bytes=request.output_bytes,
        alias_bytes=request.alias_bytes, before_temp_bytes=0, planned_temp_bytes=0, cost_ns=1,
        recompute_ns=0, lower_bound_ratio=0.0, status=Status.FEASIBLE, planner=request.planner, seconds=0.0,
    )  # fmt: skip


def plan_program(closed_jaxpr: Any, request: JaxprRequest) -> tuple[Any, StageOutcome]:
    """Rewrite one whole program so that it needs less memory; returns (closed jaxpr, outcome)."""
    return closed_jaxpr, _identity_outcome(request)


def plan_joint(forward: Any, backward: Any, n_outs: int, request: JaxprRequest) -> JointResult:
    """Plan a forward and a backward program as one.

    Args:
        forward: closed jaxpr, args -> (*outs, *residuals).
        backward: closed jaxpr, (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
    """
    n_saved = len(forward.jaxpr.outvars) - n_outs
    return JointResult(forward=forward, backward=backward, n_saved=n_saved, outcome=_identity_outcome(request))
