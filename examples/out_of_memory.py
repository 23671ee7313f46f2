"""A training step that does not fit its device: found out, fixed with one line, and drawn before and after.

    python -m examples.out_of_memory [folder]

The device is made up: so many bytes. Nothing is run before it fits; compiling tells what a program needs.
With a folder, a page (and with matplotlib a picture) of both programs is written there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

import coop_jax as coop
from coop_jax.screen import print_blocks
from coop_jax.text import format_bytes
from examples.models import GPTConfig, adam_init, adam_step, gpt

CONFIG = GPTConfig(layers=4, width=64, heads=4, seq=64, batch=16, vocab=256)
DEVICE_BYTES = 14 << 20


def explain(step: Any, specs: tuple[Any, Any], device_bytes: int) -> coop.Explanation:
    """Where the memory goes, and whether it fits."""
    found = coop.explain(step, *specs, donate_argnums=0, budgets=False, top=6)
    print_blocks(found.blocks(), sys.stdout)
    needed = found.memory.total_bytes
    word = "fits" if needed <= device_bytes else "does not fit"
    sys.stdout.write(f"\n{format_bytes(needed)} {word} a device of {format_bytes(device_bytes)}\n\n")
    return found


def draw(folder: Path, before: coop.Explanation, after: Any) -> None:
    """A page of both programs, and a picture where there is matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("out_of_memory.html", "out_of_memory.png"):
        try:
            coop.draw(after, folder / name, before=before.memory)
        except coop.UnsupportedError as error:
            sys.stdout.write(f"{error}\n")
        else:
            sys.stdout.write(f"drawn: {folder / name}\n")


def main(folder: Path | None = None, device_bytes: int = DEVICE_BYTES) -> Any:
    """Explain, fix, train one step, and draw."""
    problem = gpt.problem(CONFIG)
    step = adam_step(problem.loss)
    params, batch = problem.specs()
    specs = (jax.eval_shape(adam_init, params), batch)
    before = explain(step, specs, device_bytes)

    fixed = jax.jit(coop.remat(step, budget=device_bytes), donate_argnums=0)  # the one line

    compiled = fixed.lower(*specs).compile()
    print_blocks(coop.report(compiled).blocks(), sys.stdout)
    state = adam_init(problem.init(jax.random.key(0)))
    _, loss = compiled(state, problem.batch(jax.random.key(1)))
    sys.stdout.write(f"\nit runs: loss {float(loss):.4f}\n")
    if folder is not None:
        draw(folder, before, compiled)
    return compiled


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
