"""Programs with control flow: which rung of the scans' ladder, and what is done beside it.

The jaxpr stage's own search for straight-line programs comes as `Tools`, so that nothing points back at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.bodies import fit_bodies
from passes.jaxpr.calibration import SCANS, SENT, expected_ratio, tried
from passes.jaxpr.host_choice import sent_to_host
from passes.jaxpr.lift import LiftedJaxpr, lift
from passes.jaxpr.scan_choice import Rung
from passes.jaxpr.scan_emit import rewrite
from passes.jaxpr.scan_ladder import ladder, segment_ladder
from passes.jaxpr.sink import sink_into_scans
from passes.jaxpr.stacks import view_inside_scans

if TYPE_CHECKING:
    from passes.jaxpr.stage import Candidate, JaxprRequest

RUNGS_ABOVE = 2
RUNGS_BELOW = 3
# How many rungs, spread over the ladder, are looked at with stacks on the host.
RUNGS_SENT = 6
WAYS = (ALONE, RERUNS, BODIES, TIGHTER) = (0, 1, 2, 3)
# Bodies are planned for no more than this of what the program needs without.
BODIES_RATIO = 0.9
# An estimate may be off by as much, if XLA has seen nothing of the kind, or something.
UNKNOWN_RATIO, KNOWN_RATIO = 1.25, 1.05
# What is expected to cost more than this of the best is not worth another compile.
CHEAPER_RATIO = 0.95


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

    A rung alone, with re-runs beside the scans, with the bodies of control flow planned, too, and planned
    tighter; then scans in segments; where there is a host budget with stacks on the host. What was compiled
    counts as measured (`request.calibration`), the others as estimated times what their like turned out to
    need.
    """
    search = _Search(original=jaxpr, request=request, scale=scale, tools=tools)
    if request.inside:
        return _next(search.rungs(_Rungs(jaxpr, [()], request.device), WAYS), request).candidate
    sunk = sink_into_scans(view_inside_scans(jaxpr))
    rungs = _on_ladder(sunk, request.device)
    looks = search.rungs(rungs, WAYS)
    if all(look.over for look in looks):
        looks += search.rungs(_in_segments(sunk, request.device), (ALONE, RERUNS))
    if request.host_bytes:
        looks += search.sent(rungs, _next(looks, request))
    return _next(looks, request).candidate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rewritten:
    """A program with its scans rewritten for one rung, and lifted. Compared by identity."""

    rung: Rung
    program: Any
    lifted: LiftedJaxpr


class _Rungs:
    """A program on the rungs of a ladder, each rewritten when it is first looked at."""

    def __init__(self, jaxpr: Any, rungs: Sequence[Rung], device: DeviceModel) -> None:
        self._jaxpr, self._rungs, self._device = jaxpr, rungs, device
        self._made: dict[int, _Rewritten] = {}

    def __len__(self) -> int:
        return len(self._rungs)

    def __getitem__(self, k: int) -> _Rewritten:
        if k not in self._made:
            rung = self._rungs[k]
            program = rewrite(self._jaxpr, rung) if rung else self._jaxpr
            lifted = lift(program, self._device, as_xla=True)
            self._made[k] = _Rewritten(rung=rung, program=program, lifted=lifted)
        return self._made[k]


@compat.cached_by_jaxpr
def _ladder(jaxpr: Any, device: DeviceModel) -> tuple[Rung, ...]:
    """The rungs of a program's ladder; as it is, if it has none."""
    return tuple(ladder(jaxpr, device) or [()])


@compat.cached_by_jaxpr
def _on_ladder(jaxpr: Any, device: DeviceModel) -> _Rungs:
    return _Rungs(jaxpr, _ladder(jaxpr, device), device)


