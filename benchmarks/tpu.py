"""Training steps on TPUs that are not here: plain, by hand, by XLA's own pass, and within coop's budgets.

    python -m benchmarks.tpu                  # every program and chip; many hours on 2 cores
    python -m benchmarks.tpu --programs gpt_scan llama_1b --chips v5e
    python -m benchmarks.tpu --table          # only the table of what was measured before

Compiled, not run. Bytes are XLA's. Two judges of time: the cycles that XLA's compiler estimates for the
kernels of the final module (`benchmarks/cycles.py`), loop bodies times their trip counts, which is nothing of
ours; and our roofline of the same module. Rows: the plain program, or how much it needs where it does not
fit; its blocks under `jax.checkpoint` with three policies; XLA's own pass, which aims at a limit of the
compile; coop at the bytes of each of them, at .8 of the least, and at what a refusal calls the least. A line
for every row is kept in a .jsonl beside `--out`, and what is there is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import coop_jax as coop
from benchmarks.cycles import program_cycles
from benchmarks.models import POLICIES, Blocks, Model, Net, find, lower, program
from benchmarks.promise import commit, kept
from coop_jax import aot, tpu
from coop_jax.errors import CoopError, error_from_text
from coop_jax.text import format_table
from examples.models import GPTConfig, gpt, scanned
from passes.cost import DEVICES
from passes.hlo import proto

MIB = 1 << 20
BELOW_RATIO = 0.8
MOST_LEAST = 2
# Two programs whose cycles are this close are ties.
TIE_RATIO = 1.02


def _gpt(module: Any) -> Callable[..., Net]:
    def net(blocks: Blocks, **sizes: Any) -> Net:
        problem = module.problem(GPTConfig(**sizes), wrap=blocks.wrap)
        return Net(init=problem.init, batch=problem.batch, loss=problem.loss)

    return net


def _with_batch(name: str, batches: dict[str, int]) -> Model:
    """A program of the corpus with an H200's sizes but for the batch."""
    model = find(name)
    sizes = {chip: {**model.sizes["h200"], "batch": batch} for chip, batch in batches.items()}
    return dataclasses.replace(model, sizes=sizes)


def _own(name: str, net: Callable[..., Net], batches: dict[str, int]) -> Model:
    sizes = {"layers": 12, "width": 768, "heads": 12, "seq": 512, "vocab": 13312, "dtype": "bfloat16"}
    return Model(
        name=name,
        source="examples",
        net=net,
        sizes={chip: {**sizes, "batch": n} for chip, n in batches.items()},
    )


# The GPT of `benchmarks.gpt12` and `benchmarks.scan`; Llamas whose plain step does not fit the chip.
PROGRAMS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: _own("gpt", _gpt(gpt), {"v5e": 8, "v6e": 8, "v5p": 8}),
    "gpt_scan": lambda: _own("gpt_scan", _gpt(scanned), {"v5e": 8, "v6e": 8, "v5p": 8}),
    "llama_1b": lambda: _with_batch("llama_1b", {"v5e": 1, "v6e": 2, "v5p": 8}),
    "llama_8b": lambda: _with_batch("llama_8b", {"v5e:2x4": 8, "v6e:2x4": 8, "v5p:2x2x2": 16}),
    "resnet50": lambda: _with_batch("resnet50", {"v5e": 256, "v6e": 256, "v5p": 256}),
    "lstm": lambda: _with_batch("lstm", {"v5e": 256, "v6e": 256, "v5p": 256}),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program as compiled, or why it is not.

    Attributes:
        program, chip: which.
        name: such as "nothing_saveable" or "coop".
        budget_bytes: what was asked for; None where nothing was.
        rivals: whose bytes that is.
        total_bytes: XLA's count; of a plain program that does not fit, what XLA says it needs.
        fits: True if there is a program.
        cycles: XLA's estimate.
        cost_ns: our roofline.
        seconds: tracing, planning and compiling.
        least_bytes: what a refusal calls the least budget.
        error: the first line of it.
        commit: of the code.
    """

    program: str
    chip: str
    name: str
    budget_bytes: int | None = None
    rivals: str = ""
    total_bytes: int | None = None
    fits: bool = False
    cycles: int | None = None
    cost_ns: int | None = None
    seconds: float = 0.0
    least_bytes: int | None = None
    error: str = ""
    commit: str = ""


def compiled_row(model: Model, row: Row, way: str = "plain", options: dict[str, Any] | None = None) -> Row:
    """Compile one way of a program.

    Args:
        row: what is known of it: its budget makes it coop's.
        way: what happens to its blocks.
        options: of the compile.
    """
    around = None if row.name != "coop" else coop.remat(budget=row.budget_bytes)
    begin = time.perf_counter()
    try:
        made = program(model, row.chip, way, around=around)
        compiled = kept(
            lambda: lower(made, row.chip, devices=model.devices).compile(compiler_options=options)
        )
    except Exception as error:  # every failure is a row of the table
        seconds = time.perf_counter() - begin
        ours = error if isinstance(error, CoopError) else error_from_text(str(error))
        text = str(ours or error).strip().partition("\n")[0]
        return dataclasses.replace(
            row, seconds=seconds, error=text, total_bytes=tpu.bytes_out_of_memory(str(error)),
            least_bytes=getattr(ours, "least_bytes", None),
        )  # fmt: skip
    final = proto.parse(aot.final_module(compiled))
    return dataclasses.replace(
        row, fits=True, seconds=time.perf_counter() - begin, total_bytes=aot.memory(compiled).total_bytes,
        cycles=program_cycles(final), cost_ns=aot.run_ns(compiled, DEVICES[aot.target(row.chip).name]),
    )  # fmt: skip


def rows_of(model: Model, chip: str, known: Sequence[Row]) -> Iterator[Row]:
    """Every row of one program on one chip; `known` ones are yielded as they are."""
    done = {(r.name, r.budget_bytes): r for r in known}

    def take(name: str, budget: int | None = None, rivals: str = "", **how: Any) -> Row:
        facts = {"program": model.name, "chip": chip, "name": name, "budget_bytes": budget}
        asked = Row(**facts, rivals=rivals, commit=commit())
        return done.get((name, budget)) or compiled_row(model, asked, **how)

    yield (plain := take("plain"))
    rivals = []
    for policy in POLICIES if model.per_block else ():
        yield (row := take(policy, way=policy))
        rivals += [row] if row.fits else []
    limits = sorted({r.total_bytes for r in rivals if r.total_bytes})[:1]
    limits = limits or [int(0.6 * (plain.total_bytes or 0))]
    for limit in limits:
        options = {"xla_tpu_max_hbm_size_mib": max(1, limit // MIB)}
        yield (row := take("xla", limit, options=options))
        rivals += [row] if row.fits else []
    yield from _within(take, [plain, *rivals])


def _within(take: Callable[..., Row], rivals: Sequence[Row]) -> Iterator[Row]:
    budgets: dict[int, str] = {}
    for row in rivals:
        if row.fits and row.total_bytes:
            budgets[row.total_bytes] = ", ".join(filter(None, [budgets.get(row.total_bytes, ""), row.name]))
    least = min(budgets, default=rivals[0].total_bytes or 0)
    budgets.setdefault(int(BELOW_RATIO * least), "")
    refused = None
    for budget in sorted(budgets, reverse=True):
        yield (row := take("coop", budget, budgets[budget]))
        refused = row if row.error else refused
    for _ in range(MOST_LEAST):
        if refused is None or refused.least_bytes is None:
            return
        yield (row := take("coop", refused.least_bytes))
        refused = row if row.error else None


def read(path: Path) -> list[Row]:
    """The rows of earlier runs."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def read_table(out: Path) -> list[Row]:
    """The rows of the table that is there: those of other lines, too."""
    path = out.with_suffix(".json")
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    header = (
        "program",
        "chip",
        "way",
        "asked GiB",
        "total GiB",
        "M cycles",
        "roofline ms",
        "compile s",
        "commit",
        "",
    )
    return format_table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    def gib(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / 2**30:.2f}"

    note = f"at the bytes of {row.rivals}" if row.rivals else ""
    if not row.fits:
        note = f"refused, least found {gib(row.least_bytes)}" if row.least_bytes else "does not fit"
    return (
        row.program, row.chip, row.name, gib(row.budget_bytes), gib(row.total_bytes),
        "" if row.cycles is None else f"{row.cycles / 1e6:.2f}",
        "" if row.cost_ns is None else f"{row.cost_ns / 1e6:.2f}", f"{row.seconds:.0f}", row.commit, note,
    )  # fmt: skip


