"""What was asked of a compiled program, what was done, and what XLA says came out.

Bytes come from XLA's memory analysis of the compiled program, everything else from the record that the
program carries. A program that is over its budget has no report: `report` raises.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.stages import Compiled

from coop_jax import aot, mark, serialized
from coop_jax.errors import BudgetExceededError, UnsupportedError
from coop_jax.host_use import HostUse
from coop_jax.offsets import Offsets
from coop_jax.record import Record, Timed
from coop_jax.screen import Block, Lines, Printable, Table
from coop_jax.text import format_bytes, format_ns, format_pj, format_table
from passes.backend import backend_of
from passes.checked import check_types
from passes.cost import DEVICES
from passes.counts import Fixed
from passes.ir import Status
from passes.objective import LEAST_TIME
from passes.outcome import Recomputed, StageOutcome

# What tells kernels of the same kind apart.
_NUMBER = re.compile(r"\.[0-9]+$")
_SHOWN = 12
# Constants of less than this share of the budget are not worth a row.
_SEEN_RATIO = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Printable, Fixed):
    """A compiled program and its budget. All bytes are per device and of the whole program.

    Attributes:
        budget: the budget as it was given, such as "0.5 of the plain program's peak".
        budget_bytes: the same in bytes.
        baseline_total_bytes: the program without rematerialization. Where it was not compiled this is a
            prediction made before XLA's own choices, which was seen a third too low and half too high.
        baseline_compiled: True if XLA counted the baseline, False if it was predicted.
        planned_total_bytes: what the last stage that planned expected.
        compiled_total_bytes: XLA's count: arguments + outputs - aliased + temporaries + constants.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's parts of it.
        baseline_cost_ns, compiled_cost_ns: estimated time of all kernels, and on a CPU of mapping temporaries
            (`passes.cost.mapping_ns`), without rematerialization and as
            compiled; None where that program was not compiled, or came from JAX's compilation cache.
        overhead_ratio: estimated change of the program's time by all that was planned: 0.1 for a tenth more,
            negative where recompute saves more traffic than it costs. Where `baseline_cost_ns` is not known
            it is of an estimate of the program's kernels, and only `compiled_cost_ns` compares two reports.
        objective: what was planned for, such as "least energy within 10% more time".
        max_overhead: the limit of time in it, which `overhead_ratio` is above where no plan keeps it.
        compiled_energy_pj: estimated energy of a run as compiled, in picojoules; 0 where it is not known.
        energy_ratio: estimated change of the program's energy by all that was planned.
        lower_bound_ratio: no plan for this budget costs less (0.0: nothing proved).
        status: "optimal" or "feasible".
        host: what waits in the host's memory; see `coop_jax.host_use`.
        changed: True if the program was rewritten for the budget. What then runs again inside branches, or
            inside the kernels that read it, is not among `recomputed`.
        device_name: the cost model.
        planner: whose plans were taken, by stage.
        recomputed: what is recomputed.
        offsets: the temporaries' addresses; see `coop_jax.offsets`.
        seconds: planning time by stage; 0.0 where the program came from JAX's compilation cache.
        looks: how often the program was planned and compiled once more, as far as XLA's schedule.
        whole: True if the whole program was planned, since the plans of what is decorated in it did not do.
        limited: True if more plans could have been looked at, but not in the time of one compile.
        timed: the programs that were run for `tune`, the fastest, which was taken, first.
        constraints: what was asked about single values, such as "save=('h',)". What they alone make the
            program recompute is not among `recomputed`.
    """

    budget: str
    budget_bytes: int
    baseline_total_bytes: int
    baseline_compiled: bool
    planned_total_bytes: int
    compiled_total_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    baseline_cost_ns: int | None
    compiled_cost_ns: int | None
    overhead_ratio: float
    lower_bound_ratio: float
    status: Status
    device_name: str
    planner: dict[str, str]
    recomputed: tuple[Recomputed, ...]
    offsets: Offsets
    seconds: dict[str, float]
    looks: int
    whole: bool = False
    limited: bool = False
    timed: tuple[Timed, ...] = ()
    constraints: str = ""
    host: HostUse = field(default_factory=HostUse)
    changed: bool = False
    objective: str = str(LEAST_TIME)
    max_overhead: float | None = None
    compiled_energy_pj: int = 0
    energy_ratio: float = 0.0

    @property
    def baseline(self) -> str:
        """How `baseline_total_bytes` is known: "compiled" or "predicted, may be far off"."""
        return "compiled" if self.baseline_compiled else "predicted, may be far off"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **fields,
            "baseline": self.baseline,
            "status": str(self.status),
            "recomputed": [dataclasses.asdict(r) for r in self.recomputed],
            "timed": [dataclasses.asdict(t) for t in self.timed],
            "offsets": self.offsets.to_dict(),
            "host": self.host.to_dict(),
        }

    def __str__(self) -> str:
        """The blocks, their tables in Markdown."""
        lines: list[str] = []
        for block in self.blocks():
            if isinstance(block, Table):
                lines.append(format_table(block.header, block.rows))
            elif isinstance(block, Lines):
                lines += block.lines
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` was called on.

        Raises:
            KeyError, TypeError, ValueError: it is another version's, or something else.
        """
        given = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        check_types(cls, given)
        if given["budget_bytes"] <= 0:
            raise ValueError(f"budget_bytes is {given['budget_bytes']}")
        for made, items in (
            (Recomputed, given["recomputed"]),
            (Timed, given["timed"]),
            (Offsets, [given["offsets"]]),
        ):
            for item in items:
                check_types(made, item)
        known = {
            "status": Status(given["status"]),
            "recomputed": tuple(Recomputed(**item) for item in given["recomputed"]),
            "timed": tuple(Timed(**item) for item in given["timed"]),
            "offsets": Offsets(**given["offsets"]),
            "host": HostUse.from_dict(given["host"]),
        }
        return cls(**{**given, **known})

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        asked = format_bytes(self.budget_bytes)
        given = "" if self.budget == asked else f": {self.budget}"
        budget = f"budget {asked}{given}" + (f" and {self.constraints}" if self.constraints else "")
        rows = self._byte_rows()
        parts: list[Block] = [
            Lines(lines=(budget,)),
            Table(
                header=("", "bytes", "", "of budget"), rows=tuple(rows),
                shares=tuple(min(1.0, max(0, int(row[1])) / self.budget_bytes / 1.2) for row in rows),
            ),
            Lines(
                lines=(self._recompute_text(), *self.host.lines(), *self._times(), *self._energy_lines())
            ),
        ]  # fmt: skip
        if self.recomputed:
            header = ("recomputed", "times", "bytes", "cost", "stage")
            parts.append(Table(header=header, rows=tuple(_grouped(self.recomputed))))
        if host := self.host.table():
            parts.append(host)
        return [*parts, Lines(lines=(str(self.offsets), self._planning_text()))]

    def _planning_text(self) -> str:
        stages = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        if self.looks:
            times = "once" if self.looks == 1 else f"{self.looks} times"
            stages += f", in which the program was planned and compiled {times} more"
            stages += ", as a whole" if self.whole else ""
        if self.limited:
            stages += "; the search ended at its limit, the time of one compile"
        return (
            f"planning: {stages or 'none'} (costs are estimates for {self.device_name}{self._mapped_text()})"
        )

    def _mapped_text(self) -> str:
        """What a run takes beside its kernels, where the plain program's does."""
        kept_bytes = DEVICES[self.device_name].kept_bytes if self.device_name in DEVICES else 0
        if not 0 < kept_bytes < self.baseline_total_bytes - self.fixed_bytes:
            return ""
        return f", with the time to map temporaries, if more than {format_bytes(kept_bytes, exact=False)}"

    def _byte_rows(self) -> list[tuple[str, str, str, str]]:
        constant_bytes = self.compiled_total_bytes - self.fixed_bytes - self.temp_bytes
        rows = (
            (f"without rematerialization ({self.baseline})", self.baseline_total_bytes),
            ("planned", self.planned_total_bytes),
            ("compiled, XLA's count", self.compiled_total_bytes),
            ("  arguments", self.argument_bytes),
            ("  outputs", self.output_bytes),
            ("  temporaries", self.temp_bytes),
            ("  outputs in donated arguments", -self.alias_bytes),
            *([("  constants", constant_bytes)] if constant_bytes >= _SEEN_RATIO * self.budget_bytes else []),
        )
        return [
            (name, str(n), format_bytes(n, exact=False), f"{100 * n / self.budget_bytes:.1f} %")
            for name, n in rows
        ]

    def _times(self) -> list[str]:
        """What is known of the program's time."""
        runs = [_timed_text(timed) for timed in self.timed]
        if self.compiled_cost_ns is None:
            return runs
        text = f"all kernels as compiled: estimated {format_ns(self.compiled_cost_ns)}"
        if plain_ns := self.baseline_cost_ns:
            change = 100 * (self.compiled_cost_ns / plain_ns - 1)
            text += f", without rematerialization {format_ns(plain_ns)} ({change:+.2f} %)"
        return [text, *runs]

    def _energy_lines(self) -> list[str]:
        """What is known of the program's energy, and whether a limit of time is kept."""
        if not self.compiled_energy_pj:
            return []
        text = f"energy of a run: estimated {format_pj(self.compiled_energy_pj)}"
        text += f", {100 * self.energy_ratio:+.2f} % by what was planned"
        if self.objective != str(LEAST_TIME):
            text += f"; planned for the {self.objective}"
        if self.max_overhead is not None and self.overhead_ratio > self.max_overhead + 1e-9:
            text += ", which no plan keeps that was found: this is the quickest"
        return [text]

    def _recompute_text(self) -> str:
        if not self.recomputed and not self.changed:
            return "recomputed: nothing, the program keeps its budget as it is"
        if not self.recomputed:
            return "recomputed: nothing that can be listed, but the program was rewritten for the budget"
        cost = format_ns(sum(r.cost_ns for r in self.recomputed))
        bound = f"{100 * self.lower_bound_ratio:.2f} %" if self.lower_bound_ratio > 0 else "not known"
        of = "" if self.baseline_cost_ns else " of what was predicted without"
        return (
            f"recomputed: {len(self.recomputed)} ops, estimated {cost}; the program's time "
            f"{100 * self.overhead_ratio:+.2f} %{of} (lower bound {bound}, {self.status})"
        )


