"""Other people's programs in every way: plain, by hand, by XLA's own pass, and within coop's budgets.

    pip install -e '.[models,plot]'
    python -m benchmarks.side_by_side                                  # all of them; hours on 2 cores
    python -m benchmarks.side_by_side --models gpt2 unet --targets cpu # some
    python -m benchmarks.side_by_side --list                           # what there is

Each program runs in a process of its own with a time limit; a failure is a row. What is done is kept in a
.jsonl beside `--out`, a line for each program and target, and is not done again (`--again` does); rows of a
program that ran out of time are kept as well. CPU rows are measured too, in pairs with the plain program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

from benchmarks import models
from benchmarks.promise import commit
from benchmarks.side_table import Comparison, document, lost_table, plot, summary
from benchmarks.variants import Options, Row, rows_of

TARGETS = ("cpu", "h200")


def measure(name: str, target: str, options: Options, path: Path) -> None:
    """In a process of its own: compile every way of one program and write each row to a file.

    What is in the file before are rivals' rows of an earlier run.
    """
    known = read_rows(path)
    with path.open("w") as file:
        for row in rows_of(models.find(name), target, options, known):
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()


def compare(name: str, target: str, args: argparse.Namespace, rivals: Sequence[Row]) -> Comparison:
    """One program for one target, whatever happens to it; `rivals` are not compiled again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rivals))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.side_by_side", *asked(args)]
        command += ["--models", name, "--targets", target, "--rows", str(path)]
        failure = ""
        try:
            done = subprocess.run(
                command, timeout=args.timeout, env=environment(name), stderr=subprocess.PIPE, text=True,
                check=False,
            )  # fmt: skip
            if done.returncode:
                failure = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            failure = f"stopped after {args.timeout} s"
        rows = read_rows(path)
    words = ["python -m benchmarks.side_by_side", *asked(args), "--models", name, "--targets", target]
    return Comparison(
        model=name, target=target, source=source_of(name), rows=rows, failure=failure,
        command=f"{' '.join(words)} # jax {jax.__version__}, commit {commit()}",
    )  # fmt: skip


def environment(name: str) -> dict[str, str]:
    """The child's: with as many CPU devices as the program wants, and no chatter."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        devices = models.find(name).devices
    except ModuleNotFoundError:
        devices = 1
    if devices > 1:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return env


def source_of(name: str) -> str:
    """Where a program comes from; its package may be missing."""
    try:
        return models.find(name).source
    except ModuleNotFoundError as error:
        return f"needs {error.name}: pip install -e '.[models]'"


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows in a file of lines."""
    return tuple(row_of(json.loads(line)) for line in path.read_text().splitlines())


def row_of(data: dict[str, Any]) -> Row:
    """A row from its JSON."""
    return Row(**{**data, "rivals": tuple(data["rivals"])})


def asked(args: argparse.Namespace) -> list[str]:
    """The options of the command line that a child needs."""
    words = ["--runs", str(args.runs), "--around", args.around]
    words += ["--fractions", *map(str, args.fractions), "--xla-fractions", *map(str, args.xla_fractions)]
    return words + (["--no-least"] if args.no_least else [])


def stored(path: Path) -> dict[tuple[str, str], Comparison]:
    """What was measured before, the newest line of each program and target."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        data = json.loads(line)
        rows = tuple(row_of(row) for row in data["rows"])
        found[data["model"], data["target"]] = Comparison(**{**data, "rows": rows})
    return found


def write(found: dict[tuple[str, str], Comparison], out: Path) -> None:
    """The JSON, the Markdown table and a picture of each program."""
    order = {name: n for n, name in enumerate(models.names())}
    comparisons = sorted(found.values(), key=lambda c: (TARGETS.index(c.target), order[c.model]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([dataclasses.asdict(c) for c in comparisons], indent=1) + "\n")
    out.with_suffix(".md").write_text(document(comparisons))
    for each in comparisons:
        if each.rows:
            plot(each, out.with_suffix("") / f"{each.model}_{each.target}.png")


def parse() -> argparse.Namespace:
    """The command line."""
    default = Options()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(models.names()), choices=models.names())
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--fractions", nargs="*", type=float, default=list(default.fractions))
    parser.add_argument("--xla-fractions", nargs="*", type=float, default=list(default.xla_fractions))
    parser.add_argument("--around", choices=("step", "loss"), default="step", help="what coop decorates")
    parser.add_argument("--runs", type=int, default=default.runs, help="pairs of CPU steps; 0 for none")
    parser.add_argument("--no-least", action="store_true", help="do not look for the least budget")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for each program and target")
    parser.add_argument(
        "--again", choices=("all", "coop"), help="what was measured before: all of it, or all but the rivals"
    )
    parser.add_argument("--list", action="store_true", help="name the programs and stop")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/side_by_side.json"))
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, and write everything."""
    args = parse()
    if args.list:
        sys.stdout.write("".join(f"{name}: {source_of(name)}\n" for name in args.models))
        return
    if args.rows is not None:
        options = Options(
            fractions=tuple(args.fractions), xla_fractions=tuple(args.xla_fractions), runs=args.runs,
            least=not args.no_least, whole=args.around == "step",
        )  # fmt: skip
        measure(args.models[0], args.targets[0], options, args.rows)
        return
    lines = args.out.with_suffix(".jsonl")
    lines.parent.mkdir(parents=True, exist_ok=True)
    found = stored(lines)
    for target in args.targets:
        for name in args.models:
            if not args.again and (name, target) in found:
                continue
            if not has_size(name, target):
                continue
            before = found.get((name, target)) if args.again == "coop" else None
            result = compare(name, target, args, before.of("hand", "xla") if before else ())
            found[name, target] = result
            with lines.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            write(found, args.out)
            sys.stdout.write(summary([result]).splitlines()[-1] + "\n" + lost_table([result]) + "\n")
            sys.stdout.flush()
    write(found, args.out)


def has_size(name: str, target: str) -> bool:
    """True if a program is there for a target, or its package is missing, which is a row."""
    try:
        return target in models.find(name).sizes
    except ModuleNotFoundError:
        return True


if __name__ == "__main__":
    main()
