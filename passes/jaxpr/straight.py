"""Programs taken as straight lines: as they are, and planned to a depth at which they are expected to fit.

A candidate is evaluated by lifting what was emitted once more, as XLA will see it, so that what XLA stores by
itself counts. Even a plan without recomputes changes the program: values that XLA would store for the
backward pass are recomputed inside the kernels that read them there, which saves their bytes and their
traffic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.ir import Plan
from passes.jaxpr import compat
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.emit import EmitConfig, emit
from passes.jaxpr.freedom import emit_configs
from passes.jaxpr.in_place import rooms
from passes.jaxpr.lift import as_known, lift_known, lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.offsets.foreseen import holes_bytes, in_results_bytes
from passes.planners import LAST_RESORTS, PlannerConfig, planner_of
from passes.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightConfig:
    """The depths that are looked at; set by `benchmarks.gpt12`.

    Attributes:
        level_ratio: the bytes of a depth as a share of those of the one above it.
        most_candidates: how many plans are evaluated for one budget.
        much_dearer_ratio: where what fits costs so much more than the first depth, XLA may be kept from
            merging small dots: coupling layers at a quarter, 2.04 of the program's time, then 1.29. It costs
            time that is not foreseen: a LoRA within its checkpoint's bytes .99 of it, not .92.
        near_overhead: what a plan may cost above the bound for the search to end, and what one between two
            depths must promise to save. An estimate misses by more.
    """

    level_ratio: float = 0.995
    most_candidates: int = 8
    much_dearer_ratio: float = 1.15
    near_overhead: float = 0.005


CONFIG = StraightConfig()
# What is made of a jaxpr holds it, so that it would live for ever.
_kept = functools.partial(compat.cached_by_jaxpr, most=256)


def as_it_is(as_is: LiftedJaxpr, fresh: frozenset[int] = frozenset()) -> Candidate:
    """A program without recomputes; `fresh` as in `JaxprRequest`."""
    seen = as_is.seen
    timeline, free = simulate(seen), rooms(as_is.as_seen or as_is, fresh)
    return Candidate(
        lifted=as_is,
        steps=as_is.program.order,
        config=EmitConfig(),
        emitted=as_is.jaxpr,
        peak_bytes=timeline.peak_bytes - in_results_bytes(seen, timeline, free),
        cost_ns=seen.cost_ns,
        energy_pj=seen.energy_pj,
    )


def lift_as_xla(jaxpr: Jaxpr, device: DeviceModel) -> LiftedJaxpr:
    """An open jaxpr, or that of a lift, with what XLA does by itself; the same object for every request."""
    return _lifted_as_xla(_known(jaxpr, device), device)


_known = _kept(as_known)


@_kept
def _lifted_as_xla(known: Jaxpr, device: DeviceModel) -> LiftedJaxpr:
    return lift_known(known, device, as_xla=True)


def search(
    as_is: LiftedJaxpr,
    request: JaxprRequest,
    scale: float,
    than: Candidate | None = None,
    *,
    of_many: bool = False,
) -> Candidate:
    """The shallowest candidate that fits `scale` times what the budget leaves, or a better one that is known.

    It is planned for kernels in which all that can be is computed anew. Where XLA's own kernels are foreseen,
    one is planned for these, too, and the cheaper is taken: a Swin at half of its bytes then costs 1 % more
    by estimate, not 16, a mixture of experts not 12, but 7. Where nothing can be run again, or held back,
    that is the program as it is.

    Args:
        of_many: as in `PlannerConfig`.
    """
    target_bytes = max(int(request.temp_budget_bytes * scale), 1)
    device, calibration = request.device, request.calibration
    holes = counts_holes(request)
    config = PlannerConfig(
        planner=request.planner,
        quick=True,
        of_many=request.inside or request.optional or of_many,
        near_overhead=CONFIG.near_overhead,
        bound=False,
        objective=request.objective.of(as_is.program),
        without=LAST_RESORTS if request.optional else frozenset(),
    )
    deepenings = [
        _Deepening(
            _depths(as_is.jaxpr, device, config, as_xla, calibration.rounded, holes, request.fresh),
            as_is, request, target_bytes,
        )
        for as_xla in ((True, False) if BACKENDS[device.platform].fuses_greedily else (False,))
    ]  # fmt: skip
    best = than
    for each in sorted(
        deepenings, key=lambda each: (each.first.peak_bytes > target_bytes, each.first.cost_ns)
    ):
        best = each.best(than=best)
    assert best is not None, "there is a base"
    if BACKENDS[device.platform].splits_small_dots and not calibration.strict:
        # What XLA merges may be what needs a much deeper plan.
        (free,) = deepenings
        if best.peak_bytes > target_bytes or best.cost_ns > CONFIG.much_dearer_ratio * free.first.cost_ns:
            best = _Deepening(free.depths, as_is, request, target_bytes, strict=True).best(than=best)
    return as_it_is(as_is, request.fresh) if len(best.emitted.eqns) == len(as_is.jaxpr.eqns) else best


def counts_holes(request: JaxprRequest) -> bool:
    """Whether what XLA's heap takes beyond what is alive is part of a candidate's bytes."""
    return request.calibration.holes or BACKENDS[request.device.platform].heap != "in time order"


def needed_bytes(seen: LiftedJaxpr, device: DeviceModel, fresh: frozenset[int]) -> tuple[int, int, int]:
    """What is alive at most of what XLA is expected to make, what holes of its heap add, and how much of that
    is in the storage of `fresh` results."""
    program, timeline = seen.program, simulate(seen.program)
    beyond_bytes = holes_bytes(program, timeline, BACKENDS[device.platform])
    return timeline.peak_bytes, beyond_bytes, in_results_bytes(program, timeline, rooms(seen, fresh))


class _Deepening:
    """Candidates of growing depth until one fits, each as it is written best at the first depth.

    The depths are steps of a fixed frontier below the peak without recomputes, whatever the budget is, so
    that a larger budget takes the same level or a higher one.
    """

    def __init__(
        self, depths: _Depths, as_is: LiftedJaxpr, request: JaxprRequest, target_bytes: int,
        *, strict: bool = False,
    ) -> None:  # fmt: skip
        calibration = request.calibration
        ways = emit_configs(
            depths.lifted,
            as_is,
            request.device,
            strict=strict or calibration.strict,
            deep=calibration.rounded,
        )
        self.depths, self._target_bytes = depths, target_bytes
        self._first_level = self._level_of(target_bytes)
        tried = [depths.candidate(self._first_level, way) for way in ways]
        self.first = min(tried, key=lambda c: (c.peak_bytes > target_bytes, c.cost_ns))
        self._way = self.first.config

    def best(self, *, than: Candidate | None) -> Candidate:
        """The first that fits, else the smallest; what is found otherwise, if that is better `than` it.

        Deeper ones cost more, so that none is made where one costs no less already.
        """
        best, most_ns = than, math.inf
        if than is not None and than.peak_bytes <= self._target_bytes:
            most_ns = than.cost_ns * (1 - CONFIG.near_overhead)
        level, above, below = self._first_level, None, None
        stride = 1
        for _ in range(CONFIG.most_candidates):
            made, candidate = self.depths.plan(level), self.depths.candidate(level, self._way)
            is_found_below = below is not None and made.steps == below[1].steps
            if best is None or self._rank(candidate) < self._rank(best):
                best = candidate
            if candidate.cost_ns - self.depths.recompute_ns(level) >= most_ns:
                break
            if made.peak_bytes > made.budget_bytes:
                # No plan goes that deep: this one is what there is from its own level on.
                below = max(self._level_of(made.peak_bytes), 1 + above[0] if above else 0), candidate
            elif candidate.peak_bytes <= self._target_bytes:
                below = level, candidate
            elif candidate.cost_ns >= most_ns:
                break
            else:
                above = self._last_kept(level, made), candidate
            if below is None:
                # What XLA is expected to need beyond the plan grows a little with the depth, or much.
                beyond_bytes = candidate.peak_bytes - made.peak_bytes
                kept = above[0] if above else level
                deeper = max(0, self._level_of(max(self._target_bytes - beyond_bytes, 1)) - kept)
                level, stride = kept + 1 + deeper * stride, 2 * stride
            elif above is None:
                # What is in results' storage needs no plan.
                spare_bytes = made.peak_bytes - candidate.peak_bytes
                shallower = self._level_of(self._target_bytes + max(spare_bytes, 0))
                if shallower >= level - 1:
                    break
                level = shallower
            else:
                # Where it shrinks instead, there is a level between.
                share = self._share(above[1], below[1])
                hoped_ns = (1 - share) * (below[1].cost_ns - above[1].cost_ns)
                if below[0] - above[0] <= 1 or hoped_ns <= CONFIG.near_overhead * below[1].cost_ns:
                    break
                between = above[0] + math.ceil(share * (below[0] - above[0]))
                if is_found_below:  # then only what barely exceeds the plan above may be another one
                    between = above[0] + 1
                level = min(max(between, above[0] + 1), below[0] - 1)
        assert best is not None, "at least one candidate is evaluated"
        return best

    def _share(self, above: Candidate, below: Candidate) -> float:
        """How far from one candidate to another, by their bytes, the target is."""
        way_bytes = max(above.peak_bytes - below.peak_bytes, 1)
        return min(max((above.peak_bytes - self._target_bytes) / way_bytes, 0.0), 1.0)

    def _level_of(self, nbytes: int) -> int:
        """How many levels down from the peak without recomputes so many bytes are, at least none."""
        ratio = nbytes / max(self.depths.peak_bytes, 1)
        return max(0, math.ceil(math.log(ratio) / math.log(CONFIG.level_ratio) - 1e-9))

    def _last_kept(self, level: int, made: Plan) -> int:
        """The deepest level whose bytes a level's plan keeps: nothing cheaper is found for those between."""
        deepest = self._level_of(max(made.peak_bytes, 1))
        keeps = made.peak_bytes <= self.depths.level_bytes(deepest)
        return max(level, deepest if keeps else deepest - 1)

    def _rank(self, candidate: Candidate) -> tuple[int, int]:
        return fit_then_cost(candidate, self._target_bytes)