def verdict(rows: Sequence[Row]) -> str:
    """A sentence: at how many rivals' bytes coop is kept and no slower, and below how many of them all."""
    rivals, met, no_dearer, below = 0, 0, 0, []
    pairs = list(dict.fromkeys((r.program, r.chip) for r in rows))
    for pair in pairs:
        here = [r for r in rows if (r.program, r.chip) == pair]
        within = {r.budget_bytes: r for r in here if r.name == "coop" and r.fits}
        others = [r for r in here if r.name != "coop" and r.fits and r.total_bytes and r.cycles]
        both = [(r.cycles or 0, within[r.total_bytes].cycles or 0) for r in others if r.total_bytes in within]
        rivals, met = rivals + len(others), met + len(both)
        no_dearer += sum(ours <= TIE_RATIO * theirs for theirs, ours in both)
        least = min((r.total_bytes or 0 for r in others), default=1 << 62)
        below += [pair] if any(budget < least for budget in within if budget) else []
    return (
        f"At the bytes of {met} of {rivals} rivals coop is kept, and for {no_dearer} of these it needs no "
        f"more cycles (2 % are a tie). Below all rivals of {len(below)} of {len(pairs)} programs and chips "
        "there is a plan."
    )


def write(out: Path, rows: Sequence[Row]) -> None:
    """The table of everything that was measured, and its rows beside it, whichever of both is named."""
    head = (
        "Compiled for TPUs that are not here, not run. Cycles are XLA's own estimate of the final module's "
        f"kernels. `python -m benchmarks.tpu`, jax {jax.__version__}; seconds: 2 cores with other work.\n\n"
    )
    out.with_suffix(".json").write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    out.with_suffix(".md").write_text(f"{head}{table(rows)}\n\n{verdict(rows)}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--chips", nargs="*", default=["v5e", "v6e", "v5p"])
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tpu.md"))
    args = parser.parse_args()
    lines = args.out.with_suffix(".jsonl")
    found = list(dict.fromkeys([*read_table(args.out), *read(lines)]))
    for name in () if args.table else args.programs:
        model = PROGRAMS[name]()
        for chip in [c for c in model.sizes if c.partition(":")[0] in args.chips]:
            known = [r for r in found if (r.program, r.chip) == (model.name, chip)]
            for row in rows_of(model, chip, known):
                if row not in known:
                    found.append(row)
                    with lines.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
                    sys.stdout.write(" | ".join(_cells(row)) + "\n")
                    sys.stdout.flush()
                    write(args.out, found)
    write(args.out, found)


if __name__ == "__main__":
    main()
