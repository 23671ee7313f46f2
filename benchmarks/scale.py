"""How planning time and memory grow with a program: synthetic training graphs of 500 to 50,000 ops.

    python -m benchmarks.scale                    # writes benchmarks/results/scale.{json,md}
    python -m benchmarks.scale --ops 500,5000

A training graph is a forward pass and the gradient of each of its ops, which reads what the op read and,
every second time, what it made. "layers" repeats one layer of 14 ops with two residual connections; "mixed"
draws sizes, costs and skip connections at random. Each plan is made in a process of its own: seconds are
processor time, memory is the most that the process held over what it held before planning. Plans of up to
10,000 ops go through the validator, larger ones through the simulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coop_jax.text import format_table
from passes.ir import Program
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate
from passes.validate import validate

OPS = (500, 5_000, 50_000)
BUDGETS = (0.8, 0.5, 0.3)
# The validator is simple, and so takes the square of the steps.
MOST_VALIDATED_OPS = 10_000
LAYER_SIZES = (1, 3, 1, 4, 1, 1, 4, 2, 1, 4, 4, 1, 2, 1)
LAYER_COSTS = (5, 60, 5, 40, 3, 30, 5, 2, 80, 10, 10, 80, 3, 2)
RESIDUALS = {3: 3, 7: 7}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan.

    Attributes:
        cpu_s: processor time of planning.
        grown_mib: resident memory that planning took, in MiB.
    """

    graph: str
    n_ops: int
    budget_ratio: float
    status: str
    overhead_ratio: float
    lower_bound_ratio: float
    cpu_s: float
    grown_mib: float


def training_graph(kind: str, n_ops: int) -> Program:
    """A forward pass of about half of `n_ops` ops, and its gradient."""
    generator = random.Random(0)
    ops: list[dict[str, object]] = []
    buffers: list[int] = []

    def add(inputs: Sequence[int], sizes: Sequence[int], cost: int) -> list[int]:
        made = list(range(len(buffers), len(buffers) + len(sizes)))
        buffers.extend(sizes)
        ops.append({"cost": cost, "inputs": list(dict.fromkeys(inputs)), "outputs": made})
        return made

    forward: list[int] = []
    reads: list[list[int]] = []
    for i in range(n_ops * 4 // 9):
        if kind == "layers":
            size, cost = 64 * LAYER_SIZES[i % 14], LAYER_COSTS[i % 14]
            back = RESIDUALS.get(i % 14, 1)
        else:
            size, cost = generator.choice((16, 32, 64, 128, 256)), generator.choice((1, 2, 5, 20, 100))
            back = generator.randint(2, 8) if generator.random() < 0.3 else 1
        reads.append(sorted({max(0, i - 1), max(0, i - back)}) if i else [])
        forward += add([forward[j] for j in reads[-1]], [size], cost)
    gradients = {len(forward) - 1: add([forward[-1]], [buffers[forward[-1]]], 1)[0]}
    for i in reversed(range(len(forward))):
        seen = [gradients[i], *(forward[j] for j in reads[i]), *([forward[i]] if i % 2 else [])]
        found = add(seen, [*(buffers[forward[j]] for j in reads[i]), 1], 2 * int(str(ops[i]["cost"])))
        for j, gradient in zip(reads[i], found, strict=False):
            both = [gradients[j], gradient] if j in gradients else []
            gradients[j] = add(both, [buffers[forward[j]]], 1)[0] if both else gradient
    text = {"format": "coop-program/1", "name": kind, "ops": ops, "buffers": buffers, "outputs": []}
    return Program.from_json(json.dumps(text))


def measure(case: tuple[str, int, float]) -> Row:
    """Plan one graph; in a fresh process, or the memory is that of an earlier call, too."""
    kind, n_ops, budget_ratio = case
    program = training_graph(kind, n_ops)
    budget_bytes = int(budget_ratio * simulate(program).peak_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    made = plan(program, budget_bytes, PlannerConfig())
    cpu_s = time.process_time() - begin
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if n_ops <= MOST_VALIDATED_OPS:
        validate(program, made)
    else:
        assert simulate(program, made.steps).peak_bytes == made.peak_bytes <= budget_bytes
    unit = 1024 if sys.platform.startswith("linux") else 1024**2
    return Row(
        graph=kind,
        n_ops=len(program.ops),
        budget_ratio=budget_ratio,
        status=made.status.value,
        overhead_ratio=made.overhead_ratio,
        lower_bound_ratio=made.lower_bound_ratio,
        cpu_s=cpu_s,
        grown_mib=(after - before) / unit,
    )


def table(rows: Sequence[Row]) -> str:
    """A line for each graph and size: overhead, bound and seconds by budget, and the most memory."""
    budgets = sorted({row.budget_ratio for row in rows}, reverse=True)
    header = ["graph", "ops"]
    header += [f"{b:g}: {what}" for b in budgets for what in ("overhead %", "bound %", "CPU s")]
    lines = []
    for graph, n_ops in dict.fromkeys((row.graph, row.n_ops) for row in rows):
        mine = {row.budget_ratio: row for row in rows if (row.graph, row.n_ops) == (graph, n_ops)}
        line = [graph, str(n_ops)]
        for b in budgets:
            row = mine[b]
            line += [
                f"{100 * row.overhead_ratio:.2f}",
                f"{100 * row.lower_bound_ratio:.2f}",
                f"{row.cpu_s:.2f}",
            ]
        lines.append([*line, f"{max(row.grown_mib for row in mine.values()):.0f}"])
    return format_table([*header, "MiB"], lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(map(str, OPS)))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale.json"))
    args = parser.parse_args(argv)
    cases = [
        (kind, int(n_ops), float(budget))
        for kind in ("layers", "mixed")
        for n_ops in args.ops.split(",")
        for budget in args.budgets.split(",")
    ]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = list(pool.imap(measure, cases))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(rows))
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
