"""A stronger lower bound: linear relaxations of the exact mode's 0-1 programs over several frames at once.

A fine frame counts recomputes in different blocks apart, but lets a recompute be split among blocks, so that
it needs less room in each; a coarse one does not. So nested frames are joined in one linear program: what is
kept at a breakpoint is the same in all that have it, and an op that is recomputed in a block of a frame is
recomputed in some block of the next finer one within it. Every plan is a point of it.

The solver's floating point is not trusted. Rounded to fixed point, its dual solution is evaluated in
integers: any non-negative prices of the rows give a bound, good prices a good one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]
from ortools.sat.python import cp_model

from passes.ir import Plan, Program, Status
from passes.liveness import Graph
from passes.planners.bounds import cut_bound
from passes.planners.exact.frame import Frame, unit_bytes
from passes.planners.exact.retention import Retention, build
from passes.simulate import simulate_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Size and precision; set by `benchmarks.planners`, below .4 of the peak.

    Attributes:
        levels: breakpoints of each frame, ascending.
        most_ops: of a program; above them the bound is the cut bound.
        units: the budget in units of the program.
        price_bits: of a price, after the point.
    """

    levels: tuple[int, ...] = (1, 2, 4, 8)
    most_ops: int = 1000
    units: int = 10**6
    price_bits: int = 60


CONFIG = LinearConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear constraint: the sum of coefficient times column over `terms` is at least `least`."""

    terms: tuple[tuple[int, int], ...]
    least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """Minimize the cost of columns between 0 and 1.

    Attributes:
        cost_ns: cost of every column.
        rows: the constraints.
    """

    cost_ns: tuple[int, ...]
    rows: tuple[Row, ...]


def lp_bound(program: Program, budget_bytes: int, levels: Sequence[int] = CONFIG.levels) -> float:
    """A lower bound on the overhead ratio of every plan within `budget_bytes`, never below the cut bound.

    Above `CONFIG.most_ops` ops it is the cut bound.

    Args:
        levels: how many breakpoints each frame has, ascending.

    Returns:
        The ratio; infinite if no plan keeps the budget.
    """
    bound_ratio = cut_bound(program, budget_bytes)
    base_ns = program.cost_ns
    graph = Graph.of(program)
    breakpoints = tight_ops(graph, budget_bytes, max(levels))
    if math.isinf(bound_ratio) or not base_ns or not breakpoints or len(program.ops) > CONFIG.most_ops:
        return bound_ratio
    frames = [Frame.of(graph, tuple(sorted(breakpoints[:count]))) for count in levels]
    relaxed = joined(frames, budget_bytes, unit_bytes(graph, budget_bytes, CONFIG.units))
    return max(bound_ratio, proved_ns(relaxed, prices_of(relaxed)) / base_ns)


def strengthened(program: Program, plan: Plan) -> Plan:
    """A plan with the stronger bound beside it, and optimal if it reaches that."""
    if plan.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return plan
    bound_ratio = max(plan.lower_bound_ratio, lp_bound(program, plan.budget_bytes))
    if math.isinf(bound_ratio):
        return plan
    proved = plan.status.found and plan.overhead_ratio <= bound_ratio
    return replace(plan, lower_bound_ratio=bound_ratio, status=Status.OPTIMAL if proved else plan.status)


def tight_ops(graph: Graph, budget_bytes: int, count: int) -> list[int]:
    """Up to `count` ops to cut at: the peak's, then the fullest in ever shorter stretches after it.

    Recomputes come after the peak; only where the peak is near the end are there breakpoints before it.
    """
    live = simulate_graph(graph, range(len(graph.cost_ns))).live_bytes
    over = [t for t in range(len(live)) if live[t] > budget_bytes]
    if not over:
        return []
    breakpoints = [max(over, key=lambda t: (live[t], graph.local_bytes[t], t))]
    after = [t for t in over if t >= breakpoints[0]]
    where = after if len(after) >= count else over
    parts = 2
    while len(breakpoints) < min(count, len(where)):
        for k in range(parts):
            stretch = where[len(where) * k // parts : len(where) * (k + 1) // parts]
            if stretch and not any(stretch[0] <= t <= stretch[-1] for t in breakpoints):
                breakpoints.append(max(stretch, key=lambda t: (graph.local_bytes[t], live[t], t)))
        parts *= 2
    return breakpoints[:count]


def joined(frames: Sequence[Frame], budget_bytes: int, unit: int) -> LinearProgram:
    """The relaxations of nested frames, coarsest first, as one program; the finest one's recomputes cost.

    Args:
        frames: each one's breakpoints contain those of the one before.
        unit: bytes to a unit.
    """
    cost_ns: list[int] = []
    rows: list[Row] = []
    kept: dict[tuple[int, int], int] = {}
    coarse: dict[tuple[int, int], int] = {}
    for level, frame in enumerate(frames):
        made = build(frame, budget_bytes, unit)
        column = _columns(made, kept, len(cost_ns))
        cost_ns += [0] * (1 + max(column, default=-1) - len(cost_ns))
        for terms, least in _relaxed_rows(made):
            rows.append(Row(terms=tuple((column[j], v) for j, v in terms), least=least))
        fine = {key: column[literal.index] for key, literal in made.recompute.items()}
        if level:
            rows += _links(frames[level - 1], frame, coarse, fine)
        coarse = fine
    for (_, op), j in coarse.items():
        cost_ns[j] = frames[-1].graph.cost_ns[op]
    return LinearProgram(cost_ns=tuple(cost_ns), rows=tuple(rows))


def _columns(made: Retention, kept: dict[tuple[int, int], int], n_columns: int) -> list[int]:
    """The column of every variable of a model; `kept` has those of (breakpoint, buffer) and is added to."""
    column = [-1] * len(made.model.proto.variables)
    for (block, buffer), literal in made.kept.items():
        key = (made.frame.breakpoints[block - 1], buffer)
        if key not in kept:
            kept[key] = n_columns
            n_columns += 1
        column[literal.index] = kept[key]
    for j, known in enumerate(column):
        if known < 0:
            column[j] = n_columns
            n_columns += 1
    return column


def _relaxed_rows(made: Retention) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Every constraint of a model as terms over its variables and what they add up to at least."""
    for constraint in made.model.proto.constraints:
        if constraint.has_bool_or():  # asking for another kind would make it one
            yield _plain([(j, 1) for j in constraint.bool_or.literals], 1)
            continue
        linear = constraint.linear
        terms = list(zip(linear.vars, linear.coeffs, strict=True))
        low, high = linear.domain
        if low > cp_model.INT_MIN:
            yield _plain(terms, low)
        if high < cp_model.INT_MAX:
            yield _plain([(j, -v) for j, v in terms], -high)


