"""Step times and peak bytes on the GPU that is here: plain, by hand, and within coop's budgets.

    make gpu                                              # the tests marked gpu, then this
    python -m benchmarks.gpu                              # under 10 minutes on one H100
    python -m benchmarks.gpu --models unet --small        # tries the script out, on a CPU too

Each way of each program runs in a process of its own, since a device's peak bytes are never reset. Compiles
overlap, measurements do not: a lock is held around the steps. Time over the estimate of the final kernels
says how far the cost model is off; where it differs between rows of a program, the model ranks wrongly.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import coop_jax as coop
from benchmarks import models
from benchmarks.models import PLAIN, Model, program
from coop_jax import aot
from coop_jax.errors import CoopError, error_from_text
from coop_jax.text import format_bytes, format_table
from passes.cost import DEVICES

# Written plainly: they need optax and nothing else. Sizes are such that a step takes tens of milliseconds.
SIZES: dict[str, dict[str, Any]] = {
    "llama_1b": {"layers": 12, "width": 2048, "inner": 8192, "heads": 32, "groups": 8}
    | {"seq": 2048, "batch": 4, "vocab": 32000, "dtype": "bfloat16"},
    "gpt3_2.7b": {"layers": 8, "batch": 4},
    "unet": {"channels": 128, "levels": (1, 2, 2, 4), "depth": 2, "image": 128, "batch": 32}
    | {"dtype": "bfloat16"},
    "densenet121": {"batch": 128},
    "swin": {"depths": (2, 2, 6, 2), "width": 96, "head": 32, "size": 7, "image": 224, "batch": 128}
    | {"classes": 1000, "dtype": "bfloat16"},
    "bilstm": {},
}
HAND = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
FRACTIONS = (0.75, 0.5, 0.35)
STEPS, WARM_UP = 10, 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of one program.

    Attributes:
        model, way: such as "unet" and "nothing_saveable", "coop 0.5 of plain" or "coop in nothing_saveable".
        budget_bytes: what coop was asked for; None for the others.
        total_bytes: XLA's count.
        peak_bytes: what the device says its peak was, arguments included; None where it does not say.
        estimated_ns: of the final kernels.
        step_ms: measured, the median.
        compile_s: tracing, planning and compiling, beside other compiles.
        error: its first line.
    """

    model: str
    way: str
    budget_bytes: int | None = None
    total_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_ns: int | None = None
    step_ms: float | None = None
    compile_s: float | None = None
    error: str = ""


def sized(name: str, small: bool) -> Model:
    """A program of the corpus with the sizes of this benchmark, or those for a CPU."""
    model = models.find(name)
    sizes = model.sizes["cpu"] if small else {**model.sizes.get("h200", {}), **SIZES[name]}
    return dataclasses.replace(model, sizes={"gpu": sizes})


def measured(asked: Row, small: bool, lock: Path) -> Row:
    """Compile one way and run it on this machine's first device."""
    model = sized(asked.model, small)
    if asked.budget_bytes is None:
        made = program(model, "gpu", asked.way)
    else:
        made = program(model, "gpu", around=coop.remat(budget=asked.budget_bytes))
    begin = time.perf_counter()
    try:
        compiled = jax.jit(made.step, donate_argnums=0).lower(*made.specs()).compile()
    except Exception as error:  # every failure is a row
        found = error if isinstance(error, CoopError) else error_from_text(str(error))
        return dataclasses.replace(asked, error=str(found or error).strip().partition("\n")[0])
    compile_s = time.perf_counter() - begin
    device = jax.devices()[0]
    kind = aot.model_for(device.platform, device.device_kind)
    row = dataclasses.replace(
        asked,
        total_bytes=aot.memory(compiled).total_bytes,
        estimated_ns=aot.run_ns(compiled, DEVICES[kind.name]),
        compile_s=compile_s,
    )
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        state, batch = jax.block_until_ready(jax.jit(made.arguments)(jax.random.key(0)))
        seconds = []
        for _ in range(WARM_UP + STEPS):
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, batch))
            seconds.append(time.perf_counter() - begin)
    stats = device.memory_stats() or {}
    return dataclasses.replace(
        row,
        step_ms=1e3 * statistics.median(seconds[WARM_UP:]),
        peak_bytes=stats.get("peak_bytes_in_use"),
    )


def in_process(asked: Row, small: bool, lock: Path) -> Row:
    """`measured` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--row", json.dumps(dataclasses.asdict(asked))]
    command += ["--lock", str(lock), *(["--small"] if small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return dataclasses.replace(asked, error=(done.stderr.strip().splitlines() or ["no output"])[-1])
    return Row(**json.loads(lines[-1]))


def rows_of(name: str, small: bool, lock: Path) -> Iterator[Row]:
    """Every way of one program, the plain one first."""
    plain = in_process(Row(model=name, way=PLAIN), small, lock)
    yield plain
    rivals = []
    for way in HAND:
        rivals.append(in_process(Row(model=name, way=way), small, lock))
        yield rivals[-1]
    if plain.total_bytes is None:
        return
    budgets = [(f"coop {f:g} of plain", int(f * plain.total_bytes)) for f in FRACTIONS]
    budgets += [(f"coop in {r.way}", r.total_bytes) for r in rivals if r.total_bytes is not None]
    for way, budget in budgets:
        yield in_process(Row(model=name, way=way, budget_bytes=budget), small, lock)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: bytes, times, and ratios to the plain row of the same program."""
    plain = {row.model: row for row in rows if row.way == PLAIN}
    lines = []
    for row in rows:
        base = plain[row.model]
        if row.step_ms is None or row.total_bytes is None or row.estimated_ns is None:
            lines.append((row.model, row.way, row.error or "refused", "", "", "", "", ""))
            continue
        lines.append(
            (
                row.model, row.way, format_bytes(row.total_bytes, exact=False),
                "" if row.peak_bytes is None else format_bytes(row.peak_bytes, exact=False),
                f"{row.step_ms:.2f}", _ratio(row.step_ms, base.step_ms),
                _ratio(row.estimated_ns, base.estimated_ns), f"{1e6 * row.step_ms / row.estimated_ns:.2f}",
            )
        )  # fmt: skip
    head = (
        "program",
        "way",
        "XLA's total",
        "device's peak",
        "step ms",
        "x plain",
        "estimated x",
        "ms / estimate",
    )
    return format_table(head, lines)


def _ratio(one: float, other: float | None) -> str:
    return "" if not other else f"{one / other:.3f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--jobs", type=int, default=4, help="programs that are compiled at once")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="without its ending; benchmarks/results/gpu_NAME by default")
    args = parser.parse_args()
    if args.row is not None:
        row = measured(Row(**json.loads(args.row)), args.small, args.lock)
        sys.stdout.write(json.dumps(dataclasses.asdict(row)) + "\n")
        return
    name = jax.devices()[0].device_kind
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        lock = Path(folder) / "lock"
        found = list(pool.map(lambda model: list(rows_of(model, args.small, lock)), args.models))
    rows = [row for part in found for row in part]
    text = f"# {name}, jax {jax.__version__}\n\n{table(rows)}\n"
    sys.stdout.write(text)
    out = args.out or Path("benchmarks/results") / f"gpu_{name.lower().replace(' ', '_')}"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    facts = {"device": name, "jax": jax.__version__, "rows": [dataclasses.asdict(row) for row in rows]}
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
