"""Large-neighbourhood search by the model with lifetimes: all recomputes in a few slots are chosen anew.

Outside of these slots recomputes may be left out, and none are offered. Where the plan is placed, live ranges
that live outside stay where they are. Neighbourhoods grow where the solver proves their optimum, and shrink
where it does not; where none helps any more, two are joined, and each gets more work. Deterministic under a
limit of work; every state is a plan within the budget that costs no more than the one before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from passes.liveness import Graph, live_ranges
from passes.planners.candidate import Candidate
from passes.planners.exact.axis import Axis
from passes.planners.exact.lifetimes import Lifetimes, add_hint, build, recompute_ns
from passes.planners.exact.limits import Clock
from passes.planners.placing import end_of
from passes.planners.schedule import slots_of
from passes.simulate import simulate_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsConfig:
    """How large neighbourhoods are; set by the rows "exact" of `benchmarks.planners`.

    Attributes:
        first_work: of the solver for a neighbourhood, in its deterministic seconds.
        more_work: how many times as much it gets where none helps any more.
        first_slots: of a neighbourhood.
        fewest_slots: of one that was too large to solve.
        patience: after how many neighbourhoods in vain each gets more.
        lower_parts: by which part of what is missing a placed plan is led lower at a time.
        build_work: of making a model, for each of its steps.
        most_offered: recomputes in a neighbourhood, all its slots together.
        fewest_offered: recomputes in a slot, however many slots there are.
    """

    first_work: float = 0.1
    more_work: float = 3.0
    first_slots: int = 6
    fewest_slots: int = 2
    patience: int = 30
    lower_parts: int = 16
    build_work: float = 1e-4
    most_offered: int = 400
    fewest_offered: int = 30


CONFIG = SlotsConfig()


def improve(
    graph: Graph, budget_bytes: int, best: Candidate, clock: Clock, floor_ns: int, keep: float = 0.0
) -> Candidate:
    """A plan that costs no more; placed if the given one is.

    Args:
        best: a plan within the budget, with offsets if these shall be within it, too.
        floor_ns: cost of all steps that is cheap enough to stop.
        keep: how much of the clock's limit is not for this.
    """
    generator = random.Random(0)
    base_ns = max(1, sum(graph.cost_ns))
    n_slots, stale, work = CONFIG.first_slots, 0, CONFIG.first_work
    try:
        while clock.left > keep and best.cost_ns > floor_ns:
            clock.say(f"plan {best.cost_ns / base_ns - 1:+.3%}, {n_slots} slots anew")
            window = _window(best.steps, len(graph.cost_ns), n_slots, generator)
            if stale > CONFIG.patience // 2:
                window |= _window(best.steps, len(graph.cost_ns), n_slots, generator)
            seed = generator.randrange(1 << 30)
            offered = _near(graph, best.steps, window)
            better, is_best = solve_slots(
                graph,
                budget_bytes,
                best,
                window,
                clock,
                most_ns=best.cost_ns,
                offered=offered,
                most_work=work,
                keep=keep,
                seed=seed,
            )
            n_slots = n_slots + 1 if is_best else max(CONFIG.fewest_slots, n_slots - 1)
            is_better = better is not None and better.cost_ns < best.cost_ns
            stale = 0 if is_better else stale + 1
            best = better or best
            if is_best and min(len(window), len(offered) + 1) > len(graph.cost_ns):
                break
            if stale >= CONFIG.patience:
                stale, n_slots, work = 0, n_slots + 2, CONFIG.more_work * work
    except KeyboardInterrupt:
        clock.stop()
    return best


def lower(
    graph: Graph, budget_bytes: int, known: Candidate, clock: Clock, *, most_ns: int | None, keep: float
) -> Candidate:
    """A placed plan that ends lower, within the budget if one is found; it may cost more.

    Args:
        known: a placed plan that ends above the budget.
        most_ns: the most that all steps may cost; None for any cost.
        keep: how much of the clock's limit is not for this.
    """
    generator = random.Random(0)
    n_slots, work = CONFIG.first_slots, CONFIG.first_work
    try:
        while clock.left > keep and (end_bytes := heap_bytes(graph, known)) > budget_bytes:
            clock.say(f"placed in {end_bytes} bytes, {end_bytes / budget_bytes - 1:.2%} too many")
            target_bytes = max(budget_bytes, end_bytes - 1 - (end_bytes - budget_bytes) // CONFIG.lower_parts)
            window = _window_above(graph, known, target_bytes, n_slots, generator)
            seed = generator.randrange(1 << 30)
            better, is_best = solve_slots(
                graph,
                target_bytes,
                known,
                window,
                clock,
                most_ns=most_ns,
                offered=_near(graph, known.steps, window),
                most_work=work,
                keep=keep,
                seed=seed,
            )
            known = better or known
            if better is None:
                n_slots = n_slots + 1 if is_best else max(CONFIG.fewest_slots, n_slots - 1)
    except KeyboardInterrupt:
        clock.stop()
    return known


def _window_above(
    graph: Graph, known: Candidate, target_bytes: int, n_slots: int, generator: random.Random
) -> frozenset[int]:
    """Slots around where a live range ends above a target; all where only scratch memory does."""
    slots = slots_of(known.steps)
    ranges = live_ranges(graph, known.steps)
    at = [offset for row in known.offsets for offset in row]
    high = [
        c for c, b in enumerate(ranges.buffer) if graph.nbytes[b] and at[c] + graph.nbytes[b] > target_bytes
    ]
    positions = [position for c in high for position in range(ranges.start[c], ranges.stop[c])]
    middle = slots[generator.choice(positions)] if positions else generator.randrange(len(graph.cost_ns))
    return _around(middle, n_slots, len(graph.cost_ns), generator)


def heap_bytes(graph: Graph, placed: Candidate) -> int:
    """The end of the highest live range, and of scratch memory at the lowest offsets left to it."""
    ranges = live_ranges(graph, placed.steps)
    at = [offset for row in placed.offsets for offset in row]
    highest = end_of(graph, placed)
    for position, op in enumerate(placed.steps):
        if work := graph.workspace_bytes[op]:
            alive = sorted(
                (at[c], at[c] + graph.nbytes[b])
                for c, b in enumerate(ranges.buffer)
                if ranges.start[c] <= position < ranges.stop[c] and graph.nbytes[b]
            )
            low = graph.argument_bytes
            for begin, end in alive:
                if begin - low >= work:
                    break
                low = max(low, end)
            highest = max(highest, low + work)
    return highest


def _window(steps: Sequence[int], n_ops: int, n_slots: int, generator: random.Random) -> frozenset[int]:
    """Slots around some recompute."""
    slots = [slot for op, slot in zip(steps, slots_of(steps), strict=True) if op != slot]
    return _around(generator.choice(slots), n_slots, n_ops, generator)


def _around(slot: int, n_slots: int, n_ops: int, generator: random.Random) -> frozenset[int]:
    """So many slots, one of them given."""
    first = max(0, min(slot - generator.randrange(n_slots), n_ops + 1 - n_slots))
    return frozenset(range(first, min(n_ops + 1, first + n_slots)))


def _near(graph: Graph, steps: Sequence[int], window: Collection[int]) -> frozenset[int]:
    """Ops to offer in a window: what its steps read, what passes through it, and what those are made from."""
    n_ops = len(graph.cost_ns)
    most = max(CONFIG.fewest_offered, CONFIG.most_offered // len(window))
    if most >= n_ops:
        return frozenset(range(n_ops))
    inside = [n for n, slot in enumerate(slots_of(steps)) if slot in window]
    ranges = live_ranges(graph, steps)
    passing = [
        b
        for b, start, stop in zip(ranges.buffer, ranges.start, ranges.stop, strict=True)
        if inside and start < inside[-1] < stop
    ]
    near: dict[int, None] = {}
    queue = deque([*(b for n in inside for b in graph.inputs[steps[n]]), *passing])
    while queue and len(near) < most:
        op = graph.producer[queue.popleft()]
        if op not in near:
            near[op] = None
            queue.extend(graph.inputs[op])
    return frozenset(near)


def solve_slots(
    graph: Graph,
    budget_bytes: int,
    known: Candidate,
    window: Collection[int],
    clock: Clock,
    *,
    most_ns: int | None,
    offered: Collection[int] | None = None,
    most_work: float | None = None,
    keep: float = 0.0,
    seed: int = 0,
) -> tuple[Candidate | None, bool]:
    """The best plan that is found around another one.

    Args:
        known: a plan to start from, placed if the others shall be; need not keep the budget.
        window: slots in which recomputes are offered.
        most_ns: the most that all steps may cost; None for any cost.
        offered: ops to offer there; None for all.
        most_work: a limit in the solver's deterministic seconds, besides that of the clock.
        keep: how much of the clock's limit is not for this.

    Returns:
        The plan, None if there is none or none was found; and whether nothing was left open.
    """
    recompute_limit_ns = None if most_ns is None else most_ns - sum(graph.cost_ns)
    axis = Axis.around(graph, known.steps, window, cost_limit_ns=recompute_limit_ns, offered=offered)
    positions = axis.positions(known.steps)
    offsets = _offsets_on(axis, positions, known)
    outside = _outside(axis, positions, known, window)
    pinned = {
        (p, b): at
        for (p, b), at in offsets.items()
        if (p, b) in outside and at + graph.nbytes[b] <= budget_bytes
    }
    made = build(axis, budget_bytes, placed=bool(known.offsets), offsets=pinned)
    add_hint(made, positions, offsets)
    if recompute_limit_ns is not None:
        made.model.add(recompute_ns(made) <= recompute_limit_ns)
    clock.charge(CONFIG.build_work * len(axis.steps))
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.cp_model_probing_level = 0
    code = clock.solve(solver, made.model, keep=keep, most_work=most_work)
    answer = _answer(made, solver) if code in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return answer, code in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


def _offsets_on(axis: Axis, positions: Sequence[int], known: Candidate) -> dict[tuple[int, int], int]:
    """(position on the axis, buffer): where the live ranges of a plan lie; empty if they are not placed."""
    rows = zip(positions, known.steps, known.offsets, strict=True) if known.offsets else ()
    return {(p, b): at for p, op, row in rows for b, at in zip(axis.graph.outputs[op], row, strict=True)}


def _outside(
    axis: Axis, positions: Sequence[int], known: Candidate, window: Collection[int]
) -> frozenset[tuple[int, int]]:
    """(position on the axis, buffer): live ranges that are dead before a window, or made after it."""
    inside = [n for n, slot in enumerate(slots_of(known.steps)) if slot in window]
    ranges = live_ranges(axis.graph, known.steps)
    return frozenset(
        (positions[start], b)
        for b, start, stop in zip(ranges.buffer, ranges.start, ranges.stop, strict=True)
        if not inside or stop <= inside[0] or start > inside[-1]
    )


def _answer(made: Lifetimes, solver: cp_model.CpSolver) -> Candidate:
    """The plan of a solver's answer."""
    axis = made.axis
    taken = [p for p, run in enumerate(made.run) if solver.boolean_value(run)]
    row = _offsets(made, solver)
    steps = tuple(axis.steps[p] for p in taken)
    timeline = simulate_graph(axis.graph, steps)
    return Candidate(
        steps=steps,
        peak_bytes=timeline.peak_bytes,
        cost_ns=timeline.cost_ns,
        offsets=tuple(row[p] for p in taken) if made.offset else (),
    )


def _offsets(made: Lifetimes, solver: cp_model.CpSolver) -> list[tuple[int, ...]]:
    """For every position the offsets of what it makes, in bytes; buffers of none lie at the bottom."""
    graph = made.axis.graph
    at = {(made.uses[b][k].position, b): solver.value(place) for (b, k), place in made.offset.items()}
    return [
        tuple(graph.argument_bytes + made.unit * at.get((p, b), 0) for b in graph.outputs[op])
        for p, op in enumerate(made.axis.steps)
    ]
