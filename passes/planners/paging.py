"""Keep, recompute or page: the cheapest of all three for each value, on the real schedule.

Recompute alone brings the program to some level; pages take the rest. What the link hides costs nothing, so
the best level is where the link is full: there the cheapest values are recomputed, the others are kept or
paged. Levels between the budget and the program's own peak are tried, coarse ones first, then around the
best. Recompute alone is one of the candidates, so that a plan with pages never costs more.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

from passes.ir import OpId, Plan, Program, Status
from passes.liveness import Graph
from passes.offsets.best_fit import place_graph
from passes.planners.config import PlannerConfig
from passes.planners.cut import Descent, Style, Work, descend
from passes.planners.pager import Host, Paged, Pager
from passes.planners.search import Search

LEVELS = 8
PLACED_RATIOS = (1.0, 0.995, 0.985, 0.97, 0.95, 0.92, 0.88)
STYLES = (Style(tilt_ratio=0.1), Style(tilt_ratio=-0.3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A sequence with its pages.

    Attributes:
        descent: the sequence.
        paged: its pages.
        page_offsets: where each page's copy comes back, if it is placed.
        end_bytes: the end of the highest copy then.
    """

    descent: Descent
    paged: Paged
    page_offsets: tuple[int, ...] = ()
    end_bytes: int = 0

    @property
    def total_ns(self) -> int:
        """Time of all steps, and of waiting."""
        return self.descent.cost_ns + self.paged.waiting_ns


def host_of(config: PlannerConfig) -> Host | None:
    """What pages may use; None if there are to be none."""
    if not config.host_bytes or config.link is None:
        return None
    return Host(link=config.link, nbytes=config.host_bytes, forced=config.must_page)


def with_pages(graph: Graph, descent: Descent, budget_bytes: int, host: Host) -> Mixed | None:
    """A sequence with the pages that bring it within the budget; None if none do."""
    paged = Pager(graph, descent.steps, host).within(budget_bytes)
    return None if paged is None else Mixed(descent=descent, paged=paged)


def mixed(
    graph: Graph, start: Descent, known: Iterable[Descent], budget_bytes: int, host: Host, work: Work
) -> Mixed | None:
    """The cheapest sequence with pages within the budget that is found; None if none is.

    Args:
        start: the schedule without re-runs.
        known: further sequences to try.
    """
    tried = [with_pages(graph, one, budget_bytes, host) for one in (start, *known)]
    levels = [budget_bytes + (start.peak_bytes - budget_bytes) * k // LEVELS for k in range(LEVELS)]
    for level_bytes in levels:
        for style in STYLES:
            lowered = descend(graph, start, level_bytes, Work(work.limit), style)
            tried.append(with_pages(graph, lowered, budget_bytes, host))
    found = [one for one in tried if one is not None]
    return min(found, key=lambda one: (one.total_ns, len(one.paged.pages)), default=None)


def plan_paged(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
    """Plan `program` within the budgets of device and host; the entry for configs with `host_bytes`.

    Returns:
        A plan that keeps both budgets, `status.found`; else the plan of lowest peak that was found, without
        pages if even all of them do not suffice.
    """
    begin = time.perf_counter()
    host = host_of(config)
    assert host is not None, "plans with pages need a host budget"
    search = Search(program, config)
    alone = search.best(budget_bytes)
    best: Mixed | None = None
    for ratio in PLACED_RATIOS if config.placed else (1.0,):
        best = mixed(search.graph, search.start, (alone,), int(ratio * budget_bytes), host, search.work())
        if best is None or not config.placed:
            break
        best = _placed(search.graph, best, budget_bytes)
        if best.end_bytes <= budget_bytes:
            break
    made = _plan(search, best, alone, budget_bytes, host)
    return dataclasses.replace(made, planner=config.planner, seconds=time.perf_counter() - begin)


def _placed(graph: Graph, found: Mixed, budget_bytes: int) -> Mixed:
    """The same with offsets, of what comes back, too."""
    pages = found.paged.pages
    placement = place_graph(graph, found.descent.steps, budget_bytes, pages)
    descent = dataclasses.replace(found.descent, offsets=placement.offsets)
    return dataclasses.replace(
        found, descent=descent, page_offsets=placement.page_offsets, end_bytes=placement.heap_bytes
    )


def _plan(search: Search, found: Mixed | None, alone: Descent, budget_bytes: int, host: Host) -> Plan:
    """A plan of what was found; of the sequence without pages where nothing was."""
    if found is None:
        made = search.plan(alone, budget_bytes, 0.0, "")
        proved = max(search.graph.local_bytes, default=0) + search.graph.argument_bytes > budget_bytes
        status = Status.INFEASIBLE if proved else Status.UNKNOWN
        return dataclasses.replace(made, status=status, lower_bound_ratio=0.0, host_budget_bytes=host.nbytes)
    base_ns = search.start.cost_ns
    steps = tuple(OpId(op) for op in found.descent.steps)
    misses = found.paged.peak_bytes > budget_bytes or found.end_bytes > budget_bytes
    best = Status.OPTIMAL if found.total_ns == base_ns else Status.FEASIBLE
    return Plan(
        steps=steps,
        peak_bytes=found.paged.peak_bytes,
        budget_bytes=budget_bytes,
        overhead_ratio=(found.total_ns - base_ns) / base_ns if base_ns else 0.0,
        lower_bound_ratio=0.0,
        status=Status.UNKNOWN if misses else best,
        planner="",
        seconds=0.0,
        offsets=found.descent.offsets,
        pages=found.paged.pages,
        page_offsets=found.page_offsets,
        waiting_ns=found.paged.waiting_ns,
        host_peak_bytes=found.paged.host_peak_bytes,
        host_budget_bytes=host.nbytes,
    )
