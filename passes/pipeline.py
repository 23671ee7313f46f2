"""The path of a program: six stages, by name, in their order.

    |         | goes in                             | comes out                                        |
    | ------- | ----------------------------------- | ------------------------------------------------ |
    | prepare | a program, or its forward and       | `Work`: the one open jaxpr that is planned, and  |
    |         | backward part, calls inlined        | how what is made of it is written in its place   |
    | lift    | that jaxpr, a cost model            | its `Program`: ops, buffers, bytes, times        |
    | plan    | the program, bytes, its blocks      | `Planned`: the candidate to take, with its       |
    |         | under ready policies                | `Plan` and jaxpr, and what was done              |
    | emit    | the candidate, a cost model         | the program, or its parts; what came where       |
    |         |                                     | nothing was changed                              |
    | XLA fuses it, decides the order of its kernels, and calls back                                  |
    | enforce | the scheduled module, bytes         | the module to go on with, and what was done; the |
    |         |                                     | very same bytes where nothing was changed        |
    | XLA makes code of it and counts its bytes                                                       |
    | check   | the budget, XLA's count             | a `Verdict`                                      |

`coop_jax.lowering` calls the first four, `coop_jax.callback` the last two, when XLA calls it. A program goes
this way once. Where XLA makes something else of it than was planned, `coop_jax.alternatives` sends other
programs the same way up to the enforcing stage, and takes one of them. Inside, a stage calls what it needs:
planning evaluates candidates by emitting and lifting them once more, and the enforcing stage lifts, plans and
emits kernels as the first four do equations.

`tests/test_pipeline.py` checks what goes into each stage and what comes out of it, on whole programs.
"""

from __future__ import annotations

from functools import partial

from passes.counts import check
from passes.hlo.enforce import enforce
from passes.interpreter import on_deep_stack, uncollected
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.hands import Hands
from passes.jaxpr.stage import Work, emit, lift, plan, prepare, prepare_parts
from passes.outcome import StageOutcome

__all__ = ["STAGES", "check", "emit", "enforce", "lift", "plan", "plan_joint", "plan_program", "prepare"]

STAGES = (prepare, lift, plan, emit, enforce, check)


def plan_program(closed_jaxpr: ClosedJaxpr, request: JaxprRequest) -> tuple[ClosedJaxpr, StageOutcome]:
    """Rewrite one whole program so that it needs less memory.

    Args:
        closed_jaxpr: calls inlined. Where its work is inside a `shard_map` its body is planned, and the
            request's bytes are those of one device.

    Returns:
        The closed jaxpr to run (the same object if the program fits as it is) and what was done.
    """
    return _walk(prepare(closed_jaxpr), request)


def plan_joint(
    forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int, request: JaxprRequest
) -> tuple[tuple[ClosedJaxpr, ClosedJaxpr], StageOutcome]:
    """Plan a forward and a backward program as one.

    Args:
        forward: closed jaxpr, args -> (*outs, *residuals), calls inlined.
        backward: closed jaxpr, (*residuals, *cotangents) -> gradients, calls inlined.
        n_outs: how many of forward's results are outs.

    Returns:
        Both to run, closed: args -> (*outs, *saved) and (*saved, *cotangents) -> gradients; what was done.
    """
    return _walk(prepare_parts(forward, backward, n_outs), request)


@on_deep_stack
@uncollected()
def _walk[Written](work: Work[Written], request: JaxprRequest) -> tuple[Written, StageOutcome]:
    with work.context():
        lifted = lift(work.jaxpr, request)
        planned = plan(lifted, request, partial(Hands, work.jaxpr, request))
    return emit(work, planned, request), planned.outcome
