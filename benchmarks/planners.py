"""Every planner on every graph, within .9 to .2 of its live peak: cost, proof, placement, time.

    python -m benchmarks.planners --graphs FOLDER              # all coop-program/1 files in a folder
    python -m benchmarks.planners --graphs FOLDER --gpt 12     # and the kernels of a 12-layer GPT's step
    python -m benchmarks.planners --graphs FOLDER --only auto,exact --budgets 0.5,0.4

A cell of the table is the overhead in percent; "-" is no plan found, "none" is a proof that there is none,
"=" marks a proved optimum. The last column is the least budget that is kept, as a share of the live peak,
found by bisection for all planners but `exact`. Everything else is in the JSON file beside it: the lower
bound, the bytes of the pool with their fragmentation, recomputes and processor seconds. A plan counts only
if it is placed within its budget, holes included; the baselines are replayed at addresses, and so is
`auto`. `exact` is solved jointly, so that its proof is of the placed plan. Every plan goes through the
validator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

from coop_jax import aot
from coop_jax.cli import placed_bytes
from coop_jax.text import format_table
from examples.models import GPTConfig, gpt
from passes.hlo import graph, proto
from passes.hlo.lift import lift
from passes.ir import Program, Status
from passes.planners import PlannerConfig, plan
from passes.planners.exact.linear import strengthened
from passes.registry import PLANNERS
from passes.simulate import simulate
from passes.validate import validate

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
MOST_EXACT_OPS = 400
STRONG_BOUND_RATIO = 0.4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one planner did with one graph and budget.

    Attributes:
        within: whether the plan, placed, keeps the budget.
        pool_bytes: the end of its highest copy.
        fragmentation_ratio: how much that is over the plan's live peak.
        cpu_s: processor time of the planner, all threads.
        least: whether the budget is the least one that the planner keeps, to a percent of the live peak.
    """

    graph: str
    n_ops: int
    budget_ratio: float
    budget_bytes: int
    planner: str
    status: str
    within: bool
    overhead_ratio: float
    lower_bound_ratio: float
    peak_bytes: int
    pool_bytes: int
    fragmentation_ratio: float
    recomputes: int
    cpu_s: float
    least: bool = False


def measure(program: Program, budget_ratio: float, planner: str, time_limit_s: float) -> Row:
    """Plan, check and place."""
    before_bytes = simulate(program).peak_bytes
    budget_bytes = int(budget_ratio * before_bytes)
    exact = planner == "exact"
    config = PlannerConfig(
        planner=planner, placed=True, joint=exact, time_limit_s=time_limit_s if exact else None
    )
    begin = time.process_time()
    made = plan(program, budget_bytes, config)
    cpu_s = time.process_time() - begin
    if planner == "auto" and budget_ratio <= STRONG_BOUND_RATIO:
        made = strengthened(program, made)
    validate(program, made)
    pool_bytes = placed_bytes(program, made)
    return Row(
        graph=program.name,
        n_ops=len(program.ops),
        budget_ratio=budget_ratio,
        budget_bytes=budget_bytes,
        planner=planner,
        status=made.status.value,
        within=made.status.found and pool_bytes <= budget_bytes,
        overhead_ratio=made.overhead_ratio,
        lower_bound_ratio=made.lower_bound_ratio,
        peak_bytes=made.peak_bytes,
        pool_bytes=pool_bytes,
        fragmentation_ratio=pool_bytes / made.peak_bytes - 1 if made.peak_bytes else 0.0,
        recomputes=len(made.recomputes()),
        cpu_s=cpu_s,
    )


def measure_least(program: Program, planner: str, time_limit_s: float) -> Row | None:
    """The least budget that a planner keeps, in whole percent of the live peak; None if it keeps none."""
    best: Row | None = None
    low, high = 0, 101
    while high - low > 1:
        middle = (low + high) // 2
        row = measure(program, middle / 100, planner, time_limit_s)
        if row.within:
            best, high = row, middle
        else:
            low = middle
    return best and dataclasses.replace(best, least=True)


def cell(row: Row | None) -> str:
    """The overhead in percent, or why there is none."""
    if row is None:
        return ""
    if row.within:
        return f"{100 * row.overhead_ratio:.2f}" + ("=" if row.status == Status.OPTIMAL.value else "")
    return "none" if row.status == Status.INFEASIBLE.value else "-"


