"""Where a program's memory goes, before any budget: `coop.explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop_jax import aot
from coop_jax.advice import BudgetRange, Donation, budgets_of, donations
from coop_jax.inspecting import inspect
from coop_jax.plain import compile_plain
from coop_jax.progress import progress
from coop_jax.saving import save
from coop_jax.screen import Block, Heading, Lines, Printable
from coop_jax.tables import memory_blocks
from coop_jax.text import format_bytes
from passes.memory_map import MemoryMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Printable):
    """A program's memory without a budget, and what could be had.

    Attributes:
        memory: where its bytes are; see `passes.memory_map.MemoryMap`.
        device_name: the device that it was compiled for.
        donations: arguments that could be donated.
        recompute: what budgets cost; None if nobody asked.
        paging: what they cost with all of the host's memory that JAX can use; None if nobody asked, or
            nothing can be paged there, as on a CPU.
        top: how many rows a table shows.
    """

    memory: MemoryMap
    device_name: str
    donations: tuple[Donation, ...] = ()
    recompute: BudgetRange | None = None
    paging: BudgetRange | None = None
    top: int = 8

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        advice = self._advice()
        blocks = memory_blocks(self.memory, top=self.top)
        return [*blocks, Heading(text="what could be had"), Lines(lines=tuple(advice))] if advice else blocks

    def _advice(self) -> list[str]:
        lines = [
            f"by donating argument {d.argnum} (donate_argnums={d.argnum}): up to {format_bytes(d.nbytes)}"
            for d in self.donations
        ]
        if self.recompute is not None:
            lines += self.recompute.lines("by recomputing")
            if self.paging is not None:
                lines += self.paging.lines("by paging, too (host=)")
            else:
                lines.append(f"by paging: nothing, since nothing is paged on {self.device_name}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        return {
            "device": self.device_name,
            "memory": self.memory.to_dict(),
            "donations": [dataclasses.asdict(d) for d in self.donations],
            "recompute": None if self.recompute is None else self.recompute.to_dict(),
            "paging": None if self.paging is None else self.paging.to_dict(),
        }

    def save(self, path: str | Path) -> None:
        """Write it to a file whose ending says how: .png or .svg (a picture), .html (a page), .json, .txt.

        Raises:
            UnsupportedError: another ending, or a picture without matplotlib.
        """
        budget_range = self.recompute or BudgetRange()
        made = budget_range.half or budget_range.milder
        save(
            self,
            path,
            maps=[self.memory, budget_range.planned],
            titles=("as it is", "within half" if budget_range.half else "within three quarters"),
            budget_bytes=None if made is None else made.budget_bytes,
        )


def explain(
    fn: Callable[..., Any],
    *specs: Any,
    device: str | aot.Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    budgets: bool = True,
    top: int = 8,
) -> Explanation:
    """Compile a function as it is, perhaps for a device that is not here, and say where its memory goes.

    Args:
        fn: the function, not decorated: a whole step, with its gradient taken inside.
        specs: its positional arguments, as arrays or `jax.ShapeDtypeStruct` objects.
        device: such as "h200"; None means the default device of this process.
        donate_argnums, static_argnums: as in `jax.jit`.
        kwargs: keyword arguments of `fn`.
        budgets: also compile it within half of its bytes, and look for the least budget; where values can be
            paged, both once more with the host's memory. Each takes a few compiles.
        top: how many rows a table shows.

    Raises:
        UnsupportedError: the device is not known, or its compiler is not installed.
    """
    with progress() as tell:
        tell("compiling the program as it is")
        plain = compile_plain(
            fn, specs, device=device, donate_argnums=donate_argnums, static_argnums=static_argnums,
            kwargs=kwargs,
        )  # fmt: skip
        return Explanation(
            memory=inspect(plain.compiled),
            device_name=plain.device.name,
            donations=donations(plain.lowered),
            recompute=budgets_of(plain, tell) if budgets else None,
            paging=budgets_of(plain, tell, with_host=True) if budgets and plain.pages else None,
            top=top,
        )
