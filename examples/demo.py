"""Train a byte-level GPT on Python's own source code within a memory budget; print one table.

    make demo        (or: python -m examples.demo --steps 30)

The same training step runs plainly, with `jax.checkpoint` around every block, and with `coop.remat` at
0.6 and 0.35 of the plain step's total. Bytes are XLA's own count of each compiled step. Times are
medians of ratios to the plain step, measured in turn within one process.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import coop_jax as coop
from coop_jax import aot
from coop_jax.text import format_bytes, format_table
from examples.models import GPTConfig, adam_init, adam_step, gpt

CONFIG = GPTConfig(layers=4, width=128, heads=4, seq=256, batch=16, vocab=256)
FRACTIONS = (0.6, 0.35)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compile the training step.

    Attributes:
        name: for the table.
        compiled: (state, tokens) -> (state, loss); the state is donated.
        recomputed: what is recomputed, in words.
    """

    name: str
    compiled: Any
    recomputed: str


@dataclass(slots=True, kw_only=True)
class Run:
    """What one variant's training produced so far."""

    state: Any
    seconds: list[float]
    loss: float = float("nan")
    first_gradients: Any = None


def library_text(limit: int = 4_000_000) -> np.ndarray:
    """Bytes of the Python standard library's source files, in order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(bytes(text[:limit]), np.uint8)


def batches(config: GPTConfig, seed: int) -> Iterator[jax.Array]:
    """Random windows of the library's text, the same ones for the same seed."""
    text = library_text()
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - config.seq - 1, config.batch)
        windows = np.stack([text[s : s + config.seq + 1] for s in starts])
        yield jnp.asarray(windows, jnp.int32)


def variants(config: GPTConfig) -> list[Variant]:
    """Compile the step in every way."""
    plain = gpt.problem(config)
    blocks = gpt.problem(config, wrap=jax.checkpoint)
    state = jax.eval_shape(lambda key: adam_init(plain.init(key)), jax.random.key(0))
    specs = (state, plain.specs()[1])

    def compile_step(step: Any) -> Any:
        return jax.jit(step, donate_argnums=0).lower(*specs).compile()

    step = adam_step(plain.loss)
    found = [
        Variant(name="plain", compiled=compile_step(step), recomputed=""),
        Variant(
            name="jax.checkpoint, every block",
            compiled=compile_step(adam_step(blocks.loss)),
            recomputed="every block",
        ),
    ]
    for fraction in FRACTIONS:
        compiled = compile_step(coop.remat(step, budget=fraction))
        name = f"coop.remat, budget {fraction:g}"
        found.append(Variant(name=name, compiled=compiled, recomputed=describe(coop.report(compiled))))
    return found


def describe(report: coop.Report) -> str:
    """What a report says is recomputed, in a few words."""
    counts = collections.Counter(item.op.split(".")[0] for item in report.recomputed)
    most = ", ".join(f"{count} {op}" for op, count in counts.most_common(3))
    return f"{len(report.recomputed)} ops: {most}" if counts else "nothing"


def train(found: Sequence[Variant], config: GPTConfig, steps: int) -> list[Run]:
    """Train every variant on the same batches, in turn: each step of each, then the next step."""
    init = jax.jit(lambda key: adam_init(gpt.init(config, key)))
    runs = [Run(state=init(jax.random.key(0)), seconds=[]) for _ in found]
    for i, tokens in zip(range(steps), batches(config, seed=0), strict=False):
        for k in range(len(found)):
            which = (i + k) % len(found)
            run = runs[which]
            start = time.perf_counter()
            run.state, loss = found[which].compiled(run.state, tokens)
            run.loss = float(loss)
            run.seconds.append(time.perf_counter() - start)
            if i == 0:
                # After one step from zero, Adam's first moment is a tenth of the gradient.
                run.first_gradients = jax.tree.map(lambda m: np.asarray(m) * 10, run.state["mean"])
    return runs


def largest_difference(found: Any, expected: Any) -> float:
    """The largest absolute difference between any two entries of two pytrees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def table(found: Sequence[Variant], runs: Sequence[Run], steps: int) -> str:
    """The one table."""
    header = (
        "step",
        "total",
        "temporaries",
        "of plain",
        "time",
        f"loss after {steps}",
        "gradients",
        "recomputed",
    )
    plain = aot.memory(found[0].compiled)
    rows = []
    for variant, run in zip(found, runs, strict=True):
        memory = aot.memory(variant.compiled)
        ratios = [a / b for a, b in zip(run.seconds[1:], runs[0].seconds[1:], strict=True)]
        difference = largest_difference(run.first_gradients, runs[0].first_gradients)
        rows.append(
            (
                variant.name,
                format_bytes(memory.total_bytes, exact=False),
                format_bytes(memory.temp_bytes, exact=False),
                f"{memory.total_bytes / plain.total_bytes:.3f}",
                f"{statistics.median(ratios):.2f} x",
                f"{run.loss:.4f}",
                "equal" if difference == 0 else f"{difference:.0e}",
                variant.recomputed,
            )
        )
    return format_table(header, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps of every variant (at least 2)")
    parser.add_argument("--layers", type=int, default=CONFIG.layers)
    parser.add_argument("--batch", type=int, default=CONFIG.batch)
    parser.add_argument("--seq", type=int, default=CONFIG.seq)
    args = parser.parse_args()
    config = GPTConfig(
        layers=args.layers, width=CONFIG.width, heads=CONFIG.heads, seq=args.seq, batch=args.batch
    )
    start = time.perf_counter()
    sys.stdout.write(f"compiling a byte-level GPT's training step in {2 + len(FRACTIONS)} ways: {config}\n")
    found = variants(config)
    sys.stdout.write(
        f"training each for {args.steps} steps on the Python standard library's source files\n\n"
    )
    runs = train(found, config, max(2, args.steps))
    sys.stdout.write(table(found, runs, max(2, args.steps)) + "\n\n")
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(runs[0].first_gradients))
    sys.stdout.write(
        "total, temporaries: XLA's count of the compiled step. of plain: part of the plain total. "
        "time: median ratio of a step\nto the plain step. gradients: largest difference of any gradient to "
        f"the plain step's, whose largest is {largest:.1e}.\n"
        f"{time.perf_counter() - start:.0f} s in all on {jax.devices()[0].device_kind}.\n"
    )


if __name__ == "__main__":
    main()