def fit_then_cost(candidate: Candidate, target_bytes: int) -> tuple[int, int]:
    """Within a number of bytes by time, else by bytes; smaller is better."""
    return max(candidate.expected_bytes, target_bytes), candidate.cost_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Depths:
    """A program's plans and candidates by level, which belong to no budget.

    Each is made when it is first asked for.

    Attributes:
        lifted: the program that is planned.
        peak_bytes: its peak without recomputes.
        planner: plans it for a number of bytes.
        rounded: as in `Calibration`.
        holes: whether holes of XLA's heap count.
        fresh: as in `JaxprRequest`.
    """

    lifted: LiftedJaxpr
    peak_bytes: int
    planner: Callable[[int], Plan]
    device: DeviceModel
    rounded: bool
    holes: bool
    fresh: frozenset[int]
    _plans: dict[int, Plan] = field(default_factory=dict)
    _candidates: dict[tuple[int, EmitConfig], Candidate] = field(default_factory=dict)

    def plan(self, level: int) -> Plan:
        """The plan for the bytes of a level."""
        if level not in self._plans:
            self._plans[level] = self.planner(self.level_bytes(level))
        return self._plans[level]

    def level_bytes(self, level: int) -> int:
        """What a level's plan is made for."""
        return int(self.peak_bytes * CONFIG.level_ratio**level)

    def recompute_ns(self, level: int) -> int:
        """What the recomputes of a level's plan take; no shallower one saves more."""
        return round(self.plan(level).overhead_ratio * self.lifted.program.cost_ns)

    def candidate(self, level: int, written: EmitConfig) -> Candidate:
        """The same as it is written."""
        if (level, written) not in self._candidates:
            self._candidates[level, written] = self._evaluated(self.plan(level), written)
        return self._candidates[level, written]

    def _evaluated(self, made: Plan, written: EmitConfig) -> Candidate:
        """Emit a plan and estimate what XLA will need for it.

        Where XLA's fusion is foreseen by its own rules, what was emitted is lifted as XLA would by itself.
        Elsewhere that assumes that XLA stores all that it shares, the plan that it stores no value that it
        could compute in each reader. The truth lies between, on a 12-layer GPT within 2 % of the middle at
        six depths. What XLA's heap takes beyond what is alive comes on top of that; where it is packed in the
        order of time, only once `Calibration.holes` says so.
        """
        emitted = emit(self.lifted, made.steps, written)
        # Nothing is merged across the barriers that recomputes wait behind.
        seen = lift_seen(emitted, self.device, rounded=self.rounded, held=True)
        alive_bytes, beyond_bytes, given_bytes = needed_bytes(seen, self.device, self.fresh)
        if not BACKENDS[self.device.platform].fuses_greedily:
            alive_bytes = (made.peak_bytes + max(alive_bytes, made.peak_bytes)) // 2
        return Candidate(
            lifted=self.lifted,
            steps=made.steps,
            config=written,
            emitted=emitted,
            peak_bytes=alive_bytes - given_bytes + (beyond_bytes if self.holes else 0),
            holes_bytes=0 if self.holes else beyond_bytes,
            cost_ns=seen.program.cost_ns,
            energy_pj=seen.program.energy_pj,
            foreseen=seen,
            plan=made,
        )


@_kept
def _depths(
    known: Jaxpr,
    device: DeviceModel,
    config: PlannerConfig,
    as_xla: bool,
    rounded: bool,
    holes: bool,
    fresh: frozenset[int],
) -> _Depths:
    lifted = (
        _lifted_as_xla(known, device) if as_xla else lift_known(known, device, as_xla=False, rounded=rounded)
    )
    peak_bytes = simulate(lifted.program).peak_bytes
    return _Depths(
        lifted=lifted, peak_bytes=peak_bytes, planner=planner_of(lifted.program, config), device=device,
        rounded=rounded, holes=holes, fresh=fresh,
    )  # fmt: skip
