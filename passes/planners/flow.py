"""What to keep across one position, and what to recompute after it: a parametric minimum cut.

At position `t` of a schedule every live range that is needed after `t` is either kept across it (its bytes)
or its producer is recomputed (its cost), which needs the producer's inputs after `t` in turn. A cut that
weighs bytes against cost chooses; walking along the lower hull of (kept bytes, cost) finds the cheapest
choice whose kept bytes fit, and a lower bound on every choice that fits.

Nodes: the source (demanded after `t`), the sink, one per op that may be recomputed, one per buffer that
such an op reads. Arcs: source -> producer (bytes), op -> sink (cost), op -> input (infinite), input ->
its producer (bytes), or input -> sink (bytes) where the producer must not be recomputed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from ortools.graph.python import max_flow  # type: ignore[import-untyped]

from passes.liveness import Graph, IntArray
from passes.planners.schedule import Schedule

SCALE = 10**12
INFINITE = 4 * SCALE
SOURCE, SINK = 0, 1
COST_UNITS = 1000
# Along a hull; set by `benchmarks.planners`.
MOST_FLOWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One side of a cut: what is recomputed.

    Attributes:
        kept_bytes: bytes kept across the position, besides what it needs itself.
        cost: cost of running `ops` once each, tilted, in 1/`COST_UNITS` ns.
        ops: ops to recompute, ascending.
    """

    kept_bytes: int
    cost: int
    ops: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class CutProblem:
    """The cut problem at one position of a schedule.

    Attributes:
        forced_bytes: what is alive whatever is chosen.
        demanded: buffers across the position that may be recomputed, with the position of their next use.
        next_runs: for every buffer where it is made next after the position.
        ops: candidates for recomputes; node of `ops[k]` is `2 + k`.
        reads: (candidate, buffer) pairs where the buffer must be kept or recomputed for the candidate.
        tails, heads, arc_bytes, arc_cost: the arcs; both weights zero means infinite, and costs are in
            1/`COST_UNITS` ns.
        n_nodes: how many nodes they join.
        free_ops: how many candidates cost nothing; the cut counts one unit for each so that it avoids them.
    """

    forced_bytes: int
    demanded: dict[int, int]
    next_runs: list[int]
    ops: list[int] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    arc_bytes: list[int] = field(default_factory=list)
    arc_cost: list[int] = field(default_factory=list)
    n_nodes: int = 2
    free_ops: int = 0


def cut_problem_at(
    schedule: Schedule,
    position: int,
    *,
    slot: int | None = None,
    tilt_ratio: float = 0.0,
    level_bytes: int | None = None,
) -> CutProblem:
    """The cut problem at `position`; O(buffers + ops that might be recomputed).

    Args:
        slot: ask whether an op may be recomputed in this slot, instead of in that of its next use; the
            bounds ask for the earliest one.
        tilt_ratio: how much dearer the last op counts than it is; a little of it makes equal layers
            flip one after the other instead of all at once.
        level_bytes: do not let go of values that could not come back within this level.
    """
    graph = schedule.graph
    op_now = schedule.steps[position]
    here = {*graph.inputs[op_now], *graph.outputs[op_now]}
    problem = CutProblem(
        forced_bytes=int(schedule.live[position]),
        demanded={},
        next_runs=schedule.order.next_runs(position, len(graph.nbytes)),
    )
    needs: dict[int, int] = {}
    for b, need in zip(*schedule.order.across(position), strict=True):
        if b in here or not graph.nbytes[b]:
            continue
        producer = graph.producer[b]
        if _can_recompute(schedule, producer, need, slot) and (
            level_bytes is None or _can_return(schedule, b, need, level_bytes)
        ):
            problem.demanded[b] = need
            problem.forced_bytes -= graph.nbytes[b]
            needs[producer] = min(need, needs.get(producer, need))
    _add_candidates(schedule, position, problem, needs, slot)
    _add_arcs(schedule.graph, problem, tilt_ratio)
    return problem


def _free_here(schedule: Schedule, position: int, all_of_them: bool = False) -> set[int]:
    """Buffers that the op at `position` holds anyway; unless asked, not those whose place it takes."""
    graph, op = schedule.graph, schedule.steps[position]
    free = {*graph.inputs[op], *graph.outputs[op]}
    if graph.shares[op] and not all_of_them:
        free.difference_update(
            {b for _, b in graph.shares[op]}.intersection(schedule.order.dying_at(position))
        )
    return free


