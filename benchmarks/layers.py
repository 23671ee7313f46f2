"""`coop.remat` in the place of `jax.checkpoint`, around each block of programs that nobody here wrote.

    python -m benchmarks.layers                              # on this machine's CPU; 20 minutes on one core
    python -m benchmarks.layers --target h200 --models gpt2
    python -m benchmarks.layers --table                      # only the table of what was measured before

Compiled, not run. Each program is compiled plain, with `jax.checkpoint` around its blocks, and in the bytes
of that with `coop.remat` around the whole step, and around the blocks. Packages call `jax.checkpoint` by its
name (`nn.remat`, `hk.remat`, `eqx.filter_checkpoint`), so for the last way `coop.remat` has that name while
a program is traced. Costs are estimates of the final kernels; seconds are CPU time of one compile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import coop_jax as coop
from benchmarks import models, promise
from benchmarks.models import PLAIN, lower, program
from coop_jax import aot
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.text import format_table
from passes.cost import DEVICES

POLICIES = ("dots_saveable", "nothing_saveable")
HEAD = (
    "Compiled, not run; `python -m benchmarks.layers`. Bytes are XLA's count, costs estimates of the final\n"
    "kernels over those of the plain program, seconds CPU time of one compile.\n\n"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compile a program: XLA's count, None where it was refused; estimated cost; CPU seconds."""

    total_bytes: int | None
    cost_ns: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One program in the bytes of one policy.

    Attributes:
        model, target, policy: which.
        plain, hand, step, blocks: the ways, the last two with `coop.remat`.
        commit: of the code.
    """

    model: str
    target: str
    policy: str
    plain: Way
    hand: Way
    step: Way
    blocks: Way
    commit: str


def compiled(target: str, make: Callable[[], models.Program]) -> Way:
    """A step made, traced, lowered and compiled; all that JAX remembers is forgotten before."""
    jax.clear_caches()
    begin = time.process_time()
    try:
        made = lower(make(), None if target == "cpu" else target).compile()
    except InfeasibleBudgetError:
        return Way(total_bytes=None, cost_ns=0, seconds=time.process_time() - begin)
    seconds = time.process_time() - begin
    cost_ns, _ = aot.run_cost(made, DEVICES[target])
    return Way(total_bytes=aot.memory(made).total_bytes, cost_ns=cost_ns, seconds=seconds)


@contextlib.contextmanager
def in_the_place_of_checkpoint(budget: int) -> Iterator[None]:
    """`jax.checkpoint` is `coop.remat` with a budget, whatever else it is asked for."""

    def remat(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return coop.remat(function, budget=budget)

    own = jax.checkpoint
    jax.checkpoint = jax.remat = remat
    try:
        yield
    finally:
        jax.checkpoint = jax.remat = own


def compare(name: str, target: str) -> list[Comparison]:
    """One program in the bytes of every policy."""
    model = models.find(name)
    plain = compiled(target, lambda: program(model, target, PLAIN))
    found = []
    for policy in POLICIES:
        hand = compiled(target, lambda p=policy: program(model, target, p))
        budget = hand.total_bytes or 0
        step = compiled(
            target, lambda b=budget: program(model, target, around=lambda f: coop.remat(f, budget=b))
        )
        with in_the_place_of_checkpoint(budget):
            blocks = compiled(target, lambda p=policy: program(model, target, p))
        ways = {"plain": plain, "hand": hand, "step": step, "blocks": blocks}
        found.append(Comparison(model=name, target=target, policy=policy, commit=promise.commit(), **ways))
    return found


def table(rows: list[Comparison]) -> str:
    """The rows as a Markdown table."""
    header = (
        "program", "target", "policy", "MiB of plain", "cost by hand", "step", "blocks", "blocks / hand",
        "seconds plain", "by hand", "step", "blocks", "commit",
    )  # fmt: skip

    def cost(row: Comparison, way: Way) -> str:
        return "refused" if way.total_bytes is None else f"{way.cost_ns / row.plain.cost_ns:.3f}"

    cells = []
    for r in rows:
        kept = r.blocks.total_bytes is not None
        cells.append(
            (
                r.model, r.target, r.policy,
                f"{(r.hand.total_bytes or 0) / 2**20:.1f} of {(r.plain.total_bytes or 0) / 2**20:.1f}",
                *(cost(r, way) for way in (r.hand, r.step, r.blocks)),
                f"{r.blocks.cost_ns / r.hand.cost_ns:.3f}" if kept else "",
                *(f"{way.seconds:.1f}" for way in (r.plain, r.hand, r.step, r.blocks)), r.commit,
            )
        )  # fmt: skip
    return format_table(header, cells)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for name in models.names() if name not in ("llama_8b", "lstm", "mlp")]
    parser.add_argument("--models", nargs="*", default=every, choices=models.names())
    parser.add_argument("--target", default="cpu", choices=("cpu", "h200"))
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/layers.md"))
    args = parser.parse_args()
    lines = args.out.with_suffix(".jsonl")
    for name in () if args.table else args.models:
        for found in compare(name, args.target):
            line = json.dumps(dataclasses.asdict(found))
            with lines.open("a") as file:
                file.write(line + "\n")
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    rows = {}
    for line in lines.read_text().splitlines():
        read = json.loads(line)
        ways = {key: Way(**read[key]) for key in ("plain", "hand", "step", "blocks")}
        rows[read["model"], read["target"], read["policy"]] = Comparison(**{**read, **ways})
    args.out.write_text(HEAD + table(list(rows.values())) + "\n")


if __name__ == "__main__":
    main()
