"""Training steps that XLA refuses for a TPU's memory, under bare `coop.remat`.

    python -m benchmarks.rescue                             # every program for a v5e; hours on 2 cores
    python -m benchmarks.rescue --programs flax_scan lstm --chip v6e

Compiled, not run. The batch of each program is doubled from the one it has until XLA says that the plain step
needs 1.2 times what the chip has; then the whole step is compiled under `@coop.remat` without arguments. A
line for every program is added to `--out` at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import coop_jax as coop
from benchmarks.models import Model, find, lower, program
from benchmarks.tpu import PROGRAMS
from coop_jax import aot, tpu
from coop_jax.errors import CoopError, error_from_text

# The first eight are of packages from PyPI, or written after others; `gpt` and `gpt_scan` are of `examples`.
NAMES = (
    "flax_scan", "equinox_vit", "resnet50", "lstm", "bilstm", "unet", "densenet121", "llama_1b",
    "gpt_scan", "gpt",
)  # fmt: skip
LEAST_RATIO = 1.2
MOST_DOUBLINGS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """One program.

    Attributes:
        program, chip, batch: which.
        plain_bytes: what XLA says that its plain step needs.
        memory_bytes: what XLA lets a program have there.
        total_bytes: XLA's count of the step under `coop.remat`; None if it was refused.
        seconds: tracing, planning and compiling it.
        error: the first line of a refusal.
    """

    program: str
    chip: str
    batch: int
    plain_bytes: int
    memory_bytes: int
    total_bytes: int | None = None
    seconds: float = 0.0
    error: str = ""


def sized(name: str, chip: str, batch: int | None = None) -> Model:
    """A program with an H200's sizes but for the batch, which is a fourth of that where it is None."""
    model = PROGRAMS[name]() if name in ("gpt", "gpt_scan") else find(name)
    sizes = dict(model.sizes.get("h200") or model.sizes[chip])
    return dataclasses.replace(model, sizes={chip: {**sizes, "batch": batch or max(1, sizes["batch"] // 4)}})


def plain_bytes(model: Model, chip: str) -> int:
    """What XLA needs for the plain step, whether it fits or not."""
    try:
        return aot.memory(lower(program(model, chip), chip).compile()).total_bytes
    except jax.errors.JaxRuntimeError as error:
        needed = tpu.bytes_out_of_memory(str(error))
        if needed is None:
            raise
        return needed


def too_large(name: str, chip: str) -> tuple[Model, int]:
    """A program whose plain step does not fit the chip, and what that needs."""
    model, memory_bytes = sized(name, chip), aot.target(chip).memory_bytes
    needed = plain_bytes(model, chip)
    for _ in range(MOST_DOUBLINGS):
        if needed >= LEAST_RATIO * memory_bytes:
            break
        model = sized(name, chip, 2 * model.sizes[chip]["batch"])
        needed = plain_bytes(model, chip)
    return model, needed


def rescue(name: str, chip: str) -> Rescue:
    """Compile one program that is too large under bare `coop.remat`."""
    model, needed = too_large(name, chip)
    found = Rescue(
        program=name, chip=chip, batch=model.sizes[chip]["batch"], plain_bytes=needed,
        memory_bytes=aot.target(chip).memory_bytes,
    )  # fmt: skip
    begin = time.perf_counter()
    try:
        compiled = lower(program(model, chip, around=coop.remat), chip).compile()
    except (CoopError, jax.errors.JaxRuntimeError) as error:
        ours = error if isinstance(error, CoopError) else error_from_text(str(error)) or error
        text = str(ours).partition("\n")[0]
        return dataclasses.replace(found, seconds=time.perf_counter() - begin, error=text)
    total_bytes = aot.memory(compiled).total_bytes
    return dataclasses.replace(found, seconds=time.perf_counter() - begin, total_bytes=total_bytes)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--chip", default="v5e", choices=list(tpu.CHIPS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rescue.jsonl"))
    args = parser.parse_args()
    for name in args.programs:
        line = json.dumps(dataclasses.asdict(rescue(name, args.chip)))
        with args.out.open("a") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
