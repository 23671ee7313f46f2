"""The promise, on every example model: within budget by XLA's own count, or a clear refusal.

    python -m benchmarks.promise                          # every case, about 30 minutes on 2 cores
    python -m benchmarks.promise --models mlp --devices cpu --fractions 0.6 0.4

Each model as a whole training step with Adam (state donated) and as a loss under `jax.value_and_grad`, on the
CPU and on an H200 that is not here, at fractions of the plain program's total. On the CPU the program
also runs, and its results are compared with the plain program's. `--devices v5e v6e` does it for TPUs, with
their temporaries kept in HBM; `--lines FILE` keeps every cell at once, with the commit it is of.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np

import coop_jax as coop
from benchmarks.cycles import program_cycles
from coop_jax import aot, tpu
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError, error_from_text
from coop_jax.planning import MOST_COMPILES
from coop_jax.text import format_bytes, format_table
from examples.models import (
    ConvConfig,
    GPTConfig,
    LSTMConfig,
    MLPConfig,
    Problem,
    adam_init,
    adam_step,
    convnet,
    gpt,
    lstm,
    mlp,
)
from passes.hlo import proto

FORMS = ("step", "grad")
FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4)
# By what their batches are multiplied with.
MODELS: dict[str, Callable[[int], Problem]] = {
    "gpt": lambda n: gpt.problem(GPTConfig(layers=4, width=128, heads=4, seq=128, batch=8 * n)),
    "mlp": lambda n: mlp.problem(MLPConfig(layers=8, width=128, batch=1024 * n)),
    "conv": lambda n: convnet.problem(ConvConfig(stages=2, depth=3, channels=16, image=32, batch=16 * n)),
    "lstm": lambda n: lstm.problem(LSTMConfig(steps=12, width=64, batch=128 * n)),
}
# Every tuple in a TPU's program takes 16 KiB: a third of the small LSTM.
TPU_BATCHES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program at one budget.

    Attributes:
        model, form, device, fraction: which.
        plain_bytes: XLA's total of the plain program.
        fixed_bytes: the arguments and outputs in it.
        budget_bytes: fraction of plain_bytes.
        total_bytes: XLA's total of the program within the budget; None if it was refused.
        planned_bytes: what was predicted for it.
        least_bytes: what the refusal says is the least budget.
        overhead_ratio: as the report has it, estimated before XLA made kernels of the plan.
        cycles_ratio: the same by XLA's own estimate of the compiled program and of the plain one; None where
            its compiler makes none.
        difference: the largest difference of loss or any gradient to the plain program's, over the largest
            value of that array; None where the program cannot run here.
        seconds: tracing, planning and compiling.
        commit: of the code.
    """

    model: str
    form: str
    device: str
    fraction: float
    plain_bytes: int
    fixed_bytes: int
    budget_bytes: int
    total_bytes: int | None = None
    planned_bytes: int | None = None
    least_bytes: int | None = None
    overhead_ratio: float | None = None
    cycles_ratio: float | None = None
    difference: float | None = None
    seconds: float
    commit: str = ""

    @property
    def kept(self) -> bool:
        """True if the program is within its budget."""
        return self.total_bytes is not None and self.total_bytes <= self.budget_bytes


def build(problem: Problem, form: str, budget: int | None) -> tuple[Any, tuple[Any, Any]]:
    """The jitted program of a form, within a budget or plain, and its argument's shapes."""
    params, batch = problem.specs()
    if form == "step":
        step = adam_step(problem.loss)
        limited = step if budget is None else coop.remat(step, budget=budget)
        return jax.jit(limited, donate_argnums=0), (jax.eval_shape(adam_init, params), batch)
    loss = problem.loss if budget is None else coop.remat(problem.loss, budget=budget)
    return jax.jit(jax.value_and_grad(loss)), (params, batch)


