"""Plan the bodies of control flow whose inner peak is what breaks the budget.

To its surroundings control flow is one op with a workspace, the peak of its largest body. Where the program
is over its target while such an op runs, the body may take what the target leaves beside the values that
are alive around it, and is planned for that as a program of its own: what is recomputed is recomputed in
every iteration, in every branch that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from passes.cost import DeviceModel
from passes.jaxpr.compat import Jaxpr, JaxprEqn
from passes.jaxpr.inline import with_flat_bodies
from passes.jaxpr.lift import carried_by, inner_work, lift, results_bytes
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.jaxpr.rewrite import with_equations
from passes.simulate import simulate

PlanBody = Callable[[Jaxpr, int], Jaxpr]


def fit_bodies(jaxpr: Jaxpr, device: DeviceModel, target_bytes: int, plan_body: PlanBody) -> Jaxpr:
    """An open jaxpr whose bodies take no more than the target leaves them, as far as they can be planned.

    Args:
        plan_body: (open jaxpr, by how many bytes its temporaries exceed what they may take) -> an open jaxpr
            that computes the same; itself where nothing is won.

    Returns:
        The same object if no body is changed.
    """
    lifted = lift(jaxpr, device, as_xla=True)
    live = simulate(lifted.program).live_bytes
    allowed: dict[int, int] = {}
    for op, body, nbytes in zip(lifted.program.ops, lifted.bodies, live, strict=True):
        root = body[-1]
        if lifted.jaxpr.eqns[root].primitive.name in CONTROL_FLOW and nbytes > target_bytes:
            allowed[root] = op.workspace_bytes - (int(nbytes) - target_bytes)
    eqns = [
        _with_bodies(eqn, device, allowed[i], plan_body) if i in allowed else eqn
        for i, eqn in enumerate(lifted.jaxpr.eqns)
    ]
    planned = with_equations(lifted.jaxpr, eqns)
    return jaxpr if planned is lifted.jaxpr else planned


def _with_bodies(eqn: JaxprEqn, device: DeviceModel, allowed_bytes: int, plan_body: PlanBody) -> JaxprEqn:
    def fitted(body: Jaxpr) -> Jaxpr:
        work = inner_work(body, device, carried_by(eqn))
        taken_bytes = work.peak_bytes
        if eqn.primitive.name == "cond":
            taken_bytes = work.branch_bytes - results_bytes(body.outvars, device)
        excess_bytes = taken_bytes - allowed_bytes
        return plan_body(body, excess_bytes) if excess_bytes > 0 else body

    return with_flat_bodies(eqn, fitted)


def has_control_flow(eqns: Sequence[JaxprEqn]) -> bool:
    """True if some equation has a body that may be planned."""
    return any(eqn.primitive.name in CONTROL_FLOW for eqn in eqns)