def _can_recompute(schedule: Schedule, op: int, position: int, slot: int | None = None) -> bool:
    if slot is None:
        at_end = position >= len(schedule.steps)
        slot = len(schedule.graph.cost_ns) if at_end else schedule.slots[position]
    return op < slot and schedule.graph.program.ops[op].can_recompute(slot)


def _can_return(schedule: Schedule, buffer: int, need: int, level_bytes: int) -> bool:
    """False if making `buffer` again just before `need`, a position within the level, breaks the level.

    Counts what is alive there now, and the inputs of the producer that are not; their own closures not.
    """
    if need >= len(schedule.steps) or schedule.live[need] > level_bytes:
        return True
    graph = schedule.graph
    op = graph.producer[buffer]
    total_bytes = schedule.crossing_bytes(need) + graph.workspace_bytes[op]
    total_bytes += sum([graph.nbytes[b] for b in graph.outputs[op] if b != buffer])
    missing = [b for b in graph.inputs[op] if not schedule.order.alive_at(b, need)]
    total_bytes += sum([graph.nbytes[b] for b in missing])
    total_bytes -= sum([min(graph.nbytes[o], graph.nbytes[i]) for o, i in graph.shares[op] if i in missing])
    return total_bytes <= level_bytes


def _add_candidates(
    schedule: Schedule, position: int, problem: CutProblem, needs: dict[int, int], slot: int | None
) -> None:
    """Grow the candidates downwards from the demanded buffers; `needs` is when each op is needed."""
    graph = schedule.graph
    free = _free_here(schedule, position, all_of_them=slot is not None)
    if slot is not None:  # the bounds count what is needed and cannot be recomputed as alive anyway
        free.update(b for b in schedule.order.across(position)[0] if b not in problem.demanded)
    demanded, next_runs = problem.demanded, problem.next_runs
    queue = [-op for op in needs]
    heapq.heapify(queue)
    while queue:
        op = -heapq.heappop(queue)
        need = needs[op]
        problem.ops.append(op)
        for b in graph.inputs[op]:
            if b not in demanded:
                if b in free or not graph.nbytes[b] or next_runs[b] < need:
                    continue
                problem.reads.append((op, b))
            producer = graph.producer[b]
            known = needs.get(producer)
            if known is None:
                if _can_recompute(schedule, producer, need, slot):
                    heapq.heappush(queue, -producer)
                    needs[producer] = need
            elif need < known and _can_recompute(schedule, producer, need, slot):
                needs[producer] = need


def _add_arcs(graph: Graph, problem: CutProblem, tilt_ratio: float) -> None:
    """The network's arcs: demanded buffers, costs of the candidates, then what the candidates read."""
    node = {op: 2 + k for k, op in enumerate(problem.ops)}
    n_ops = len(problem.ops)
    of_buffer: dict[int, int] = {}
    for _, b in problem.reads:
        if b not in of_buffer:
            of_buffer[b] = 2 + n_ops + len(of_buffer)
    problem.n_nodes = 2 + n_ops + len(of_buffer)
    weights = [
        round(graph.cost_ns[op] * COST_UNITS * (1 + tilt_ratio * op / len(graph.cost_ns)))
        for op in problem.ops
    ]
    problem.free_ops = weights.count(0)
    problem.tails = [SOURCE] * len(problem.demanded) + list(range(2, 2 + n_ops))
    problem.heads = [node[graph.producer[b]] for b in problem.demanded] + [SINK] * n_ops
    problem.arc_bytes = [graph.nbytes[b] for b in problem.demanded] + [0] * n_ops
    problem.arc_cost = [0] * len(problem.demanded) + [max(1, weight) for weight in weights]
    problem.tails += of_buffer.values()
    problem.heads += [node.get(graph.producer[b], SINK) for b in of_buffer]
    problem.arc_bytes += [graph.nbytes[b] for b in of_buffer]
    problem.tails += [node[op] for op, _ in problem.reads]
    problem.heads += [of_buffer[b] for _, b in problem.reads]
    problem.arc_bytes += [0] * len(problem.reads)
    problem.arc_cost += [0] * (len(of_buffer) + len(problem.reads))


