"""What the search tries, in order: each strategy adds candidates to a pool (`passes.planners.candidate`).

`STRATEGIES` plan for a budget, `DEEPEST` for the lowest peak, `PLACING` for a budget that counts holes, too.
To add one, write a function and name it in a list; `PlannerConfig.without` switches one off by its name, and
`tests/test_strategies.py` has a program for each that is planned worse without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from passes.planners.candidate import Candidate, CandidatePool, WorkLimit
from passes.planners.cut import Style, deepen, descend, lower_to, relax
from passes.planners.greedy import evict_one_by_one
from passes.planners.neighbourhood import improve
from passes.planners.placing import end_of, walks, with_offsets, with_slack
from passes.planners.schedule import Schedule, prune
from passes.planners.segments import in_segments
from passes.planners.state import SEARCH, SearchState


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """How the strategies go about it; limits as in `SearchState.work`, ratios of the budget or the peak.

    Attributes:
        portfolio: the styles of cuts from the start, the most telling first. `benchmarks.planners`: with four
            of them 17 of 108 cells cost more, and 5 less.
        cuts_limits: what each style may take: where the first gets stuck others plan well with a tenth of
            that. `benchmarks.side_by_side`: a ViT's plans for .18 to .2 of its bytes cost 23 to 53 % where
            the first took it all, else 18 to 20.
        missed_cuts_limits: what cuts may take in all where every style misses the budget: the first goes on.
        evict_units_per_op, evict_limits: one-by-one evictions need so much work to be left, and take this
            share of it.
        evict_tried: how many evictions are looked at each time.
        segments: into how many the forward pass is divided. With the limits of a compile random_layered_100
            costs 94 % at .6 without, 47 with them, an MLP of 36 blocks at .058 of its peak 46 and 38.
        far_ratio: they are tried where cuts cost more than the bound by so much of it.
        segments_limits: what each number of them may take.
        low_styles: those of the bisection for the lowest peak. `benchmarks.planners`, column "least".
        near_ratio: where the bisection ends.
        restarts: from how many of the other candidates neighbourhoods are searched, too.
        tighter_ratios: shares of the budget that placed plans are made for. `benchmarks.planners`:
            random_layered_250 costs 4.6 instead of 5.3 % at .8 with the first.
        near_placed: a placed plan may cost so much more than the plan that it comes from.
        most_items: how many steps the first of them is worth its time for.
        huge_ops: from so many on neighbourhoods take no more than what cuts left. `benchmarks.scale`.
    """

    portfolio: tuple[Style, ...] = (
        Style(tilt_ratio=0.1),
        Style(tilt_ratio=0.1, filled=0, fitting=False),
        Style(stages=4, filled=0, fitting=False),
        Style(reserve_ratio=0.06),
        Style(tilt_ratio=-0.3, filled=0),
        Style(stages=3, tilt_ratio=0.1, fitting=False),
        Style(tilt_ratio=0.1, below_ratio=0.04),
        Style(stages=4),
        Style(reserve_ratio=0.1, filled=0, fitting=False),
        Style(stages=2),
        Style(stages=12, tilt_ratio=0.1),
        Style(stages=6, filled=0),
        Style(stages=4, reserve_ratio=0.1),
        Style(reserve_ratio=0.2),
    )
    cuts_limits: float = 1 / 3
    missed_cuts_limits: float = 3.0
    evict_units_per_op: int = 1000
    evict_limits: float = 1 / 2
    evict_tried: int = 8
    segments: tuple[int, ...] = (6, 16, 24)
    far_ratio: float = 0.1
    segments_limits: float = 1 / 3
    low_styles: tuple[Style, ...] = (
        Style(tilt_ratio=0.1),
        Style(reserve_ratio=0.06),
        Style(stages=4, tilt_ratio=0.1),
        Style(tilt_ratio=-0.3, fitting=False),
    )
    near_ratio: float = 0.004
    restarts: int = 3
    tighter_ratios: tuple[float, ...] = (0.995, 0.985, 0.97, 0.95, 0.92, 0.88)
    near_placed: float = 0.004
    most_items: int = 400
    huge_ops: int = 2000


CONFIG = StrategyConfig()


def cuts(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """Minimum cuts at the peaks, from the start, in several styles until the work limit or near the bound."""
    if state.start.peak_bytes > pool.best.peak_bytes > pool.budget_bytes:
        yield lower_to(state.graph, pool.best.steps, pool.budget_bytes, work)
    for style in CONFIG.portfolio:
        part = WorkLimit(int(work.limit * CONFIG.cuts_limits))
        yield descend(state.graph, state.start, pool.budget_bytes, part, style)
        work.done += part.done
        if not work.left or state.is_near(pool):
            break


def longer_cuts(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The first style of cuts goes on where every style misses the budget."""
    part = WorkLimit(int(work.limit * CONFIG.missed_cuts_limits) - work.done)
    yield descend(state.graph, state.start, pool.budget_bytes, part, CONFIG.portfolio[0])
    work.done += part.done


