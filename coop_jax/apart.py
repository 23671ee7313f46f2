"""Forward and backward parts that run as programs of their own, as under a derivative outside `jit`.

As one program they need less: what is saved is stored only where XLA wants it to be, and dies when it was
read. Apart, all of it is a result of the one and an argument of the other, which nothing frees. So they are
planned together for fewer bytes, until each is expected to keep the budget alone.
"""

from __future__ import annotations

import dataclasses

from coop_jax.requests import unlimited
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr
from passes.outcome import StageOutcome
from passes.pipeline import plan_joint, plan_program

Parts = tuple[ClosedJaxpr, ClosedJaxpr]

# How many plans are made.
MOST_PLANS = 4


def planned_apart(
    halves: Parts, n_outs: int, request: JaxprRequest, together: tuple[Parts, StageOutcome]
) -> tuple[Parts, StageOutcome]:
    """The first plan by which either part is expected to keep the budget alone, else that with the smallest
    arguments and results: the enforcing stage plans what is left.

    Args:
        halves, n_outs: as `passes.pipeline.plan_joint` takes them.
        request: for the budget of either part.
        together: the plan for both as one program.
    """
    made, tried = together, list[tuple[int, tuple[Parts, StageOutcome]]]()
    aim_bytes = request.budget_bytes
    for _ in range(MOST_PLANS):
        outcomes = [alone(part, request) for part in made[0]]
        excess_bytes = max(map(needed_bytes, outcomes)) - request.budget_bytes
        if excess_bytes <= 0:
            return made
        tried.append((max(o.fixed_bytes for o in outcomes), made))
        if aim_bytes <= request.fixed_bytes:
            break
        if len(tried) > 1:
            aim_bytes = min(aim_bytes, request.fixed_bytes + made[1].planned_temp_bytes) - excess_bytes
        made = plan_joint(*halves, n_outs, dataclasses.replace(request, budget_bytes=aim_bytes, apart=True))
    return min(tried, key=lambda one: one[0])[1]


def alone(part: ClosedJaxpr, request: JaxprRequest) -> StageOutcome:
    """What the jaxpr stage says of a part as a program of its own."""
    own = dataclasses.replace(
        unlimited(request),
        argument_bytes=sum(map(compat.aval_nbytes, part.in_avals)),
        output_bytes=sum(map(compat.aval_nbytes, part.out_avals)),
        fresh=frozenset(range(len(part.out_avals))),
    )
    return plan_program(part, own)[1]


def needed_bytes(outcome: StageOutcome) -> int:
    """What XLA is expected to need for a program as it is, at least a byte."""
    return max(1, outcome.fixed_bytes + outcome.before_temp_bytes)