class Cutter:
    """Solves one `CutProblem` for any weighing of bytes against cost."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self._bytes: IntArray = np.asarray(problem.arc_bytes, dtype=np.int64)
        self._cost: IntArray = np.asarray(problem.arc_cost, dtype=np.int64)
        self._infinite = (self._bytes == 0) & (self._cost == 0)
        self._heads = np.asarray(problem.heads, dtype=np.int32)
        self._tails = np.asarray(problem.tails, dtype=np.int32)
        self._bytes_sum = max(1, int(self._bytes.sum()))
        self._cost_sum = max(1, int(self._cost.sum()))
        self._flow = max_flow.SimpleMaxFlow()
        self._arcs = self._flow.add_arcs_with_capacity(
            self._tails, self._heads, np.zeros(len(self._tails), dtype=np.int64)
        )
        self.solved = 0

    def keep_all(self) -> Cut:
        """Keep everything, run nothing again."""
        kept = sum(self._bytes[k] for k, tail in enumerate(self.problem.tails) if tail == SOURCE)
        return Cut(kept_bytes=int(kept), cost=0, ops=())

    def least_bytes(self) -> Cut:
        """The cheapest choice among those that keep the fewest bytes, but for rounding."""
        return self.solve(1.0, 1e-7 * self._bytes_sum / self._cost_sum)

    def least_kept_bytes(self) -> int:
        """No choice keeps fewer bytes, whatever it costs; exact."""
        self._solve(np.where(self._infinite, self._bytes_sum + 1, self._bytes))
        return int(self._flow.optimal_flow())

    def _solve(self, capacity: IntArray) -> None:
        self._flow.set_arcs_capacity(self._arcs, capacity)
        status = self._flow.solve(SOURCE, SINK)
        assert status == self._flow.OPTIMAL, f"maximum flow ended with {status}"
        self.solved += 1

    def rounding(self, byte_weight: float, cost_weight: float) -> float:
        """How far above the true minimum `solve`'s value can be, capacities being integers."""
        total = byte_weight * self._bytes_sum + cost_weight * self._cost_sum
        return 2 * len(self._tails) * total / SCALE

    def solve(self, byte_weight: float, cost_weight: float) -> Cut:
        """The choice that minimizes `byte_weight * kept_bytes + cost_weight * cost`."""
        total = byte_weight * self._bytes_sum + cost_weight * self._cost_sum
        capacity = (self._bytes * (byte_weight * SCALE / total)).astype(np.int64)
        capacity += np.ceil(self._cost * (cost_weight * SCALE / total)).astype(np.int64)
        capacity[self._infinite] = INFINITE
        self._solve(capacity)
        side = np.zeros(self.problem.n_nodes, dtype=bool)
        side[np.asarray(self._flow.get_source_side_min_cut(), dtype=np.int64)] = True
        crossing = side[self._tails] & ~side[self._heads]
        return Cut(
            kept_bytes=int(self._bytes[crossing].sum()),
            cost=int(self._cost[crossing].sum()),
            ops=tuple(sorted(op for k, op in enumerate(self.problem.ops) if side[2 + k])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """Where the lower hull of (kept bytes, cost) crosses a capacity.

    Attributes:
        fits: the cheapest vertex of the hull within the capacity, or the one of least bytes.
        over: the vertex before it, which is cheaper and does not fit; None if everything fits.
        bound_ns: no choice within the capacity costs less; None if no choice fits.
        flows: how many flows were solved.
    """

    fits: Cut
    over: Cut | None = None
    bound_ns: float | None
    flows: int


def cheapest_within(problem: CutProblem, capacity_bytes: int) -> Hull:
    """Walk along the hull to the cheapest choice that keeps at most `capacity_bytes`."""
    cutter = Cutter(problem)
    above = cutter.keep_all()
    if above.kept_bytes <= capacity_bytes or not problem.demanded:
        return Hull(fits=above, bound_ns=0.0 if above.kept_bytes <= capacity_bytes else None, flows=0)
    below = cutter.least_bytes()
    if below.kept_bytes > capacity_bytes:
        return Hull(fits=below, bound_ns=None, flows=cutter.solved)
    bound = 0.0
    while cutter.solved < MOST_FLOWS:
        byte_weight = below.cost - above.cost
        cost_weight = above.kept_bytes - below.kept_bytes
        if byte_weight <= 0:
            break
        middle = cutter.solve(float(byte_weight), float(cost_weight))
        line = byte_weight * below.kept_bytes + cost_weight * below.cost
        value = byte_weight * middle.kept_bytes + cost_weight * middle.cost
        slack = cutter.rounding(byte_weight, cost_weight)
        bound = max(bound, (value - slack - byte_weight * capacity_bytes) / cost_weight)
        if value >= line * (1 - 1e-9):
            break
        if middle.kept_bytes <= capacity_bytes:
            below = middle
        else:
            above = middle
    bound_ns = max(0.0, bound - problem.free_ops) / COST_UNITS
    return Hull(fits=below, over=above, bound_ns=bound_ns, flows=cutter.solved)


def filled_up(graph: Graph, problem: CutProblem, hull: Hull, capacity_bytes: int, most: int) -> Cut:
    """A choice between the hull's vertices, where at most so many values make up what is missing cheaply.

    The next vertex may let go of far more than a small excess asks for, and be far dearer.
    """
    if hull.over is None or not most:
        return hull.fits
    prices = _Prices(graph, problem)
    recomputed = set(hull.over.ops)
    cost, kept_bytes = hull.over.cost, hull.over.kept_bytes
    for _ in range(most):
        if kept_bytes <= capacity_bytes:
            return Cut(kept_bytes=kept_bytes, cost=cost, ops=tuple(sorted(recomputed)))
        best: tuple[float, int, list[int]] | None = None
        for b in problem.demanded:
            if graph.producer[b] not in recomputed:
                freed_bytes = min(graph.nbytes[b], kept_bytes - capacity_bytes)
                limit = hull.fits.cost - cost if best is None else best[0] * freed_bytes
                price, closure = prices.of(graph.producer[b], recomputed, limit)
                score = price / freed_bytes
                if price < hull.fits.cost - cost and (best is None or score < best[0]):
                    best = (score, price, closure)
        if best is None:
            break
        cost += best[1]
        recomputed.update(best[2])
        freed = [b for b in problem.demanded if graph.producer[b] in best[2]]
        kept_bytes -= sum([graph.nbytes[b] for b in freed])
    return hull.fits


class _Prices:
    """What it costs to run one more op of a cut problem, every demanded input being kept."""

    def __init__(self, graph: Graph, problem: CutProblem) -> None:
        self._graph = graph
        self._reads: dict[int, list[int]] = {}
        for op, b in problem.reads:
            self._reads.setdefault(op, []).append(b)
        weights = zip(problem.tails, problem.heads, problem.arc_cost, strict=True)
        of_node = {tail: cost for tail, head, cost in weights if head == SINK}
        self._cost = {op: of_node[2 + k] for k, op in enumerate(problem.ops)}

    def of(self, op: int, recomputed: set[int], limit: float) -> tuple[int, list[int]]:
        """The ops to run besides `recomputed` and their cost; cut short where it reaches `limit`."""
        closure, price = [op], self._cost[op]
        seen = {op}
        for top in closure:
            if price >= limit:
                break
            for b in self._reads.get(top, ()):
                producer = self._graph.producer[b]
                if producer in self._cost and producer not in recomputed and producer not in seen:
                    seen.add(producer)
                    closure.append(producer)
                    price += self._cost[producer]
        return price, closure


def missing_runs(
    schedule: Schedule, position: int, problem: CutProblem, recomputed: tuple[int, ...]
) -> Mapping[int, list[int]]:
    """Where to insert recomputes so that everything of `recomputed` that is demanded comes back in time.

    Returns:
        For positions the ops to run just before them, `len(steps)` for the end.
    """
    graph = schedule.graph
    chosen = frozenset(recomputed)
    free = _free_here(schedule, position)
    restored: set[int] = set()
    inserts: dict[int, list[int]] = {}
    evicted = [(need, b) for b, need in problem.demanded.items() if graph.producer[b] in chosen]
    for need, buffer in sorted(evicted):
        closure: set[int] = set()
        stack = [buffer]
        while stack:
            b = stack.pop()
            op = graph.producer[b]
            if b in restored or op not in chosen or b in free or op in closure:
                continue
            if problem.next_runs[b] < need or not _can_recompute(schedule, op, need):
                continue
            closure.add(op)
            stack.extend(graph.inputs[op])
        for op in sorted(closure):
            inserts.setdefault(need, []).append(op)
            restored.update(graph.outputs[op])
    return inserts
