"""Which planner, and how hard it tries.

Limits are counts of work, because plans must not depend on load; the exact mode takes seconds if asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from passes.ir import BufferId
from passes.link import Link
from passes.objective import LEAST_TIME, Objective
from passes.registry import PLANNERS as PLANNERS

SEARCHING = tuple(name for name, planner in PLANNERS.items() if planner.searches)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """How long a search takes, in units of work; set by `benchmarks.scale` and `benchmarks.planners`.

    Attributes:
        units_per_op: of a large program.
        least_units: of a small one.
        quick_units: of a small one, where someone waits.
        units_per_op_of_many: at most, of one of many plans of a program.
        fewest_cuts: positions at which the bound is looked for.
        most_cuts: such positions of a small program, where nobody waits.
        cut_ops: the ops of a program times those positions, between the two.
    """

    units_per_op: int = 100
    least_units: int = 1_000_000
    quick_units: int = 200_000
    units_per_op_of_many: int = 400
    fewest_cuts: int = 8
    most_cuts: int = 32
    cut_ops: int = 10_000


LIMITS = LimitsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """What to plan with.

    Attributes:
        planner: "auto"; "cut" (cuts without a search around them) or "window" (walks over addresses);
            "exact" (a 0-1 program, from `auto`'s plan on); or a baseline: "dtr", "dtr-eq", "dte",
            "coop-online", "chen"; "delta" with a host.
        work_limit: how much work a search may do, in units of about a microsecond; None scales with the
            program (about a second, and 100 us an op from 10,000 ops on; if `quick` a fifth of a second, two
            with pages, and 100 us an op from 2000 ops on). It ends sooner near the bound; far from it, or
            where the first search misses the budget, a few times as much is done in all.
        quick: whether someone waits for the plan, such as a compile.
        of_many: whether it is one of many that are made for a program: of a loop's body, beside what its
            scans keep, or for fewer bytes than the budget.
        near_overhead: neighbourhoods are searched until a plan costs no more above the bound than this share
            of the program's cost.
        placed: whether the budget is for the plan placed at addresses, holes included, instead of its live
            bytes; the plan then carries offsets.
        bound: whether to prove a lower bound on the overhead beside the plan, and of a plan that misses its
            budget, or is the lowest, that no other is lower.
        strong_bound: whether to prove the linear bound, too: tighter at low budgets, and seconds of work. The
            exact mode does so where it proves no optimum.
        bound_cuts: at how many positions of the program to look for the bound; None for 8, and up to 32
            where the program is small and nobody waits.
        exact_work_limit: what the exact mode may use, in its solver's deterministic seconds.
        time_limit_s: wall clock for the exact mode instead; its plan then depends on the machine.
        joint: whether the exact mode also places the plan, so that it fits without any fragmentation.
        without: names of strategies (`passes.planners.strategies`) to leave out, to see what they give.
        host_bytes: bytes that pages may take on the host at once; 0 for no paging.
        link: what carries them; needed where `host_bytes` is not 0.
        must_page: buffers that spend the longest gap between their uses on the host, whatever it costs.
        objective: what a plan takes the least of; energy for programs whose ops have `energy_pj`.
        report: called by the exact mode with lines of progress, after two seconds.
    """

    planner: str = "auto"
    work_limit: int | None = None
    quick: bool = False
    of_many: bool = False
    near_overhead: float = 0.0
    placed: bool = False
    bound: bool = True
    strong_bound: bool = False
    bound_cuts: int | None = None
    exact_work_limit: float = 20.0
    time_limit_s: float | None = None
    joint: bool = False
    without: frozenset[str] = frozenset()
    host_bytes: int = 0
    link: Link | None = None
    must_page: frozenset[BufferId] = frozenset()
    objective: Objective = LEAST_TIME
    report: Callable[[str], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise ValueError(f"unknown planner {self.planner!r}; choose one of {', '.join(PLANNERS)}")
        if self.work_limit is not None and self.work_limit < 0:
            raise ValueError(f"`work_limit` is {self.work_limit}; it must not be negative")
        if self.bound_cuts is not None and self.bound_cuts < 1:
            raise ValueError(f"`bound_cuts` is {self.bound_cuts}; it must be at least 1")
        if self.host_bytes < 0:
            raise ValueError(f"`host_bytes` is {self.host_bytes}; it must not be negative")
        if self.host_bytes and self.link is None:
            raise ValueError(f"`host_bytes` is {self.host_bytes}, but no `link` says how fast they move")
        if self.objective.least == "energy" and not PLANNERS[self.planner].frugal:
            raise ValueError(
                f"planner {self.planner!r} knows time only; `objective` energy is for auto and exact"
            )
        if self.planner == "delta" and not self.host_bytes:
            raise ValueError("planner 'delta' swaps to the host; give `host_bytes` and a `link`")
        if self.must_page and not self.host_bytes:
            raise ValueError(f"{len(self.must_page)} buffers must be paged, but `host_bytes` is 0")

    def n_cuts(self, n_ops: int) -> int:
        """At how many positions of a program of `n_ops` ops to look for the bound."""
        if self.bound_cuts is not None:
            return self.bound_cuts
        most = LIMITS.fewest_cuts if self.quick else LIMITS.most_cuts
        return max(LIMITS.fewest_cuts, min(most, LIMITS.cut_ops // max(1, n_ops)))

    def units(self, n_ops: int) -> int:
        """The work limit for a program of `n_ops` ops."""
        if self.work_limit is not None:
            return self.work_limit
        quick_units = LIMITS.quick_units * (2 if self.host_bytes else 1)
        if self.of_many:
            quick_units = min(quick_units, LIMITS.units_per_op_of_many * n_ops)
        return max(quick_units if self.quick else LIMITS.least_units, LIMITS.units_per_op * n_ops)