@compat.cached_by_jaxpr
def _in_segments(jaxpr: Any, device: DeviceModel) -> _Rungs:
    """The program on the rungs below its ladder."""
    return _Rungs(jaxpr, segment_ladder(_ladder(jaxpr, device)[-1], device), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A candidate.

    Attributes:
        expected_bytes: what XLA is expected to need for it.
        over: whether that is over the budget.
        tried: True if the expectation was measured.
    """

    candidate: Candidate
    expected_bytes: int
    over: bool
    tried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What is the same for all candidates of one search.

    Attributes:
        original: the program as it came.
        scale: estimated over real bytes of temporaries, before anything was compiled.
    """

    original: Any
    request: JaxprRequest
    scale: float
    tools: Tools

    def rungs(self, rungs: _Rungs, ways: Sequence[int]) -> list[_Look]:
        """Candidates of some rungs, among them the cheapest that fits.

        Bytes fall along the ladder, so the first rung that fits is found by bisection; others may be cheaper.
        """
        found: dict[tuple[int, int], _Look] = {}

        def look(k: int, way: int) -> _Look:
            if (k, way) not in found:
                found[k, way] = self._look(rungs[k], way, lowest=k == len(rungs) - 1)
            return found[k, way]

        for way in ways:
            low, high = 0, len(rungs)
            while low < high:
                middle = (low + high) // 2
                if look(middle, way).over:
                    low = middle + 1
                else:
                    high = middle
            if low < len(rungs):
                above = range(max(0, low - RUNGS_ABOVE), low)
                below = range(low, min(low + 1 + RUNGS_BELOW, len(rungs)))
                for k in below:
                    look(k, way)
                for k in above:
                    look(k, min(way + 1, ways[-1]))
                best = min(found, key=lambda at: _rank(found[at]))
                if BODIES in ways:  # planned bodies may be cheaper even where nothing asks for fewer bytes
                    look(best[0], BODIES)
                break
        return list(found.values())

    def sent(self, rungs: _Rungs, here: _Look) -> list[_Look]:
        """Candidates with stacks on the host: on some rungs of the ladder, on the best also with its bodies
        planned and with re-runs beside the scans.

        Args:
            here: the best without; where that fits, only what may cost less is looked at.
        """
        last = len(rungs) - 1
        found: dict[int, _Look] = {}
        for k in sorted({round(n * last / (RUNGS_SENT - 1)) for n in range(RUNGS_SENT)}):
            if not here.over and rungs[k].lifted.program.cost_ns >= here.candidate.cost_ns:
                continue
            if (look := self._sent(rungs[k], ALONE)) is not None:
                found[k] = look
        if not found:
            return []
        best = min(found, key=lambda k: _rank(found[k]))
        deeper = self._sent(rungs[best], BODIES)
        return [*found.values(), *([] if deeper is None else [deeper])]

    def _sent(self, rung: _Rewritten, way: int) -> _Look | None:
        """One rung with as few stacks on the host as make it fit; None where none can be sent."""
        request = self.request
        program, as_is = rung.program, rung.lifted
        if way == BODIES:
            program, as_is = self._with_bodies(program, as_is, 1)
        ratio = self._ratio(f"{SCANS}+{SENT}", self.tools.alone(as_is).peak_bytes, 1 / self.scale)
        limit_bytes = request.temp_budget_bytes

        def excess_of(written: Any) -> int:
            alone = self.tools.alone(lift(written, request.device, as_xla=True))
            return round(alone.peak_bytes * ratio) - limit_bytes

        sent = sent_to_host(program, request.device, request.host_bytes, excess_of)
        if sent is None:
            return None
        lifted = lift(sent.program, request.device, as_xla=True)

        def named(made: Candidate) -> Candidate:
            return replace(
                made, scans=rung.rung, rewritten=True, bodies=program is not rung.program,
                paged=sent.paged, cost_ns=made.cost_ns + sent.waiting_ns,
            )  # fmt: skip

        alone = self._expect(named(self.tools.alone(lifted)), ratio)
        if way == ALONE or not alone.over:
            return alone
        searched = named(self.tools.search(lifted, request, 1 / ratio))
        return min(alone, self._expect(searched, ratio), key=_rank)

    def _look(self, rung: _Rewritten, way: int, *, lowest: bool) -> _Look:
        """One rung in one of the `WAYS`; the lowest is not given up before it was compiled itself."""
        request = self.request
        program, as_is = rung.program, rung.lifted
        if way in (BODIES, TIGHTER):
            program, as_is = self._with_bodies(program, as_is, 2 if way == TIGHTER else 1)

        def named(made: Candidate) -> Candidate:
            rewritten, bodies = program is not self.original, program is not rung.program
            return replace(made, scans=rung.rung, rewritten=rewritten, bodies=bodies)

        alone = named(self.tools.alone(as_is))
        ratio = self._ratio(alone.planner, alone.peak_bytes, 1 / self.scale)
        found = self._expect(alone, 1 / self.scale / UNKNOWN_RATIO if lowest else ratio)
        if way == ALONE or not found.over:
            return found
        ratio = self._ratio(f"{alone.planner}+{request.planner}", request.temp_budget_bytes, ratio)
        searched = named(self.tools.search(as_is, request, 1 / ratio))
        return found if searched.peak_bytes == alone.peak_bytes else self._expect(searched, ratio)

    def _with_bodies(self, program: Any, as_is: LiftedJaxpr, aims: int) -> tuple[Any, LiftedJaxpr]:
        """A program with its bodies planned, and lifted; a second aim is lower by what the first missed."""
        device = self.request.device
        target_bytes = max(int(self.request.temp_budget_bytes * self.scale), 1)
        aim_bytes = min(target_bytes, int(BODIES_RATIO * self.tools.alone(as_is).peak_bytes))
        for _ in range(aims):
            planned = fit_bodies(
                program,
                device,
                aim_bytes,
                lambda body, nbytes: self.tools.plan_body(body, nbytes, self.request),
            )
            lifted = lift(planned, device, as_xla=True)
            excess_bytes = self.tools.alone(lifted).peak_bytes - target_bytes
            if excess_bytes <= 0:
                break
            aim_bytes = max(aim_bytes - 2 * excess_bytes, 1)
        return planned, lifted

    def _expect(self, made: Candidate, ratio: float) -> _Look:
        known = tried(self.request.calibration.measured, made.planner, made.peak_bytes)
        nbytes = round(made.peak_bytes * ratio) if known is None else known.temp_bytes
        over = nbytes > self.request.temp_budget_bytes
        return _Look(candidate=made, expected_bytes=nbytes, over=over, tried=known is not None)

    def _ratio(self, planner: str, estimated_bytes: int, prior_ratio: float) -> float:
        return expected_ratio(self.request.calibration.measured, planner, estimated_bytes, prior_ratio)


def _next(looks: Sequence[_Look], request: JaxprRequest) -> _Look:
    """What to compile: what is expected to be best; once that was compiled, what may be better still."""
    best = min(looks, key=_rank)
    if best.over or not best.tried:
        return best

    def may_fit(look: _Look) -> bool:
        known = any(m.planner == look.candidate.planner for m in request.calibration.measured)
        return look.expected_bytes <= (KNOWN_RATIO if known else UNKNOWN_RATIO) * request.temp_budget_bytes

    def is_worth_it(look: _Look) -> bool:
        cheaper = look.candidate.cost_ns <= CHEAPER_RATIO * best.candidate.cost_ns
        return not look.tried and cheaper and may_fit(look)

    return min(filter(is_worth_it, looks), key=lambda look: look.expected_bytes, default=best)


def _rank(look: _Look) -> tuple[int, int, int]:
    """Within the budget by time; then by bytes, what was not tried first. Smaller is better."""
    if look.over:
        return 1 + look.tried, look.expected_bytes, look.candidate.cost_ns
    return 0, look.candidate.cost_ns, look.expected_bytes
