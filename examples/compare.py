"""What the other examples print: a step compiled plainly and within budgets, and how far its results move."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import coop_jax as coop
from coop_jax import aot
from coop_jax.text import format_table

RATIOS = (0.8, 0.6, 0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One way to run a step.

    Attributes:
        name: such as "plain" or "0.6 of the temporaries".
        budget_bytes: what was asked for; None for the plain step.
        total_bytes, temp_bytes: what XLA needs; None where no plan was found.
        difference: largest difference of a result from the plain step's, relative to its largest value.
    """

    name: str
    budget_bytes: int | None = None
    total_bytes: int | None = None
    temp_bytes: int | None = None
    difference: float = 0.0


def compare(step: Callable[..., Any], *args: Any, ratios: Sequence[float] = RATIOS) -> list[Compiled]:
    """Compile and run `step` plainly and with budgets that leave it some of its temporary bytes.

    Args:
        step: takes and returns pytrees of arrays.
        ratios: of the plain step's temporaries.
    """
    plain = jax.jit(step).lower(*args).compile()
    memory, expected = aot.memory(plain), plain(*args)
    rows = [Compiled(name="plain", total_bytes=memory.total_bytes, temp_bytes=memory.temp_bytes)]
    for ratio in ratios:
        name = f"{ratio:g} of the temporaries"
        budget = memory.fixed_bytes + int(ratio * memory.temp_bytes)
        try:
            limited = jax.jit(coop.remat(step, budget=budget)).lower(*args).compile()
        except coop.InfeasibleBudgetError:
            rows.append(Compiled(name=name, budget_bytes=budget))
            continue
        found = aot.memory(limited)
        rows.append(
            Compiled(
                name=name,
                budget_bytes=budget,
                total_bytes=found.total_bytes,
                temp_bytes=found.temp_bytes,
                difference=_difference(limited(*args), expected),
            )
        )
    return rows


def _difference(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    numbers = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs if _is_number(a)]
    return max(float(np.abs(a - b).max() / (np.abs(b).max() + 1e-30)) for a, b in numbers if a.size)


def _is_number(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.number))


def show(rows: Sequence[Compiled]) -> None:
    """Print the rows as a table, in MiB."""

    def mib(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / 2**20:.2f}"

    header = ("step", "budget MiB", "total MiB", "temporary MiB", "difference")
    cells = [
        (
            row.name,
            mib(row.budget_bytes),
            "no plan found" if row.total_bytes is None else mib(row.total_bytes),
            mib(row.temp_bytes),
            "" if row.total_bytes is None else f"{row.difference:.1e}",
        )
        for row in rows
    ]
    sys.stdout.write(format_table(header, cells) + "\n")