def segments(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The forward pass in segments, lowered by cuts from there, where cuts alone are far above the bound."""
    for count in CONFIG.segments:
        if state.is_near(pool, CONFIG.far_ratio * state.bound_at(pool.budget_bytes)):
            break
        part = WorkLimit(int(CONFIG.segments_limits * work.limit))
        schedule = Schedule(state.graph, in_segments(state.graph, state.forward_end, count))
        prune(schedule)
        yield lower_to(state.graph, schedule.compact(), pool.budget_bytes, part)
        work.done += part.done


def evictions(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """One value at a time is evicted, on programs small enough for it."""
    left = work.limit - work.done
    if CONFIG.evict_units_per_op * state.n_ops <= left and not state.is_near(pool):
        part = WorkLimit(int(CONFIG.evict_limits * left))
        yield evict_one_by_one(state.graph, state.start, pool.budget_bytes, part, CONFIG.evict_tried)
        work.done += part.done


def led_below(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """A search around the candidate of lowest peak that leads it below its own peak, time and again."""
    if not state.is_impossible(pool.budget_bytes):
        floor_ns = state.start.cost_ns
        yield improve(state.graph, pool.best, pool.budget_bytes, floor_ns, work, state.kinds)


def relaxed(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The deepest candidate, which belongs to the program, with fewer recomputes: as many as fit."""
    yield relax(state.graph, deepest(state), pool.budget_bytes)


def neighbourhoods(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """Large neighbourhoods of the best candidates: some recomputes out, cuts to repair it."""
    near_overhead = state.config.near_overhead
    floor_ns = state.floor_ns(pool.budget_bytes, near_overhead)
    for seed, start in enumerate((pool.best, *pool.others(CONFIG.restarts))):
        if state.is_near(pool, near_overhead) or not work.left:
            return
        yield improve(state.graph, start, pool.budget_bytes, floor_ns, work, state.kinds, seed)


def deepest(state: SearchState) -> Candidate:
    """The sequence of lowest peak that is found; it does not depend on any budget."""
    if state.deepest is None:
        pool = CandidatePool(state.working_set_bytes, state.start)
        run_all(state, DEEPEST, pool)
        state.deepest = pool.best
    return state.deepest


def small_steps(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """Cuts of the best candidate to a little below its own peak, again and again."""
    yield deepen(state.graph, pool.best, pool.budget_bytes, work)


def bisection(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """Halve the bytes between the bound and the best: cuts from the start, else from the best."""
    low_bytes = pool.budget_bytes
    while pool.best.peak_bytes - low_bytes > CONFIG.near_ratio * pool.best.peak_bytes and work.left:
        known, level_bytes = pool.best, (pool.best.peak_bytes + low_bytes) // 2
        for style in CONFIG.low_styles:
            if pool.best.peak_bytes > level_bytes and work.left:
                yield descend(state.graph, state.start, level_bytes, work, style)
        if pool.best.peak_bytes > level_bytes:
            yield lower_to(state.graph, known.steps, level_bytes, work)
        if pool.best.peak_bytes > level_bytes:
            low_bytes = level_bytes


def pool_walks(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterable[Candidate]:
    """The schedule run in an address-ordered pool from which windows are evicted, placed as it ran."""
    return walks(state.graph, pool, work)


def tighter(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The plan made for a little less than the budget, so that packing has some bytes to lose."""
    if len(pool.first.steps) <= CONFIG.most_items:
        yield _tighter(state, pool, CONFIG.tighter_ratios[0], work)


def slack(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The plan made anew with slack in the slots where packing got stuck, some of which is taken back."""
    slackened = with_slack(state.graph, state.start, pool.first, pool.budget_bytes, work)
    if slackened is not None:
        yield slackened


def much_tighter(state: SearchState, pool: CandidatePool, work: WorkLimit) -> Iterator[Candidate]:
    """The plan made for ever less than the budget, until one can be packed or is too dear."""
    ratios = CONFIG.tighter_ratios[1:]
    for ratio in ratios:
        most_ns = pool.least_ns
        placed = _tighter(state, pool, ratio, WorkLimit(work.limit // len(ratios)))
        yield placed
        if placed.cost_ns >= most_ns or end_of(state.graph, placed) <= pool.budget_bytes:
            return


def _tighter(state: SearchState, pool: CandidatePool, ratio: float, work: WorkLimit) -> Candidate:
    """A sequence for a share of the budget, or near it, with offsets."""
    target_bytes = int(pool.budget_bytes * ratio)
    lower = lower_to(state.graph, pool.first.steps, target_bytes, work)
    lower = improve(state.graph, lower, target_bytes, state.start.cost_ns, work, state.kinds)
    return with_offsets(state.graph, lower, pool.budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to find candidates.

    Attributes:
        name: what `PlannerConfig.without` calls it.
        run: makes candidates, lazily; its docstring says how.
        when: whether it is run "always", or only while the budget is "missed" or "kept".
        limits: of its clock, as in `SearchState.work`, for a program.
        after: whose clock it goes on with where `limits` are 0.0: the first that ran.
        rest: the limits of a fresh clock where nothing is left of that one.
        own: whether its clock counts apart from the total.
    """

    name: str
    run: Callable[[SearchState, CandidatePool, WorkLimit], Iterable[Candidate]]
    when: Literal["always", "missed", "kept"] = "always"
    limits: Callable[[SearchState], float] = lambda state: 1.0
    after: tuple[str, ...] = ()
    rest: float = 0.0
    own: bool = False


def _none(state: SearchState) -> float:
    """Another strategy's clock goes on."""
    return 0.0


def _around(state: SearchState) -> float:
    """Neighbourhoods take most where nobody waits and where a step does not take long."""
    if state.n_ops >= CONFIG.huge_ops or (state.config.quick and state.n_ops >= SEARCH.large_ops):
        return 0.0
    if state.config.quick:
        return 0.7
    return 3.0 if state.n_ops < SEARCH.large_ops else 2.0


_AUTO = (
    Strategy(name="cuts", run=cuts),
    Strategy(name="longer cuts", run=longer_cuts, when="missed", limits=_none, after=("cuts",)),
    Strategy(name="segments", run=segments, own=True),
    Strategy(name="evictions", run=evictions, limits=_none, after=("cuts",)),
    Strategy(name="led below", run=led_below, when="missed", limits=lambda state: 2.0),
    Strategy(name="relaxed", run=relaxed, when="missed", limits=_none, after=("cuts",)),
    Strategy(
        name="neighbourhoods", run=neighbourhoods, when="kept", limits=_around, after=("cuts",), rest=1 / 3
    ),
)
# What is tried where all else misses the budget; most of the work.
LAST_RESORTS = frozenset({"longer cuts", "led below", "relaxed", "small steps", "bisection"})
# What each planner that searches tries for a budget.
STRATEGIES = {"auto": _AUTO, "cut": _AUTO[:-1], "window": (Strategy(name="walks", run=pool_walks),)}
DEEPEST = (
    Strategy(name="cuts", run=cuts, own=True),
    Strategy(name="longer cuts", run=longer_cuts, when="missed", limits=_none, after=("cuts",)),
    Strategy(name="small steps", run=small_steps, when="missed", limits=lambda state: 1 / 3, own=True),
    Strategy(name="bisection", run=bisection, when="missed", own=True),
)
# How a plan is made again where its live bytes keep the budget, and its addresses do not.
PLACING = (
    Strategy(name="tighter", run=tighter, when="missed", limits=lambda state: 2 / 3, own=True),
    Strategy(name="slack", run=slack, when="missed", limits=lambda state: 7 / 3, own=True),
    Strategy(name="much tighter", run=much_tighter, when="missed", limits=lambda state: 1.0, own=True),
)


def run_all(state: SearchState, strategies: Iterable[Strategy], pool: CandidatePool) -> None:
    """Let strategies fill a pool, in order, each while it is wanted."""
    clocks: dict[str, WorkLimit] = {}
    for strategy in strategies:
        wanted = strategy.when == "always" or (strategy.when == "kept") == pool.keeps_budget
        if not wanted or strategy.name in state.config.without:
            continue
        limits = strategy.limits(state)
        work = next((clocks[name] for name in strategy.after if name in clocks and not limits), None)
        if work is None or (strategy.rest and not work.left):
            work = (state.own_work if strategy.own else state.work)(limits or strategy.rest)
        clocks[strategy.name] = work
        pool.offer(strategy.run(state, pool, work))
