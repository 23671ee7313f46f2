"""`coop pack` against CP-SAT alone: static allocation on its own.

    python -m benchmarks.pack                                          # rectangles cut up at random
    python -m benchmarks.pack --problems FOLDER --capacity 1048576     # and all problems in a folder

The columns are the packer of `coop pack`, on one core, and CP-SAT's `NoOverlap2D` with one and two workers,
each within the time limit. Every packing is checked. A cell has milliseconds of wall clock, and in brackets
of processor time, all threads together; "-" is neither a packing nor a proof. "cut" are rectangles of time x
bytes that were cut up, so they fit without a hole; of "holed" some items are left out, others begin later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ortools.sat.python import cp_model

from coop_jax.pack import read_items
from coop_jax.text import format_table
from passes.offsets.packing import Item, Span, check_packing, live_bytes
from passes.planners.exact.rectangles import model_of, pack

RECTANGLE_BYTES, RECTANGLE_TIMES = 1024, 1000
HOLED_RATIO, LATER_RATIO = 0.08, 0.3
# Kind, number of items, seed.
GENERATED = (
    ("cut", 100, 1),
    ("cut", 200, 2),
    ("cut", 300, 3),
    ("holed", 150, 4),
    ("holed", 250, 5),
    ("holed", 400, 6),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Items to be placed within a capacity."""

    name: str
    items: list[Item]
    capacity_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one packer did with one problem.

    Attributes:
        fits: True with a checked packing, False with a proof that there is none, None for neither.
        wall_ms, cpu_ms: milliseconds on the clock, and of all threads together.
    """

    problem: str
    n_items: int
    capacity_bytes: int
    live_bytes: int
    packer: str
    fits: bool | None
    method: str
    wall_ms: float
    cpu_ms: float


def cut_up(n_items: int, times: int, capacity_bytes: int, seed: int) -> list[Item]:
    """A rectangle of times x bytes cut into items, larger pieces more often: they fit without a hole."""
    random_number = random.Random(seed)
    pieces = [(0, times, 0, capacity_bytes)]
    while len(pieces) < n_items:
        areas = [(stop - start) * (top - low) for start, stop, low, top in pieces]
        start, stop, low, top = pieces.pop(random_number.choices(range(len(pieces)), areas)[0])
        if random_number.random() < 0.5 and stop - start > 1:
            middle = random_number.randrange(start + 1, stop)
            pieces += [(start, middle, low, top), (middle, stop, low, top)]
        elif top - low > 1:
            middle = random_number.randrange(low + 1, top)
            pieces += [(start, stop, low, middle), (start, stop, middle, top)]
        else:
            pieces.append((start, stop, low, top))
    return [(Span(start=start, stop=stop, nbytes=top - low),) for start, stop, low, top in pieces]


def holed(items: Sequence[Item], seed: int) -> list[Item]:
    """Some of the items, and some of them not from their start on."""
    random_number = random.Random(seed)
    kept = []
    for (span,) in items:
        if random_number.random() >= HOLED_RATIO:
            later = random_number.randrange(1 + (span.stop - span.start) // 3)
            start = span.start + (later if random_number.random() < LATER_RATIO else 0)
            kept.append((dataclasses.replace(span, start=start),))
    return kept


def generated(kind: str, n_items: int, seed: int) -> Problem:
    """One of the rectangles."""
    items = cut_up(n_items, RECTANGLE_TIMES, RECTANGLE_BYTES, seed)
    return Problem(
        name=f"{kind} {n_items}",
        items=holed(items, seed) if kind == "holed" else items,
        capacity_bytes=RECTANGLE_BYTES,
    )


def read(folder: Path, capacity_bytes: int) -> list[Problem]:
    """All problems in a folder, by name."""
    return [
        Problem(name=path.stem, items=read_items(path)[1], capacity_bytes=capacity_bytes)
        for path in sorted(folder.glob("*.csv"))
    ]


def by_pack(problem: Problem, time_limit_s: float) -> tuple[bool | None, Sequence[int], str]:
    """Whether it fits, offsets, and the method, by `coop pack`."""
    made = pack(problem.items, problem.capacity_bytes, time_limit_s)
    return made.fits, made.offsets, made.method


def by_cp_sat(workers: int) -> Callable[[Problem, float], tuple[bool | None, Sequence[int], str]]:
    """The same by CP-SAT alone."""

    def run(problem: Problem, time_limit_s: float) -> tuple[bool | None, Sequence[int], str]:
        model, variables, unit = model_of(problem.items, problem.capacity_bytes)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = workers
        solver.parameters.max_time_in_seconds = time_limit_s
        code = solver.solve(model)
        if code in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return True, [unit * solver.value(x) for x in variables], "cp-sat"
        return (False if code == cp_model.INFEASIBLE else None), [], "cp-sat"

    return run


PACKERS = {"coop pack": by_pack, "CP-SAT, 1 worker": by_cp_sat(1), "CP-SAT, 2 workers": by_cp_sat(2)}


def measure(problem: Problem, packer: str, time_limit_s: float) -> Row:
    """Pack and check."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    fits, offsets, method = PACKERS[packer](problem, time_limit_s)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    if fits:
        check_packing(problem.items, offsets, problem.capacity_bytes)
    return Row(
        problem=problem.name,
        n_items=len(problem.items),
        capacity_bytes=problem.capacity_bytes,
        live_bytes=live_bytes(problem.items),
        packer=packer,
        fits=fits,
        method=method if fits is not None else "",
        wall_ms=1000 * wall_s,
        cpu_ms=1000 * cpu_s,
    )


def cell(row: Row) -> str:
    """Milliseconds of an answer, "no" before those of a proof that there is no packing."""
    if row.fits is None:
        return "-"
    return ("" if row.fits else "no ") + f"{row.wall_ms:.0f} ({row.cpu_ms:.0f})"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each problem."""
    packers = list(dict.fromkeys(row.packer for row in rows))
    cells = {(row.problem, row.packer): cell(row) for row in rows}
    lines = [
        [row.problem, str(row.n_items), f"{100 * row.live_bytes / row.capacity_bytes:.1f}"]
        + [cells.get((row.problem, packer), "") for packer in packers]
        for row in rows
        if row.packer == packers[0]
    ]
    return format_table(["problem", "items", "live %", *packers], lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=Path, help="folder of CSV files as for `coop pack`")
    parser.add_argument("--capacity", type=int, default=1 << 20, help="bytes for the problems of the folder")
    parser.add_argument("--generated", type=int, default=len(GENERATED), help="how many rectangles")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each packer and problem")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pack.json"))
    args = parser.parse_args(argv)
    problems = read(args.problems, args.capacity) if args.problems else []
    problems += [generated(*spec) for spec in GENERATED[: args.generated]]
    rows: list[Row] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for problem in problems:
        for packer in PACKERS:
            rows.append(measure(problem, packer, args.time_limit))
            sys.stdout.write(f"{problem.name} {packer}: {cell(rows[-1])}\n")
            sys.stdout.flush()
        args.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