def run_once(problem: Problem, form: str, compiled: Any) -> list[np.ndarray]:
    """Loss and gradients of a compiled program on made-up data, always the same.

    A step's gradients are read from Adam's first moment. Its parameters are left out: the first update is
    the gradient's sign times the rate, so that a gradient that is zero but for rounding moves them by it.
    """
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1))
    if form == "step":
        state, loss = compiled(adam_init(params), batch)
        results = (state["mean"], loss)
    else:
        results = compiled(params, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference of any result, relative to the largest value of that result."""
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in zip(found, expected, strict=True)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The program without a budget, compiled.

    Attributes:
        memory: XLA's count.
        cycles: XLA's estimate of its time; None where it writes none.
        results: of a run; None where it cannot run here.
    """

    memory: aot.Memory
    cycles: int | None
    results: list[np.ndarray] | None


def cycles(compiled: Any, device: str) -> int | None:
    """XLA's estimate of a program's time, where its compiler writes one."""
    return program_cycles(proto.parse(aot.final_module(compiled))) if is_tpu(device) else None


def is_tpu(device: str) -> bool:
    """True for a TPU, or a slice of them."""
    return device.partition(":")[0] in tpu.CHIPS


def options(device: str) -> dict[str, str] | None:
    """Of the compile: these programs would fit into a TPU's memory on the chip, where nothing counts."""
    return {"xla_msa_enable": "DISABLED"} if is_tpu(device) else None


def cases(
    problem: Problem, form: str, device: str, fractions: list[float], lines: Path | None = None
) -> list[Case]:
    """Compile the plain program and one program for each fraction of its total.

    Args:
        lines: the file that every case is added to as soon as it is done.
    """
    where = None if device == "cpu" else device
    jitted, specs = build(problem, form, None)
    compiled = aot.lower_for(jitted, specs, device=where).compile(compiler_options=options(device))
    results = run_once(problem, form, compiled) if where is None else None
    plain = Plain(memory=aot.memory(compiled), cycles=cycles(compiled, device), results=results)
    found = []
    for fraction in fractions:
        found.append(one_case(problem, form, device, fraction, plain))
        sys.stdout.write(table(found).split("\n")[-1] + "\n")
        sys.stdout.flush()
        if lines is not None:
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    return found


@functools.cache
def commit() -> str:
    """The commit of the code, with a "+" if files but those of results differ from it."""

    def said(*words: str) -> str:
        return subprocess.run(("git", *words), capture_output=True, text=True, check=False).stdout.strip()

    changed = said("status", "--porcelain", "--untracked-files=no", "--", ":/", ":/!benchmarks/results")
    return said("describe", "--always", "--abbrev=7") + ("+" if changed else "")


def latest(lines: Path) -> list[Case]:
    """The last case of each program, device and fraction, in the order of the table."""
    found = [Case(**json.loads(line)) for line in lines.read_text().splitlines()]
    cells = {(c.model, c.form, c.device, c.fraction): c for c in found}
    names = list(MODELS)
    return sorted(
        cells.values(),
        key=lambda c: (c.device, names.index(c.model), FORMS[::-1].index(c.form), -c.fraction),
    )


def within(problem: Problem, form: str, device: str, budget: int) -> Any:
    """The compiled program."""

    def compiled() -> Any:
        jitted, specs = build(problem, form, budget)
        lowered = aot.lower_for(jitted, specs, device=None if device == "cpu" else device)
        return lowered.compile(compiler_options=options(device))

    return kept(compiled)


def kept(compiled: Callable[[], Any]) -> Any:
    """What a compile gives; one that fell short is done again, as its message says."""
    for left in reversed(range(MOST_COMPILES)):
        try:
            return compiled()
        except BudgetExceededError as over:
            if over.held_bytes is None or not left:
                raise
    raise AssertionError("the last compile returns or raises")


def one_case(problem: Problem, form: str, device: str, fraction: float, plain: Plain) -> Case:
    """Compile one program within `fraction` of the plain total."""
    budget = int(fraction * plain.memory.total_bytes)
    start = time.perf_counter()
    facts: dict[str, Any] = {
        "model": problem.name, "form": form, "device": device, "fraction": fraction,
        "plain_bytes": plain.memory.total_bytes, "fixed_bytes": plain.memory.fixed_bytes,
        "budget_bytes": budget, "commit": commit(),
    }  # fmt: skip
    try:
        compiled = within(problem, form, device, budget)
    except (InfeasibleBudgetError, jax.errors.JaxRuntimeError) as error:
        refused = error if isinstance(error, InfeasibleBudgetError) else error_from_text(str(error))
        if not isinstance(refused, InfeasibleBudgetError):
            raise
        return Case(**facts, least_bytes=refused.least_bytes, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    apart = None
    if plain.results is not None:
        apart = difference(run_once(problem, form, compiled), plain.results)
    needed_cycles = cycles(compiled, device)
    report = coop.report(compiled)
    return Case(
        **facts,
        total_bytes=aot.memory(compiled).total_bytes,
        planned_bytes=report.planned_total_bytes,
        overhead_ratio=report.overhead_ratio,
        cycles_ratio=needed_cycles / plain.cycles - 1 if needed_cycles and plain.cycles else None,
        difference=apart,
        seconds=seconds,
    )


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f} %"


def table(found: list[Case]) -> str:
    """The cases as a Markdown table."""
    header = (
        "program", "of plain", "budget", "total", "kept", "overhead", "cycles", "difference", "least",
        "seconds", "commit",
    )  # fmt: skip
    rows = []
    for case in found:
        sizes = [
            None if n is None else format_bytes(n, exact=False) for n in (case.total_bytes, case.least_bytes)
        ]
        rows.append(
            (
                f"{case.model} {case.form} {case.device}",
                f"{case.fraction:g}",
                format_bytes(case.budget_bytes, exact=False),
                sizes[0] or "",
                "yes" if case.kept else "refused" if case.total_bytes is None else "OVER",
                _percent(case.overhead_ratio),
                _percent(case.cycles_ratio),
                "" if case.difference is None else f"{case.difference:.0e}",
                sizes[1] or "",
                f"{case.seconds:.1f}",
                case.commit,
            )
        )
    return format_table(header, rows)


def head(found: list[Case]) -> str:
    """What to know of the cases before their table."""
    if not any(is_tpu(c.device) for c in found):
        return ""
    return (
        "Compiled for TPUs that are not here, not run: batches eight times those of the CPU's table, with\n"
        "temporaries kept in HBM. `python -m benchmarks.promise --devices v5e v6e --lines FILE`; every cell\n"
        "says the commit of the code that compiled it. The overhead is the report's, estimated in part\n"
        "before XLA made kernels of the plan; cycles are what XLA's compiler writes beside the kernels of\n"
        "the compiled program, above the plain one's. Seconds: 2 cores with other work.\n\n"
    )


def summary(found: list[Case]) -> str:
    """How many cases kept their budgets."""
    kept, refused = sum(c.kept for c in found), sum(c.total_bytes is None for c in found)
    over = len(found) - kept - refused
    return f"{len(found)} programs, {kept} within budget, {refused} refused, {over} over."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--devices", nargs="*", default=["cpu", "h200"])
    parser.add_argument("--fractions", nargs="*", type=float, default=list(FRACTIONS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/promise.json"))
    parser.add_argument("--lines", type=Path, help="keep every cell here at once, and make the table of all")
    args = parser.parse_args()
    found: list[Case] = []
    for model in args.models:
        for form in args.forms:
            for device in args.devices:
                found += cases(
                    MODELS[model](TPU_BATCHES if is_tpu(device) else 1),
                    form,
                    device,
                    args.fractions,
                    args.lines,
                )
    found = found if args.lines is None else latest(args.lines)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([dataclasses.asdict(c) for c in found], indent=1) + "\n")
    args.out.with_suffix(".md").write_text(f"{head(found)}{table(found)}\n\n{summary(found)}\n")
    sys.stdout.write(summary(found) + "\n")
    sys.exit(1 if any(c.total_bytes is not None and not c.kept for c in found) else 0)


if __name__ == "__main__":
    main()
