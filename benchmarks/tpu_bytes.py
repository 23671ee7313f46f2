"""What was predicted of programs on TPUs, against what XLA says that they need.

    python -m benchmarks.tpu_bytes                        # every program for a v5e; half an hour on 2 cores
    python -m benchmarks.tpu_bytes --programs "gpt grad" swin --chip v6e

Compiled, not run, as a user compiles: after XLA has called back it moves values to the chip's own memory, so
what is predicted is a bound from above. Where XLA needs more by over .1 %, the program is asked for a budget
between both: the check must refuse it, and the next compile must keep it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import coop_jax as coop
from benchmarks import models, promise
from coop_jax import aot, tpu
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError, error_from_text
from coop_jax.text import format_bytes, format_table
from examples.models import GPTConfig, scanned

LOW_RATIO = 1e-3
# Temporaries of hundreds of megabytes: of smaller ones most are moved to the chip.
BATCHES = 64
CORPUS = (
    "gpt2", "bert_large", "vit", "resnet50", "lstm", "flax_scan", "penzai_llama", "equinox_vit", "unet",
    "densenet121", "swin", "bilstm",
)  # fmt: skip
HEAD = (
    "Compiled for TPUs that are not here, not run, as a user compiles: XLA moves values to the chip's own\n"
    "memory (VMEM) after it called back, so that what is predicted is a bound from above.\n"
    "`python -m benchmarks.tpu_bytes`\n\n"
)
Lower = Callable[[int, str], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program.

    Attributes:
        predicted_bytes: the total, when XLA calls back.
        total_bytes: by XLA.
        budget_bytes: between both, where the prediction is low by more than .1 %.
        first, again: what two compiles for it came to: "kept", "refused", "caught" by the check, or "over".
    """

    program: str
    chip: str
    predicted_bytes: int
    total_bytes: int
    budget_bytes: int | None = None
    first: str = ""
    again: str = ""


def of_problem(model: str, form: str, batches: int) -> Lower:
    """An example under `coop.remat`, as `benchmarks.promise` compiles it."""

    def lower(budget: int, chip: str) -> Any:
        made = (
            scanned.problem(GPTConfig(batch=8 * batches))
            if model == "scanned"
            else promise.MODELS[model](batches)
        )
        jitted, specs = promise.build(made, form, budget)
        return aot.lower_for(jitted, specs, device=chip)

    return lower


def of_corpus(name: str) -> Lower:
    """A step of `benchmarks.models` under `coop.remat`: few and small layers, a large batch."""

    def lower(budget: int, chip: str) -> Any:
        model = models.find(name)
        sizes = {**model.sizes["cpu"], "batch": BATCHES * model.sizes["cpu"]["batch"]}
        model = dataclasses.replace(model, sizes={chip: sizes})
        return models.lower(models.program(model, chip, around=coop.remat(budget=budget)), chip)

    return lower


def programs() -> dict[str, Lower]:
    """Every program, by name."""
    found = {
        f"{model} {form} x{batches}": of_problem(model, form, batches)
        for model in (*promise.MODELS, "scanned")
        for form in promise.FORMS
        for batches in (promise.TPU_BATCHES, BATCHES)
    }
    return found | {name: of_corpus(name) for name in CORPUS}


def measure(name: str, lower: Lower, chip: str) -> Row:
    """Compile a program that may have all of the memory; where XLA needs more than foreseen, for less."""
    compiled = lower(aot.target(chip).memory_bytes, chip).compile()
    predicted, total = coop.report(compiled).planned_total_bytes, aot.memory(compiled).total_bytes
    row = Row(program=name, chip=chip, predicted_bytes=predicted, total_bytes=total)
    if total <= (1 + LOW_RATIO) * predicted:
        return row
    budget = (predicted + total) // 2
    first, again = (outcome(lower, budget, chip) for _ in range(2))
    return dataclasses.replace(row, budget_bytes=budget, first=first, again=again)


def outcome(lower: Lower, budget: int, chip: str) -> str:
    """What becomes of a program that is compiled for a budget."""
    try:
        compiled = lower(budget, chip).compile()
    except BudgetExceededError:
        return "caught"
    except (InfeasibleBudgetError, jax.errors.JaxRuntimeError) as error:
        refused = error if isinstance(error, InfeasibleBudgetError) else error_from_text(str(error))
        if not isinstance(refused, InfeasibleBudgetError):
            raise
        return "refused"
    return "kept" if aot.memory(compiled).total_bytes <= budget else "over"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    header = ("program", "chip", "predicted", "XLA's", "predicted is", "asked for less", "again")
    cells = [
        (
            r.program, r.chip, *(format_bytes(n, exact=False) for n in (r.predicted_bytes, r.total_bytes)),
            f"{100 * (r.predicted_bytes / r.total_bytes - 1):+.2f} %", r.first, r.again,
        )
        for r in rows
    ]  # fmt: skip
    return format_table(header, cells)


def summary(rows: list[Row]) -> str:
    """How many predictions were low, and what became of those."""
    low = [r for r in rows if r.first]
    held = [r for r in low if r.first != "over" and r.again != "over"]
    return f"{len(rows)} programs, {len(low)} predicted low by more than .1 %, {len(held)} of those caught."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(programs()), choices=list(programs()))
    parser.add_argument("--chip", default="v5e", choices=list(tpu.CHIPS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tpu_bytes.md"))
    args = parser.parse_args()
    lines = args.out.with_suffix(".jsonl")
    for name in args.programs:
        line = json.dumps(dataclasses.asdict(measure(name, programs()[name], args.chip)))
        with lines.open("a") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    rows = [Row(**json.loads(line)) for line in lines.read_text().splitlines()]
    args.out.write_text(f"{HEAD}{table(rows)}\n\n{summary(rows)}\n")


if __name__ == "__main__":
    main()
