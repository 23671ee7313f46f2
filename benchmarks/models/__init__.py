"""Programs that nobody here wrote, or wrote as others do: whole training steps to compare planners on.

`names()` lists them, `find(name)` imports one. Packages are an extra: `pip install -e '.[models]'`; a model
needs only its own. A new program is a `Model` in a file here and a line in `FILES`.
"""

from __future__ import annotations

import importlib

from benchmarks.models.model import OWN, PLAIN, POLICIES, Blocks, Model, Net, Program, lower, program

__all__ = [
    "OWN",
    "PLAIN",
    "POLICIES",
    "Blocks",
    "Model",
    "Net",
    "Program",
    "find",
    "lower",
    "names",
    "program",
]

FILES = {
    "gpt2": "transformers_flax",
    "bert_large": "transformers_flax",
    "vit": "transformers_flax",
    "resnet50": "haiku_nets",
    "lstm": "haiku_nets",
    "pallas_scan": "pallas_attention",
    "pallas_unrolled": "pallas_attention",
    "flax_scan": "flax_scan",
    "penzai_llama": "penzai_llama",
    "equinox_vit": "equinox_vit",
    "unet": "unet",
    "densenet121": "densenet",
    "swin": "swin",
    "bilstm": "bilstm",
    "schnet": "schnet",
    "gpt3_2.7b": "gpt3",
    "mlp": "mlp",
    "llama_1b": "llama",
    "llama_8b": "llama",
}


def names() -> tuple[str, ...]:
    """Every program, by name."""
    return tuple(FILES)


def find(name: str) -> Model:
    """A program by its name.

    Raises:
        KeyError: there is none of that name.
        ModuleNotFoundError: its package is not installed.
    """
    module = importlib.import_module(f"benchmarks.models.{FILES[name]}")
    return next(model for model in module.MODELS if model.name == name)
