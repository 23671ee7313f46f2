"""A compiled program as a picture or a page: `coop.draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.stages import Compiled

from coop_jax import mark
from coop_jax.inspecting import inspect
from coop_jax.saving import Shown, save
from coop_jax.tables import memory_blocks
from passes.memory_map import MemoryMap


def draw(
    compiled: Compiled, path: str | Path, *, before: Any = None, budget_bytes: int | None = None
) -> None:
    """Draw where the memory of a compiled program is: over time by kind, and at its addresses.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returned, a path as `coop.inspect` takes it, or what
            `coop.inspect` returned.
        path: ends in .png, .svg or .pdf (a picture, with matplotlib), .html (a page with all of it), .json
            or .txt.
        before: another program to stand beside it, such as the same without a budget.
        budget_bytes: a line; None takes the program's own budget, if it has one.

    Raises:
        UnsupportedError: another ending, or a picture without matplotlib.
        InputError: a file that cannot be read.
    """
    if budget_bytes is None and hasattr(compiled, "runtime_executable"):
        record = mark.record_of(compiled)
        budget_bytes = None if record is None else record.budget_bytes
    after = _map(compiled)
    maps = [after] if before is None else [_map(before), after]
    titles = (after.name,) if before is None else ("before", "after")
    shown = Shown(found=tuple(memory_blocks(after)), fields=after.to_dict())
    save(shown, path, maps=maps, titles=titles, budget_bytes=budget_bytes)


def _map(source: Any) -> MemoryMap:
    return source if isinstance(source, MemoryMap) else inspect(source)
