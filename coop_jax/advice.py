"""What could be had of a program: by donating, by recomputing, and by letting values wait on the host.

Two budgets are asked for, without the host's memory and, where values can be paged, with all of it: half of
the plain program's bytes, which is compiled, and one that leaves next to nothing for temporaries. That one
is refused, and the refusal names the least that was found: a plan that is written into XLA's own schedule,
whose heap is predicted exactly. It is not compiled once more; `coop.minimum_budget` does that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from coop_jax import aot
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError
from coop_jax.inspecting import inspect
from coop_jax.plain import Plain, report_beside
from coop_jax.planning import compile_within
from coop_jax.report import Report
from coop_jax.text import format_bytes, format_ns
from coop_jax.xla import UNLIMITED_BYTES
from passes.memory_map import MemoryMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Donation:
    """What giving up arguments would save: outputs of the same shape and type take their place.

    Attributes:
        argnum: place of the argument among the positional ones.
        nbytes: of its arrays that outputs can take over. XLA decides when it compiles, so "up to".
    """

    argnum: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRange:
    """What budgets cost, over their range: half of the plain program's bytes, and the least.

    Attributes:
        least_bytes: the least budget that is known to be met when it is asked for; None if none is.
        least_proved: True if no plan goes below it.
        half: the report of a compile at half of the bytes; None if that was refused.
        half_refused: why, in a line; "" if it was not.
        planned: the program's memory at half; None as `half` is.
    """

    least_bytes: int | None = None
    least_proved: bool = False
    half: Report | None = None
    half_refused: str = ""
    planned: MemoryMap | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every field but `planned` by name, in JSON types."""
        return {
            "least_bytes": self.least_bytes,
            "least_proved": self.least_proved,
            "half": None if self.half is None else self.half.to_dict(),
            "half_refused": self.half_refused,
        }

    def lines(self, how: str) -> list[str]:
        """A sentence about each; `how` is what was allowed."""
        found = [f"{how}, half of it: {self.half_refused}"] if self.half is None else [self._half_line(how)]
        if self.least_bytes is not None:
            known = "proved" if self.least_proved else "not proved"
            least = format_bytes(self.least_bytes)
            found.append(f"{how}, the least budget: {least} (planned in XLA's schedule; {known})")
        return found

    def _half_line(self, how: str) -> str:
        assert self.half is not None, "it was compiled"
        line = f"{how}, half of it, {format_bytes(self.half.budget_bytes)}: {_cost_text(self.half)}"
        if self.half.host.budget_bytes:
            waiting = self.half.host.compiled_bytes
            there = f"{format_bytes(waiting, exact=False)} wait there" if waiting else "nothing needs to"
            line += f"; {there}"
        return f"{line} (compiled)"


def _cost_text(report: Report) -> str:
    plain, compiled = report.baseline_cost_ns, report.compiled_cost_ns
    if plain and compiled is not None:
        change = f"{100 * (compiled / plain - 1):+.1f} % by estimate"
        return f"kernels {format_ns(plain)} -> {format_ns(compiled)}, {change}"
    return f"recompute costs +{100 * report.overhead_ratio:.1f} % by estimate"


def budgets_of(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    plain: Plain,
    options: dict[str, Any],
    tell: Callable[[str], None],
    *,
    with_host: bool = False,
) -> BudgetRange:
    """Compile a function within half of its bytes, and ask for less than is possible.

    Args:
        fn, specs: as in `coop.explain`.
        plain: the same function, compiled without a budget.
        options: other arguments of `compile_within`.
        tell: is told of everything that takes long.
        with_host: True to give all of the host's memory that JAX can use.
    """
    how = ", with the host's memory" if with_host else ""
    options = {**options, "host": UNLIMITED_BYTES} if with_host else options
    tell(f"compiling it within half of its bytes{how}")
    half_bytes = max(1, aot.memory(plain.compiled).total_bytes // 2)
    try:
        compiled = compile_within(fn, *specs, budget=half_bytes, **options)
    except InfeasibleBudgetError as refused:
        return BudgetRange(
            least_bytes=refused.least_bytes, least_proved=refused.proved, half_refused=_first_line(refused)
        )
    except BudgetExceededError as missed:
        found = BudgetRange(half_refused=_first_line(missed))
    else:
        found = BudgetRange(half=report_beside(compiled, plain), planned=inspect(compiled))
    tell(f"looking for the least budget{how}")
    least_bytes, proved = least_of(fn, specs, plain, options)
    return dataclasses.replace(found, least_bytes=least_bytes, least_proved=proved)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def least_of(
    fn: Callable[..., Any], specs: Sequence[Any], plain: Plain, options: dict[str, Any]
) -> tuple[int | None, bool]:
    """The least budget that is named when nothing is left for temporaries, and whether that is proved.

    Arguments are those of `budgets_of`.
    """
    asked_bytes = aot.memory(plain.compiled).fixed_bytes + 1
    try:
        compile_within(fn, *specs, budget=asked_bytes, **options)
    except InfeasibleBudgetError as refused:
        return refused.least_bytes, refused.proved
    except BudgetExceededError:
        return None, False
    return asked_bytes, False


def donations(lowered: Any) -> tuple[Donation, ...]:
    """Arguments of a lowered program whose arrays outputs could take over, largest first."""
    free: dict[Any, int] = {}
    for out in jax.tree.leaves(lowered.out_info):
        key = (out.shape, out.dtype)
        free[key] = free.get(key, 0) + 1
    arguments = lowered.args_info[0]
    leaves = [(n, leaf) for n, argument in enumerate(arguments) for leaf in jax.tree.leaves(argument)]
    for _, leaf in leaves:
        if leaf.donated and free.get((leaf.shape, leaf.dtype), 0):
            free[leaf.shape, leaf.dtype] -= 1
    saved: dict[int, int] = {}
    for n, leaf in leaves:
        key = (leaf.shape, leaf.dtype)
        if not leaf.donated and free.get(key, 0):
            free[key] -= 1
            saved[n] = saved.get(n, 0) + leaf.dtype.itemsize * _count(leaf.shape)
    return tuple(
        Donation(argnum=n, nbytes=saved[n]) for n in sorted(saved, key=lambda n: (-saved[n], n)) if saved[n]
    )


def _count(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
