"""Recompute alone against recompute with pages: simulated, on kernels with roofline costs.

    python -m benchmarks.paging                          # writes benchmarks/results/paging.{json,md}
    python -m benchmarks.paging --only "x 4096" --links pcie5,c2c
    python -m benchmarks.paging --graphs FOLDER          # coop-program/1 files, too; links relative to a step

Nothing here is compiled or measured: programs come from `benchmarks.kernels`, a plan takes the time of its
kernels and of waiting for the link, replayed with both queues, and every plan goes through the validator,
which replays them on its own. A cell is the overhead in percent; "-" is no plan found. "bound" is what no
plan can cost less than. "least" is the lowest live peak that was found, as a share of the program's own,
with its overhead; for the last link only.
A link's number is what it carries in one step over the peak.
"delta" is DELTA's filter and director (`passes.planners.baselines.delta`), for the last link, too.

    python -m benchmarks.paging --device v6e --links tpu-v6e
    python -m benchmarks.paging --only resnet --budgets 0.6,0.49,0.44,0.3     # DELTA's settings
    python -m benchmarks.paging --only resnet18 --budgets 0.5,0.3 --energy    # POET's objective

2.04 and 2.25 times the batch that fits (ResNet-50 and -101) are budgets of .49 and .44 of the peak, 40 to
70 % of the memory saved are .6 to .3. With --energy a cell is "time / energy", both over the program's own,
and "least energy" asks for that within the time that recompute alone takes in the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.kernels import Transformer, resnet, transformer
from coop_jax.text import format_table
from passes.cost import DEVICES, DeviceModel
from passes.ir import Plan, Program
from passes.link import LINKS, Link
from passes.objective import Objective
from passes.planners import PlannerConfig, least_peak, plan
from passes.planners.paging.energy import with_energy
from passes.simulate import simulate
from passes.validate import validate

BUDGETS = (0.7, 0.5, 0.4, 0.3, 0.2)
HOST_BYTES = 64 * 10**9
WIDTHS = (768, 1024, 2048, 4096, 8192)
# Of so small a vocabulary recompute alone costs what it cost a prototype (docs/paging.md).
PROTOTYPES = (4096, 8192)
RELATIVE = (0.25, 0.5, 1.0, 2.0)


def programs(device: DeviceModel = DEVICES["h200"]) -> dict[str, Callable[[], Program]]:
    """The programs by name; BERT is a transformer of width 1024 with short sequences and 24 layers."""
    found: dict[str, Callable[[], Program]] = {
        Transformer(width=width).name: lambda width=width: transformer(Transformer(width=width), device)
        for width in WIDTHS
    }
    for width in PROTOTYPES:
        small = Transformer(width=width, seq=1024, vocab=1024)
        found[f"{small.name}, vocabulary 1024"] = lambda small=small: replace(
            transformer(small, device), name=f"{small.name}, vocabulary 1024"
        )
    bert = Transformer(width=1024, layers=24, seq=512, batch=32, head=64, vocab=30_522, flash=False)
    found["bert large b32"] = lambda: replace(transformer(bert, device), name="bert large b32")
    for depth in (18, 50, 101):
        found[f"resnet{depth} b256"] = lambda depth=depth: resnet(depth, 256, device=device)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan.

    Attributes:
        link: its name, "none" for recompute alone.
        way: "alone", "pages", "delta" or "least energy".
        waiting_ratio: the part of the overhead that is waiting.
        link_ratio: what the link carries in a step without overhead, over the peak.
        energy_ratio: energy of steps and copies over the program's own, less one; 0 where it is not known.
    """

    program: str
    n_ops: int
    budget_ratio: float
    link: str
    way: str
    status: str
    overhead_ratio: float
    lower_bound_ratio: float
    waiting_ratio: float
    recomputes: int
    pages: int
    host_peak_bytes: int
    link_ratio: float
    energy_ratio: float
    seconds: float


def row(
    program: Program, budget_ratio: float, link: Link | None, way: str, made: Plan, peak_bytes: int
) -> Row:
    """What a plan came to; checked by the validator."""
    validate(program, made, link)
    carried = 0.0 if link is None else link.to_host_bytes_per_second * program.cost_ns / 1e9
    return Row(
        program=program.name,
        n_ops=len(program.ops),
        budget_ratio=budget_ratio,
        link="none" if link is None else link.name,
        way=way,
        status=made.status.value,
        overhead_ratio=made.overhead_ratio,
        lower_bound_ratio=made.lower_bound_ratio,
        waiting_ratio=made.waiting_ns / program.cost_ns,
        recomputes=len(made.recomputes()),
        pages=len(made.pages),
        host_peak_bytes=made.host_peak_bytes,
        link_ratio=carried / peak_bytes,
        energy_ratio=_energy_ratio(program, link, made),
        seconds=made.seconds,
    )


def _energy_ratio(program: Program, link: Link | None, made: Plan) -> float:
    base_pj = sum(op.energy_pj for op in program.ops)
    return with_energy(program, made, link).energy_pj / base_pj - 1 if base_pj else 0.0


