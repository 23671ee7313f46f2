"""A training step of Llama 3.2 1B, which a TPU v5e cannot hold, and the plan with which it can.

    python -m examples.llama_on_tpu

No TPU is needed: it is compiled for one that is not here (`pip install --no-deps libtpu`). Takes minutes.
"""

from __future__ import annotations

import dataclasses
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import coop_jax as coop
from benchmarks.models import Model, find, program
from coop_jax import aot, tpu


def llama(layers: int = 16, batch: int = 1, seq: int = 2048) -> Model:
    """Llama 3.2 1B with AdamW, or with fewer layers and tokens."""
    found = find("llama_1b")
    sizes = {**found.sizes["h200"], "layers": layers, "batch": batch, "seq": seq}
    return dataclasses.replace(found, sizes={"v5e": sizes})


def main(model: Model | None = None) -> None:
    """Print what the plain step needs, and the report of the one within the chip's memory."""
    made = program(model or llama(), "v5e")
    memory_bytes = aot.target("v5e").memory_bytes
    try:
        jitted = jax.jit(made.step, donate_argnums=0)
        plain = aot.lower_for(jitted, made.specs(), device="v5e").compile()
        needed_bytes = aot.memory(plain).total_bytes
    except Exception as error:  # XLA's refusal, which says how much it needs
        needed_bytes = tpu.bytes_out_of_memory(str(error)) or 0
    sys.stdout.write(f"plain: {needed_bytes / 2**30:.2f} of {memory_bytes / 2**30:.2f} GiB\n\n")
    sys.stdout.write(f"{coop.plan(made.step, *made.specs(), budget=None, device='v5e', donate_argnums=0)}\n")


if __name__ == "__main__":
    main()
