"""Drawn residual networks, in the bytes of `jax.checkpoint` around all of their blocks, or the first ones.

    python -m benchmarks.random_blocks                          # 80 of them for an absent H200; 25 minutes
    python -m benchmarks.random_blocks --first 80 --nets 20 --device h100
    python -m benchmarks.random_blocks --part 1 --parts 2       # every other one; lines are kept, and go on

Compiled, not run. A block is two products with an activation between, with or without biases, a
normalization, a gate and a residual connection, of weights in float32 or bfloat16; a step has momentum, or
returns gradients. By hand is `jax.checkpoint` around each block, and around a drawn number of the first ones.
`coop.remat` is around the whole step, with the bytes of that. Costs are estimates of the final kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp

import coop_jax as coop
from benchmarks import promise
from coop_jax import aot
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.text import format_table
from passes.cost import DEVICES

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": jax.nn.gelu,
    "erf": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}
RATE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A drawn network: blocks of `width` with `4 * width` inside, and what they are made of.

    Attributes:
        master: weights in float32, converted in each block.
        momentum: a step with momentum; else it returns the gradients.
    """

    layers: int
    width: int
    tokens: int
    activation: str
    bias: bool
    norm: bool
    gate: bool
    master: bool
    momentum: bool

    def __str__(self) -> str:
        flags = [name for name in ("bias", "norm", "gate", "master", "momentum") if getattr(self, name)]
        return f"{self.layers} x {self.width}, {self.tokens} tokens, " + ", ".join([self.activation, *flags])

    def specs(self) -> tuple[Any, jax.ShapeDtypeStruct]:
        """The state, weights and moments, and a batch, as shapes."""
        spec, wide = jax.ShapeDtypeStruct, 4 * self.width
        dtype = jnp.float32 if self.master else jnp.bfloat16
        block = {
            "up": spec((self.width, wide), dtype), "down": spec((wide, self.width), dtype),
            "gate": spec((self.width, wide) if self.gate else (1,), dtype),
            "inner": spec((wide,), dtype), "outer": spec((self.width,), dtype),
        }  # fmt: skip
        weights = [block] * self.layers
        return (weights, weights), spec((self.tokens, self.width), jnp.bfloat16)

    def block(self, weights: Any, x: Any) -> Any:
        """One block."""
        w = jax.tree.map(lambda v: v.astype(jnp.bfloat16), weights)
        y = x
        if self.norm:
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
            y = (wide * scale).astype(jnp.bfloat16)
        h = ACTIVATIONS[self.activation](y @ w["up"] + (w["inner"] if self.bias else 0))
        out = (h * (y @ w["gate"]) if self.gate else h) @ w["down"]
        return x + (out + w["outer"] if self.bias else out)

    def step(self, state: Any, x: Any, deep: int = 0) -> Any:
        """One step of training, with `jax.checkpoint` around so many of the first blocks."""

        def loss(weights: Any) -> Any:
            y = x
            for k, block in enumerate(weights):
                y = (jax.checkpoint(self.block) if k < deep else self.block)(block, y)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        weights, moments = state
        gradients = jax.grad(loss)(weights)
        if self.momentum:
            gradients = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
        return jax.tree.map(lambda w, g: (w - RATE * g).astype(w.dtype), weights, gradients), gradients


def depths(seed: int) -> tuple[int, int]:
    """How many blocks are under `jax.checkpoint` by hand: some of a network's, and all."""
    layers = drawn(seed).layers
    return random.Random(-1 - seed).randrange(1, layers), layers


