"""Step times and peak bytes on the GPU that is here: plain, by hand, and within coop's budgets.

    make gpu                                              # the tests marked gpu, then this
    python -m benchmarks.gpu                              # see --minutes
    python -m benchmarks.gpu --models unet --small        # tries the script out, on a CPU too

All ways of all programs are compiled, each in a process of its own; a kernel is tuned once, on the device,
for all of them. Then they are loaded again and run, one at a time, from the smallest of a program on, so that
the peak bytes of the device, which are never reset in a process, are those of each.
Time over the estimate of the final kernels says how far the cost model is off; where it differs between rows
of a program, the model ranks wrongly. Single kernels beside their estimates are in `..._kernels.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")

import jax
from jax.experimental import serialize_executable

import coop_jax as coop
from benchmarks import gpu_kernels, models
from benchmarks.models import PLAIN, Model, Program, program
from coop_jax import aot
from coop_jax.errors import CoopError, error_from_text
from coop_jax.text import format_bytes, format_table
from passes.backend import CPU

# By default those written plainly, which need optax and nothing else. A step takes tens of milliseconds; what
# has no sizes here has those for an H200, and needs the packages of the extra "models".
SIZES: dict[str, dict[str, Any]] = {
    "llama_1b": {"layers": 12, "width": 2048, "inner": 8192, "heads": 32, "groups": 8}
    | {"seq": 2048, "batch": 2, "vocab": 32000, "dtype": "bfloat16"},
    "gpt3_2.7b": {"layers": 8, "batch": 4},
    "mlp": {"layers": 10, "width": 16384, "batch": 16384, "dtype": "bfloat16"},
    "unet": {"channels": 128, "levels": (1, 2, 2, 4), "depth": 2, "image": 128, "batch": 8}
    | {"dtype": "bfloat16"},
    "densenet121": {"batch": 128},
    "swin": {"depths": (1, 1, 2, 1), "width": 96, "head": 32, "size": 7, "image": 224, "batch": 128}
    | {"classes": 1000, "dtype": "bfloat16"},
    "bilstm": {"seq": 256},
}
HAND = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
FRACTIONS = (0.75, 0.5, 0.35)
PAGES = {"mlp": (0.9, 0.8, 0.75)}  # budgets at which pages pay
HOST = "64GiB"
TIMINGS, WARM_UP = 10, 3
SHORTEST = 0.02  # seconds that are timed at once, of as many steps as that takes
SECONDS = 240  # that a compile may take


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of one program.

    Attributes:
        model, way: such as "unet" and "nothing_saveable", "coop 0.5 of plain" or "coop in nothing_saveable".
        budget_bytes: what coop was asked for; None for the others.
        host: the host budget, if any.
        profiled: measure single kernels, not the step.
        total_bytes, host_bytes: XLA's count.
        peak_bytes: what the device says its peak was, arguments included; None where it does not say.
        estimated_ns: of the final kernels.
        step_ms: measured, the median.
        spread: of the steps that counted, the longest over the shortest.
        loss: after the warm-up, whose steps are as many for every way.
        compile_s: tracing, planning and compiling, beside other compiles; the plain one tunes most kernels.
        recomputed: how many ops and kernels run again.
        kernels: as `benchmarks.gpu_kernels.Kernel` has them.
        others: what the profiler saw beside them, in ns of a step.
        error: its first line.
    """

    model: str
    way: str
    budget_bytes: int | None = None
    host: str | None = None
    profiled: bool = False
    total_bytes: int | None = None
    host_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_ns: int | None = None
    step_ms: float | None = None
    spread: float | None = None
    loss: float | None = None
    compile_s: float | None = None
    recomputed: int | None = None
    kernels: list[dict[str, Any]] | None = None
    others: dict[str, float] | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """Its program and way, as a file may be called."""
        return f"{self.model}, {self.way}{', profiled' * self.profiled}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is wanted of a program, beside what is compared always: plain, by hand, and coop in those bytes.

    Attributes:
        model: its name.
        fractions: of the plain program's bytes, as budgets; those of `PAGES` with host memory, too.
        profiled: single kernels of two ways, too.
    """

    model: str
    fractions: tuple[float, ...] = ()
    profiled: bool = False


def sized(name: str, small: bool) -> Model:
    """A program of the corpus with the sizes of this benchmark, or those for a CPU."""
    model = models.find(name)
    sizes = model.sizes["cpu"] if small else {**model.sizes.get("h200", {}), **SIZES.get(name, {})}
    return dataclasses.replace(model, sizes={"gpu": sizes})


def compile_flat(made: Program) -> jax.stages.Compiled:
    """A step from and to a list of arrays: not every tree that holds them can be kept in a file."""
    state, batch = made.specs()
    given, tree = jax.tree.flatten(state)

    def step(leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], jax.Array]:
        after, loss = made.step(tree.unflatten(leaves), batch)
        return jax.tree.leaves(after), loss

    return jax.jit(step, donate_argnums=0).lower(given, batch).compile()


def compile_one(asked: Row, small: bool, file: Path) -> Row:
    """Compile one way, and keep it in a file."""
    model, device = sized(asked.model, small), jax.devices()[0]
    if asked.budget_bytes is None:
        made = program(model, "gpu", asked.way)
    else:
        made = program(model, "gpu", around=coop.remat(budget=asked.budget_bytes, host=asked.host))
    begin = time.perf_counter()
    try:
        compiled = compile_flat(made)
    except Exception as error:  # every failure is a row
        found = error if isinstance(error, CoopError) else error_from_text(str(error))
        return dataclasses.replace(asked, error=str(found or error).strip().partition("\n")[0])
    compile_s = time.perf_counter() - begin
    memory, costs = aot.memory(compiled), aot.model_for(device.platform, device.device_kind)
    row = dataclasses.replace(
        asked, total_bytes=memory.total_bytes, host_bytes=memory.host_bytes, compile_s=compile_s,
        estimated_ns=aot.run_ns(compiled, costs),
    )  # fmt: skip
    if asked.budget_bytes is not None:
        row = dataclasses.replace(row, recomputed=len(coop.report(compiled).recomputed))
    if asked.profiled:
        found = gpu_kernels.kernels(compiled, costs)
        row = dataclasses.replace(row, kernels=[dataclasses.asdict(k) for k in found])
    file.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return row


def run_some(rows: Sequence[tuple[Row, Path]], small: bool) -> Iterator[Row]:
    """Run compiled ways of one program, the smallest first, while no other process runs one."""
    made = program(sized(rows[0][0].model, small), "gpu")
    initial = jax.jit(made.arguments).lower(jax.random.key(0)).compile()
    folder = rows[0][1].parent
    with (folder / "one at a time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for row, file in sorted(rows, key=lambda pair: pair[0].total_bytes or 0):
            try:
                compiled = serialize_executable.deserialize_and_load(*pickle.loads(file.read_bytes()))
                state, batch = jax.block_until_ready(initial(jax.random.key(0)))
                yield _run(row, compiled, jax.tree.leaves(state), batch)
            except Exception as error:  # such as no memory: the others count all the same
                yield dataclasses.replace(row, error=str(error).strip().partition("\n")[0])


def _run(row: Row, compiled: Any, state: Any, batch: Any) -> Row:
    def steps(count: int = 1) -> Any:
        nonlocal state
        for _ in range(count):
            state, loss = compiled(state, batch)
        return jax.block_until_ready((state, loss))[1]

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        steps(count)
        return (time.perf_counter() - begin) / count

    for _ in range(WARM_UP):
        loss = steps()
    if row.kernels is not None:
        listed = [gpu_kernels.Kernel(**k) for k in row.kernels]
        seen, others = gpu_kernels.measured(listed, steps)
        return dataclasses.replace(row, kernels=[dataclasses.asdict(k) for k in seen], others=others)
    count = math.ceil(SHORTEST / seconds(1))
    found = [seconds(count) for _ in range(TIMINGS)]
    stats = jax.devices()[0].memory_stats() or {}
    return dataclasses.replace(
        row, step_ms=1e3 * statistics.median(found), spread=max(found) / min(found), loss=float(loss),
        peak_bytes=stats.get("peak_bytes_in_use"),
    )  # fmt: skip


def in_process(asked: Row, small: bool, file: Path) -> Row:
    """`compile_one` in a process of its own."""
    tuned = f"--xla_gpu_per_fusion_autotune_cache_dir={file.parent / 'tuned'}"
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), tuned, *([gpu_kernels.GRAPHS_OFF] * asked.profiled)))
    given = ["--compile", json.dumps(dataclasses.asdict(asked)), "--file", str(file)]
    found, error = _lines([*given, *(["--small"] * small)], {"XLA_FLAGS": flags.strip()}, SECONDS)
    return found[0] if found else dataclasses.replace(asked, error=error)


def run_in_process(rows: Sequence[tuple[Row, Path]], small: bool) -> list[Row]:
    """`run_some` in a process of its own."""
    listed = rows[0][1].with_suffix(".json")
    listed.write_text(json.dumps([[dataclasses.asdict(row), str(file)] for row, file in rows]))
    found, error = _lines(["--run", str(listed), *(["--small"] * small)], {}, SECONDS)
    known = {(row.way, row.profiled) for row in found}
    lost = [row for row, _ in rows if (row.way, row.profiled) not in known]
    return [*found, *(dataclasses.replace(row, error=error) for row in lost)]


def _lines(given: Sequence[str], environ: Mapping[str, str], seconds: float) -> tuple[list[Row], str]:
    """The rows that this script prints in another process, and how that ended."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu", *given], stdout=out, stderr=errors, check=False,
                timeout=seconds, env={**os.environ, **environ},
            )  # fmt: skip
            ended = ""
        except subprocess.TimeoutExpired:
            ended = f"not done in {seconds} s"
        out.seek(0)
        errors.seek(0)
        found = [Row(**json.loads(line)) for line in out if line.startswith("{") and line.endswith("\n")]
        return found, ended or " | ".join(errors.read().strip().splitlines()[-3:]) or "no output"


