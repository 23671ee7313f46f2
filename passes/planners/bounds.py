"""What no plan can beat: the working-set bound on the peak and the cut bound on the overhead.

Working-set bound: when op `t` runs first, what it needs itself is alive, and besides it enough of what came
before that everything that later ops read is held or can still be recomputed: the smallest such set is a
minimum cut in bytes alone. Where every op may be recomputed at any time that is nothing.

Cut bound: when op `t` runs first, everything that later ops read is held, or recomputed afterwards. So
the recomputes after that position cost at least the cheapest choice of the cut at `t` on the original
schedule whose kept bytes fit beside what `t` itself needs. Both bounds relax in the plans' favour: what
`t` reads and writes is free to keep, in-place ops save all they could, and a recompute needs no workspace.

With pages, what the link has carried by then is away: its rate times the time until `t`, which waiting and
recomputes before `t` lengthen at their own price, never more than the host's budget. The bound is then the
least of that price and the cut's together, which prices a kept byte at no more than a byte of link time.
"""

from __future__ import annotations

import math

import numpy as np

from passes.ir import Program
from passes.link import Link
from passes.liveness import Graph
from passes.planners.flow import COST_UNITS, MOST_FLOWS, CutProblem, Cutter, cheapest_within, cut_problem_at
from passes.planners.schedule import Schedule

ROUNDING_NS = 1e-3
# At how many positions it is asked what must be held; set by column "least" of `benchmarks.planners`.
HELD_POSITIONS = 6


def at_least_ns(base_ns: int, bound_ratio: float) -> int:
    """What every plan costs at least, by a bound on the overhead; costs are integers, so it is rounded up."""
    return base_ns + math.ceil(base_ns * bound_ratio - ROUNDING_NS)


def working_set_bytes(program: Program) -> int:
    """A peak that no plan can go below: for every op what it and its position cannot do without."""
    graph = Graph.of(program)
    return least_bytes(graph, Schedule(graph, range(len(graph.cost_ns))))


def least_bytes(graph: Graph, schedule: Schedule) -> int:
    """The working-set bound of a program, whose ops `schedule` runs once each."""
    forced = forced_bytes(graph, last_needs(graph))
    least = max(forced, default=graph.argument_bytes)
    ops = graph.program.ops
    if all(op.recomputable and op.deadline is None for op in ops):
        return least
    order = sorted(range(len(ops)), key=lambda t: (-forced[t], t))
    for t in spread(order, HELD_POSITIONS):
        if schedule.live[t] > least:
            problem = cut_problem_at(schedule, t, slot=t + 1)
            if problem.demanded:
                least = max(least, forced[t] + Cutter(problem).least_kept_bytes())
    return least


def cut_bound(program: Program, budget_bytes: int, n_cuts: int = 8) -> float:
    """A lower bound on the overhead ratio of every plan within `budget_bytes`; infinite if none exists.

    Args:
        n_cuts: at how many ops of the schedule to cut; the bound is the best of them.
    """
    bound = Bound(Graph.of(program), n_cuts)
    if least_bytes(bound.graph, bound.schedule) > budget_bytes:
        return float("inf")
    return bound.ratio(budget_bytes)


class Bound:
    """The cut bound of one program, for any number of budgets.

    Attributes:
        graph: the program.
        schedule: its ops, once each.
    """

    def __init__(self, graph: Graph, n_cuts: int) -> None:
        self.graph = graph
        self.schedule = Schedule(graph, range(len(graph.cost_ns)))
        self._forced = forced_bytes(graph, last_needs(graph))
        live = self.schedule.live
        self._positions = spread(sorted(range(len(live)), key=lambda p: (-int(live[p]), p)), n_cuts)
        self._problems: dict[int, CutProblem] = {}

    def ratio(self, budget_bytes: int) -> float:
        """A lower bound on the overhead ratio of every plan within `budget_bytes`."""
        base_ns = sum(self.graph.cost_ns)
        best_ns = 0.0
        for position in self._positions:
            if self.schedule.live[position] <= budget_bytes:
                continue
            hull = cheapest_within(self._problem(position), budget_bytes - self._forced[position])
            best_ns = max(best_ns, hull.bound_ns or 0.0)
        return best_ns / base_ns if base_ns else 0.0

    def paged_ratio(self, budget_bytes: int, link: Link, host_bytes: int) -> float:
        """The same for every plan with pages on a link, waiting being overhead, too."""
        base_ns = sum(self.graph.cost_ns)
        best_ns = 0.0
        begins_ns = np.concatenate(([0], np.cumsum(self.graph.cost_ns)))
        for position in self._positions:
            begin_ns = float(begins_ns[position])
            away_bytes = min(host_bytes, int(begin_ns * link.to_host_bytes_per_second / 1e9) + 1)
            capacity_bytes = budget_bytes + away_bytes - self._forced[position]
            if self.schedule.live[position] <= budget_bytes + away_bytes:
                continue
            price_ns = 1e9 / link.to_host_bytes_per_second
            best_ns = max(best_ns, least_with_waiting_ns(self._problem(position), capacity_bytes, price_ns))
        return best_ns / base_ns if base_ns else 0.0

    def _problem(self, position: int) -> CutProblem:
        if position not in self._problems:
            self._problems[position] = cut_problem_at(self.schedule, position, slot=position + 1)
        return self._problems[position]


