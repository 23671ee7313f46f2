"""What the jaxpr stage is asked for, and one way to run a program that it may answer with."""

from __future__ import annotations

from dataclasses import dataclass

from passes.cost import DeviceModel, mapping_ns
from passes.counts import Fixed
from passes.ir import OpId, Plan
from passes.jaxpr import compat
from passes.jaxpr.calibration import UNCALIBRATED, Calibration
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.emit import EmitConfig
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.scans.choice import Level, all_recomputed
from passes.objective import LEAST_TIME, Objective
from passes.outcome import RECOMPUTE_SCOPE, Paged, Recomputed, recomputed_by, recomputed_op
from passes.recipe import Recipe, Scans


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprRequest(Fixed):
    """What the jaxpr stage is asked for. Byte counts are of the whole XLA program where known.

    Attributes:
        budget_bytes: the whole program's budget.
        argument_bytes, output_bytes, alias_bytes: storage of the whole program that no plan can shrink.
        device: cost model.
        planner: one of `passes.planners.config.PLANNERS`.
        baseline_total_bytes: what the program needs without this stage, where that was compiled.
        calibration: what XLA made of other plans of this program.
        host_bytes: how many bytes of stacks of scans may wait on the host.
        objective: what is least.
        parts: of how many devices together bytes and times are.
        optional: True where more bytes would do: what misses is given up soon.
        most_ns: what takes longer is of no use, in time of kernels; None for no limit.
        policy: the ready policy of `jax.checkpoint` that blocks are to be under, not a plan; "" for none.
        apart: True for parts that run as programs of their own, so that all that passes from one to the other
            is stored: what XLA would compute in its reader is, though as it is the whole fits.
        fresh: positions of results whose storage no argument gives; none where that is not known.
        inside: True for a body of a program whose scans, inner ones, too, are rewritten already.
    """

    budget_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    device: DeviceModel
    planner: str = "auto"
    baseline_total_bytes: int | None = None
    calibration: Calibration = UNCALIBRATED
    host_bytes: int = 0
    objective: Objective = LEAST_TIME
    parts: int = 1
    optional: bool = False
    most_ns: int | None = None
    fresh: frozenset[int] = frozenset()
    inside: bool = False
    policy: str = ""
    apart: bool = False

    @property
    def temp_budget_bytes(self) -> int:
        """What the budget leaves for temporaries; negative if arguments and results exceed it."""
        return self.budget_bytes - self.fixed_bytes

    @property
    def kept_bytes(self) -> int:
        """Temporaries that stay mapped, see `passes.cost.mapping_ns`; 0 for a body, which has none of its
        own."""
        return 0 if self.inside else self.parts * self.device.kept_bytes

    def mapping_ns(self, temp_bytes: int) -> int:
        """Estimated time in which temporaries are mapped in each run."""
        return 0 if self.inside else self.parts * mapping_ns(self.device, temp_bytes // self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the program, and what XLA is expected to make of it.

    Attributes:
        lifted: the program that `steps` are a plan of.
        steps, config, emitted: what is run and how it is written.
        foreseen: what XLA is expected to make of that; None where it was not asked.
        peak_bytes: estimated peak of XLA's temporaries.
        hoped_bytes: what that is expected to be, where its like was compiled, or where it is the least that
            scans can be made to need and has yet to be; None means `peak_bytes`.
        holes_bytes: what holes of XLA's heap would add to that, where they are not counted.
        cost_ns, energy_pj: expected time and energy of what is run.
        plan: None for a program without recomputes.
        policy: of `jax.checkpoint`, which its blocks are under instead; "" if none is.
        scans: how its pairs of scans were rewritten before it was planned.
        recomputed_before: what scans recompute that were put in pairs before that.
        rewritten: True if anything was done to it before it was planned.
        bodies: True if bodies of control flow were planned.
        paged: stacks of scans that wait on the host.
        unrivalled: True if nothing that was looked at costs less and is expected to need but little more.
    """

    lifted: LiftedJaxpr
    steps: tuple[OpId, ...]
    config: EmitConfig
    emitted: Jaxpr
    peak_bytes: int
    cost_ns: int
    energy_pj: int
    hoped_bytes: int | None = None
    holes_bytes: int = 0
    foreseen: LiftedJaxpr | None = None
    plan: Plan | None = None
    policy: str = ""
    scans: Level = ()
    recomputed_before: tuple[Recomputed, ...] = ()
    rewritten: bool = False
    bodies: bool = False
    paged: tuple[Paged, ...] = ()
    unrivalled: bool = False

    @property
    def expected_bytes(self) -> int:
        """What a budget, times the scale of the estimates, is compared with."""
        return self.peak_bytes if self.hoped_bytes is None else self.hoped_bytes

    @property
    def changed(self) -> bool:
        """False for the program as it was."""
        return self.plan is not None or self.rewritten or bool(self.policy)

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """What is recomputed: inside of scans, under a policy, and by the plan."""
        program, eqns = self.lifted.program, self.lifted.jaxpr.eqns
        inside = tuple(r for choice in self.scans for r in all_recomputed(choice))
        repeats = [
            OpId(op)
            for op, body in enumerate(self.lifted.bodies)
            if self.policy and compat.is_in_scope(eqns[body[-1]], RECOMPUTE_SCOPE)
        ]
        written = tuple(recomputed_op(program, op, "jaxpr") for op in repeats)
        return self.recomputed_before + inside + written + recomputed_by(program, self.steps, "jaxpr")

    @property
    def recipe(self) -> Recipe:
        """What was done to scans and bodies, and whose plan is run."""
        scans = Scans.SEGMENTS if any(choice.in_segments for choice in self.scans) else Scans.LEVELS
        return Recipe(
            scans=scans if self.rewritten else Scans.NONE,
            bodies=self.bodies,
            on_host=bool(self.paged),
            recompute=self.policy or (None if self.plan is None else self.plan.planner),
        )