def measure(
    program: Program, links: Sequence[Link], budgets: Sequence[float], energy: bool = False
) -> list[Row]:
    """Every budget alone; on every link with pages, by DELTA's rules, and for least energy if asked for."""
    peak_bytes = simulate(program).peak_bytes
    rows = []
    for ratio in budgets:
        budget_bytes = int(ratio * peak_bytes)
        alone = plan(program, budget_bytes, PlannerConfig(quick=True))
        rows.append(row(program, ratio, None, "alone", alone, peak_bytes))
        for link in links:
            pages = PlannerConfig(quick=True, host_bytes=HOST_BYTES, link=link)
            ways = {"pages": pages}
            if link is links[-1]:
                ways["delta"] = replace(pages, planner="delta")
            if energy:
                ways["least energy"] = replace(
                    pages, objective=Objective(least="energy", max_overhead=alone.overhead_ratio)
                )
            for way, config in ways.items():
                made = plan(program, budget_bytes, config)
                rows.append(row(program, ratio, link, way, made, peak_bytes))
    return rows


def measure_least(program: Program, links: Sequence[Link]) -> list[Row]:
    """The lowest peaks; their share of the program's own is the budget."""
    peak_bytes = simulate(program).peak_bytes
    found: list[tuple[Link | None, Plan]] = [(None, least_peak(program, PlannerConfig(quick=True)))]
    for link in links:
        config = PlannerConfig(quick=True, host_bytes=HOST_BYTES, link=link)
        found.append((link, least_peak(program, config)))
    return [row(program, p.peak_bytes / peak_bytes, link, "least", p, peak_bytes) for link, p in found]


def table(rows: Sequence[Row], device: str = "h200") -> str:
    """One Markdown table for each program."""
    energy = any(r.way == "least energy" for r in rows)
    parts = [f"Simulated on roofline costs of {device}: nothing here is compiled or measured.\n"]
    for name in dict.fromkeys(r.program for r in rows):
        mine = [r for r in rows if r.program == name]
        budgets = sorted({r.budget_ratio for r in mine if r.way != "least"}, reverse=True)
        cells = {(r.link, r.way, r.budget_ratio): r for r in mine}
        least = {
            r.link: f"{r.budget_ratio:.3f} ({100 * r.overhead_ratio:.0f} %)" for r in mine if r.way == "least"
        }
        lines = []
        for link in dict.fromkeys(r.link for r in mine):
            there = {"bound", *(r.way for r in mine if r.link == link)} - {"bound" if link == "none" else ""}
            ways = [way for way in ("alone", "pages", "bound", "least energy", "delta") if way in there]
            ratio = next(r.link_ratio for r in mine if r.link == link)
            for way in ways:
                label = {"alone": "recompute alone", "pages": f"pages, {link} ({ratio:.2f})"}.get(way, way)
                shown = [
                    _cell(cells.get((link, "pages" if way == "bound" else way, b)), way, energy)
                    for b in budgets
                ]
                lines.append([label, *shown, least.get(link, "") if way in ("alone", "pages") else ""])
        header = ["overhead %", *(f"{b:g}" for b in budgets), "least"]
        parts.append(f"### {name}, {mine[0].n_ops} ops\n\n{format_table(header, lines)}\n")
    return "\n".join(parts)


def _cell(found: Row | None, way: str, energy: bool) -> str:
    if found is None:
        return ""
    if way == "bound":
        return f"{100 * found.lower_bound_ratio:.2f}"
    if found.status not in ("optimal", "feasible"):
        return "-"
    also = f" / {100 * found.energy_ratio:.2f}" if energy else ""
    return f"{100 * found.overhead_ratio:.2f}{also}"


def read(folder: Path) -> list[Program]:
    """Programs in a folder; their costs are in units of their own."""
    found = []
    for path in sorted(folder.glob("*.json")):
        program = Program.from_json(path.read_text(encoding="utf-8"))
        found.append(replace(program, name=program.name or path.stem))
    return found


def relative(program: Program) -> list[Link]:
    """Links that carry a quarter of the peak to twice the peak while the program runs once."""
    peak_bytes = simulate(program).peak_bytes
    rates = [(share, share * peak_bytes * 1e9 / program.cost_ns) for share in RELATIVE]
    return [
        Link(name=f"{share:g} peak/step", to_host_bytes_per_second=rate, from_host_bytes_per_second=rate)
        for share, rate in rates
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--links", default="pcie3,pcie4,tpu-v5e,c2c,pcie5")
    parser.add_argument("--device", default="h200", choices=sorted(DEVICES), help="whose costs")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--graphs", type=Path, help="folder of coop-program/1 files")
    parser.add_argument("--energy", action="store_true", help="least energy, too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paging.json"))
    args = parser.parse_args(argv)
    links = [LINKS[name] for name in args.links.split(",")]
    budgets = [float(text) for text in args.budgets.split(",")]
    made = [(make(), links) for name, make in programs(DEVICES[args.device]).items() if args.only in name]
    if args.graphs:
        made += [(program, relative(program)) for program in read(args.graphs) if args.only in program.name]
    rows: list[Row] = []
    for program, some in made:
        begin = time.perf_counter()
        rows += measure(program, some, budgets, args.energy) + measure_least(program, some[-1:])
        sys.stdout.write(f"{program.name}: {time.perf_counter() - begin:.1f} s\n")
        sys.stdout.flush()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows, args.device))


if __name__ == "__main__":
    main()
