"""Programs with control flow: which level of the scans' frontier, and what is done beside it.

A body is planned by the whole jaxpr stage, which calls this; so that nothing points back at it, the stage's
function comes as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from passes.jaxpr.bodies import fit_bodies
from passes.jaxpr.candidate import Candidate, JaxprRequest
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.lift import lift
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.scans.chains import in_pairs, recomputed_in
from passes.jaxpr.scans.host_choice import sent_to_host
from passes.jaxpr.scans.levels import Levels, Rewritten, by_hand, in_segments, on_frontier
from passes.jaxpr.scans.pairs import with_open_pairs
from passes.jaxpr.straight import as_it_is, lift_as_xla, search
from passes.objective import Price
from passes.outcome import Recomputed
from passes.planners import cut_bound
from passes.recipe import Recipe, Scans

# (open jaxpr of a body, by how many bytes its temporaries are too many, request) -> an open jaxpr.
type PlanBody = Callable[[Jaxpr, int, JaxprRequest], Jaxpr]

WAYS = (ALONE, RECOMPUTES, BODIES, TIGHTER) = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredConfig:
    """What is looked at beside the first level that fits; set by `benchmarks.scan` and `benchmarks.promise`.

    Attributes:
        levels_above: how many levels of more bytes, with one thing more done beside the scans.
        levels_below: how many levels of fewer bytes, which may be cheaper.
        aims_between: how often it is aimed at a number of iterations on the level above the first that fits.
        between_ratio: what scans in two parts may cost of one; their bodies are compiled twice.
        levels_sent: how many, spread over the frontier, with stacks on the host.
        bodies_ratio: where a program fits its bodies are planned for this share of what it needs: that may be
            cheaper.
        unknown_ratio, known_ratio: by how much an estimate may be off, if XLA has seen nothing of the
            kind, or something.
        cheaper_ratio: what is expected to cost more than this share of the best is not worth another compile.
        saved_ratio: what freer kernels may cost of their bound, as far as nothing is known.
        hoped_ratio: by how much more of its bound a level is expected to save than the best does.
        promised_ratio: what planned bodies must promise, of the best, to be planned.
    """

    levels_above: int = 2
    levels_below: int = 3
    aims_between: int = 3
    between_ratio: float = 0.99
    levels_sent: int = 6
    bodies_ratio: float = 0.9
    unknown_ratio: float = 1.25
    known_ratio: float = 1.05
    cheaper_ratio: float = 0.95
    saved_ratio: float = 0.95
    hoped_ratio: float = 0.998
    promised_ratio: float = 0.995


CONFIG = StructuredConfig()


def search_structured(
    as_is: LiftedJaxpr, request: JaxprRequest, scale: float, plan_body: PlanBody
) -> Candidate:
    """The cheapest candidate that fits, among the scans' levels and what can be done beside them.

    A level alone, with recomputes beside the scans, with the bodies of control flow planned, too, and planned
    tighter; what ready policies of `jax.checkpoint` keep; all of that with scans in pairs that read stacks of
    several; then scans in segments; where there is a host budget with stacks on the host. What was compiled
    counts as measured (`request.calibration`), the others as estimated times what their like turned out to
    need.
    """
    jaxpr = as_is.jaxpr
    search_for = _Search(
        original=jaxpr, base_ns=as_is.seen.cost_ns, request=request, scale=scale, plan_body=plan_body
    )
    if request.inside:
        return _taken(search_for.levels(Levels(jaxpr, [()], request.device), WAYS), request, scale)
    opened = with_open_pairs(jaxpr)
    paired = in_pairs(opened)
    searches = {opened: search_for}
    if paired is not opened:
        in_paired = replace(search_for, recomputed_before=recomputed_in(paired, request.device))
        searches = {paired: in_paired, opened: search_for}
    # What takes least energy may be too slow, so there are the levels of least time, too.
    weighed_by = dict.fromkeys(("time", request.objective.of(as_is.program).least))
    frontiers, looks = list[tuple[_Search, Levels]](), list[_Look]()
    for program, search_in in searches.items():
        # Where scans in pairs fit, the others may be faster as they are, with nothing done beside them.
        ways = WAYS if all(look.over for look in looks) else (ALONE,)
        made = [on_frontier(program, request.device, least) for least in weighed_by]
        looks += [look for levels in made for look in search_in.levels(levels, ways)]
        frontiers += [(search_in, levels) for levels in made]
    for program, search_in in searches.items():
        looks += search_in.by_hand(by_hand(program, request.device), min(looks, key=_rank))
    if request.most_ns is None and all(look.over for look in looks):
        for least in weighed_by:
            below = in_segments(paired, request.device, least)
            looks += searches[paired].levels(below, (ALONE, RECOMPUTES))
    if request.host_bytes:
        here = _next(looks, request)
        looks += [look for search_in, levels in frontiers for look in search_in.sent(levels, here)]
    return _taken(looks, request, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A candidate.

    Attributes:
        price: what the objective makes of its time and energy.
        expected_bytes: what XLA is expected to need for it.
        over: whether that is over the budget.
        tried: True if the expectation was measured.
        bound: of recomputes beside the scans, by price, where there are any.
    """

    candidate: Candidate
    price: Price
    expected_bytes: int
    over: bool
    tried: bool
    bound: Price | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What is the same for all candidates of one search.

    Attributes:
        original: the program as it came.
        base_ns: its time.
        scale: estimated over real bytes of temporaries, before anything was compiled.
        recomputed_before: what scans recompute before they are on any level.
    """

    original: Jaxpr
    base_ns: int
    request: JaxprRequest
    scale: float
    plan_body: PlanBody
    recomputed_before: tuple[Recomputed, ...] = ()

    def levels(self, levels: Levels, ways: Sequence[int]) -> list[_Look]:
        """Candidates of some levels, among them the cheapest that fits.

        Bytes fall along the frontier, so the first level that fits is found by bisection; others may be
        cheaper.
        """
        looks: dict[tuple[int, int], _Look] = {}
        in_parts: list[_Look] = []

        def look(k: int, way: int) -> _Look:
            if (k, way) not in looks:
                lowest = k == len(levels) - 1 and not self.request.inside
                at = min(looks, key=lambda at: _rank(looks[at]), default=None)
                best = None if at is None else looks[at]
                if at and best and way >= BODIES and not self._promises(levels[k], best, levels[at[0]]):
                    return look(k, ALONE)
                looks[k, way] = self._look(levels[k], way, lowest=lowest, than=best)
            return looks[k, way]

        for way in ways:
            low, high = 0, len(levels)
            if way == RECOMPUTES and high and not look(least := self._least(levels), way).over:
                low = high = least
            while low < high:
                middle = (low + high) // 2
                if look(middle, way).over:
                    low = middle + 1
                else:
                    high = middle
            if low < len(levels):
                above = range(max(0, low - CONFIG.levels_above), low)
                below = range(low, min(low + 1 + CONFIG.levels_below, len(levels)))
                for k in below:
                    look(k, way)
                for k in above:
                    look(k, min(way + 1, ways[-1]))
                if way == ALONE and low:
                    in_parts = self._in_parts(levels, low, look(low - 1, way), look(low, way))
                best = min(looks, key=lambda at: _rank(looks[at]))
                if BODIES in ways:  # planned bodies may be cheaper even where nothing asks for fewer bytes
                    look(best[0], BODIES)
                break
        return [*looks.values(), *in_parts]

    def _promises(self, level: Rewritten, best: _Look, of: Rewritten) -> bool:
        """False if a level's bodies, planned, are expected to make it no cheaper than the `best`, a way `of`
        another level.

        What the best saves beside its level, and what that costs, says what a level costs that must save
        more: in proportion at least. What must save less may do so for the square of that.
        """
        target_bytes = int(self.request.temp_budget_bytes * self.scale)
        own, here = (as_it_is(each.lifted, self.request.fresh) for each in (of, level))
        saved_bytes = own.peak_bytes - target_bytes
        if best.over or saved_bytes <= 0 or of is level:
            return True
        share = max(0, here.peak_bytes - target_bytes) / saved_bytes
        extra = (best.price[1] - self._price(own)[1]) * share * min(share, 1)
        return self._price(here)[1] + extra < CONFIG.promised_ratio * best.price[1]

    def _least(self, levels: Levels) -> int:
        """The level whose recomputes beside the scans have the least bound; bounds fall, then rise."""

        def bound(k: int) -> Price | None:
            return self._bound(as_it_is(levels[k].lifted), int(self.request.temp_budget_bytes * self.scale))

        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            here, below = bound(middle), bound(middle + 1)
            if here is None or (below is not None and below < here):
                low = middle + 1
            else:
                high = middle
        return low

    def _in_parts(self, levels: Levels, k: int, higher: _Look, lower: _Look) -> list[_Look]:
        """The last iterations of the scans on the level above `k`, as many as fit; on level `k` all fit.

        Args:
            higher, lower: these two levels alone.
        """
        limit_bytes, share, over_bytes = self.request.temp_budget_bytes, 1.0, higher.expected_bytes
        for _ in range(CONFIG.aims_between):
            share *= (limit_bytes - lower.expected_bytes) / max(1, over_bytes - lower.expected_bytes)
            level = levels.between(k, share)
            if level is None:
                break
            look = self._look(level, ALONE)
            if not look.over:
                is_worth_it = look.price <= (lower.price[0], CONFIG.between_ratio * lower.price[1])
                return [look] if is_worth_it else []
            over_bytes = look.expected_bytes
        return []

    def by_hand(self, levels: Levels, best: _Look) -> list[_Look]:
        """Every level without anything beside it, and between the first that fits and the one above it, where
        that promises less than the `best`."""
        looks = [self._look(levels[k], ALONE) for k in range(len(levels))]
        k = next((k for k, look in enumerate(looks) if not look.over), 0)
        if not k:
            return looks
        higher, lower = looks[k - 1], looks[k]
        spare_bytes = self.request.temp_budget_bytes - lower.expected_bytes
        share = spare_bytes / max(1, higher.expected_bytes - lower.expected_bytes)
        hoped = higher.price[1] * share + lower.price[1] * (1 - share)
        if (lower.price[0], hoped) < min(best, *looks, key=_rank).price:
            looks += self._in_parts(levels, k, higher, lower)
        return looks

    def sent(self, levels: Levels, here: _Look) -> list[_Look]:
        """Candidates with stacks on the host: on some levels of the frontier, on the best also with its
        bodies planned and with recomputes beside the scans.

        Args:
            here: the best without; where that fits, only what may cost less is looked at.
        """
        last = len(levels) - 1
        looks: dict[int, _Look] = {}
        for k in sorted({round(n * last / (CONFIG.levels_sent - 1)) for n in range(CONFIG.levels_sent)}):
            if not here.over and self._price(as_it_is(levels[k].lifted)) >= here.price:
                continue
            if (look := self._sent(levels[k], ALONE)) is not None:
                looks[k] = look
        if not looks:
            return []
        best = min(looks, key=lambda k: _rank(looks[k]))
        deeper = self._sent(levels[best], BODIES)
        return [*looks.values(), *([] if deeper is None else [deeper])]

    def _sent(self, level: Rewritten, way: int) -> _Look | None:
        """One level with as few stacks on the host as make it fit; None where none can be sent."""
        request = self.request
        program, lifted = level.program, level.lifted
        if way == BODIES:
            program, lifted = self._with_bodies(program, lifted, 1)
        here = as_it_is(lifted, request.fresh)
        ratio = self._ratio(Recipe(scans=Scans.LEVELS, on_host=True), here.peak_bytes, 1 / self.scale)
        limit_bytes = request.temp_budget_bytes

        def excess_of(written: Jaxpr) -> int:
            peak_bytes = as_it_is(lift(written, request.device, as_xla=True), request.fresh).peak_bytes
            return round(peak_bytes * ratio) - limit_bytes

        sent = sent_to_host(program, request.device, request.host_bytes, excess_of)
        if sent is None:
            return None
        lifted = lift(sent.program, request.device, as_xla=True)

        def named(made: Candidate) -> Candidate:
            return replace(
                made, scans=level.level, recomputed_before=self.recomputed_before, rewritten=True,
                bodies=program is not level.program, paged=sent.paged, cost_ns=made.cost_ns + sent.waiting_ns,
                energy_pj=made.energy_pj + sent.energy_pj,
            )  # fmt: skip

        alone = self._expect(named(as_it_is(lifted, request.fresh)), ratio)
        if way == ALONE or not alone.over:
            return alone
        searched = named(search(lifted, request, 1 / ratio, of_many=True))
        return min(alone, self._expect(searched, ratio), key=_rank)

    def _look(self, level: Rewritten, way: int, *, lowest: bool = False, than: _Look | None = None) -> _Look:
        """One level in one of the `WAYS`; the lowest is not given up before it was compiled itself, as no
        body ever is.

        Args:
            than: what fits already, if it does: nothing is recomputed beside what cannot become cheaper.
        """
        request = self.request
        program, as_is = level.program, level.lifted
        if request.most_ns is not None and as_is.seen.cost_ns >= request.most_ns:
            way = ALONE  # what more is done costs more
        if way in (BODIES, TIGHTER):
            program, as_is = self._with_bodies(program, as_is, 2 if way == TIGHTER else 1)

        def named(made: Candidate) -> Candidate:
            rewritten, bodies = program is not self.original, program is not level.program
            return replace(
                made,
                scans=level.level,
                recomputed_before=self.recomputed_before,
                rewritten=rewritten,
                bodies=bodies,
            )

        alone = named(as_it_is(as_is, request.fresh))
        ratio = self._ratio(alone.recipe, alone.peak_bytes, 1 / self.scale)
        expected = self._expect(alone, 1 / self.scale / CONFIG.unknown_ratio if lowest else ratio)
        if way == ALONE or not expected.over:
            return expected
        beside = replace(alone.recipe, recompute=request.planner)
        ratio = self._ratio(beside, request.temp_budget_bytes, ratio)
        bound = self._bound(alone, int(request.temp_budget_bytes / ratio))
        if bound is not None and than is not None and not than.over and _is_hopeless(bound, than):
            return expected
        searched = named(search(as_is, request, 1 / ratio, of_many=True))
        if searched.peak_bytes == alone.peak_bytes:
            return expected
        return replace(self._expect(searched, ratio), bound=bound)

    def _bound(self, alone: Candidate, temp_bytes: int) -> Price | None:
        """What recomputes beside the scans do not go below, but for the traffic that freer kernels save; None
        where only such kernels may need so few bytes."""
        ratio = cut_bound(alone.lifted.program, temp_bytes, n_cuts=2)
        if math.isinf(ratio):
            return None
        return self._price(replace(alone, cost_ns=round(alone.cost_ns * (1 + ratio))))

    def _with_bodies(self, program: Jaxpr, as_is: LiftedJaxpr, aims: int) -> tuple[Jaxpr, LiftedJaxpr]:
        """A program with its bodies planned, and lifted; a second aim is lower by what the first missed."""
        device, fresh = self.request.device, self.request.fresh
        target_bytes = max(int(self.request.temp_budget_bytes * self.scale), 1)
        peak_bytes = as_it_is(as_is, fresh).peak_bytes
        aim_bytes = target_bytes if target_bytes < peak_bytes else int(CONFIG.bodies_ratio * peak_bytes)
        for _ in range(aims):
            planned = fit_bodies(
                program, device, aim_bytes, lambda body, excess: self.plan_body(body, excess, self.request)
            )
            lifted = as_is if planned is program else lift_as_xla(planned, device)
            excess_bytes = as_it_is(lifted, fresh).peak_bytes - target_bytes
            if excess_bytes <= 0:
                break
            aim_bytes = max(aim_bytes - 2 * excess_bytes, 1)
        return planned, lifted

    def _expect(self, made: Candidate, ratio: float) -> _Look:
        known = self.request.calibration.tried(made.recipe, made.peak_bytes)
        nbytes = round(made.peak_bytes * ratio) if known is None else known.temp_bytes
        over = nbytes > self.request.temp_budget_bytes
        return _Look(
            candidate=made, price=self._price(made), expected_bytes=nbytes, over=over, tried=known is not None
        )

    def _price(self, made: Candidate) -> Price:
        return self.request.objective.price(
            cost_ns=made.cost_ns, energy_pj=made.energy_pj, base_ns=self.base_ns
        )

    def _ratio(self, recipe: Recipe, estimated_bytes: int, prior_ratio: float) -> float:
        return self.request.calibration.expected_ratio(recipe, estimated_bytes, prior_ratio)


def _taken(looks: Sequence[_Look], request: JaxprRequest, scale: float) -> Candidate:
    """What to compile, and whether something else may follow from what XLA makes of it."""
    taken = _next(looks, request)
    most_bytes = CONFIG.unknown_ratio * request.temp_budget_bytes
    near = (look for look in looks if look.price < taken.price and not look.tried)
    unrivalled = not taken.over and all(look.expected_bytes > most_bytes for look in near)
    return replace(taken.candidate, hoped_bytes=int(taken.expected_bytes * scale), unrivalled=unrivalled)


def _next(looks: Sequence[_Look], request: JaxprRequest) -> _Look:
    """What to compile: what is expected to be best; once that was compiled, what may be better still."""
    best = min(looks, key=_rank)
    if best.over or not best.tried:
        return best

    def may_fit(look: _Look) -> bool:
        known = request.calibration.alike(look.candidate.recipe)
        ratio = CONFIG.known_ratio if known else CONFIG.unknown_ratio
        return look.expected_bytes <= ratio * request.temp_budget_bytes

    def is_worth_it(look: _Look) -> bool:
        cheaper = look.price <= (best.price[0], CONFIG.cheaper_ratio * best.price[1])
        return not look.tried and cheaper and may_fit(look)

    return min(filter(is_worth_it, looks), key=lambda look: look.expected_bytes, default=best)


def _is_hopeless(bound: Price, best: _Look) -> bool:
    """True if nothing with a bound is expected to be cheaper than the best, which may be below its own."""
    saved_ratio = CONFIG.saved_ratio if best.bound is None else min(1.0, best.price[1] / best.bound[1])
    return (bound[0], CONFIG.hoped_ratio * saved_ratio * bound[1]) >= best.price


def _rank(look: _Look) -> tuple[int, ...]:
    """Within the budget by price; then by bytes, what was not tried first. Smaller is better."""
    if look.over:
        return 1 + look.tried, look.expected_bytes, *look.price
    return 0, *look.price, look.expected_bytes
