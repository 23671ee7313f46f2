"""A thousand random programs within random budgets: what was kept, refused or broken.

    python -m benchmarks.random_programs --programs 1000          # goes on where it stopped
    python -m benchmarks.random_programs --seeds 17 42            # these again, every budget printed

A seed is a program: a function of `tests.programs` and all that `tests.ways` draws for it. Programs that JAX
itself refuses, and most that have hardly any temporaries, are drawn anew from the same seed. What is asked of
each, and the verdicts, are in `tests.judge`. Shapes are tiny and LLVM's optimisation is off (kernels and
buffers are the same without it). Planners search a tenth of what they do by default (`--units`): plans are
worse, promises must hold all the same.

Batches run in a process of their own, so that not even a crash of XLA ends the run: it is that program's
verdict. A line of JSON for each finished program is appended beside the results; seeds that are in it are
not run again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
)

from coop_jax.text import format_table
from passes.planners import config
from tests import judge, programs, ways

BATCH = 25
MOST_DRAWS = 40
FEW_BYTES = 4096
TIMEOUT_S = 600
VERDICTS = ("kept", "refused", *judge.BROKEN)

Row = dict[str, Any]


def drawn(seed: int, first: int, say: Callable[[Row], None]) -> tuple[ways.Case, str, judge.Plain]:
    """The case of a seed, its text, and the undecorated program; `say` hears of every draw."""
    for n in range(first, MOST_DRAWS):
        say({"draw": n, "seed": seed})
        choices = programs.Seeded(f"{seed}/{n}")
        case = ways.case_of(choices, depth=choices.one_of((0, 0, 1, 1, 2)), most=3)
        try:
            plain = judge.plain(case)
        except judge.NotForJAXError:
            continue
        if plain.memory.temp_bytes >= FEW_BYTES or choices.integer(0, 9) == 0:
            say({"draw": None, "seed": seed})
            return case, f"{seed}/{n}", plain
    raise AssertionError(f"JAX refuses all {MOST_DRAWS} programs of seed {seed}")


def run_one(seed: int, first: int = 0, say: Callable[[Row], None] = lambda row: None) -> Row:
    """Draw a program, from draw `first` on, and ask all that is asked of it."""
    begin = time.process_time()
    case, text, plain = drawn(seed, first, say)
    with tempfile.TemporaryDirectory() as folder, judge.compilation_cache(folder if case.cached else None):
        asks = [dataclasses.asdict(ask) for ask in judge.asked(case, plain)]
    return {
        "seed": seed, "drawn": text, "way": case.way, "place": case.place, "dtype": case.dtype,
        "constraint": case.constraint if ways.constrained(case) else "",
        "kinds": sorted(programs.kinds_in(case.recipe)), "cached": case.cached, "exported": case.exported,
        "plain_bytes": plain.memory.total_bytes, "temp_bytes": plain.memory.temp_bytes,
        "cpu_s": round(time.process_time() - begin, 2), "asks": asks,
    }  # fmt: skip


def worker(seeds: Iterable[str]) -> None:
    """Print lines for each program, SEED or SEED/DRAW: when it is drawn, and what became of it."""

    def say(row: Row) -> None:
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()

    for text in seeds:
        seed, _, first = text.partition("/")
        say(run_one(int(seed), int(first or 0), say))


def run_batch(seeds: Sequence[int], units: int, take: Callable[[Row], None]) -> None:
    """Run seeds in a process of their own.

    Where it dies, that is the verdict of the program it was at; or the next draw is taken, if it dies of the
    undecorated one.
    """
    left = [str(seed) for seed in seeds]
    while left:
        options = ["--units", str(units), "--worker", *left]
        command = [sys.executable, "-m", "benchmarks.random_programs", *options]
        draw = None
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            for line in _lines(process):
                if "asks" in line:
                    take(line)
                    left.pop(0)
                else:
                    draw = line["draw"]
            process.wait()
            errors.seek(0)
            ends = f"exit code {process.returncode}; {errors.read()[-300:]}"
        if left:
            seed = left.pop(0).split("/")[0]
            if draw is None:
                take(_died(int(seed), ends))
            else:
                left.insert(0, f"{seed}/{draw + 1}")


def _lines(process: subprocess.Popen[str]) -> Iterator[Row]:
    """What a worker prints; a program that takes too long ends it."""
    assert process.stdout is not None
    while True:
        alarm = threading.Timer(TIMEOUT_S, process.kill)
        alarm.start()
        line = process.stdout.readline()
        alarm.cancel()
        if not line:
            return
        if line.startswith("{"):
            yield json.loads(line)


def _died(seed: int, ends: str) -> Row:
    """The row of a program with which its process ended."""
    crash = judge.Ask(what="process", budget=0, verdict="crashed", note=ends)
    blank = {"drawn": f"{seed}/?", "way": "?", "place": "?", "dtype": "?", "constraint": "", "kinds": []}
    numbers = {"plain_bytes": 0, "temp_bytes": 0, "cpu_s": 0.0, "cached": False, "exported": False}
    return {"seed": seed, **blank, **numbers, "asks": [dataclasses.asdict(crash)]}


def verdict(row: Row) -> str:
    """The worst of a program's verdicts; "refused" if no budget was kept."""
    found = {ask["verdict"] for ask in row["asks"]}
    for broken in judge.BROKEN:
        if broken in found:
            return broken
    return "kept" if "kept" in found else "refused"


