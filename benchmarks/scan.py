"""A GPT whose layers are a `lax.scan`: memory and estimated time of every way to rematerialize it.

    python -m benchmarks.scan                              # 12 layers on an H200 that is not here
    python -m benchmarks.scan --device cpu --small         # a small one on this machine's CPU
    python -m benchmarks.scan --only none,coop --layers 48 # some rows, more layers
    python -m benchmarks.scan --layers-of-plan 2,48        # planning time against the number of layers

Rows: the plain program; the scan's body under `jax.checkpoint` with three policies; XLA's own pass (the
device's memory made small; GPUs only); coop with 0.6, 0.4 and 0.25 of the plain total, with the totals of the
policies, and with the least budget that it reaches. Planning seconds count all plans, and the compiles that
look at them. Bytes are XLA's, the time is the roofline cost of the
final kernels, loops counted as often as they run. Seconds are of a machine that others may use.
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
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

import coop_jax as coop
from benchmarks.gpt12 import Row, compile_row, table
from coop_jax import aot
from examples.models import GPTConfig, scanned

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
XLA_FRACTIONS = (0.6, 0.4, 0.25)
COOP_FRACTIONS = (0.6, 0.4, 0.25)
SMALL = GPTConfig(layers=12, width=128, heads=4, seq=128, batch=8, vocab=256)
LARGE = GPTConfig(layers=12, width=768, heads=12, seq=512, batch=8, vocab=13312, dtype="bfloat16")


def rows_of(config: GPTConfig, device: str, only: list[str]) -> list[Row]:
    """Compile every row that is asked for; "none" is always there."""
    target = None if device == "cpu" else aot.target(device)
    specs = scanned.problem(config).specs()
    rows: list[Row] = []

    def take(name: str, fn: Callable[..., Any], where: Any = target, **extra: Any) -> Row | None:
        if name != "none" and only and not any(part in name for part in only):
            return None
        rows.append(compile_row(name, fn, specs, where, **extra))
        sys.stdout.write(table([rows[0], rows[-1]]).split("\n")[-1] + "\n")
        sys.stdout.flush()
        return rows[-1]

    plain_loss = scanned.problem(config).loss
    plain = take("none", jax.value_and_grad(plain_loss))
    assert plain is not None
    assert plain.total_bytes is not None, plain.error
    budgets = {int(f * plain.total_bytes) for f in COOP_FRACTIONS}
    for policy in POLICIES:
        chosen = getattr(jax.checkpoint_policies, policy)
        wrapped = scanned.problem(config, wrap=lambda f, chosen=chosen: jax.checkpoint(f, policy=chosen))
        row = take(f"checkpoint {policy}", jax.value_and_grad(wrapped.loss))
        budgets |= {row.total_bytes} if row is not None and row.total_bytes is not None else set()
    for fraction in XLA_FRACTIONS if target is not None else ():
        memory = int(fraction * plain.total_bytes / 0.8)
        take(f"xla {memory >> 20} MiB of memory", jax.value_and_grad(plain_loss), target.with_memory(memory))
    for budget in sorted(budgets, reverse=True):
        take(coop_name(budget), jax.value_and_grad(coop.remat(plain_loss, budget=budget, device=device)))
    take_least(take, plain_loss, device, plain.fixed_bytes or 1)
    return rows


def planning_rows(config: GPTConfig, device: str, layers: list[int]) -> list[Row]:
    """The plain program and coop with 0.4 of its total, for some numbers of layers."""
    target = None if device == "cpu" else aot.target(device)
    rows: list[Row] = []
    for n in layers:
        problem = scanned.problem(dataclasses.replace(config, layers=n))
        plain = compile_row(f"{n} layers, none", jax.value_and_grad(problem.loss), problem.specs(), target)
        assert plain.total_bytes is not None, plain.error
        limited = coop.remat(problem.loss, budget=int(0.4 * plain.total_bytes), device=device)
        name = f"{n} layers, coop 0.4"
        rows += [plain, compile_row(name, jax.value_and_grad(limited), problem.specs(), target)]
    return rows


def coop_name(budget: int) -> str:
    """Such as "coop 812 MiB"."""
    return f"coop {budget / 2**20:.0f} MiB"


def take_least(take: Callable[..., Row | None], loss: Any, device: str, fixed_bytes: int) -> None:
    """The least budget that an impossible one's refusal names."""
    asked = fixed_bytes
    for _ in range(4):
        row = take(coop_name(asked), jax.value_and_grad(coop.remat(loss, budget=asked, device=device)))
        if row is None or row.least_bytes is None or row.least_bytes <= asked:
            return
        asked = row.least_bytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h200")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--layers-of-plan", default="", help="such as 2,48: planning time of so many layers")
    parser.add_argument("--only", default="", help="comma-separated parts of row names: none,dots,xla,coop")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scan.json"))
    args = parser.parse_args()
    config = dataclasses.replace(SMALL if args.small else LARGE, layers=args.layers)
    if args.layers_of_plan:
        rows = planning_rows(config, args.device, [int(n) for n in args.layers_of_plan.split(",")])
    else:
        rows = rows_of(config, args.device, [part for part in args.only.split(",") if part])
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
    title = f"`jax.value_and_grad` of a scanned GPT ({sizes}) for {args.device}, jax {jax.__version__}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    args.out.with_suffix(".md").write_text(f"{title}\n\n{table(rows)}\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
