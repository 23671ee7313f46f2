"""How long the exact mode may take, and what is left of it.

Every model is solved through a `Clock`, which also notices Ctrl-C: the solver answers to that by itself, with
the best that it has, and nothing is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

REPORT_AFTER_S = 2.0
LP_SUBSOLVERS = ("max_lp", "reduced_costs")
# A solver that ends with less of its limit used, and nothing proved, was stopped by the user.
EARLY_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactConfig:
    """How long the exact mode may take.

    Attributes:
        work_limit: in the solver's deterministic seconds, all models together; the same on every machine.
        time_limit_s: wall clock instead, and the solver then uses `workers` threads.
        workers: threads of the solver under a wall-clock limit.
        report: called with a line of progress about every two seconds, once two have passed.
    """

    work_limit: float = 20.0
    time_limit_s: float | None = None
    workers: int = 2
    report: Callable[[str], None] | None = None


class Clock:
    """What is left of a limit; a part of it for each stage that is not the last.

    Attributes:
        config: the whole limit.
        stopped: whether the user asked to stop.
    """

    def __init__(self, config: ExactConfig) -> None:
        self.config = config
        self.stopped = False
        self._begin = time.perf_counter()
        self._work_left = config.work_limit
        self._reported_s = 0.0

    @property
    def seconds(self) -> float:
        """Wall clock since the beginning."""
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        """What is left: seconds under a limit of wall clock, else the solver's deterministic seconds."""
        if self.stopped:
            return 0.0
        limit_s = self.config.time_limit_s
        return max(0.0, self._work_left if limit_s is None else limit_s - self.seconds)

    def solve(
        self,
        solver: cp_model.CpSolver,
        model: cp_model.CpModel,
        *,
        keep: float = 0.0,
        most_work: float | None = None,
    ) -> cp_model.CpSolverStatus:
        """Solve within what is left.

        Args:
            keep: how much of what is left is not for this model.
            most_work: a limit for this model in deterministic seconds; it is solved in one thread then.
        """
        limit = max(1e-3, self.left - keep)
        works = [] if most_work is None else [most_work]
        parameters = solver.parameters
        parameters.num_workers = 1
        if self.config.time_limit_s is None:
            works.append(limit)
        else:
            parameters.max_time_in_seconds = limit
            if most_work is None and self.config.workers > 1:
                parameters.num_workers = self.config.workers
                parameters.subsolvers.extend(LP_SUBSOLVERS)
        if works:
            parameters.max_deterministic_time = min(works)
        code = solver.solve(model)
        used = solver.response_proto.deterministic_time
        self._work_left -= used
        ended = code in (cp_model.OPTIMAL, cp_model.INFEASIBLE, cp_model.MODEL_INVALID)
        worked = bool(works) and used >= EARLY_RATIO * min(works)
        waited = self.config.time_limit_s is not None and solver.wall_time >= EARLY_RATIO * limit
        if not (ended or worked or waited):
            self.stop()
        return code

    def charge(self, work: float) -> None:
        """Count what was done outside of the solver, in its deterministic seconds."""
        self._work_left -= work

    def stop(self) -> None:
        """Nothing is left from now on: the user asked for that."""
        if not self.stopped:
            self.say("stopped; the best plan so far is kept", now=True)
        self.stopped = True

    def say(self, text: str, *, now: bool = False) -> None:
        """A line of progress, at most one every two seconds unless it must be `now`."""
        if self.config.report is not None and (now or self.seconds - self._reported_s >= REPORT_AFTER_S):
            self._reported_s = self.seconds
            self.config.report(f"exact: {self.seconds:.1f} s, {text}")
