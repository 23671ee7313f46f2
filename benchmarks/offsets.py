"""Offsets predicted, and pinned, over a corpus of programs: on the CPU and on an H200 that is not here.

    python -m benchmarks.offsets                      # all programs on both, about 20 minutes on 2 cores
    python -m benchmarks.offsets --devices cpu --only attention
    JAX_PLATFORMS=cuda python -m benchmarks.offsets --devices gpu    # on this machine's GPU, and run there

For every program: temporaries that XLA assigned, how many of them lie where they were predicted from the
module that XLA hands to its callback, what its packing takes over what is alive at once, how long the
prediction took (CPU time), and what pinning makes of it. Where they can run, the pinned program and XLA's do,
in turn, on random data, many times where pinning saved a percent or more: the results are compared bit by
bit, and "time" is the median of the ratios of neighbouring runs, pinned to XLA's. For a GPU that is not here
what is rewritten is proved, and not run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import numpy as np

import coop_jax as coop
from benchmarks.programs import SampleProgram, corpus
from coop_jax import aot, pinning, serialized
from coop_jax.addresses import address_view
from coop_jax.text import format_table
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.heap import predict_assigned
from passes.hlo.schema import schema
from passes.jaxpr import compat
from passes.pinning.pin import PinError, pin

FRAGMENTED, MANY_CALLS = 0.99, 1000
WARM_UP = 2
HERE = ("cpu", "gpu")
RESULTS = Path(__file__).parent / "results"


def random_arguments(specs: Any) -> Any:
    """Arrays for shapes: small whole numbers for integers, normal numbers otherwise."""
    rng = np.random.default_rng(0)

    def fill(s: Any) -> Any:
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 4, s.shape), s.dtype)
        return jnp.asarray(rng.normal(size=s.shape) * 0.3, s.dtype)

    return jax.tree.map(fill, specs)


def timed_call(compiled: Any, args: Any) -> tuple[list[np.ndarray], float]:
    """Results of one call on its own copy of the arguments, and the seconds that it took."""
    copied = jax.block_until_ready(jax.tree.map(jnp.copy, args))
    begin = time.perf_counter()
    results = jax.block_until_ready(compiled(*copied))
    seconds = time.perf_counter() - begin
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)], seconds


def paired_runs(programs: tuple[Any, Any], args: Any, calls: int) -> tuple[bool, float]:
    """Whether two programs always give the same bits, and the median of second's time to first's."""
    equal, ratios = True, []
    for i in range(calls + WARM_UP):
        runs: list[Any] = [None, None]
        for which in (0, 1) if i % 2 else (1, 0):
            runs[which] = timed_call(programs[which], args)
        (first, first_seconds), (second, second_seconds) = runs
        equal = equal and all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
        ratios.append(second_seconds / first_seconds)
    return equal, statistics.median(ratios[WARM_UP:])


def pinned_row(compiled: Any, program: SampleProgram, calls: int) -> dict[str, Any]:
    """Pin a program and run both."""
    pinned = coop.pin(compiled)
    found = pinning.outcome_of(pinned)
    assert found is not None, "pin leaves a note"
    calls = calls if found.temp_bytes > FRAGMENTED * found.temp_bytes_before else MANY_CALLS
    equal, ratio = paired_runs((compiled, pinned), random_arguments(program.specs), calls)
    return {
        "pinned": found.pinned, "reason": found.reason, "pinned_bytes": found.temp_bytes,
        "pinned_live_bytes": found.live_bytes, "pin_seconds": found.seconds, "calls": calls,
        "equal_bits": equal, "time_ratio": ratio if found.pinned else None,
    }  # fmt: skip


def rewritten_row(compiled: Any) -> dict[str, Any]:
    """Rewrite the executable for a GPU that is not here: proved, not run."""
    begin = time.process_time()
    data = serialized.to_bytes(compiled)
    try:
        found = pin(data, schema(serialized.proto_library("cuda")), "cuda")
    except PinError as error:
        return {"pinned": False, "reason": str(error)}
    changed = found.data is not data
    return {
        "pinned": changed, "reason": "" if changed else "as good", "pinned_bytes": found.temp_bytes,
        "pinned_live_bytes": found.live_bytes, "pin_seconds": time.process_time() - begin,
    }  # fmt: skip


def predict_seconds(compiled: Any) -> float:
    """CPU time to read a compiled program's module and to predict its offsets."""
    begin = time.process_time()
    data = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    view = graph.read(proto.parse(data))
    predict_assigned(Assigner(view, serialized.kind_of(compiled), old_rules=compat.OLD_RULES))
    return time.process_time() - begin


def row(program: SampleProgram, device: str, calls: int) -> dict[str, Any]:
    """Everything about one program on one device."""
    jitted = jax.jit(program.fn, donate_argnums=program.donate)
    lowered = aot.lower_for(jitted, program.specs, device=None if device in HERE else device)
    begin = time.perf_counter()
    try:
        compiled = lowered.compile()
        seconds = time.perf_counter() - begin
    except coop.InfeasibleBudgetError as error:
        return {"program": program.name, "device": device, "least_bytes": error.least_bytes}
    view = address_view(compiled)
    found: dict[str, Any] = {
        "program": program.name, "device": device, "buffers": view.buffers, "equal": view.equal,
        "predicted_temp_bytes": view.predicted_temp_bytes, "temp_bytes": view.temp_bytes,
        "live_bytes": view.live_bytes, "packed_bytes": view.packed_bytes,
        "compile_seconds": seconds, "predict_seconds": predict_seconds(compiled),
    }  # fmt: skip
    return found | (pinned_row(compiled, program, calls) if device in HERE else rewritten_row(compiled))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = []
    for r in rows:
        if "least_bytes" in r:
            lines.append((r["program"], r["device"], "refused", *[""] * 7))
            continue
        over = 100 * (r["temp_bytes"] / max(1, r["live_bytes"]) - 1)
        left = ""
        if r.get("pinned"):
            left = f"{r['pinned_bytes']} ({100 * (r['pinned_bytes'] / r['pinned_live_bytes'] - 1):.2f} %)"
        elif "reason" in r:
            left = "as good" if "as good" in r["reason"] else r["reason"][:40]
        same = {True: "yes", False: "NO", None: ""}[r.get("equal_bits")]
        lines.append(
            (r["program"], r["device"], f"{r['equal']} of {r['buffers']}", f"{r['predict_seconds']:.2f}",
             str(r["predicted_temp_bytes"]), str(r["temp_bytes"]), f"{over:.2f} %", left, same,
             f"x {r['time_ratio']:.2f}" if r.get("time_ratio") else "")
        )  # fmt: skip
    head = ("program", "device", "as predicted", "in s", "predicted B", "temp B", "over live",
            "pinned B (over live)", "same bits", "time")  # fmt: skip
    return format_table(head, lines)


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=["cpu", "h200"])
    parser.add_argument("--only", default="", help="part of a program's name")
    parser.add_argument("--calls", type=int, default=201)
    parser.add_argument("--out", default="offsets")
    options = parser.parse_args()
    rows = []
    for device in options.devices:
        for program in corpus():
            if options.only in program.name:
                rows.append(row(program, device, options.calls))
                sys.stdout.write(f"{table(rows[-1:]).splitlines()[-1]}\n")
                sys.stdout.flush()
    text = table(rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.out}.md").write_text(f"{text}\n")
    (RESULTS / f"{options.out}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
