"""Plans for the bodies of loops and the branches of conditionals, where the plan of what surrounds them
cannot keep the budget.

To the entry a loop or a conditional is one op, and what its body or its largest branch needs is that op's
workspace. XLA orders them without regard to a budget. So where one is what breaks it, each of its
computations is put in a better order and planned as the entry is, for what it may have; if what these call is
what breaks that, it comes first. A recompute costs as often as a loop iterates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.cost import DeviceModel
from passes.hlo.cost import trip_count
from passes.hlo.dataflow import loop_parts
from passes.hlo.emit import emit
from passes.hlo.graph import Computation, Instruction, Module
from passes.hlo.lift import LiftedModule, lift
from passes.hlo.reorder import depth_first, reordered
from passes.ir import OpId, Plan, Program
from passes.outcome import MAX_TIGHTEST, LiveValue, Recomputed, recomputed_by, tightest_values
from passes.planners import PlannerConfig, least_peak, plan, working_set_bytes
from passes.simulate import simulate


def tightened(
    lifted: LiftedModule, least: Plan, limit_bytes: int, device: DeviceModel, config: PlannerConfig
) -> tuple[LiftedModule, tuple[Recomputed, ...]] | None:
    """The entry with what it calls planned, and what that recomputes, costs of all iterations; None where
    nothing that is called is what breaks the limit.

    Args:
        lifted: the entry of a module.
        least: its plan of lowest peak.
        limit_bytes: what the live bytes should not exceed.
        config: how to plan what is called.
    """
    work = _Work(lifted, device, replace(config, host_bytes=0, link=None, must_page=frozenset()))
    work.shrink_called(lifted, least, limit_bytes, iterations=1)
    if work.module is lifted.module:
        return None
    return work.entry(), tuple(work.recomputed)


def ordered(lifted: LiftedModule, device: DeviceModel) -> LiftedModule:
    """The entry with the loops and conditionals that need the most in a better order inside, where there is
    one and it is not packed worse."""
    work = _Work(lifted, device, PlannerConfig())
    work.order_called(lifted)
    entry = lifted if work.module is lifted.module else work.entry()
    return entry if entry.prediction.total_bytes <= lifted.prediction.total_bytes else lifted


def tightest(lifted: LiftedModule, steps: Sequence[OpId], device: DeviceModel) -> tuple[LiveValue, ...]:
    """The largest values alive at the peak of a computation's steps, inside of what it calls then, too."""
    found = tightest_values(lifted.program, steps)
    caller = _callers(lifted).get(steps[simulate(lifted.program, steps).peak_step])
    if caller is None:
        return found
    work = _Work(lifted, device, PlannerConfig())
    largest = max(work.bodies(caller), key=_peak_bytes)
    inside = tightest(largest, largest.program.order, device)
    return tuple(sorted((*found, *inside), key=lambda value: -value.nbytes)[:MAX_TIGHTEST])


class _Work:
    """A module whose called computations are planned one after the other.

    Attributes:
        module, assigner: as they are now.
        recomputed: what called computations recompute.
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

    def order_called(self, scope: LiftedModule) -> None:
        """Put what is called where more is alive than at all other ops in a better order."""
        live_bytes, callers = simulate(scope.program).live_bytes, _callers(scope)
        most_bytes = max((int(n) for op, n in enumerate(live_bytes) if op not in callers), default=0)
        for op, caller in callers.items():
            if live_bytes[op] > most_bytes:
                for k in range(len(_called(self.module, caller))):
                    before, body = self.module, self.body(caller, k)
                    self.order_called(body)
                    self._order(body if self.module is before else self.body(caller, k))

    def _order(self, body: LiftedModule) -> bool:
        """Put one computation in a better order; whether there is one."""
        orders = [reordered(body)]
        if self.assigner.backend.runs_branches_together:
            orders.append(depth_first(body))
        found = [order for order in orders if order is not None]
        if found:
            self._write(body, min(found, key=lambda order: simulate(body.program, order).peak_bytes))
        return bool(found)

    def shrink_called(self, scope: LiftedModule, made: Plan, limit_bytes: int, iterations: int) -> None:
        """Plan all that is called at whose place a plan of its surroundings is over a limit."""
        for caller, excess_bytes in _over(scope, made, limit_bytes):
            before, bodies = self.module, self.bodies(caller)
            target_bytes = max(map(_peak_bytes, bodies)) - excess_bytes
            times = trip_count(self.module, caller) if caller.opcode == "while" else 1
            for k, body in enumerate(bodies):
                if _peak_bytes(body) > target_bytes:
                    body = body if self.module is before else self.body(caller, k)
                    self._shrink(caller, k, body, target_bytes, iterations * times)

    def _shrink(
        self, caller: Instruction, k: int, body: LiftedModule, target_bytes: int, iterations: int
    ) -> None:
        """Plan one computation, which is called with number `k`, for some bytes."""
        if self._order(body):
            body = self.body(caller, k)
        made = self._plan(body.program, target_bytes)
        if made.peak_bytes > target_bytes:
            before = self.module
            self.shrink_called(body, made, target_bytes, iterations)
            if self.module is not before:
                body = self.body(caller, k)
                made = self._plan(body.program, target_bytes)
        if made.peak_bytes < _peak_bytes(body):
            self._write(body, made.steps)
            recomputed = recomputed_by(body.program, made.steps, "hlo")
            self.recomputed += [replace(r, cost_ns=iterations * r.cost_ns) for r in recomputed]

    def bodies(self, caller: Instruction) -> list[LiftedModule]:
        """All that is called, as it is now."""
        return [self.body(caller, k) for k in range(len(_called(self.module, caller)))]

    def body(self, caller: Instruction, k: int) -> LiftedModule:
        """The computation with a number that is called, as it is now."""
        # What the whole module will need is asked of its entry alone.
        return lift(
            self.module, self.device, self.before.platform, scope=_called(self.module, caller)[k],
            assigner=self.assigner, prediction=self.before.prediction,
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
    """What calls others in a computation, each with the bytes by which a plan is over a limit while it
    runs."""
    live_bytes = simulate(scope.program, made.steps).live_bytes
    over: dict[OpId, int] = {}
    for step, op in enumerate(made.steps):
        over[op] = max(over.get(op, 0), int(live_bytes[step]) - limit_bytes)
    callers = _callers(scope)
    for op, excess_bytes in over.items():
        if op in callers and excess_bytes > 0:
            yield callers[op], excess_bytes


def _callers(scope: LiftedModule) -> dict[OpId, Instruction]:
    """The loops and conditionals of a computation, by op."""
    instructions = [scope.scope.by_id[i] for i in scope.instructions]
    callers = ("while", "conditional")
    return {OpId(op): found for op, found in enumerate(instructions) if found.opcode in callers}


def _called(module: Module, caller: Instruction) -> list[Computation]:
    """The body of a loop, or the branches of a conditional."""
    if caller.opcode == "while":
        return [loop_parts(module, caller)[0]]
    return [module.computations[c] for c in caller.called]


def _peak_bytes(body: LiftedModule) -> int:
    return simulate(body.program).peak_bytes
