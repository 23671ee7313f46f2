"""Packing by two exact methods by turns: the sweep, and CP-SAT's `NoOverlap2D`.

Items that are apart in time are packed apart. The two methods are good at different problems, and how long
either takes is mostly luck: each round has other orders and another seed, and more work. Without a wall-clock
limit the rounds are few, so that the answer does not depend on the machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from passes.offsets.packing import Item, Packing, apart, check_packing, live_bytes
from passes.offsets.solver import ROUND_TRIES, SOLVER, LimitError, Sweep

MOST_AREA = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RectanglesConfig:
    """Rounds of both methods; set by the rows A to K of `benchmarks.pack`.

    Attributes:
        most_items: of the sweep, whose tables grow with their square.
        first_work: of CP-SAT in the first round, about as long as the sweep's.
        most_rounds: without a wall clock.
    """

    most_items: int = 2000
    first_work: float = 0.02
    most_rounds: int = 3


CONFIG = RectanglesConfig()


def pack(items: Sequence[Item], capacity_bytes: int, time_limit_s: float | None = None) -> Packing:
    """Offsets within `capacity_bytes`, or a proof that there are none.

    Args:
        time_limit_s: wall clock; None for a few rounds.
    """
    begin = time.perf_counter()
    if live_bytes(items) > capacity_bytes:
        return Packing(fits=False, offsets=(), method="live bytes", seconds=time.perf_counter() - begin)
    offsets = [0] * len(items)
    methods: list[str] = []
    fits: bool | None = True
    for group in apart(items):
        chosen = [items[i] for i in group]
        left_s = None if time_limit_s is None else time_limit_s - (time.perf_counter() - begin)
        fits, packed, method = _pack_group(chosen, capacity_bytes, left_s)
        methods.append(method)
        if not fits:
            break
        for i, offset in zip(group, packed, strict=True):
            offsets[i] = offset
    if fits:
        check_packing(items, offsets, capacity_bytes)
    return Packing(
        fits=fits,
        offsets=tuple(offsets) if fits else (),
        method=" and ".join(sorted(set(methods))) if fits else methods[-1],
        seconds=time.perf_counter() - begin,
    )


def model_of(
    items: Sequence[Item], capacity_bytes: int
) -> tuple[cp_model.CpModel, list[cp_model.IntVar], int]:
    """`NoOverlap2D` over all spans; also the offset variables and how many bytes one of their units is."""
    unit = math.gcd(*(span.nbytes for item in items for span in item)) or 1
    capacity = capacity_bytes // unit
    time_of = _times(items, capacity)
    model = cp_model.CpModel()
    offsets: list[cp_model.IntVar] = []
    across, along = [], []
    for index, item in enumerate(items):
        height = max((span.nbytes for span in item), default=0) // unit
        offsets.append(model.new_int_var(0, capacity - height, f"offset {index}"))
        for span in item:
            if span.nbytes and span.start < span.stop:
                name, length = f"item {index}", time_of[span.stop] - time_of[span.start]
                across.append(model.new_fixed_size_interval_var(time_of[span.start], length, name))
                along.append(model.new_fixed_size_interval_var(offsets[-1], span.nbytes // unit, name))
    model.add_no_overlap_2d(across, along)
    return model, offsets, unit


def _times(items: Sequence[Item], capacity: int) -> dict[int, int]:
    """For every time what stands for it: itself, or its number where CP-SAT's 64-bit areas would overflow."""
    times = sorted({time for item in items for span in item for time in (span.start, span.stop)})
    area = capacity * (times[-1] - times[0]) if times else 0
    return {time: time if area < MOST_AREA else k for k, time in enumerate(times)}


def _pack_group(
    items: Sequence[Item], capacity_bytes: int, time_limit_s: float | None
) -> tuple[bool | None, list[int], str]:
    """Whether items fit, their offsets, and what found it."""
    end = math.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    sweep = Sweep(items, capacity_bytes, lambda: time.perf_counter() > end)
    solver: _Solver | None = None
    for n_rounds in itertools.count() if time_limit_s is not None else range(CONFIG.most_rounds):
        if len(items) <= CONFIG.most_items:
            try:
                offsets = sweep.solve(sweep.tries + ROUND_TRIES * SOLVER.more**n_rounds, n_rounds)
                return offsets is not None, offsets or [], "sweep"
            except LimitError:
                pass
        solver = solver or _Solver(items, capacity_bytes)
        solver.run(n_rounds, end - time.perf_counter())
        if solver.fits is not None:
            return solver.fits, solver.offsets, "cp-sat"
        if time.perf_counter() > end:
            break
    return None, [], ""


class _Solver:
    """CP-SAT on one problem."""

    def __init__(self, items: Sequence[Item], capacity_bytes: int) -> None:
        self.model, self.variables, self.unit = model_of(items, capacity_bytes)
        self.fits: bool | None = None
        self.offsets: list[int] = []

    def run(self, n_rounds: int, left_s: float) -> None:
        """Solve with the round's seed and work, and keep an answer."""
        if left_s <= 0:
            return
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.use_dynamic_precedence_in_disjunctive = True
        solver.parameters.random_seed = n_rounds
        solver.parameters.max_deterministic_time = CONFIG.first_work * SOLVER.more**n_rounds
        solver.parameters.max_time_in_seconds = left_s
        code = solver.solve(self.model)
        if code in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self.offsets = [self.unit * solver.value(x) for x in self.variables]
            self.fits = True
        elif code == cp_model.INFEASIBLE:
            self.fits = False
