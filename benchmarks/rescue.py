"""Training steps that XLA refuses for a TPU's memory, under bare `coop.remat`.

    python -m benchmarks.rescue                             # every program for a v5e; an hour on 2 cores
    python -m benchmarks.rescue --programs flax_scan lstm --chip v6e
    python -m benchmarks.rescue --table                     # only the table of what was measured before

Compiled, not run. The batch of each program is multiplied by powers of two until the plain step needs 1.2 to
3 times what the chip has, by XLA's count for one where it fits (a v5p; for the chip itself XLA rematerializes
before it refuses, and names what is left). Then the step is compiled under bare `@coop.remat`. Two programs
have the sizes that they have for an H200; the others are of the same code with fewer and smaller layers. A
line for every program is added to a .jsonl beside `--out` at once, and the table is made of all lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

import coop_jax as coop
from benchmarks import promise
from benchmarks.models import Blocks, Model, Net, find, lower, program
from coop_jax import aot, tpu
from coop_jax.errors import CoopError, error_from_text
from coop_jax.text import format_table
from examples.models import GPTConfig, Problem, scanned

# Of packages from PyPI, or written after others.
LARGE = ("llama_1b", "flax_scan")
SMALL = (
    "lstm", "bilstm", "equinox_vit", "unet", "densenet121", "swin", "gpt2", "vit", "bert_large",
    "penzai_llama", "resnet50",
)  # fmt: skip
# The models of `examples`; their "batch" is what the batches of `benchmarks.promise` are multiplied with.
EXAMPLES: dict[str, Callable[[int], Problem]] = {
    **{f"example {name}": made for name, made in promise.MODELS.items()},
    "example scanned gpt": lambda n: scanned.problem(GPTConfig(batch=8 * n)),
}
NAMES = (*LARGE, *EXAMPLES, *SMALL)
HEAD = (
    "Compiled for TPUs that are not here, not run. `python -m benchmarks.rescue`; what plain steps need is\n"
    "XLA's count for a v5p, where it fits; XLA alone is what XLA says for the chip itself, after its own\n"
    "rematerialization; seconds: 2 cores with other work.\n\n"
)
LEAST_RATIO, AIM_RATIO, MOST_RATIO = 1.2, 1.9, 3.0
MOST_STEPS = 8
ROOMY = "v5p"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """One program.

    Attributes:
        program, chip, batch: which.
        plain_bytes: what its plain step needs, by XLA's count for a chip where that fits.
        xla_bytes: what XLA says that it needs for `chip`, after its own rematerialization; None if not asked.
        memory_bytes: what XLA lets a program have there.
        total_bytes: XLA's count of the step under `coop.remat`; None if it was refused.
        seconds: tracing, planning and compiling it.
        error: the first line of a refusal.
        commit: of the code.
    """

    program: str
    chip: str
    batch: int
    plain_bytes: int
    memory_bytes: int
    xla_bytes: int | None = None
    total_bytes: int | None = None
    seconds: float = 0.0
    error: str = ""
    commit: str = ""


def example(name: str) -> Model:
    """A model of `examples` as one of the corpus."""

    def net(blocks: Blocks, *, batch: int) -> Net:
        problem = EXAMPLES[name](batch)
        return Net(init=problem.init, batch=problem.batch, loss=problem.loss)

    return Model(name=name, source="examples", net=net, sizes={"cpu": {"batch": promise.TPU_BATCHES**2}})


def sized(name: str, chip: str, batch: int | None = None) -> Model:
    """A program with another batch; None for the one it has."""
    model = example(name) if name in EXAMPLES else find(name)
    sizes = dict(model.sizes["h200" if name in LARGE else "cpu"])
    sizes["batch"] = batch or sizes["batch"]
    return dataclasses.replace(model, sizes={chip: sizes, ROOMY: sizes})


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
    needed = plain_bytes(model, ROOMY)
    for _ in range(MOST_STEPS):
        if LEAST_RATIO <= needed / memory_bytes <= MOST_RATIO:
            break
        doublings = round(math.log2(AIM_RATIO * memory_bytes / needed)) or 1
        model = sized(name, chip, int(model.sizes[chip]["batch"] * 2.0**doublings))
        needed = plain_bytes(model, ROOMY)
    return model, needed


def rescue(name: str, chip: str, *, alone: bool = False) -> Rescue:
    """Compile one program that is too large under bare `coop.remat`."""
    model, needed = too_large(name, chip)
    found = Rescue(
        program=name, chip=chip, batch=model.sizes[chip]["batch"], plain_bytes=needed,
        xla_bytes=plain_bytes(model, chip) if alone else None, memory_bytes=aot.target(chip).memory_bytes,
        commit=promise.commit(),
    )  # fmt: skip
    begin = time.perf_counter()
    try:
        compiled = promise.kept(lambda: lower(program(model, chip, around=coop.remat), chip).compile())
    except (CoopError, jax.errors.JaxRuntimeError) as error:
        ours = error if isinstance(error, CoopError) else error_from_text(str(error)) or error
        text = str(ours).partition("\n")[0]
        return dataclasses.replace(found, seconds=time.perf_counter() - begin, error=text)
    total_bytes = aot.memory(compiled).total_bytes
    return dataclasses.replace(found, seconds=time.perf_counter() - begin, total_bytes=total_bytes)


def table(rows: list[Rescue]) -> str:
    """The rows as a Markdown table."""
    header = (
        "program",
        "chip",
        "batch",
        "plain GiB",
        "of the memory",
        "XLA alone GiB",
        "under remat GiB",
        "seconds",
        "commit",
        "",
    )
    cells = [
        (
            r.program, r.chip, str(r.batch), f"{r.plain_bytes / 2**30:.2f}",
            f"{r.plain_bytes / r.memory_bytes:.2f}",
            "" if r.xla_bytes is None else f"{r.xla_bytes / 2**30:.2f}",
            "" if r.total_bytes is None else f"{r.total_bytes / 2**30:.2f}", f"{r.seconds:.0f}",
            r.commit, r.error,
        )
        for r in rows
    ]  # fmt: skip
    return format_table(header, cells)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--chip", default="v5e", choices=list(tpu.CHIPS))
    parser.add_argument("--alone", action="store_true", help="ask XLA for the chip, too, which may take long")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rescue.md"))
    args = parser.parse_args()
    lines = args.out.with_suffix(".jsonl")
    for name in () if args.table else args.programs:
        line = json.dumps(dataclasses.asdict(rescue(name, args.chip, alone=args.alone)))
        with lines.open("a") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    found = [Rescue(**json.loads(line)) for line in lines.read_text().splitlines()]
    rows = list({(r.program, r.chip): r for r in found}.values())
    args.out.write_text(HEAD + table(rows) + "\n")


if __name__ == "__main__":
    main()
