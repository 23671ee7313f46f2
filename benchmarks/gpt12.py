"""A 12-layer GPT on an H200 that is not here: memory and estimated time of every way to rematerialize.

    python -m benchmarks.gpt12                        # everything, about 15 minutes on 2 cores
    python -m benchmarks.gpt12 --only none,nothing    # some rows
    python -m benchmarks.gpt12 --only coop --layers 2 # coop's rows of a small model

Rows: the plain program; every block under `jax.checkpoint` with three policies; XLA's own pass (the
device's memory made small); coop at the same temporary bytes and at fractions of the plain ones. Every
row is compiled by XLA; bytes are XLA's, the time is the roofline cost of the final kernels
(`passes.hlo.cost`). Rows are kept in the JSON file, so that a second run with `--only` adds to the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

import coop_jax as coop
from coop_jax import aot, mark
from coop_jax.errors import CoopError, error_from_text
from coop_jax.text import format_table
from examples.models import GPTConfig, gpt
from passes.cost import DEVICES

MIB = 2**20
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
XLA_GIB = (4.0, 3.5, 3.0, 2.5, 2.0, 1.5)
COOP_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compiled program: XLA's bytes, the estimated time of its kernels, and how long it took to get."""

    name: str
    budget_temp_mib: float | None = None
    temp_mib: float | None = None
    total_bytes: int | None = None
    fixed_bytes: int | None = None
    cost_ms: float | None = None
    compile_s: float | None = None
    planning_s: float | None = None
    jaxpr_recompute_ms: float | None = None
    hlo_recompute_ms: float | None = None
    least_bytes: int | None = None
    error: str = ""


def compile_row(
    name: str, fn: Callable[..., Any], specs: Any, device: aot.Target | None, **extra: Any
) -> Row:
    """Compile `fn` for `device` (None: this machine's CPU) and read what came out."""
    start = time.perf_counter()
    try:
        compiled = aot.lower_for(fn, specs, device=device).compile()
    except (CoopError, jax.errors.JaxRuntimeError) as error:
        found = error if isinstance(error, CoopError) else error_from_text(str(error))
        extra["least_bytes"] = getattr(found, "least_bytes", None)
        return Row(
            name=name,
            error=str(found or error).partition("\n")[0],
            compile_s=time.perf_counter() - start,
            **extra,
        )
    seconds = time.perf_counter() - start
    memory = aot.memory(compiled)
    record = mark.record_of(compiled)
    stages = [] if record is None else [s for s in (record.jaxpr, record.hlo) if s is not None]
    recompute = {f"{s.stage}_recompute_ms": s.recompute_ns / 1e6 for s in stages}
    return Row(
        name=name,
        temp_mib=memory.temp_bytes / MIB,
        total_bytes=memory.total_bytes,
        fixed_bytes=memory.fixed_bytes,
        cost_ms=aot.run_ns(compiled, DEVICES["cpu" if device is None else device.name]) / 1e6,
        compile_s=seconds,
        planning_s=sum(s.seconds for s in stages) if stages else None,
        **recompute,
        **extra,
    )


def rival_rows(config: GPTConfig) -> dict[str, Callable[[], Row]]:
    """What a JAX user has today, by row name."""
    h200 = aot.target("h200")
    plain = gpt.problem(config)
    specs = plain.specs()
    rows: dict[str, Callable[[], Row]] = {
        "none": lambda: compile_row("none", jax.grad(plain.loss), specs, h200)
    }

    def with_policy(policy: str) -> Callable[[], Row]:
        chosen = getattr(jax.checkpoint_policies, policy)
        wrapped = gpt.problem(config, wrap=lambda f: jax.checkpoint(f, policy=chosen))
        name = f"checkpoint {policy}"
        return lambda: compile_row(name, jax.grad(wrapped.loss), specs, h200)

    def with_memory(gib: float) -> Callable[[], Row]:
        small = h200.with_memory(int(gib * 2**30))
        return lambda: compile_row(f"xla {gib:g} GiB", jax.grad(plain.loss), specs, small)

    rows |= {f"checkpoint {p}": with_policy(p) for p in POLICIES}
    rows |= {f"xla {g:g} GiB": with_memory(g) for g in XLA_GIB}
    return rows


