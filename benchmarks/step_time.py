"""What half of the temporaries cost in time: a 4-layer GPT's training step on this machine.

    python -m benchmarks.step_time            # about 2 minutes on 2 cores

The plain step and the step within its arguments, outputs and half of its temporaries run in turn in one
process, each on its own copy of the state; the number is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

import coop_jax as coop
from benchmarks.timing import paired
from coop_jax import aot
from coop_jax.text import format_bytes
from examples.models import GPTConfig, adam_init, adam_step, gpt

GOAL_RATIO = 1.35


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fraction", type=float, default=0.5, help="of the plain step's temporaries")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    args = parser.parse_args()
    config = GPTConfig(layers=4, width=args.width, heads=8, seq=256, batch=8, vocab=1024)
    problem = gpt.problem(config)
    params, batch = problem.specs()
    specs = (jax.eval_shape(adam_init, params), batch)
    step = adam_step(problem.loss)
    plain = jax.jit(step, donate_argnums=0).lower(*specs).compile()
    before = aot.memory(plain)
    budget = before.fixed_bytes + int(args.fraction * before.temp_bytes)
    limited = jax.jit(coop.remat(step, budget=budget), donate_argnums=0).lower(*specs).compile()

    def arguments() -> tuple[Any, Any]:
        return adam_init(problem.init(jax.random.key(0))), problem.batch(jax.random.key(1))

    ratios = [pair.wall_ratio for pair in paired(plain, limited, arguments, args.runs)]
    result = {
        "config": str(config),
        "plain_temp_bytes": before.temp_bytes,
        "temp_bytes": aot.memory(limited).temp_bytes,
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "estimated_overhead_ratio": coop.report(limited).overhead_ratio,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(
        f"temporaries {format_bytes(before.temp_bytes)} -> {format_bytes(result['temp_bytes'])}; step time x "
        f"{result['median_ratio']:.3f} (median of {args.runs} pairs, goal {GOAL_RATIO})\n"
    )


if __name__ == "__main__":
    main()
