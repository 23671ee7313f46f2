"""Models in plain JAX, for the demo, the tests and the benchmarks."""

from examples.models.convnet import ConvConfig
from examples.models.gpt import GPTConfig
from examples.models.lstm import LSTMConfig
from examples.models.mlp import MLPConfig
from examples.models.problem import Problem, adam_init, adam_step, sgd_step

__all__ = [
    "ConvConfig",
    "GPTConfig",
    "LSTMConfig",
    "MLPConfig",
    "Problem",
    "adam_init",
    "adam_step",
    "sgd_step",
]
