"""Baselines as planners: a program and a budget in, a `Plan` with offsets out."""

from __future__ import annotations

from collections.abc import Callable

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.offsets.placement import place_graph
from passes.planners.baselines import chen, scores
from passes.planners.baselines.delta import Delta, DeltaError
from passes.planners.baselines.runtime import Policy, Runtime
from passes.planners.bounds import working_set_bytes
from passes.planners.config import PlannerConfig
from passes.planners.paging.queues import traffic
from passes.planners.pool_run import NoRoomError, Walked, median_byte_ns
from passes.simulate import simulate_graph

POLICIES: dict[str, Callable[[Graph], Policy]] = {
    "dtr": lambda graph: scores.Dtr(),
    "dtr-eq": lambda graph: scores.DtrEq(),
    "dte": lambda graph: scores.Dte(),
    "coop-online": lambda graph: scores.CoopOnline(median_byte_ns(graph)),
}


def plan(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """What the baseline that `config` names does within a budget, addresses included, without a host.

    Returns:
        A FEASIBLE plan with offsets; where the baseline runs out of memory the plan without recomputes,
        UNKNOWN, or INFEASIBLE if nothing could fit.
    """
    graph, name = Graph.of(program), config.planner
    outcome = _chen(graph, budget_bytes) if name == "chen" else _replay(graph, budget_bytes, name)
    steps = outcome.steps if outcome else range(len(program.ops))
    timeline = simulate_graph(graph, steps)
    impossible = working_set_bytes(program) > budget_bytes
    missed = Status.INFEASIBLE if impossible else Status.UNKNOWN
    return Plan(
        steps=tuple(map(OpId, steps)),
        peak_bytes=timeline.peak_bytes,
        budget_bytes=budget_bytes,
        overhead_ratio=timeline.overhead_ratio,
        lower_bound_ratio=0.0,
        status=Status.FEASIBLE if outcome else missed,
        planner=name,
        seconds=0.0,
        offsets=outcome.offsets if outcome else (),
    )


def plan_delta(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """What DELTA does within the budgets of device and host; live bytes, not placed.

    Returns:
        A FEASIBLE plan; where it runs out of memory the plan without recomputes, UNKNOWN.
    """
    assert config.link is not None, "PlannerConfig asks for a link"
    graph, link, host_bytes = Graph.of(program), config.link, config.host_bytes
    try:
        steps, pages = Delta(graph, budget_bytes, host_bytes, link).run()
    except DeltaError:
        steps, pages = list(range(len(program.ops))), []
    wrapped = tuple(map(OpId, steps))
    timeline = simulate_graph(graph, steps, pages)
    moved = traffic(program, wrapped, pages, link)
    base_ns = program.cost_ns
    fits = timeline.peak_bytes <= budget_bytes and moved.host_peak_bytes <= host_bytes
    return Plan(
        steps=wrapped,
        peak_bytes=timeline.peak_bytes,
        budget_bytes=budget_bytes,
        overhead_ratio=(moved.total_ns - base_ns) / base_ns if base_ns else 0.0,
        lower_bound_ratio=0.0,
        status=Status.FEASIBLE if fits else Status.UNKNOWN,
        planner="delta",
        seconds=0.0,
        pages=tuple(pages),
        waiting_ns=moved.waiting_ns,
        host_peak_bytes=moved.host_peak_bytes,
        host_budget_bytes=host_bytes,
    )


def _replay(graph: Graph, budget_bytes: int, name: str) -> Walked | None:
    try:
        return Runtime(graph, budget_bytes, POLICIES[name](graph)).run()
    except NoRoomError:
        return None


def _chen(graph: Graph, budget_bytes: int) -> Walked | None:
    """The cheapest segment size whose placed live ranges fit; no segments at all if the program fits."""
    best: tuple[int, Walked] | None = None
    for steps in ([*range(len(graph.cost_ns))], *chen.candidates(graph)):
        cost_ns = sum(graph.cost_ns[op] for op in steps)
        if best is not None and cost_ns >= best[0]:
            continue
        placement = place_graph(graph, steps)
        if placement.heap_bytes <= budget_bytes:
            best = cost_ns, Walked(steps=tuple(steps), offsets=placement.offsets)
    return None if best is None else best[1]