def summary(rows: Sequence[Row], heading: str) -> str:
    """Tables of programs by way, place and feature, of budgets by what they are, and what is broken."""
    asks = [ask for row in rows for ask in row["asks"]]
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[f"way: {row['way']}"].append(row)
        groups[f"place: {row['place']}"].append(row)
        groups[f"dtype: {row['dtype']}"].append(row)
        if row["constraint"]:
            groups[f"constraint: {row['constraint']}"].append(row)
        for kind in row["kinds"]:
            groups[f"holds: {kind}"].append(row)
    by_group = [(name, [verdict(row) for row in group]) for name, group in sorted(groups.items())]
    by_ask = [
        (what, [ask["verdict"] for ask in asks if ask["what"] == what])
        for what in dict.fromkeys(ask["what"] for ask in asks)
    ]
    broken = [(row, ask) for row in rows for ask in row["asks"] if ask["verdict"] in judge.BROKEN]
    cpu_s = sum(row["cpu_s"] for row in rows)
    parts = [
        heading,
        f"{len(rows)} programs, {len(asks)} budgets, {cpu_s:.0f} s of CPU. Programs by their worst verdict: "
        + ", ".join(f"{[verdict(r) for r in rows].count(v)} {v}" for v in VERDICTS)
        + ". Budgets: " + ", ".join(f"{[a['verdict'] for a in asks].count(v)} {v}" for v in VERDICTS) + ".",
        _counts("budgets", by_ask),
        _counts("programs", by_group),
    ]  # fmt: skip
    if broken:
        lines = [
            f"- seed {row['seed']} ({row['way']}, {row['place']}, {row['dtype']}): {ask['what']} "
            f"{ask['budget']}: {ask['verdict']}: {ask['note'] or ask['total_bytes']}"
            for row, ask in broken
        ]
        parts.append(
            "Broken (again with `python -m benchmarks.random_programs --seeds SEED`):\n\n" + "\n".join(lines)
        )
    return "\n\n".join(parts) + "\n"


def _counts(what: str, groups: Sequence[tuple[str, Sequence[str]]]) -> str:
    table = [(name, str(len(found)), *(str(found.count(v)) for v in VERDICTS)) for name, found in groups]
    return format_table((what, "all", *VERDICTS), table)


def show(row: Row) -> None:
    """Print every budget of a program."""
    about = (
        f"{row['drawn']}: {row['way']}, {row['place']}, {row['dtype']}, {row['constraint']}, {row['kinds']}"
    )
    sys.stdout.write(f"{about}, plain {row['plain_bytes']} ({row['temp_bytes']}), {row['cpu_s']} s\n")
    for ask in row["asks"]:
        numbers = f"total {ask['total_bytes']}, {ask['cost_ns']} ns, least {ask['least_bytes']}"
        sys.stdout.write(f"    {ask['what']} {ask['budget']}: {ask['verdict']}; {numbers} {ask['note']}\n")


def main() -> None:
    """Run what is left of the programs, and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these only, printed")
    parser.add_argument("--processes", type=int, default=1, help="batches at a time")
    parser.add_argument("--units", type=int, default=20_000, help="a planner's work in one search")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no batch after so many")
    parser.add_argument("--heading", default="Random programs", help="the summary's first line")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/random_programs.json"))
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config.LIMITS = dataclasses.replace(config.LIMITS, quick_units=args.units)
    if args.worker is not None:
        worker(args.worker)
        return
    if args.seeds is not None:
        for seed in args.seeds:
            show(run_one(seed))
        return
    sys.exit(1 if _run(args) else 0)


def _run(args: argparse.Namespace) -> bool:
    """The run; whether anything is broken."""
    begin = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.with_suffix(".jsonl")
    rows = {r["seed"]: r for r in map(json.loads, lines.read_text().splitlines())} if lines.exists() else {}

    lock = threading.Lock()

    def take(row: Row) -> None:
        with lock, lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
            rows[row["seed"]] = row

    wanted = [seed for seed in range(args.first, args.first + args.programs) if seed not in rows]

    def batch(start: int) -> None:
        if time.monotonic() - begin > 60 * args.minutes:
            return
        run_batch(wanted[start : start + BATCH], args.units, take)
        counts = collections.Counter(map(verdict, list(rows.values())))
        sys.stdout.write(f"{len(rows)} programs, {time.monotonic() - begin:.0f} s: {dict(counts)}\n")
        sys.stdout.flush()

    with futures.ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(batch, range(0, len(wanted), BATCH)))
    ordered = [rows[seed] for seed in sorted(rows)]
    args.out.write_text(json.dumps([_brief(row) for row in ordered], indent=None) + "\n")
    args.out.with_suffix(".md").write_text(summary(ordered, args.heading))
    return any(verdict(row) in judge.BROKEN for row in ordered)


def _brief(row: Row) -> Row:
    """A row without what is empty in it, and without the texts of refusals."""
    asks = [
        {
            k: v
            for k, v in ask.items()
            if v not in (None, "") and (k != "note" or ask["verdict"] in judge.BROKEN)
        }
        for ask in row["asks"]
    ]
    return {**row, "asks": asks}


if __name__ == "__main__":
    main()
