"""What a stage did: plain facts that the report, the errors and the benchmarks read.

Both stages that plan (the jaxpr stage and the enforcing stage) return one `StageOutcome`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from passes.counts import Fixed
from passes.ir import BufferId, OpId, Page, Program, Status
from passes.liveness import live_steps
from passes.recipe import Recipe
from passes.simulate import simulate

MAX_TIGHTEST = 12
# In the names of what the jaxpr stage runs again, so that whoever looks at the compiled program finds it.
RECOMPUTE_SCOPE = "coop_recompute"

Stage = Literal["jaxpr", "hlo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """One op that a plan runs again.

    Attributes:
        op: kernel or primitive name, such as "dot_general" or "fusion.12".
        source: the user's line that it comes from, "" where XLA does not say.
        nbytes: bytes of its outputs, which were freed in the meantime.
        cost_ns: estimated time of the recompute.
        stage: which stage wrote it into the program.
    """

    op: str
    source: str
    nbytes: int
    cost_ns: int
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """One value that waits in the host's memory.

    Attributes:
        op: the kernel or primitive that makes it.
        source: the user's line that it comes from, "" where XLA does not say.
        nbytes: its bytes.
        times: how often it comes back.
        stage: which stage wrote it into the program.
    """

    op: str
    source: str
    nbytes: int
    times: int
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """One value that is alive at the tightest point of a program."""

    op: str
    source: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome(Fixed):
    """What one planning stage found and did. All bytes are per device.

    Attributes:
        stage: "jaxpr" or "hlo".
        changed: False if the stage returned its program as it was (but for the mark).
        budget_bytes: the whole program's budget.
        argument_bytes, output_bytes, alias_bytes: storage that no plan can shrink
            (fixed = argument + output - alias).
        before_temp_bytes: predicted peak of temporaries without this stage's work.
        planned_temp_bytes: predicted peak of temporaries with it.
        ordered_temp_bytes: that in a better order and without copies that nothing needs, which any other plan
            would have, too; None where the program keeps its budget as it is.
        unordered_temp_bytes: predicted peak in XLA's own order, where that keeps the budget and so is left
            alone; None where it is not, or where XLA keeps the program's order.
        cost_ns: estimated time of the program before this stage.
        recompute_ns: estimated time of the program after this stage less `cost_ns`: negative where recompute
            saves more traffic than it costs.
        energy_pj, recompute_pj: the same of its energy; 0 where the device's power is not known.
        lower_bound_ratio: no plan of this stage's program costs less (0.0: nothing proved).
        status: see `Status`.
        recipe: what was done, and whose plan was taken.
        seconds: wall time of this stage, all looks at other plans included.
        looks: how often the program was planned and compiled once more to look at another plan.
        limited: True if there were more to look at, but that would have taken longer than the compile.
        host_budget_bytes: what may wait in the host's memory; 0 for no paging.
        host_bytes: predicted bytes there, a user's own offloading included.
        waiting_ns: estimated time that kernels stand still for the link; a part of `recompute_ns`.
        paged: what waits in the host's memory, in program order.
        recomputed: what is recomputed, in program order.
        tightest: the largest values alive at the tightest point, largest first.
        least_total_bytes: the least whole-program budget that this stage could meet; filled when
            `status` is not found, else None. The enforcing stage meets it if it is asked for.
        least_proved: True if no plan of this stage's program goes below `least_total_bytes`.
        needs_pinning: True if the budget is kept only after the temporaries are packed anew.
        unsteered_bytes: where XLA's packing was steered, for the budget or the least, the least total
            without that; else None.
        constraints: what the user asked about single values, such as "save=('h',)".
        apart: True for a forward or a backward part that is a program of its own, as outside `jit`.
        kernels_ns: the least that the program is expected to take with its own kernels, some of them run
            again, within the budget; None where that is not known, or not possible.
        policy: the cheapest of the ready policies of `jax.checkpoint` around the program's blocks that may
            keep the budget, where none was taken; "" if there is none.
        policy_ns: what the program is expected to take under it.
        unrivalled: True if no other plan was near that costs less.
        constant_bytes: arrays that are written in the program; counted with its temporaries.
        holes_bytes: what holes of XLA's heap would add to `planned_temp_bytes`, where they are not counted.
    """

    stage: Stage
    changed: bool
    budget_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    before_temp_bytes: int
    planned_temp_bytes: int
    cost_ns: int
    recompute_ns: int
    lower_bound_ratio: float
    status: Status
    recipe: Recipe
    seconds: float
    recomputed: tuple[Recomputed, ...] = ()
    tightest: tuple[LiveValue, ...] = ()
    least_total_bytes: int | None = None
    least_proved: bool = False
    needs_pinning: bool = False
    unsteered_bytes: int | None = None
    constraints: str = ""
    apart: bool = False
    looks: int = 0
    limited: bool = False
    host_budget_bytes: int = 0
    host_bytes: int = 0
    waiting_ns: int = 0
    paged: tuple[Paged, ...] = ()
    kernels_ns: int | None = None
    policy: str = ""
    policy_ns: int | None = None
    energy_pj: int = 0
    recompute_pj: int = 0
    unrivalled: bool = False
    constant_bytes: int = 0
    holes_bytes: int = 0
    ordered_temp_bytes: int | None = None
    unordered_temp_bytes: int | None = None

    @property
    def needed_temp_bytes(self) -> int:
        """What the program needs, in whatever order, if nothing is run again."""
        ordered_bytes = self.ordered_temp_bytes
        return self.before_temp_bytes if ordered_bytes is None else ordered_bytes

    @property
    def run_ns(self) -> int:
        """Estimated time of the program after this stage."""
        return self.cost_ns + self.recompute_ns

    @property
    def planned_total_bytes(self) -> int:
        """The whole program's predicted peak."""
        return self.fixed_bytes + self.planned_temp_bytes

    @property
    def expected_total_bytes(self) -> int:
        """The whole program's predicted peak in the order in which it will be run."""
        unordered_bytes = self.unordered_temp_bytes
        return self.planned_total_bytes if unordered_bytes is None else self.fixed_bytes + unordered_bytes

    @property
    def planner(self) -> str:
        """The recipe as text."""
        return str(self.recipe)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the recipe as text, by the name of "planner"."""
        fields = asdict(self)
        return {**{k: v for k, v in fields.items() if k != "recipe"}, "planner": self.planner}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageOutcome:
        """The outcome that `to_dict` made a dictionary of."""
        fields = {k: v for k, v in data.items() if k != "planner"}
        fields["recipe"] = Recipe.of_text(data["planner"])
        fields["status"] = Status(data["status"])
        fields["recomputed"] = tuple(Recomputed(**r) for r in data["recomputed"])
        fields["paged"] = tuple(Paged(**p) for p in data["paged"])
        fields["tightest"] = tuple(LiveValue(**v) for v in data["tightest"])
        return cls(**fields)


def changes(stages: Iterable[StageOutcome]) -> tuple[float, float]:
    """By which shares stages, in their order, change a program's time and its energy.

    A later stage's program already contains what an earlier one added, so factors multiply.
    """
    time_ratio = energy_ratio = 1.0
    for stage in stages:
        time_ratio *= 1 + stage.recompute_ns / max(1, stage.cost_ns)
        energy_ratio *= 1 + stage.recompute_pj / max(1, stage.energy_pj)
    return time_ratio - 1, energy_ratio - 1


def scaled(outcome: StageOutcome, *, over: int) -> StageOutcome:
    """An outcome with its bytes, times and energy divided: of one device's part."""
    temps = ("before_temp_bytes", "planned_temp_bytes", "constant_bytes", "holes_bytes")
    names = ("budget_bytes", "argument_bytes", "output_bytes", "alias_bytes", *temps)
    spent = ("cost_ns", "recompute_ns", "waiting_ns", "energy_pj", "recompute_pj")
    values = {name: getattr(outcome, name) // over for name in (*names, *spent)}
    unless_none = (
        "least_total_bytes",
        "ordered_temp_bytes",
        "unordered_temp_bytes",
        "kernels_ns",
        "policy_ns",
    )
    values |= {name: None if (n := getattr(outcome, name)) is None else n // over for name in unless_none}
    recomputed = tuple(
        replace(r, nbytes=r.nbytes // over, cost_ns=r.cost_ns // over) for r in outcome.recomputed
    )
    paged = tuple(replace(p, nbytes=p.nbytes // over) for p in outcome.paged)
    tightest = tuple(replace(v, nbytes=v.nbytes // over) for v in outcome.tightest)
    return replace(outcome, **values, recomputed=recomputed, paged=paged, tightest=tightest)


def recomputed_by(program: Program, steps: Sequence[OpId], stage: Stage) -> tuple[Recomputed, ...]:
    """The ops that a sequence of steps runs again, once for every recompute, in the order of the steps.

    A first run that nothing reads is not written: the op has only moved, which costs nothing.
    """
    seen: set[OpId] = set()
    recomputed = []
    for step, is_live in zip(steps, live_steps(program, steps), strict=True):
        if not is_live:
            continue
        if step in seen:
            recomputed.append(recomputed_op(program, step, stage))
        seen.add(step)
    return tuple(recomputed)


def recomputed_op(program: Program, op_id: OpId, stage: Stage) -> Recomputed:
    """An op that is run again."""
    op = program.ops[op_id]
    nbytes = sum(program.buffers[b].nbytes for b in op.outputs)
    return Recomputed(op=op.name, source=op.source, nbytes=nbytes, cost_ns=op.cost_ns, stage=stage)


def paged_by(program: Program, pages: Sequence[Page], stage: Stage) -> tuple[Paged, ...]:
    """What pages send to the host, each live range once, in the order of their runs."""
    times: dict[tuple[int, BufferId], int] = {}
    for page in sorted(pages, key=lambda p: (-1 if p.run is None else p.run, p.buffer)):
        key = (-1 if page.run is None else page.run, page.buffer)
        times[key] = times.get(key, 0) + 1
    paged = []
    for (_, buffer), n in times.items():
        producer = program.producer[buffer]
        op = None if producer is None else program.ops[producer]
        paged.append(
            Paged(
                op=program.buffers[buffer].name if op is None else op.name,
                source="" if op is None else op.source,
                nbytes=program.buffers[buffer].nbytes,
                times=n,
                stage=stage,
            )
        )
    return tuple(paged)


def tightest_values(program: Program, steps: Sequence[OpId]) -> tuple[LiveValue, ...]:
    """The largest values that ops of the program keep alive at the peak of a sequence of steps."""
    timeline = simulate(program, steps)
    lives = zip(timeline.ranges.buffer, timeline.ranges.start, timeline.ranges.stop, strict=True)
    alive = [program.buffers[b] for b, start, stop in lives if start <= timeline.peak_step < stop]
    alive.sort(key=lambda buffer: (-buffer.nbytes, buffer.id))
    values = []
    for buffer in alive[:MAX_TIGHTEST]:
        producer = program.producer[buffer.id]
        if producer is not None and buffer.nbytes:
            op = program.ops[producer]
            values.append(LiveValue(op=op.name, source=op.source, nbytes=buffer.nbytes))
    return tuple(values)
