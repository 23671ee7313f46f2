"""Packing by two exact methods side by side: the sweep, and CP-SAT's `NoOverlap2D`.

Items that are apart in time are packed apart. The two methods are good at different problems. With a
wall-clock limit both run at once, the solver in a thread of its own, and the first answer counts; without
one they take turns within limits of work, so that the answer does not depend on the machine. The solver
starts again and again, with another seed and more work each time: how long it takes is mostly luck.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence

from ortools.sat.python import cp_model

from passes.offsets.packing import Item, Packing, apart, check_packing, live_bytes
from passes.offsets.sweep import MOST_ITEMS, LimitError, Sweep

MOST_TRIES = 20_000
SOLVER_WORK = 10.0
FIRST_WORK = 0.1
NEVER = 1 << 60


def pack(items: Sequence[Item], capacity_bytes: int, time_limit_s: float | None = None) -> Packing:
    """Offsets within `capacity_bytes`, or a proof that there are none.

    Args:
        time_limit_s: wall clock; None for limits of work.
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
        fits, found, method = _pack_group(chosen, capacity_bytes, left_s)
        methods.append(method)
        if not fits:
            break
        for i, offset in zip(group, found, strict=True):
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
    model = cp_model.CpModel()
    offsets: list[cp_model.IntVar] = []
    across, along = [], []
    for index, item in enumerate(items):
        height = max((span.nbytes for span in item), default=0) // unit
        offsets.append(model.new_int_var(0, capacity - height, f"offset {index}"))
        for span in item:
            if span.nbytes and span.start < span.stop:
                name = f"item {index}"
                across.append(model.new_fixed_size_interval_var(span.start, span.stop - span.start, name))
                along.append(model.new_fixed_size_interval_var(offsets[-1], span.nbytes // unit, name))
    model.add_no_overlap_2d(across, along)
    return model, offsets, unit


def _pack_group(
    items: Sequence[Item], capacity_bytes: int, time_limit_s: float | None
) -> tuple[bool | None, list[int], str]:
    """Whether items fit, their offsets, and what found it."""
    if time_limit_s is None:
        return _in_turn(items, capacity_bytes)
    return _side_by_side(items, capacity_bytes, time_limit_s)


class _Solver:
    """CP-SAT on one problem."""

    def __init__(self, items: Sequence[Item], capacity_bytes: int) -> None:
        self.model, self.variables, self.unit = model_of(items, capacity_bytes)
        self.solver = cp_model.CpSolver()
        self.solver.parameters.num_workers = 1
        self.solver.parameters.use_dynamic_precedence_in_disjunctive = True
        self.solver.parameters.catch_sigint_signal = False
        self.fits: bool | None = None
        self.offsets: list[int] = []
        self.stopped = False

    def run(self, work_limit: float, time_limit_s: float | None = None) -> None:
        """Solve until there is an answer, and keep it; `stopped` and the limits end it without one."""
        end = math.inf if time_limit_s is None else time.perf_counter() + time_limit_s
        left = work_limit
        for turn in itertools.count():
            left_s = end - time.perf_counter()
            if self.stopped or left <= 0 or left_s <= 0:
                return
            parameters = self.solver.parameters
            parameters.random_seed = turn
            parameters.max_deterministic_time = min(left, FIRST_WORK * 2**turn)
            parameters.max_time_in_seconds = left_s
            code = self.solver.solve(self.model)
            left -= self.solver.response_proto.deterministic_time
            if code in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                self.offsets = [self.unit * self.solver.value(x) for x in self.variables]
                self.fits = True
                return
            if code == cp_model.INFEASIBLE:
                self.fits = False
                return


def _in_turn(items: Sequence[Item], capacity_bytes: int) -> tuple[bool | None, list[int], str]:
    if len(items) <= MOST_ITEMS:
        try:
            found = Sweep(items, capacity_bytes).solve(MOST_TRIES)
            return found is not None, found or [], "sweep"
        except LimitError:
            pass
    solver = _Solver(items, capacity_bytes)
    solver.run(SOLVER_WORK)
    return solver.fits, solver.offsets, "" if solver.fits is None else "cp-sat"


def _side_by_side(
    items: Sequence[Item], capacity_bytes: int, time_limit_s: float
) -> tuple[bool | None, list[int], str]:
    end = time.perf_counter() + time_limit_s
    solver = _Solver(items, capacity_bytes)
    thread = threading.Thread(target=solver.run, args=(math.inf, time_limit_s), daemon=True)
    thread.start()
    try:
        if len(items) <= MOST_ITEMS:
            sweep = Sweep(items, capacity_bytes, lambda: not thread.is_alive() or time.perf_counter() > end)
            try:
                found = sweep.solve(NEVER)
                return found is not None, found or [], "sweep"
            except LimitError:
                pass
        while thread.is_alive() and time.perf_counter() < end:
            thread.join(0.05)
    finally:
        solver.stopped = True
        while thread.is_alive():
            solver.solver.stop_search()
            thread.join(0.05)
    return solver.fits, solver.offsets, "" if solver.fits is None else "cp-sat"
