"""Offsets predicted, and pinned, over a corpus of programs: on the CPU and on an H200 that is not here.

    python -m benchmarks.offsets                      # all programs on both, about 20 minutes on 2 cores
    python -m benchmarks.offsets --devices cpu --only attention

For every program: temporaries that XLA assigned, how many of them lie where they were predicted from the
module that XLA hands to its callback, what its packing takes over what is alive at once, and on the CPU what
pinning makes of it; the pinned program runs on random data, many times where pinning saved a percent or more,
and its results are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
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
from coop_jax import aot, pinning
from coop_jax.addresses import compile_and_view
from coop_jax.text import format_table

FRAGMENTED, MANY_CALLS = 0.99, 333
RESULTS = Path(__file__).parent / "results"


def random_arguments(specs: Any) -> Any:
    """Arrays for shapes: small whole numbers for integers, normal numbers otherwise."""
    rng = np.random.default_rng(0)

    def fill(s: Any) -> Any:
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 4, s.shape), s.dtype)
        return jnp.asarray(rng.normal(size=s.shape) * 0.3, s.dtype)

    return jax.tree.map(fill, specs)


def pinned_row(compiled: Any, program: SampleProgram, calls: int) -> dict[str, Any]:
    """Pin a CPU program and run both."""
    pinned = coop.pin(compiled)
    found = pinning.outcome_of(pinned)
    assert found is not None, "pin leaves a note"
    args = random_arguments(program.specs)
    equal = True
    calls = calls if found.temp_bytes > FRAGMENTED * found.temp_bytes_before else MANY_CALLS * calls
    for _ in range(calls):
        results = [jax.tree.leaves(c(*jax.tree.map(jnp.copy, args))) for c in (compiled, pinned)]
        equal = equal and all(
            np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*results, strict=True)
        )
    return {
        "pinned": found.pinned, "reason": found.reason, "pinned_bytes": found.temp_bytes,
        "pinned_live_bytes": found.live_bytes, "pin_seconds": found.seconds, "calls": calls,
        "equal_bits": equal,
    }  # fmt: skip


def row(program: SampleProgram, device: str, calls: int) -> dict[str, Any]:
    """Everything about one program on one device."""
    jitted = jax.jit(program.fn, donate_argnums=program.donate)
    lowered = aot.lower_for(jitted, program.specs, device=None if device == "cpu" else device)
    begin = time.perf_counter()
    compiled, view = compile_and_view(lowered)
    found: dict[str, Any] = {
        "program": program.name, "device": device, "buffers": view.buffers, "equal": view.equal,
        "predicted_temp_bytes": view.predicted_temp_bytes, "temp_bytes": view.temp_bytes,
        "live_bytes": view.live_bytes, "packed_bytes": view.packed_bytes,
        "compile_seconds": time.perf_counter() - begin,
    }  # fmt: skip
    if device == "cpu":
        found |= pinned_row(compiled, program, calls)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = []
    for r in rows:
        over = 100 * (r["temp_bytes"] / max(1, r["live_bytes"]) - 1)
        left = ""
        if r.get("pinned"):
            left = f"{r['pinned_bytes']} ({100 * (r['pinned_bytes'] / r['pinned_live_bytes'] - 1):.2f} %)"
        elif "reason" in r:
            left = "as good" if "as good" in r["reason"] else r["reason"][:40]
        same = {True: "yes", False: "NO", None: ""}[r.get("equal_bits")]
        lines.append(
            (r["program"], r["device"], f"{r['equal']} of {r['buffers']}", str(r["predicted_temp_bytes"]),
             str(r["temp_bytes"]), f"{over:.2f} %", left, same)
        )  # fmt: skip
    head = ("program", "device", "as predicted", "predicted B", "temp B", "over live", "pinned B (over live)",
            "same bits")  # fmt: skip
    return format_table(head, lines)


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", default=["cpu", "h200"])
    parser.add_argument("--only", default="", help="part of a program's name")
    parser.add_argument("--calls", type=int, default=3)
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