def least_with_waiting_ns(problem: CutProblem, capacity_bytes: int, price_ns: float) -> float:
    """No choice costs less, where bytes beyond the capacity may be had at `price_ns` each.

    That is the hull's bound with no byte priced above `price_ns`: the largest of the lines with such slopes.
    """
    cutter = Cutter(problem)
    above = cutter.keep_all()
    if above.kept_bytes <= capacity_bytes or not problem.demanded:
        return 0.0
    below, best, most = None, 0.0, price_ns * COST_UNITS
    while cutter.solved < MOST_FLOWS:
        slope = most
        if below is not None:
            slope = min(most, (below.cost - above.cost) / (above.kept_bytes - below.kept_bytes))
        if slope <= 0:
            break
        middle = cutter.solve(slope, 1.0)
        value = slope * (middle.kept_bytes - capacity_bytes) + middle.cost
        gained = value - cutter.rounding(slope, 1.0) - best
        best += max(0.0, gained)
        if middle.kept_bytes > capacity_bytes:
            if below is None or middle.kept_bytes >= above.kept_bytes:
                break
            above = middle
        elif below is not None and middle.kept_bytes <= below.kept_bytes:
            break
        else:
            below = middle
    return max(0.0, best - problem.free_ops) / COST_UNITS


def forced_bytes(graph: Graph, last_need: list[int]) -> list[int]:
    """For every op the bytes that are alive at its first run in every plan."""
    ops = graph.program.ops
    held_from = _held_from(graph)
    grows = [0] * (len(ops) + 1)
    for b, begin in enumerate(held_from):
        if begin < last_need[b]:
            grows[begin] += graph.nbytes[b]
            grows[last_need[b]] -= graph.nbytes[b]
    held_bytes, forced = 0, []
    for t, op in enumerate(ops):
        held_bytes += grows[t]
        here = {*graph.inputs[t], *graph.outputs[t]}
        total = sum([graph.nbytes[b] for b in here if not held_from[b] <= t < last_need[b]])
        total += held_bytes + graph.argument_bytes + op.workspace_bytes
        forced.append(total - _most_shared_bytes(graph, t, last_need))
    return forced


def _held_from(graph: Graph) -> list[int]:
    """For every buffer the first op at which it is alive in every plan, if an op from there on reads it."""
    ops = graph.program.ops

    def begin(op: int) -> int:
        if op < 0 or (ops[op].recomputable and ops[op].deadline is None):
            return len(ops)
        return max(op + 1, ops[op].deadline or 0) if ops[op].recomputable else op + 1

    return [begin(op) for op in graph.producer]


def _most_shared_bytes(graph: Graph, t: int, last_need: list[int]) -> int:
    """At most this many bytes can op `t` save by taking dying inputs' places."""
    by_output: dict[int, int] = {}
    by_input: dict[int, int] = {}
    for out, inp in graph.shares[t]:
        if last_need[inp] > t and not graph.program.ops[graph.producer[inp]].can_recompute(t + 1):
            continue
        nbytes = min(graph.nbytes[out], graph.nbytes[inp])
        by_output[out] = max(nbytes, by_output.get(out, 0))
        by_input[inp] = max(nbytes, by_input.get(inp, 0))
    return min(sum(by_output.values()), sum(by_input.values()))


def last_needs(graph: Graph) -> list[int]:
    """For every buffer the last op that reads it, the number of ops for outputs, else its producer."""
    last = list(graph.producer)
    for op, inputs in enumerate(graph.inputs):
        for b in inputs:
            last[b] = op
    for b in graph.program.outputs:
        last[b] = len(graph.cost_ns)
    return last


def spread(order: list[int], n_cuts: int) -> list[int]:
    """The first `n_cuts` positions of a permutation that are not next to each other."""
    gap = max(1, len(order) // (4 * n_cuts))
    chosen: list[int] = []
    for position in order:
        if all(abs(position - other) >= gap for other in chosen):
            chosen.append(position)
        if len(chosen) == n_cuts:
            break
    return chosen
