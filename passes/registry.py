"""The planners by name: one line each, of words only, so that the command line can read it without numpy.

To add one, write a file with `plan(program, budget_bytes, config) -> Plan` and name it here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A planner and where it is.

    Attributes:
        does: what it does, in a few words, for people.
        entry: "module:function" of `plan(program, budget_bytes, config) -> Plan`.
        paged: the same for configs with `host_bytes`; "" if it makes nothing of a host.
        frugal: the same for configs whose objective is energy; "" if it knows time only.
        searches: whether it is one of the search, which also finds least peaks and frontiers.
        proves: whether its plans get the linear bound without being asked.
        in_benchmark: whether `benchmarks.planners` has a line for it.
    """

    does: str
    entry: str
    paged: str = ""
    frugal: str = ""
    searches: bool = False
    proves: bool = False
    in_benchmark: bool = True


_SEARCH = "passes.planners.search:plan"
_PAGED = "passes.planners.paging.plans:plan_paged"
_FRUGAL = "passes.planners.paging.energy:plan_energy"
_REPLAYED = "passes.planners.baselines.plans:plan"


def _searching(does: str, in_benchmark: bool = False) -> Planner:
    return Planner(
        does=does, entry=_SEARCH, paged=_PAGED, frugal=_FRUGAL, searches=True, in_benchmark=in_benchmark
    )


PLANNERS = {
    "auto": _searching("search (default)", in_benchmark=True),
    "window": _searching("walks over addresses alone"),
    "cut": _searching("minimum cuts alone"),
    "exact": Planner(
        does="prove the optimum (OR-Tools)",
        entry="passes.planners.exact.plans:plan",
        paged="passes.planners.exact.plans:plan_paged",
        frugal="passes.planners.exact.plans:plan_energy",
        proves=True,
    ),
    "dtr": Planner(does="DTR, replayed", entry=_REPLAYED),
    "dtr-eq": Planner(does="DTR's equivalence classes, replayed", entry=_REPLAYED),
    "dte": Planner(does="MegEngine's variant, replayed", entry=_REPLAYED),
    "coop-online": Planner(does="Coop as published, replayed", entry=_REPLAYED),
    "chen": Planner(does="segments of the forward pass", entry=_REPLAYED),
    "delta": Planner(
        does="DELTA, with --host",
        entry="passes.planners.baselines.plans:plan_delta",
        paged="passes.planners.baselines.plans:plan_delta",
    ),
}
