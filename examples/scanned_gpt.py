"""A GPT whose layers are a `lax.scan`: bytes of a training step before and after.

python -m examples.scanned_gpt
"""

from __future__ import annotations

import jax

from examples.compare import compare, show
from examples.models import GPTConfig, scanned, sgd_step

CONFIG = GPTConfig(layers=6, width=64, heads=4, seq=64, batch=16, vocab=256)


def main() -> None:
    """Compile plainly and within three budgets, and print what each needs."""
    problem = scanned.problem(CONFIG)
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1))
    show(compare(sgd_step(problem.loss), params, batch))


if __name__ == "__main__":
    main()
