"""Programs with control flow: which rung of the scans' ladder, and what is done beside it.

The jaxpr stage's own search for straight-line programs comes as `Tools`, so that nothing points back at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from passes.jaxpr.bodies import fit_bodies
from passes.jaxpr.lift import LiftedJaxpr, lift
from passes.jaxpr.scan_emit import rewrite
from passes.jaxpr.scan_ladder import Rung, ladder, segment_ladder
from passes.jaxpr.sink import sink_into_scans

if TYPE_CHECKING:
    from passes.jaxpr.stage import Candidate, JaxprRequest

RUNGS_ABOVE = 2
RUNGS_BELOW = 3
WAYS = (ALONE, RERUNS, BODIES) = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What is done to one program.

    Attributes:
        alone: the program without re-runs.
        search: the program with re-runs, so that it fits.
        plan_body: (open jaxpr of a body, bytes for its temporaries, request) -> an open jaxpr.
    """

    alone: Callable[[LiftedJaxpr], Candidate]
    search: Callable[[LiftedJaxpr, JaxprRequest, float], Candidate]
    plan_body: Callable[[Any, int, JaxprRequest], Any]


def search_structured(jaxpr: Any, request: JaxprRequest, scale: float, tools: Tools) -> Candidate:
    """The cheapest candidate that fits, among the rungs of the scans' ladder and what can be done beside it.

    A rung alone, with re-runs beside the scans, with the bodies of control flow planned, too; then scans
    in segments.
    """
    target_bytes = max(int(request.temp_budget_bytes * scale), 1)
    original, jaxpr = jaxpr, sink_into_scans(jaxpr)
    rungs: list[Rung] = ladder(jaxpr, request.device) or [()]
    found = _search_rungs(jaxpr, rungs, request, scale, tools)
    if found.peak_bytes > target_bytes and rungs[-1]:
        segments = segment_ladder(rungs[-1], request.device)
        if segments:
            found = min(
                found,
                _search_rungs(jaxpr, segments, request, scale, tools, ways=(ALONE, RERUNS)),
                key=lambda c: _rank(c, target_bytes),
            )
    return replace(found, rewritten=found.rewritten or jaxpr is not original)


def _search_rungs(
    jaxpr: Any,
    rungs: Sequence[Rung],
    request: JaxprRequest,
    scale: float,
    tools: Tools,
    *,
    ways: Sequence[int] = WAYS,
) -> Candidate:
    """The cheapest candidate that fits of some rungs.

    Bytes fall along the ladder, so the first rung that fits is found by bisection; others may be cheaper.
    """
    target_bytes = max(int(request.temp_budget_bytes * scale), 1)
    found: dict[tuple[int, int], Candidate] = {}

    def look(k: int, way: int) -> Candidate:
        if (k, way) not in found:
            found[k, way] = _look(jaxpr, rungs[k], request, scale, way, tools)
        return found[k, way]

    for way in ways:
        low, high = 0, len(rungs)
        while low < high:
            middle = (low + high) // 2
            if look(middle, way).peak_bytes <= target_bytes:
                high = middle
            else:
                low = middle + 1
        if low < len(rungs):
            for k in range(low + 1, min(low + 1 + RUNGS_BELOW, len(rungs))):
                look(k, way)
            for k in range(max(0, low - RUNGS_ABOVE), low):
                look(k, min(way + 1, ways[-1]))
            break
    return min(found.values(), key=lambda c: _rank(c, target_bytes))


def _look(jaxpr: Any, rung: Rung, request: JaxprRequest, scale: float, way: int, tools: Tools) -> Candidate:
    """One rung in one of the `WAYS`."""
    device, target_bytes = request.device, max(int(request.temp_budget_bytes * scale), 1)
    program = rewrite(jaxpr, rung) if rung else jaxpr
    if way == BODIES:
        program = fit_bodies(
            program, device, target_bytes, lambda body, nbytes: tools.plan_body(body, nbytes, request)
        )
    as_is = lift(program, device, as_xla=True)
    made = tools.alone(as_is)
    if way != ALONE and made.peak_bytes > target_bytes:
        made = tools.search(as_is, request, scale)
    return replace(made, scans=rung, rewritten=program is not jaxpr)


def _rank(candidate: Candidate, target_bytes: int) -> tuple[bool, int, int]:
    """Within the target by time, else by bytes; smaller is better."""
    over = candidate.peak_bytes > target_bytes
    return over, candidate.peak_bytes if over else candidate.cost_ns, candidate.peak_bytes
