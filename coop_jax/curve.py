"""What a budget costs, over its whole range: `coop.pareto`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop_jax import aot
from coop_jax.advice import least_of
from coop_jax.budget import Budget
from coop_jax.errors import BudgetError, CoopError
from coop_jax.plain import Plain, compile_plain
from coop_jax.points import ParetoPoint, Points, Rival
from coop_jax.progress import progress
from coop_jax.report import report
from coop_jax.rivals import natural_rivals
from coop_jax.saving import save
from coop_jax.screen import Block, Heading, Lines, Printable, Table
from coop_jax.text import format_bytes, format_ns

# Below what a refusal names, the least budget is looked for with one compile in so many, from the top down in
# steps of one in so many of what there is, and no more once it is found within this share of all bytes.
_PART_FOR_LEAST = 3
_FIRST_STEPS = 8
_CLOSE_RATIO = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(Points, Printable):
    """Overhead against budget, with what it says as tables and files."""

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        rows = [
            (f"budget {format_bytes(p.budget_bytes, exact=False)}", _bytes(p.total_bytes), _ns(p.cost_ns),
             "refused" if p.overhead_ratio is None else f"{100 * p.overhead_ratio:+.1f} %",
             f"{100 * p.lower_bound_ratio:.1f} %" if p.lower_bound_ratio else "")
            for p in self.points
        ]  # fmt: skip
        rows += [
            (r.name, _bytes(r.total_bytes), _ns(r.cost_ns), f"{100 * r.overhead_ratio:+.1f} %", "")
            for r in self.rivals
        ]
        rows.append(("without a budget", _bytes(self.plain_bytes), _ns(self.plain_ns), "+0.0 %", ""))
        least = "is not known" if self.least_bytes is None else format_bytes(self.least_bytes)
        met_bytes = min((p.total_bytes for p in self.points if p.total_bytes is not None), default=None)
        if self.least_bytes is not None and met_bytes is not None and met_bytes < self.least_bytes:
            least += f", met by a program of {format_bytes(met_bytes)}: less may do"
        return [
            Heading(text=f"what a budget costs on {self.device_name}"),
            Table(
                header=("", "compiled", "kernels", "overhead", "plan's recompute at least"), rows=tuple(rows)
            ),
            Lines(
                lines=(
                    f"the least budget that was found: {least}",
                    "bytes are XLA's count; times are estimates of all kernels, not measured",
                )
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Write it to a file whose ending says how: .png or .svg (the curve), .html, .json, .txt.

        Raises:
            UnsupportedError: another ending, or a picture without matplotlib.
        """
        save(self, path, pareto=self)


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes, exact=False)


def _ns(cost_ns: int | None) -> str:
    return "" if cost_ns is None else format_ns(cost_ns)


def pareto(
    fn: Callable[..., Any],
    *specs: Any,
    budgets: int | Sequence[int | float | str] = 12,
    device: str | aot.Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    rivals: Mapping[str, Callable[..., Any]] | None = None,
) -> Pareto:
    """Compile a function within many budgets, and say what each costs; one compile a budget.

    Args:
        fn: the function, not decorated: a whole step, with its gradient taken inside.
        specs: its positional arguments, as arrays or `jax.ShapeDtypeStruct` objects.
        budgets: how many, at most a third of them below what a refusal names as the least, the others from
            that up, below what the plain program needs; or the budgets themselves: bytes, sizes such as
            "8GiB", fractions of what the plain program needs.
        device: such as "h200"; None means the default device of this process.
        donate_argnums, static_argnums: as in `jax.jit`.
        kwargs: keyword arguments of `fn`.
        rivals: other ways to write `fn`, by name. None looks for natural blocks, scans' bodies and layers
            that repeat, and compiles them under three policies of `jax.checkpoint`; {} compiles no rival.

    Raises:
        UnsupportedError: the device is not known, or its compiler is not installed.
        BudgetError: one of `budgets` is none, or a share of the device's memory; or it is no number from 1.
    """
    if isinstance(budgets, int) and budgets < 1:
        raise BudgetError(f"budgets={budgets!r}: give how many, at least 1, or the budgets themselves.")
    static = aot.places(static_argnums, specs)
    donate = aot.donated(fn, specs, donate_argnums=donate_argnums, kwargs=kwargs, static_argnums=static)
    options: dict[str, Any] = {
        "device": device, "donate_argnums": donate, "static_argnums": static, "kwargs": kwargs,
    }  # fmt: skip
    with progress() as tell:
        tell("compiling the program as it is")
        plain = compile_plain(fn, specs, **options)
        total, plain_ns = plain.memory.total_bytes, plain.cost_ns
        others = []
        if rivals is None:
            rivals = natural_rivals(fn, specs, static_argnums=static, kwargs=kwargs)
        for name, other in rivals.items():
            tell(f"compiling {name}")
            others.append(_rival(name, compile_plain(other, specs, **options), plain_ns))
        search = _Search(plain, tell, budgets if isinstance(budgets, int) else len(budgets))
        least = None
        if isinstance(budgets, int):
            tell("looking for the least budget")
            least = search.descend(least_of(plain)[0])
            budgets = _spread(least, total, budgets - len(search.points))
        for budget in budgets:
            search.look(_resolved(budget, total))
    points = sorted(search.points, key=lambda p: p.budget_bytes)
    met = [p.budget_bytes for p in points if p.total_bytes is not None]
    return Pareto(
        points=tuple(points), least_bytes=min(met, default=least), plain_bytes=total, plain_ns=plain_ns,
        rivals=tuple(others), device_name=plain.device.name,
    )  # fmt: skip


