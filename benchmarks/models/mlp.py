"""A wide perceptron: its products take longer than what they keep takes to the host and back."""

from __future__ import annotations

from typing import Any

import optax

from benchmarks.models.model import Blocks, Model, Net
from examples.models import MLPConfig, mlp


def net(blocks: Blocks, **sizes: Any) -> Net:
    """The perceptron of the examples; a layer of it is no block that a user would wrap."""
    problem = mlp.problem(MLPConfig(**sizes))
    return Net(init=problem.init, batch=problem.batch, loss=problem.loss)


MODELS = (
    Model(
        name="mlp",
        source="written here",
        net=net,
        sizes={"cpu": {"width": 512, "batch": 4096}},
        optimizer=lambda: optax.sgd(1e-3),
        per_block=False,
    ),
)