def _plain(terms: list[tuple[int, int]], least: int) -> tuple[list[tuple[int, int]], int]:
    """The same row without negated literals, whose number is -1 less the variable's."""
    least -= sum(v for j, v in terms if j < 0)
    return [(j, v) if j >= 0 else (-1 - j, -v) for j, v in terms], least


def _links(
    coarser: Frame, finer: Frame, coarse: dict[tuple[int, int], int], fine: dict[tuple[int, int], int]
) -> list[Row]:
    """An op that is recomputed in a block is recomputed in some part of it."""
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {key: [] for key in coarse}
    for (block, op), j in fine.items():
        key = (coarser.block(finer.slots(block)[0]), op)
        if key in parts:
            parts[key].append((j, 1))
    return [Row(terms=(*parts[key], (j, -1)), least=0) for key, j in coarse.items()]


def prices_of(relaxed: LinearProgram) -> list[float]:
    """What the solver says each row is worth, in ns; zeros if it finds no optimum."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    columns = [solver.NumVar(0, 1, "") for _ in relaxed.cost_ns]
    for column, cost_ns in zip(columns, relaxed.cost_ns, strict=True):
        solver.Objective().SetCoefficient(column, cost_ns)
    rows = []
    for row in relaxed.rows:
        made = solver.Constraint(row.least, solver.infinity())
        for j, v in row.terms:
            made.SetCoefficient(columns[j], v)
        rows.append(made)
    if solver.Solve() != solver.OPTIMAL:
        return [0.0] * len(rows)
    return [row.dual_value() for row in rows]


def proved_ns(relaxed: LinearProgram, prices: Sequence[float]) -> int:
    """A lower bound on the program's optimum over whole columns, from any prices; in integers, so exact."""
    scale = 1 << CONFIG.price_bits
    reduced = [cost_ns * scale for cost_ns in relaxed.cost_ns]
    total = 0
    for row, price in zip(relaxed.rows, prices, strict=True):
        scaled = max(0, int(price * scale))
        if scaled:
            total += scaled * row.least
            for j, v in row.terms:
                reduced[j] -= scaled * v
    total += sum([r for r in reduced if r < 0])
    return max(0, -(-total // scale))