def without_coop(asked: Asked) -> list[Row]:
    """The ways that need no budget, the plain one first."""
    by_hand = HAND if models.find(asked.model).per_block else ()
    rivals = [Row(model=asked.model, way=way) for way in (PLAIN, *by_hand)]
    return [*rivals, *(dataclasses.replace(row, profiled=True) for row in rivals if asked.profiled)]


def with_coop(asked: Asked, found: Sequence[Row]) -> list[Row]:
    """What to ask coop for beside what was found without, the most telling first."""
    total = {row.way: row.total_bytes for row in found if row.total_bytes and not row.profiled}
    if PLAIN not in total:
        return []
    budgets = [(f"coop in {way}", total[way], None) for way in HAND if way in total]
    paged = PAGES.get(asked.model, ())
    for fraction in sorted({*asked.fractions, *paged}, reverse=True):
        budget = int(fraction * total[PLAIN])
        budgets.append((f"coop {fraction:g} of plain", budget, None))
        if fraction in paged:
            budgets.append((f"coop {fraction:g} of plain, host", budget, HOST))
    rows = [Row(model=asked.model, way=way, budget_bytes=b, host=host) for way, b, host in budgets]
    return [*rows, *(dataclasses.replace(row, profiled=True) for row in rows[:1] if asked.profiled)]