def table(rows: Sequence[Row]) -> str:
    """One Markdown table for each graph: a line for each planner, and the best lower bound."""
    parts = []
    for name in dict.fromkeys(row.graph for row in rows):
        mine = {(r.planner, r.budget_ratio): r for r in rows if r.graph == name and not r.least}
        least = {r.planner: f"{r.budget_ratio:.2f}" for r in rows if r.graph == name and r.least}
        budgets = sorted({budget for _, budget in mine}, reverse=True)
        planners = list(dict.fromkeys(planner for planner, _ in mine))
        lines = [[p, *(cell(mine.get((p, b))) for b in budgets), least.get(p, "")] for p in planners]
        bounds = [max((r.lower_bound_ratio for (_, at), r in mine.items() if at == b)) for b in budgets]
        lines.append(["lower bound", *(f"{100 * bound:.2f}" for bound in bounds), ""])
        lines += [
            [f"{p}, CPU seconds", *(f"{r.cpu_s:.2f}" if (r := mine.get((p, b))) else "" for b in budgets), ""]
            for p in planners
            if p in ("auto", "exact")
        ]
        header = ["overhead %", *(f"{b:g}" for b in budgets), "least"]
        parts.append(f"### {name}\n\n{format_table(header, lines)}\n")
    return "\n".join(parts)


def read(folder: Path) -> list[Program]:
    """All programs in a folder, smallest first; a file without a name of its own has the file's."""
    programs = []
    for path in sorted(folder.glob("*.json")):
        program = Program.from_json(path.read_text(encoding="utf-8"))
        programs.append(dataclasses.replace(program, name=program.name or path.stem))
    return sorted(programs, key=lambda program: (len(program.ops), program.name))


def gpt_kernels(layers: int) -> Program:
    """The kernels of a GPT's gradient as XLA schedules them for an H200 that is not here."""
    problem = gpt.problem(
        GPTConfig(layers=layers, width=768, heads=12, seq=512, batch=8, vocab=13312, dtype="bfloat16")
    )
    compiled = aot.lower_for(jax.grad(problem.loss), problem.specs(), device=aot.target("h200")).compile()
    module = compiled.runtime_executable().hlo_modules()[0]
    view = graph.read(proto.parse(module.as_serialized_hlo_module_proto()))
    lifted = lift(view, aot.model_for("gpu", "NVIDIA H200"), "cuda")
    return dataclasses.replace(lifted.program, name=f"gpt{layers}_h200")


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the JSON file and the Markdown tables beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    path.with_suffix(".md").write_text(table(rows))


def run(
    programs: Sequence[Program],
    budgets: Sequence[float],
    planners: Sequence[str],
    time_limit_s: float,
    path: Path,
) -> list[Row]:
    """Measure everything, one plan after the other, and keep the files up to date."""
    rows: list[Row] = []
    for program in programs:
        for budget_ratio in budgets:
            for planner in planners:
                if planner == "exact" and len(program.ops) > MOST_EXACT_OPS:
                    continue
                rows.append(measure(program, budget_ratio, planner, time_limit_s))
                last = rows[-1]
                sys.stdout.write(
                    f"{program.name} {budget_ratio:g} {planner}: {cell(last)} ({last.cpu_s:.2f} s)\n"
                )
                sys.stdout.flush()
        for planner in planners:
            found = None if planner == "exact" else measure_least(program, planner, time_limit_s)
            if found is not None:
                rows.append(found)
                sys.stdout.write(f"{program.name} {planner}: keeps {found.budget_ratio:.2f}\n")
        save(rows, path)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=Path, required=True, help="folder of coop-program/1 files")
    parser.add_argument("--gpt", type=int, default=0, metavar="LAYERS", help="compile a GPT's kernels, too")
    parser.add_argument("--only", default=",".join(name for name, p in PLANNERS.items() if p.in_benchmark))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for each exact plan")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planners.json"))
    args = parser.parse_args(argv)
    programs = read(args.graphs)
    if args.gpt:
        programs.append(gpt_kernels(args.gpt))
    budgets = [float(text) for text in args.budgets.split(",")]
    rows = run(programs, budgets, args.only.split(","), args.time_limit, args.out)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()
