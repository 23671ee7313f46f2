"""Recompute and offsets together: a plan that fits its budget at addresses, without fragmentation.

The cheapest plan of all, placed or not, is solved for first. If its copies can be packed in the budget
(best fit, then the exact packers), it is the cheapest placed plan, too, and that is proved. If not, the
budget of the live bytes is lowered by what the packing lacks; the cheapest plan that is then packed is
kept, and the bound stays that of the first. The search's placed plan is always among them.
"""

from __future__ import annotations

import dataclasses
import time

from passes.ir import Plan, Program, Status
from passes.liveness import Graph, copies_of
from passes.offsets.best_fit import copy_groups, place_graph
from passes.planners.exact.packing import pack
from passes.planners.exact.solve import ExactConfig, solve_exact

MOST_BUDGETS = 5
PACKING_SHARE = 0.25


def solve_jointly(program: Program, budget_bytes: int, hint: Plan, config: ExactConfig) -> Plan:
    """The cheapest plan with offsets within a budget.

    Args:
        hint: the search's plan; one with offsets within the budget is kept if nothing is cheaper.

    Returns:
        A plan with offsets, OPTIMAL or FEASIBLE; or one without, INFEASIBLE, or UNKNOWN where no plan
        could be placed.
    """
    begin = time.perf_counter()
    graph = Graph.of(program)
    best = hint if _end(graph, hint) <= budget_bytes and hint.status.found else None
    first: Plan | None = None
    target_bytes = budget_bytes
    for tries in range(MOST_BUDGETS):
        left = _left(config, begin)
        made = solve_exact(program, target_bytes, hint, left)
        first = first or made
        if not made.status.found:
            break
        placed, lacking_bytes = _placed(graph, made, budget_bytes, _left(config, begin))
        if placed is not None:
            found = _labelled(placed, first, budget_bytes, proved=not tries)
            if best is None or found.overhead_ratio <= best.overhead_ratio:
                best = found
            break
        target_bytes = min(target_bytes, made.peak_bytes) - max(1, lacking_bytes << max(0, tries - 1))
    assert first is not None, "at least one budget is tried"
    if best is None:
        missed = Status.UNKNOWN if first.status.found else first.status
        return dataclasses.replace(first, status=missed)
    return _labelled(best, first, budget_bytes, proved=best.status is Status.OPTIMAL)


def _placed(graph: Graph, made: Plan, budget_bytes: int, config: ExactConfig) -> tuple[Plan | None, int]:
    """The plan with offsets, or None and how many bytes best fit lacks."""
    placement = place_graph(graph, made.steps)
    if placement.heap_bytes <= budget_bytes:
        return dataclasses.replace(made, offsets=placement.offsets), 0
    group, items = copy_groups(graph, made.steps, copies_of(graph, made.steps))
    limit_s = None if config.time_limit_s is None else PACKING_SHARE * config.time_limit_s
    packed = pack([tuple(item) for item in items], budget_bytes - graph.argument_bytes, limit_s)
    if not packed.fits:
        return None, placement.heap_bytes - budget_bytes
    offsets: list[tuple[int, ...]] = []
    copy = 0
    for op in made.steps:
        count = len(graph.outputs[op])
        offsets.append(
            tuple(graph.argument_bytes + packed.offsets[group[c]] for c in range(copy, copy + count))
        )
        copy += count
    return dataclasses.replace(made, offsets=tuple(offsets)), 0


def _labelled(plan: Plan, first: Plan, budget_bytes: int, *, proved: bool) -> Plan:
    """The plan under the joint problem's budget, bound and status."""
    bound_ratio = min(first.lower_bound_ratio, plan.overhead_ratio)
    optimal = proved or plan.overhead_ratio <= first.lower_bound_ratio
    return dataclasses.replace(
        plan,
        budget_bytes=budget_bytes,
        lower_bound_ratio=bound_ratio,
        status=Status.OPTIMAL if optimal and first.status is Status.OPTIMAL else Status.FEASIBLE,
        planner="exact",
    )


def _end(graph: Graph, plan: Plan) -> float:
    """The end of the highest copy of a placed plan; infinite for one without offsets."""
    if not plan.offsets:
        return float("inf")
    ends = [
        offset + graph.nbytes[b]
        for op, offsets in zip(plan.steps, plan.offsets, strict=True)
        for b, offset in zip(graph.outputs[op], offsets, strict=True)
    ]
    return max(ends, default=graph.argument_bytes)


def _left(config: ExactConfig, begin: float) -> ExactConfig:
    """The same limits less the seconds that are gone."""
    if config.time_limit_s is None:
        return config
    left_s = max(0.1, config.time_limit_s - (time.perf_counter() - begin))
    return dataclasses.replace(config, time_limit_s=left_s)
