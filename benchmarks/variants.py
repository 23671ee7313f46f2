"""One program of the corpus, compiled in every way: plain, by hand, by XLA's own pass, and within budgets.

`rows_of` yields a `Row` for each, the plain one first. Bytes are XLA's, costs are the roofline estimate of
the final kernels; what the plan expected of both is beside them. On this machine's CPU each program also
runs.

Not done: `everything_saveable`, which keeps what the plain program keeps, and policies that offload.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

import coop_jax as coop
from benchmarks.models import OWN, PLAIN, Model, Program, lower, program
from benchmarks.timing import filled, paired
from coop_jax import aot, mark
from coop_jax.errors import CoopError, error_from_text
from passes.cost import DEVICES

SAME_RATIO = 0.005
LEAST_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is asked for.

    Attributes:
        fractions: budgets of coop beside its rivals' bytes, as parts of the plain total, largest first.
        xla_fractions: parts of the plain total that XLA's own pass is to aim at (GPUs only).
        runs: pairs of steps on the CPU; 0 for none.
        least: also look for the least budget.
        whole: decorate the whole step (True) or the loss alone.
    """

    fractions: tuple[float, ...] = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
    xla_fractions: tuple[float, ...] = (0.6, 0.4)
    runs: int = 7
    least: bool = True
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program as compiled.

    Attributes:
        name: such as "nothing_saveable" or "coop 812.00 MiB".
        kind: "plain", "hand" (a policy or the package's own option), "xla" or "coop".
        budget_bytes: what coop was asked for.
        rivals: whose bytes that is.
        total_bytes, fixed_bytes: XLA's count, and the arguments and outputs in it; None without a program.
        cost_ns: estimated time of the final kernels.
        wall_s, cpu_s: tracing, planning and compiling: wall time, and CPU time of this process.
        planning_s: of which coop says it planned and looked; None if it says nothing.
        looks: how often coop compiled the program once more to look at another plan.
        planned_bytes, planned_plain_bytes: what the first stage's plan expected of the total, with and
            without itself.
        planned_change: by how much the plan expected the cost to change, 0.1 for a tenth more.
        reported_change: the same as `report.overhead_ratio` says it.
        least_bytes: what a refusal calls the least budget.
        step_ratio, step_cpu_ratio: measured step time over the plain one's, medians of pairs.
        error: the first line of it; empty if the program is there.
    """

    name: str
    kind: str
    budget_bytes: int | None = None
    rivals: tuple[str, ...] = ()
    total_bytes: int | None = None
    fixed_bytes: int | None = None
    cost_ns: int | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    planning_s: float | None = None
    looks: int | None = None
    planned_bytes: int | None = None
    planned_plain_bytes: int | None = None
    planned_change: float | None = None
    reported_change: float | None = None
    least_bytes: int | None = None
    step_ratio: float | None = None
    step_cpu_ratio: float | None = None
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Compiler:
    """Compiles and measures the ways of one model for one target."""

    model: Model
    target: str
    options: Options
    plain: Any = None
    made: list[Row] = field(default_factory=list)

    def take(self, made: Program, name: str, kind: str, memory_bytes: int | None = None, **facts: Any) -> Row:
        """Compile one program, measure it, and keep its row.

        Args:
            memory_bytes: of the target's device; None leaves it as it is.
            facts: of the row.
        """
        compiled, row = self._compiled(made, Row(name=name, kind=kind, **facts), memory_bytes)
        if compiled is not None:
            row = _described(row, compiled, self.target)
            if kind == "plain":
                self.plain = compiled
            elif self.target == "cpu" and self.options.runs:
                try:
                    row = self._run(row, compiled, made)
                except Exception as error:  # what it would need and cost is known all the same
                    row = replace(row, error=f"does not run: {str(error).strip().splitlines()[-1]}")
        self.made.append(row)
        return row

    def _compiled(self, made: Program, row: Row, memory_bytes: int | None) -> tuple[Any, Row]:
        where = None if self.target == "cpu" else aot.target(self.target)
        if where is not None and memory_bytes is not None:
            where = where.with_memory(memory_bytes)
        wall, cpu = time.perf_counter(), time.process_time()
        compiled, failure = None, {}
        try:
            compiled = lower(made, where, devices=self.model.devices).compile()
        except Exception as error:  # every failure is a row of the table
            found = error if isinstance(error, CoopError) else error_from_text(str(error))
            text = str(found or error).strip().partition("\n")[0] or type(error).__name__
            failure = {"error": text, "least_bytes": getattr(found, "least_bytes", None)}
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        return compiled, replace(row, **seconds, **failure)

    def _run(self, row: Row, compiled: Any, made: Program) -> Row:
        pairs = paired(self.plain, compiled, lambda: filled(made.specs()), self.options.runs)
        return replace(
            row,
            step_ratio=statistics.median(p.wall_ratio for p in pairs),
            step_cpu_ratio=statistics.median(p.cpu_ratio for p in pairs),
        )


def _described(row: Row, compiled: Any, target: str) -> Row:
    """The row with what XLA, and the record of a plan, say of a compiled program."""
    memory = aot.memory(compiled)
    row = replace(
        row,
        total_bytes=memory.total_bytes,
        fixed_bytes=memory.fixed_bytes,
        cost_ns=aot.run_ns(compiled, DEVICES[target]),
    )
    record = mark.record_of(compiled)
    if record is None:
        return row
    report = coop.report(compiled)
    row = replace(
        row,
        planning_s=sum(report.seconds.values()),
        looks=report.looks,
        reported_change=report.overhead_ratio,
    )
    planned = record.jaxpr
    if planned is None:
        return row
    return replace(
        row,
        planned_bytes=planned.expected_total_bytes,
        planned_plain_bytes=planned.fixed_bytes + planned.before_temp_bytes,
        planned_change=planned.recompute_ns / max(planned.cost_ns, 1),
    )


def rows_of(model: Model, target: str, options: Options, known: Sequence[Row] = ()) -> Iterator[Row]:
    """Every row of one program for one target, the plain one first.

    Args:
        target: "cpu", or the name of a GPU that need not be here.
        known: rivals' rows of an earlier run, which are not compiled again: coop changes nothing about them.
    """
    compiler = Compiler(model=model, target=target, options=options)
    warm_up(model, target)
    plain = compiler.take(program(model, target), PLAIN, "plain")
    yield plain
    if plain.total_bytes is None:
        return
    if known:
        compiler.made += known
        yield from known
    else:
        yield from _rivals(compiler, plain)
    yield from _within_budgets(compiler, plain)


def _rivals(compiler: Compiler, plain: Row) -> Iterator[Row]:
    model, target = compiler.model, compiler.target
    for way in model.ways()[1:]:
        name = model.own if way == OWN else way
        yield compiler.take(program(model, target, way), name, "hand")
    for fraction in compiler.options.xla_fractions if target != "cpu" else ():
        # XLA aims at .8 of the device's memory.
        memory_bytes = int(fraction * (plain.total_bytes or 0) / 0.8)
        yield compiler.take(program(model, target), f"xla {fraction:g}", "xla", memory_bytes)


def warm_up(model: Model, target: str) -> None:
    """Start the compiler and fill JAX's caches of traces, so that no row pays for it."""
    made = program(model, target)
    jax.eval_shape(made.step, *made.specs())
    where = None if target == "cpu" else target
    aot.lower_for(lambda x: x + 1, (jax.ShapeDtypeStruct((), "float32"),), device=where).compile()


def _within_budgets(compiler: Compiler, plain: Row) -> Iterator[Row]:
    options, refused = compiler.options, None
    assert plain.total_bytes is not None, plain.error
    for budget, rivals in budgets_of(compiler.made, options.fractions):
        if refused is not None and not rivals:
            continue
        row = _within(compiler, budget, rivals)
        yield row
        refused = row if row.error else refused
    if not options.least:
        return
    if refused is None:
        refused = _within(compiler, plain.fixed_bytes or 1, ())
        yield refused
    tried = {row.budget_bytes for row in compiler.made}
    for _ in range(LEAST_TRIES):
        if refused.least_bytes is None or refused.least_bytes in tried:
            return
        tried.add(refused.least_bytes)
        refused = _within(compiler, refused.least_bytes, ())
        yield refused


def _within(compiler: Compiler, budget: int, rivals: tuple[str, ...]) -> Row:
    made = program(
        compiler.model, compiler.target, around=coop.remat(budget=budget), whole=compiler.options.whole
    )
    facts = {"budget_bytes": budget, "rivals": rivals}
    return compiler.take(made, f"coop {budget / 2**20:.2f} MiB", "coop", **facts)


def budgets_of(rows: Sequence[Row], fractions: Sequence[float]) -> list[tuple[int, tuple[str, ...]]]:
    """Budgets to ask coop for, largest first, and the rivals whose bytes each is.

    Rivals whose bytes are nearly the same are one budget, the smallest of them; so is a fraction close by.
    What needs as much as the plain program is no rival.
    """
    most = rows[0].total_bytes
    assert rows[0].kind == "plain", "the plain program comes first"
    assert most is not None, rows[0].error
    found: list[tuple[int, tuple[str, ...]]] = []
    rivals = [r for r in rows[1:] if r.kind in ("hand", "xla") and r.total_bytes is not None]
    for row in sorted(rivals, key=lambda r: r.total_bytes or 0):
        nbytes = row.total_bytes or 0
        if nbytes >= most:
            continue
        if found and nbytes <= (1 + SAME_RATIO) * found[-1][0]:
            found[-1] = (found[-1][0], (*found[-1][1], row.name))
        else:
            found.append((nbytes, (row.name,)))
    for fraction in fractions:
        asked = int(fraction * most)
        if all(abs(asked - nbytes) > SAME_RATIO * most for nbytes, _ in found):
            found.append((asked, ()))
    return sorted(found, reverse=True)
