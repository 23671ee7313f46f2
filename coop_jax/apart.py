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

# How many plans are made besides that for both as one program.
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
    while True:
        outcomes = alone(made[0], n_outs, request)
        excess_bytes = max(map(needed_bytes, outcomes)) - request.budget_bytes
        tried.append((max(o.fixed_bytes for o in outcomes), made))
        if excess_bytes <= 0 or len(tried) > MOST_PLANS or aim_bytes <= request.fixed_bytes:
            break
        if len(tried) > 1:
            aim_bytes = min(aim_bytes, request.fixed_bytes + made[1].planned_temp_bytes) - excess_bytes
        made = plan_joint(*halves, n_outs, dataclasses.replace(request, budget_bytes=aim_bytes, apart=True))
    parts, outcome = made if excess_bytes <= 0 else min(tried, key=lambda one: one[0])[1]
    return parts, dataclasses.replace(outcome, budget_bytes=request.budget_bytes)


def alone(parts: Parts, n_outs: int, request: JaxprRequest) -> list[StageOutcome]:
    """What the jaxpr stage says of parts as programs of their own.

    What is saved and is an argument is no result of the first; the second takes all arguments.
    """
    forward, backward = parts
    pruned, saved = forwarded(forward, n_outs)
    results = pruned.out_avals
    made = [results[i] for i in sorted(set(saved)) if i < len(results)]
    cotangents = backward.in_avals[len(saved) :]
    sizes = (
        (forward.in_avals, results),
        ([*forward.in_avals, *made, *cotangents], backward.out_avals),
    )
    return [
        plan_program(
            part,
            dataclasses.replace(
                unlimited(request),
                argument_bytes=sum(map(compat.aval_nbytes, given)),
                output_bytes=sum(map(compat.aval_nbytes, returned)),
                fresh=frozenset(range(len(part.out_avals))),
            ),
        )[1]
        for part, (given, returned) in zip(parts, sizes, strict=True)
    ]


def needed_bytes(outcome: StageOutcome) -> int:
    """What XLA is expected to need for a program as it is, at least a byte."""
    return max(1, outcome.fixed_bytes + outcome.before_temp_bytes)


def forwarded(forward: ClosedJaxpr, n_outs: int) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """`forward` without saved results that are arguments or results already, and where all come from."""
    jaxpr, consts = compat.open_jaxpr(forward)
    outvars = list(jaxpr.outvars[:n_outs])
    place = {v: i for i, v in reversed(list(enumerate(outvars))) if not isinstance(v, compat.Literal)}
    arguments = {v: i for i, v in enumerate(jaxpr.invars)}
    saved: list[tuple[str, int]] = []
    for v in jaxpr.outvars[n_outs:]:
        if (argument := compat.of_variable(arguments, v)) is not None:
            saved.append(("argument", argument))
        elif (result := compat.of_variable(place, v)) is not None:
            saved.append(("result", result))
        else:
            if compat.is_variable(v):
                place[v] = len(outvars)
            saved.append(("result", len(outvars)))
            outvars.append(v)
    pruned = compat.close_jaxpr(compat.rebuild(jaxpr, outvars=outvars), consts)
    return pruned, tuple(i if kind == "result" else len(outvars) + i for kind, i in saved)
