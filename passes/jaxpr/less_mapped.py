"""Fewer bytes than the budget leaves, where to recompute takes less time than to map them in every run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.lifted import LiftedJaxpr
from passes.planners import cut_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingConfig:
    """What is looked at beside the budget on a CPU; set by `benchmarks.side_by_side`.

    Attributes:
        few_aims: of so many numbers of bytes the smallest is planned for first.
        hoped_ratio: no plan for some bytes is expected to come nearer to its bound than the one that is there
            by more than this, its bytes being mapped.
    """

    few_aims: int = 2
    hoped_ratio: float = 0.97


CONFIG = MappingConfig()


def with_less_mapped(
    as_is: LiftedJaxpr, request: JaxprRequest, scale: float, search: Callable[[JaxprRequest], Candidate]
) -> Candidate:
    """The best for the budget, or for fewer bytes.

    The fewest bytes come first where there are few other numbers to try: mostly they win, and then it is
    known of a larger one that it cannot.

    Args:
        scale: estimated over real bytes of temporaries.
        search: gives the best for a request.
    """

    def rank(made: Candidate) -> tuple[bool, int]:
        return made.expected_bytes > scale * request.temp_budget_bytes, run_ns(made, request, scale)

    aims = _aims(request)
    upwards = len(aims) <= CONFIG.few_aims
    best, most_ns = None, None
    for temp_bytes in reversed(aims) if upwards else aims:
        if best is not None and not rank(best)[0]:
            if not upwards and best.peak_bytes <= scale * temp_bytes:
                continue
            mapping_ns = request.mapping_ns(temp_bytes)
            saved_ratio = min(1, best.cost_ns / _bound_ns(as_is, best.peak_bytes))
            hoped_ns = saved_ratio * _bound_ns(as_is, int(scale * temp_bytes)) + mapping_ns
            if CONFIG.hoped_ratio * hoped_ns >= rank(best)[1]:
                continue
            most_ns = round((rank(best)[1] - mapping_ns) / CONFIG.hoped_ratio)
        asked = replace(
            request,
            budget_bytes=request.fixed_bytes + temp_bytes,
            optional=temp_bytes != aims[0],
            most_ns=most_ns,
        )
        made = search(asked)
        if best is None or rank(made) < rank(best):
            best = made
        elif not upwards:
            break
    assert best is not None, "there is an aim"
    return best


def run_ns(candidate: Candidate, request: JaxprRequest, scale: float) -> int:
    """Estimated time of a run: of its kernels, and in which its temporaries are mapped."""
    return candidate.cost_ns + request.mapping_ns(round(candidate.peak_bytes / scale))


def _bound_ns(as_is: LiftedJaxpr, peak_bytes: int) -> float:
    """What no plan of the program as it is goes below; those of freer kernels do: they save traffic."""
    return as_is.seen.cost_ns * (1 + cut_bound(as_is.program, peak_bytes, n_cuts=2))


def _aims(request: JaxprRequest) -> list[int]:
    """Bytes of temporaries to plan for, falling: what the budget leaves, halves of that while far above what
    stays mapped, and what stays mapped."""
    aims, kept_bytes = [request.temp_budget_bytes], request.kept_bytes
    while 0 < kept_bytes < aims[-1]:
        aims.append(aims[-1] // 2 if aims[-1] >= 4 * kept_bytes else kept_bytes)
    return aims
