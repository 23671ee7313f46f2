"""Plans for the bodies of loops, where the plan of what surrounds them cannot keep the budget.

To the entry a loop is one op, and what its body needs is that op's workspace. XLA orders a body without
regard to a budget. So where a loop is what breaks it, its body is put in a better order and planned as the
entry is, for what it may have; if loops inside it are what breaks that, they come first. A recompute costs as
often as the loop iterates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.cost import DeviceModel
from passes.hlo.cost import trip_count
from passes.hlo.dataflow import loop_parts
from passes.hlo.emit import emit
from passes.hlo.graph import Instruction
from passes.hlo.lift import LiftedModule, lift
from passes.hlo.reorder import reordered
from passes.ir import OpId, Plan, Program
from passes.outcome import MAX_TIGHTEST, LiveValue, Recomputed, recomputed_by, tightest_values
from passes.planners import PlannerConfig, least_peak, plan, working_set_bytes
from passes.simulate import simulate


def tightened(
    lifted: LiftedModule, least: Plan, limit_bytes: int, device: DeviceModel, config: PlannerConfig
) -> tuple[LiftedModule, tuple[Recomputed, ...]] | None:
    """The entry with its loops' bodies planned, and what the bodies recompute, costs of all iterations; None
    where no loop is what breaks the limit.

    Args:
        lifted: the entry of a module.
        least: its plan of lowest peak.
        limit_bytes: what the live bytes should not exceed.
        config: how to plan bodies.
    """
    work = _Work(lifted, device, replace(config, host_bytes=0, link=None, must_page=frozenset()))
    work.shrink_loops(lifted, least, limit_bytes, iterations=1)
    if work.module is lifted.module:
        return None
    return work.entry(), tuple(work.recomputed)


def ordered(lifted: LiftedModule, device: DeviceModel) -> LiftedModule:
    """The entry with the bodies of the loops that need the most in a better order, where there is one and it
    is not packed worse."""
    work = _Work(lifted, device, PlannerConfig())
    work.order_loops(lifted)
    entry = lifted if work.module is lifted.module else work.entry()
    return entry if entry.prediction.total_bytes <= lifted.prediction.total_bytes else lifted


def tightest(lifted: LiftedModule, steps: Sequence[OpId], device: DeviceModel) -> tuple[LiveValue, ...]:
    """The largest values alive at the peak of a computation's steps, inside the loop that runs then, too."""
    found = tightest_values(lifted.program, steps)
    loop = _loops(lifted).get(steps[simulate(lifted.program, steps).peak_step])
    if loop is None:
        return found
    body = _Work(lifted, device, PlannerConfig()).body(loop)
    inside = tightest(body, body.program.order, device)
    return tuple(sorted((*found, *inside), key=lambda value: -value.nbytes)[:MAX_TIGHTEST])


class _Work:
    """A module whose bodies are planned one after the other.

    Attributes:
        module, assigner: as they are now.
        recomputed: what bodies recompute.
    """

    def __init__(self, lifted: LiftedModule, device: DeviceModel, config: PlannerConfig) -> None:
        self.before = lifted
        self.module = lifted.module
        self.assigner = lifted.assigner
        self.device = device
        self.config = config
        self.recomputed: list[Recomputed] = []

    def entry(self) -> LiftedModule:
        """The entry of the module as it is now."""
        return lift(self.module, self.device, self.before.platform, assigner=self.assigner)

    def order_loops(self, scope: LiftedModule) -> None:
        """Put the bodies of loops in which more is alive than at all other ops in a better order."""
        live_bytes, loops = simulate(scope.program).live_bytes, _loops(scope)
        most_bytes = max((int(n) for op, n in enumerate(live_bytes) if op not in loops), default=0)
        for op, loop in loops.items():
            if live_bytes[op] > most_bytes:
                before, body = self.module, self.body(loop)
                self.order_loops(body)
                self._order(body if self.module is before else self.body(loop))

    def _order(self, body: LiftedModule) -> bool:
        """Put one body in a better order; whether there is one."""
        order = reordered(body)
        if order is not None:
            self._write(body, order)
        return order is not None

    def shrink_loops(self, scope: LiftedModule, made: Plan, limit_bytes: int, iterations: int) -> None:
        """Plan the body of every loop at whose place a plan of its surroundings is over a limit."""
        for loop, excess_bytes in _over(scope, made, limit_bytes):
            self._shrink(loop, excess_bytes, iterations * trip_count(self.module, loop))

    def _shrink(self, loop: Instruction, excess_bytes: int, iterations: int) -> None:
        """Plan one body for as much less as its loop is over."""
        body = self.body(loop)
        target_bytes = simulate(body.program).peak_bytes - excess_bytes
        if self._order(body):
            body = self.body(loop)
        made = self._plan(body.program, target_bytes)
        if made.peak_bytes > target_bytes:
            before = self.module
            self.shrink_loops(body, made, target_bytes, iterations)
            if self.module is not before:
                body = self.body(loop)
                made = self._plan(body.program, target_bytes)
        if made.peak_bytes < simulate(body.program).peak_bytes:
            self._write(body, made.steps)
            recomputed = recomputed_by(body.program, made.steps, "hlo")
            self.recomputed += [replace(r, cost_ns=iterations * r.cost_ns) for r in recomputed]

    def body(self, loop: Instruction) -> LiftedModule:
        """The body of a loop as it is now."""
        scope, _ = loop_parts(self.module, loop)
        # What the whole module will need is asked of its entry alone.
        return lift(
            self.module, self.device, self.before.platform, scope=scope, assigner=self.assigner,
            prediction=self.before.prediction,
        )  # fmt: skip

    def _plan(self, program: Program, target_bytes: int) -> Plan:
        if target_bytes >= working_set_bytes(program):
            config = replace(self.config, objective=self.config.objective.of(program))
            made = plan(program, target_bytes, config)
            if made.peak_bytes <= target_bytes:
                return made
        return least_peak(program, replace(self.config, bound=False))

    def _write(self, body: LiftedModule, steps: Sequence[OpId]) -> None:
        self.module = emit(body, steps)
        self.assigner = self.assigner.on(self.module)


def _over(scope: LiftedModule, made: Plan, limit_bytes: int) -> Iterator[tuple[Instruction, int]]:
    """The loops of a computation, each with the bytes by which a plan is over a limit while it runs."""
    live_bytes = simulate(scope.program, made.steps).live_bytes
    over: dict[OpId, int] = {}
    for step, op in enumerate(made.steps):
        over[op] = max(over.get(op, 0), int(live_bytes[step]) - limit_bytes)
    loops = _loops(scope)
    for op, excess_bytes in over.items():
        if op in loops and excess_bytes > 0:
            yield loops[op], excess_bytes


def _loops(scope: LiftedModule) -> dict[int, Instruction]:
    """The loops of a computation, by op."""
    instructions = [scope.scope.by_id[i] for i in scope.instructions]
    return {op: loop for op, loop in enumerate(instructions) if loop.opcode == "while"}
