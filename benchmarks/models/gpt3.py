"""GPT-3 2.7B: the example GPT, its layers unrolled, at the sizes of Brown et al. (2020), table 2.1."""

from __future__ import annotations

from typing import Any

from benchmarks.models.model import Blocks, Model, Net
from examples.models import GPTConfig, gpt


def net(blocks: Blocks, **sizes: Any) -> Net:
    """The GPT of the examples."""
    problem = gpt.problem(GPTConfig(**sizes), wrap=blocks.wrap)
    return Net(init=problem.init, batch=problem.batch, loss=problem.loss)


MODELS = (
    Model(
        name="gpt3_2.7b",
        source="written here, after Brown et al. 2020",
        net=net,
        sizes={
            "cpu": {"layers": 8, "width": 128, "heads": 4, "seq": 128, "batch": 8, "vocab": 512},
            "h200": {"layers": 32, "width": 2560, "heads": 32, "seq": 2048, "batch": 2, "vocab": 50257}
            | {"dtype": "bfloat16"},
        },
    ),
)