def coop_rows(
    config: GPTConfig, known: dict[str, Row], extra_mib: list[float]
) -> dict[str, Callable[[], Row]]:
    """coop at every rival's temporary bytes, at fractions of the plain ones, and at `extra_mib`."""
    plain = known["none"]
    assert plain.temp_mib is not None, plain.error
    assert plain.fixed_bytes is not None, plain.error
    wanted = {known[f"checkpoint {p}"].temp_mib for p in POLICIES if f"checkpoint {p}" in known}
    wanted |= {f * plain.temp_mib for f in COOP_FRACTIONS} | set(extra_mib)
    return {
        f"coop {mib:.0f} MiB": coop_row(config, plain.fixed_bytes, mib)
        for mib in sorted((m for m in wanted if m is not None), reverse=True)
    }


def coop_row(config: GPTConfig, fixed_bytes: int, temp_mib: float) -> Callable[[], Row]:
    """coop with a budget that leaves `temp_mib` to temporaries."""
    problem = gpt.problem(config)
    budget = fixed_bytes + int(temp_mib * MIB)
    loss = coop.remat(problem.loss, budget=budget, device="h200")
    return lambda: compile_row(
        f"coop {temp_mib:.0f} MiB",
        jax.grad(loss),
        problem.specs(),
        aot.target("h200"),
        budget_temp_mib=temp_mib,
    )


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    header = ("rematerialization", "temp MiB", "cost ms", "slower", "compile s", "planning s", "note")
    plain = next((r.cost_ms for r in rows if r.name == "none"), None)
    cells = []
    for row in rows:
        slower = "" if plain is None or row.cost_ms is None else f"{100 * (row.cost_ms / plain - 1):+.1f} %"
        note = row.error.split("\n")[0][:60]
        values = (number(row.temp_mib, 0), number(row.cost_ms, 3), slower)
        cells.append((row.name, *values, number(row.compile_s, 1), number(row.planning_s, 2), note))
    return format_table(header, cells)


def run(config: GPTConfig, only: list[str], extra_mib: list[float], path: Path) -> list[Row]:
    """Compile what is asked for, one row after the other, and keep everything in `path`."""
    known: dict[str, Row] = {}
    if path.exists():
        stored = json.loads(path.read_text())
        if stored["config"] == dataclasses.asdict(config):
            known = {entry["name"]: Row(**entry) for entry in stored["rows"]}

    def take(todo: dict[str, Callable[[], Row]]) -> None:
        for name, compile_it in todo.items():
            if only and not any(part in name for part in only):
                continue
            known[name] = compile_it()
            sys.stdout.write(table([r for r in (known.get("none"), known[name]) if r]).split("\n")[-1] + "\n")
            sys.stdout.flush()
            save(config, list(known.values()), path)

    rivals = rival_rows(config)
    if "none" not in known:
        known["none"] = rivals["none"]()
    take(rivals)
    take(coop_rows(config, known, extra_mib))
    return list(known.values())


def save(config: GPTConfig, rows: list[Row], path: Path) -> None:
    """Write the JSON file and the Markdown table beside it."""
    stored = {"config": dataclasses.asdict(config), "rows": [dataclasses.asdict(r) for r in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
    title = f"`jax.grad` of a GPT's loss ({sizes}), compiled for an H200 with jax {jax.__version__}"
    path.with_suffix(".md").write_text(f"{title}\n\n{table(rows)}\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=13312)
    parser.add_argument(
        "--only", default="", help="comma-separated parts of row names: none,dots,xla,coop,nothing"
    )
    parser.add_argument("--temp-mib", type=float, nargs="*", default=[], help="more budgets for coop")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpt12.json"))
    args = parser.parse_args()
    config = GPTConfig(
        layers=args.layers, width=768, heads=12, seq=512, batch=8, vocab=args.vocab, dtype="bfloat16"
    )
    only = [part for part in args.only.split(",") if part]
    sys.stdout.write(table(run(config, only, args.temp_mib, args.out)) + "\n")


if __name__ == "__main__":
    main()