def drawn(seed: int) -> Net:
    """A network."""
    chance = random.Random(seed)
    return Net(
        layers=chance.choice((3, 4, 6)),
        width=chance.choice((512, 768, 1024)),
        tokens=chance.choice((4096, 8192, 16384)),
        activation=chance.choice(sorted(ACTIVATIONS)),
        **{name: chance.random() < 0.5 for name in ("bias", "norm", "gate", "master", "momentum")},
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One network, with so many `deep` blocks by hand: XLA's bytes, estimated costs; `coop_ns` is 0 where it
    was refused."""

    seed: int
    deep: int
    layers: int
    net: str
    device: str
    plain_bytes: int
    plain_ns: int
    hand_bytes: int
    hand_ns: int
    coop_bytes: int
    coop_ns: int
    commit: str


def compare(seed: int, deep: int, device: str) -> Row:
    """One network, compiled in three ways."""
    net, costs = drawn(seed), DEVICES[device]

    def compiled(step: Callable[..., Any]) -> tuple[int, int]:
        made = aot.lower_for(jax.jit(step, donate_argnums=0), net.specs(), device=device).compile()
        return aot.memory(made).total_bytes, aot.run_ns(made, costs)

    plain = compiled(net.step)
    hand = compiled(lambda state, x: net.step(state, x, deep))
    try:
        ours = compiled(coop.remat(lambda state, x: net.step(state, x), budget=hand[0]))
    except InfeasibleBudgetError:
        ours = 0, 0
    return Row(
        seed=seed, deep=deep, layers=net.layers, net=str(net), device=device, plain_bytes=plain[0],
        plain_ns=plain[1], hand_bytes=hand[0], hand_ns=hand[1], coop_bytes=ours[0], coop_ns=ours[1],
        commit=promise.commit(),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, the dearest beside by hand first, and what they come to."""
    header = ("seed", "network", "by hand", "device", "bytes", "cost by hand", "coop / by hand", "commit")
    planned = [row for row in rows if row.coop_ns]
    refused = [row for row in rows if not row.coop_ns]
    cells = [
        (
            str(row.seed), row.net, f"{row.deep} of {row.layers}", row.device,
            f"{row.hand_bytes / row.plain_bytes:.3f}", f"{row.hand_ns / row.plain_ns:.3f}",
            f"{row.coop_ns / row.hand_ns:.3f}" if row.coop_ns else "refused", row.commit,
        )
        for row in (*refused, *sorted(planned, key=lambda row: -row.coop_ns / row.hand_ns))
    ]  # fmt: skip
    head = (
        "Compiled, not run; `python -m benchmarks.random_blocks`. Bytes are of the plain step's; costs are\n"
        "estimates of final kernels.\n\n"
    )
    some = [row for row in rows if row.deep < row.layers]
    every = [row for row in rows if row.deep == row.layers]
    said = _said(every, "each block") + _said(some, "the first blocks")
    return head + said + "\n" + format_table(header, cells) + "\n"


def _said(rows: list[Row], where: str) -> str:
    planned = [row for row in rows if row.coop_ns]
    mean = math.exp(math.fsum(math.log(row.coop_ns / row.hand_ns) for row in planned) / max(len(planned), 1))
    dearer = sum(row.coop_ns > 1.01 * row.hand_ns for row in planned)
    return (
        f"Of {len(rows)} drawn networks {len(rows) - len(planned)} were refused in the bytes of\n"
        f"`jax.checkpoint` around {where}, {dearer} cost more than 1 % more than by hand;\n"
        f"the geometric mean is {mean:.3f}.\n"
    )


def kept(lines: Path) -> list[Row]:
    """What was compared before, in the order of seeds."""
    text = lines.read_text() if lines.exists() else ""
    rows = (Row(**json.loads(line)) for line in text.splitlines())
    return sorted(rows, key=lambda row: (row.seed, row.deep))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = sorted(name for name, device in DEVICES.items() if device.platform == "cuda")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nets", type=int, default=80)
    parser.add_argument("--device", default="h200", choices=gpus)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/random_blocks.md"))
    arguments = parser.parse_args()
    lines = arguments.out.with_suffix(".jsonl")
    if lines == arguments.out:
        parser.error("--out is the table; what is done is kept in a .jsonl beside it.")
    known = {(row.seed, row.deep, row.device) for row in kept(lines)}
    seeds = range(arguments.first + arguments.part, arguments.first + arguments.nets, arguments.parts)
    for seed, deep in ((s, d) for s in seeds for d in depths(s)):
        if (seed, deep, arguments.device) in known:
            continue
        row = compare(seed, deep, arguments.device)
        said = f"{row.net}, {deep} of {row.layers} by hand: {row.coop_ns / row.hand_ns:.3f}"
        sys.stderr.write(f"{seed} {said}\n")
        with lines.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    arguments.out.write_text(table(kept(lines)))


if __name__ == "__main__":
    main()