class _Search:
    """Compiles within one budget after another, and keeps what came out."""

    def __init__(self, plain: Plain, tell: Callable[[str], None], n: int) -> None:
        self.plain, self.tell, self.n = plain, tell, n
        self.points: list[ParetoPoint] = []

    def look(self, budget: int) -> ParetoPoint:
        """Compile within a budget."""
        shown = format_bytes(budget, exact=False)
        self.tell(f"budget {len(self.points) + 1} of {self.n}: {shown}")
        point = _point(budget, self.plain)
        self.points.append(point)
        return point

    def descend(self, named: int | None) -> int:
        """The least budget that at most a third of the compiles find below what a refusal named.

        What a refusal names will be met, but it is no bound. A refusal takes longest, so the first ends it.
        """
        memory = self.plain.memory
        low, high = memory.fixed_bytes, named or memory.total_bytes
        step = (high - low) // _FIRST_STEPS
        for _ in range(self.n // _PART_FOR_LEAST):
            if high - low <= _CLOSE_RATIO * memory.total_bytes:
                break
            point = self.look(max(high - step, (low + high) // 2))
            if point.total_bytes is None:
                break
            high, step = min(point.budget_bytes, point.total_bytes), 2 * step
        return high


def _spread(least: int, most: int, n: int) -> list[int]:
    """`n` budgets from `least` up, evenly, below `most`: what that takes is known."""
    if least >= most or n < 2:
        return [max(1, min(least, most))]
    return [least + (most - least) * i // n for i in range(n)]


def _rival(name: str, made: Plain, plain_ns: int) -> Rival:
    return Rival(
        name=name, total_bytes=made.memory.total_bytes, cost_ns=made.cost_ns,
        overhead_ratio=made.cost_ns / max(1, plain_ns) - 1,
    )  # fmt: skip


def _resolved(budget: int | float | str, plain_bytes: int) -> int:
    """A budget in bytes; a fraction is one of what the plain program needs.

    Raises:
        BudgetError: it is none of these.
    """
    return Budget.of(budget).resolve(device_bytes=None, baseline_bytes=lambda: plain_bytes)


def _point(budget: int, plain: Plain) -> ParetoPoint:
    try:
        compiled = plain.within(budget=budget)
    except CoopError as error:
        return ParetoPoint(budget_bytes=budget, refused=str(error).partition("\n")[0])
    compiled_report, cost_ns = report(compiled), aot.run_ns(compiled, plain.device)
    return ParetoPoint(
        budget_bytes=budget,
        total_bytes=compiled_report.compiled_total_bytes,
        cost_ns=cost_ns,
        overhead_ratio=cost_ns / max(1, plain.cost_ns) - 1,
        lower_bound_ratio=compiled_report.lower_bound_ratio,
    )