def report(compiled: Compiled) -> Report:
    """Read the report of a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returned, where `f` contains a function that
            `coop.remat` decorates.

    Raises:
        UnsupportedError: the program contains no such function.
        BudgetExceededError: XLA's count is above the budget.
    """
    compiled = aot.inner_compiled(compiled)
    if not hasattr(compiled, "memory_analysis"):
        raise UnsupportedError(
            f"`compiled` is a {type(compiled).__name__}; a report needs a compiled program: "
            "coop.report(jax.jit(f).lower(*args).compile())."
        )
    record = mark.record_of(compiled)
    if record is None:
        raise UnsupportedError(
            "this program contains no function that `coop.remat` decorates, so there is nothing to report. "
            "`coop_jax.aot.memory(compiled)` reads the memory of any program."
        )
    memory = aot.memory(compiled)
    if memory.total_bytes > record.budget_bytes:
        raise BudgetExceededError(budget_bytes=record.budget_bytes, compiled_bytes=memory.total_bytes)
    platform = serialized.platform_of(compiled)
    limit_bytes = aot.host_limit_bytes(platform)
    host = HostUse.of(record, memory.host_bytes, backend_of(platform), limit_bytes)
    return _assemble(record, memory, Offsets.of(compiled, record, memory.temp_bytes), host)