def run_all(
    asked: Sequence[Asked], small: bool, jobs: int, minutes: float, say: Callable[[Row], None]
) -> None:
    """Every row of these programs; nothing is compiled that begins once the time is up."""
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        Path(folder, "tuned").mkdir()

        def compiled_in_time(row: Row) -> tuple[Row, Path]:
            file = Path(folder, row.name)
            if time.monotonic() > until:
                return dataclasses.replace(row, error="no time left"), file
            return in_process(row, small, file), file

        def compiled(one: Asked) -> list[tuple[Row, Path]]:
            plain, *rivals = without_coop(one)
            first = pool.submit(compiled_in_time, plain).result()  # alone: it tunes what the others have, too
            others = [first, *pool.map(compiled_in_time, rivals)]
            return [*others, *pool.map(compiled_in_time, with_coop(one, [row for row, _ in others]))]

        def run(found: Sequence[tuple[Row, Path]]) -> list[Row]:
            kept = [pair for pair in found if not pair[0].error]
            refused = [row for row, _ in found if row.error]
            return [*refused, *(run_in_process(kept, small) if kept else [])]

        with ThreadPoolExecutor(max(1, jobs // 2)) as each:
            found = list(each.map(compiled, asked))
        with ThreadPoolExecutor(2) as pair:  # one is loaded while another runs: more would take its CPU cores
            for rows in pair.map(run, found):
                for row in rows:
                    say(row)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: bytes, times, and ratios to the plain row of the same program."""
    plain = {row.model: row for row in rows if row.way == PLAIN and not row.profiled}
    lines = []
    order = [*plain], [PLAIN, *HAND]
    for row in sorted((r for r in rows if not r.profiled), key=lambda r: _rank(r, *order)):
        base = plain[row.model]
        if row.step_ms is None or row.total_bytes is None or row.estimated_ns is None:
            lines.append((row.model, row.way, textwrap.shorten(row.error, 60) or "refused", *[""] * 7))
            continue
        peak = "" if row.peak_bytes is None else format_bytes(row.peak_bytes, exact=False)
        lines.append(
            (
                row.model, row.way, format_bytes(row.total_bytes, exact=False), peak, f"{row.step_ms:.2f}",
                _ratio(row.step_ms, base.step_ms), _ratio(row.estimated_ns, base.estimated_ns),
                f"{1e6 * row.step_ms / row.estimated_ns:.2f}", f"{row.loss:.4f}", f"{row.compile_s:.0f}",
            )
        )  # fmt: skip
    head = (
        "program", "way", "XLA's total", "device's peak", "step ms", "x plain", "estimated x",
        "ms / estimate", "loss", "compile s",
    )  # fmt: skip
    return format_table(head, lines)


def _rank(row: Row, names: Sequence[str], ways: Sequence[str]) -> tuple[int, int, str]:
    return names.index(row.model), ways.index(row.way) if row.way in ways else len(ways), row.way


def _ratio(one: float, other: float | None) -> str:
    return "" if not other else f"{one / other:.3f}"


def kernel_table(rows: Sequence[Row]) -> str:
    """Markdown: the kernels of the profiled programs by kind."""
    parts = []
    for row in rows:
        if row.kernels is not None:
            found = [gpu_kernels.Kernel(**k) for k in row.kernels]
            parts.append(f"## {row.model}, {row.way}\n\n{gpu_kernels.table(found)}\n")
    return "\n".join(parts)


def _print(row: Row) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(row)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=models.names())
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--fractions", nargs="*", type=float, default=FRACTIONS, help="budgets, of plain")
    parser.add_argument(
        "--profiled", nargs="*", default=[], choices=models.names(), help="their kernels, too"
    )
    parser.add_argument("--jobs", type=int, default=8, help="ways that are compiled at once")
    parser.add_argument("--minutes", type=float, default=7, help="nothing that is compiled begins after that")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="without its ending; benchmarks/results/gpu_NAME by default")
    args = parser.parse_args()
    if args.compile is not None:
        _print(compile_one(Row(**json.loads(args.compile)), args.small, args.file))
        return
    if args.run is not None:
        rows = [(Row(**row), Path(file)) for row, file in json.loads(Path(args.run).read_text())]
        for row in run_some(rows, args.small):
            _print(row)
        return
    device = jax.devices()[0]
    name = device.device_kind
    out = args.out or Path("benchmarks/results") / f"gpu_{name.lower().replace(' ', '_')}"
    out.parent.mkdir(parents=True, exist_ok=True)
    reached: dict[str, float] = {}
    found: list[Row] = []

    def keep() -> None:
        facts = {"device": name, "jax": jax.__version__, "flags": os.environ.get("XLA_FLAGS", "")}
        rows = [dataclasses.asdict(row) for row in found]
        out.with_suffix(".json").write_text(json.dumps({**facts, "reached": reached, "rows": rows}) + "\n")

    def say(row: Row) -> None:
        found.append(row)
        keep()

    asked = [
        Asked(model=model, fractions=tuple(args.fractions), profiled=model in args.profiled)
        for model in args.models
    ]
    run_all(asked, args.small, args.jobs, args.minutes, say)
    if device.platform != CPU.name:
        reached.update(gpu_kernels.ceilings())
        keep()
    lines = [f"- {what}: {value:.3g}" for what, value in reached.items()]
    text = "\n".join([f"# {name}, jax {jax.__version__}", "", *lines, "", table(found), ""])
    sys.stdout.write(text)
    out.with_suffix(".md").write_text(text)
    title = f"# {name}, kernels beside their estimates (`passes.hlo.cost`), without CUDA graphs"
    out.with_name(f"{out.name}_kernels.md").write_text(f"{title}\n\n{kernel_table(found)}")


if __name__ == "__main__":
    main()
