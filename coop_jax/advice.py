"""What could be had of a program: by donating, by recomputing, and by letting values wait on the host.

Two budgets are asked for, without the host's memory and, where values can be paged, with all of it: half of
the plain program's bytes, which is compiled (three quarters, where half is refused), and a byte. That is
refused, and the refusal names the least that was found: a plan that is written into XLA's own schedule, whose
heap is predicted exactly. It is not compiled once more; `coop.minimum_budget` does that.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from coop_jax.errors import BudgetExceededError, CoopError, InfeasibleBudgetError
from coop_jax.inspecting import inspect
from coop_jax.plain import Plain, report_beside
from coop_jax.record import UNLIMITED_BYTES
from coop_jax.report import Report
from coop_jax.text import format_bytes, format_ns
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
        milder: the report of a compile at three quarters, where half was refused; None if that was, too.
        planned: the program's memory within `half`, or `milder`; None if there is neither.
    """

    least_bytes: int | None = None
    least_proved: bool = False
    half: Report | None = None
    half_refused: str = ""
    milder: Report | None = None
    planned: MemoryMap | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every field but `planned` by name, in JSON types."""
        return {
            "least_bytes": self.least_bytes,
            "least_proved": self.least_proved,
            "half": None if self.half is None else self.half.to_dict(),
            "half_refused": self.half_refused,
            "milder": None if self.milder is None else self.milder.to_dict(),
        }

    def lines(self, how: str) -> list[str]:
        """A sentence about each; `how` is what was allowed."""
        sentences = [f"{how}, half of it: {self.half_refused}"] if self.half_refused else []
        for share, made in (("half", self.half), ("three quarters", self.milder)):
            if made is not None:
                budget = format_bytes(made.budget_bytes)
                sentences.append(f"{how}, {share} of it, {budget}: {_cost_text(made)} (compiled)")
        if self.least_bytes is not None:
            known = "proved" if self.least_proved else "not proved"
            least = format_bytes(self.least_bytes)
            sentences.append(f"{how}, the least budget: {least} (planned in XLA's schedule; {known})")
        return sentences


def _cost_text(report: Report) -> str:
    plain, compiled = report.baseline_cost_ns, report.compiled_cost_ns
    if plain and compiled is not None:
        change = f"{100 * (compiled / plain - 1):+.1f} % by estimate"
        text = f"kernels {format_ns(plain)} -> {format_ns(compiled)}, {change}"
    else:
        text = f"recompute costs +{100 * report.overhead_ratio:.1f} % by estimate"
    if not report.host.budget_bytes:
        return text
    waiting = report.host.compiled_bytes
    return text + (
        f"; {format_bytes(waiting, exact=False)} wait there" if waiting else "; nothing waits there"
    )


def budgets_of(plain: Plain, tell: Callable[[str], None], *, with_host: bool = False) -> BudgetRange:
    """Compile a program within half of its bytes, and ask for less than is possible.

    Args:
        plain: the program without a budget.
        tell: is told of everything that takes long.
        with_host: True to give all of the host's memory that JAX can use.
    """
    how = ", with the host's memory" if with_host else ""
    host_bytes = UNLIMITED_BYTES if with_host else None
    total_bytes = plain.memory.total_bytes
    tell(f"compiling it within half of its bytes{how}")
    half = _within(plain, max(1, total_bytes // 2), host_bytes)
    if not isinstance(half, CoopError):
        tell(f"looking for the least budget{how}")
        least_bytes, proved = least_of(plain, host_bytes)
        made = report_beside(half, plain)
        return BudgetRange(
            half=made, planned=inspect(half), least_bytes=_least(least_bytes, made), least_proved=proved
        )
    named = half if isinstance(half, InfeasibleBudgetError) else None
    budget_range = BudgetRange(
        half_refused=str(half).partition("\n")[0],
        least_bytes=None if named is None else named.least_bytes,
        least_proved=named is not None and named.proved,
    )
    # A refusal names what its own plans need; a milder budget may have others that need less.
    tell(f"compiling it within three quarters of its bytes{how}")
    milder = _within(plain, max(1, 3 * total_bytes // 4), host_bytes)
    if isinstance(milder, CoopError):
        return budget_range
    made = report_beside(milder, plain)
    least_bytes = _least(budget_range.least_bytes, made)
    return dataclasses.replace(budget_range, milder=made, planned=inspect(milder), least_bytes=least_bytes)


def _least(named_bytes: int | None, met: Report) -> int:
    return min(named_bytes or met.compiled_total_bytes, met.compiled_total_bytes)


def _within(plain: Plain, budget_bytes: int, host_bytes: int | None) -> Compiled | CoopError:
    """The program compiled within a budget, or why that is refused."""
    try:
        return plain.within(budget=budget_bytes, host=host_bytes)
    except (InfeasibleBudgetError, BudgetExceededError) as refused:
        return refused


def least_of(plain: Plain, host_bytes: int | None = None) -> tuple[int | None, bool]:
    """The least budget that is named where a byte is asked for, and whether that is proved."""
    answer = _within(plain, 1, host_bytes)
    if isinstance(answer, InfeasibleBudgetError):
        return answer.least_bytes, answer.proved
    return (None if isinstance(answer, CoopError) else 1), False


def donations(lowered: Lowered) -> tuple[Donation, ...]:
    """Arguments of a lowered program whose arrays outputs could take over, largest first."""
    free = Counter((out.shape, out.dtype) for out in jax.tree.leaves(lowered.out_info))
    arguments = lowered.args_info[0]
    leaves = [(n, leaf) for n, argument in enumerate(arguments) for leaf in jax.tree.leaves(argument)]
    free -= Counter((leaf.shape, leaf.dtype) for _, leaf in leaves if leaf.donated)
    saved: Counter[int] = Counter()
    for n, leaf in leaves:
        key = (leaf.shape, leaf.dtype)
        if not leaf.donated and free[key]:
            free[key] -= 1
            saved[n] += leaf.dtype.itemsize * math.prod(leaf.shape)
    return tuple(
        Donation(argnum=n, nbytes=saved[n]) for n in sorted(saved, key=lambda n: (-saved[n], n)) if saved[n]
    )