def _assemble(record: Record, memory: aot.Memory, offsets: Offsets, host: HostUse) -> Report:
    stages = record.stages
    planned = memory.fixed_bytes + stages[-1].planned_temp_bytes if stages else memory.total_bytes
    baseline = record.baseline_total_bytes
    if baseline is None:
        baseline = memory.fixed_bytes + stages[0].before_temp_bytes if stages else memory.total_bytes
    changed = [s for s in stages if s.changed]
    overhead_ratio, energy_ratio = record.changes
    return Report(
        budget=str(record.budget),
        budget_bytes=record.budget_bytes,
        baseline_total_bytes=baseline,
        baseline_compiled=record.baseline_compiled,
        planned_total_bytes=planned,
        compiled_total_bytes=memory.total_bytes,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        alias_bytes=memory.alias_bytes,
        temp_bytes=memory.temp_bytes,
        baseline_cost_ns=record.baseline_cost_ns,
        compiled_cost_ns=None if record.hlo is None else record.hlo.run_ns,
        overhead_ratio=overhead_ratio,
        objective=str(record.objective),
        max_overhead=record.objective.max_overhead,
        compiled_energy_pj=0 if record.hlo is None else record.hlo.energy_pj + record.hlo.recompute_pj,
        energy_ratio=energy_ratio,
        lower_bound_ratio=max(0.0, min(changed[0].lower_bound_ratio, overhead_ratio)) if changed else 0.0,
        status=_status(changed),
        device_name=record.device_name,
        planner={s.stage: s.planner for s in stages},
        recomputed=tuple(r for s in stages for r in s.recomputed),
        offsets=offsets,
        whole=record.whole,
        seconds={s.stage: s.seconds for s in stages},
        looks=0 if record.hlo is None else record.hlo.looks,
        timed=record.timed,
        limited=record.hlo is not None and record.hlo.limited,
        constraints=record.constraints,
        host=host,
        changed=bool(changed),
    )


