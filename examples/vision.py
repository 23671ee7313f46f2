"""A convolutional network with batch norm: bytes of a training step before and after.

python -m examples.vision
"""

from __future__ import annotations

import jax

from examples.compare import compare, show
from examples.models import ConvConfig, convnet, sgd_step

CONFIG = ConvConfig(stages=2, depth=1, channels=8, image=16, batch=32)


def main() -> None:
    """Compile plainly and within two budgets, and print what each needs."""
    problem = convnet.problem(CONFIG)
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1))
    show(compare(sgd_step(problem.loss), params, batch, ratios=(0.8, 0.6)))


if __name__ == "__main__":
    main()