def _timed_text(timed: Timed) -> str:
    """One line about a program that was run."""
    need = format_bytes(timed.total_bytes, exact=False)
    return f"measured: {format_ns(timed.run_ns)} in {need}, estimated {format_ns(timed.estimated_ns)}"


def _status(changed: Sequence[StageOutcome]) -> Status:
    """Doing nothing is optimal; two stages that both acted are optimal for no common program.

    A stage that did not expect to keep the budget has kept it if there is a report.
    """
    proved = len(changed) == 1 and changed[0].status is Status.OPTIMAL
    return Status.OPTIMAL if proved or not changed else Status.FEASIBLE


def _grouped(recomputed: Sequence[Recomputed]) -> list[tuple[str, str, str, str, str]]:
    """One row for each op and source line, largest bytes first."""
    groups: dict[tuple[str, str], list[Recomputed]] = {}
    for item in recomputed:
        op = _NUMBER.sub("", item.op)
        what = f"{op} at {_short(item.source)}" if item.source else op
        groups.setdefault((what, item.stage), []).append(item)
    ordered = sorted(groups.items(), key=lambda entry: -sum(r.nbytes for r in entry[1]))

    def row(what: str, stage: str, items: Sequence[Recomputed]) -> tuple[str, str, str, str, str]:
        nbytes, cost = sum(r.nbytes for r in items), sum(r.cost_ns for r in items)
        return (what, str(len(items)), format_bytes(nbytes, exact=False), format_ns(cost), stage)

    rows = [row(what, stage, items) for (what, stage), items in ordered[:_SHOWN]]
    if rest := [r for _, items in ordered[_SHOWN:] for r in items]:
        rows.append(row(f"{len(ordered) - _SHOWN} more", "", rest))
    return rows


def _short(source: str) -> str:
    """A source line with the last two parts of its path, and of XLA's name of an operation the last one."""
    path, space, name = source.partition(" (")
    return "/".join(path.split("/")[-2:]) + space + name.rpartition("/")[2]
