"""Where a program's memory goes, before any budget: `coop.explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from coop_jax import aot
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.inspecting import inspect
from coop_jax.planning import MinimumBudget, compile_within, minimum_budget
from coop_jax.progress import progress
from coop_jax.report import Report, report
from coop_jax.saving import save
from coop_jax.screen import Block, Heading, Lines, Printable
from coop_jax.tables import memory_blocks
from coop_jax.text import format_bytes, format_ns
from passes.cost import DEVICES, DeviceModel
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
class Explanation(Printable):
    """A program's memory without a budget, and what could be had.

    Attributes:
        memory: where its bytes are; see `passes.memory_map.MemoryMap`.
        device_name: the device that it was compiled for.
        donations: arguments that could be donated.
        least: the least budget that was compiled within; None if none was asked for, or none met.
        half: the report of a compile at half of the total; None if that was refused, or not asked for.
        half_refused: why, in a line; "" if it was not.
        planned: the program's memory at half; None as `half` is.
        top: how many rows a table shows.
    """

    memory: MemoryMap
    device_name: str
    donations: tuple[Donation, ...] = ()
    least: MinimumBudget | None = None
    half: Report | None = None
    half_refused: str = ""
    planned: MemoryMap | None = None
    top: int = 8

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        advice = self._advice()
        found = memory_blocks(self.memory, top=self.top)
        return [*found, Heading(text="what could be had"), Lines(lines=tuple(advice))] if advice else found

    def _advice(self) -> list[str]:
        lines = [
            f"donating argument {d.argnum} (donate_argnums={d.argnum}): up to {format_bytes(d.nbytes)}"
            for d in self.donations
        ]
        if self.half is not None:
            lines.append(
                f"half of it, {format_bytes(self.half.budget_bytes)}: {_cost_text(self.half)} (compiled)"
            )
        elif self.half_refused:
            lines.append(f"half of it: {self.half_refused}")
        if self.least is not None:
            known = "proved" if self.least.proved else "the least that was found, not proved"
            lines.append(f"the least budget: {format_bytes(self.least.least_bytes)} ({known}; compiled)")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        return {
            "device": self.device_name,
            "memory": self.memory.to_dict(),
            "donations": [dataclasses.asdict(d) for d in self.donations],
            "least": None if self.least is None else self.least.to_dict(),
            "half": None if self.half is None else self.half.to_dict(),
            "half_refused": self.half_refused,
        }

    def save(self, path: str | Path) -> None:
        """Write it to a file whose ending says how: .png or .svg (a picture), .html (a page), .json, .txt.

        Raises:
            UnsupportedError: another ending, or a picture without matplotlib.
        """
        after = None if self.half is None else self.half.budget_bytes
        save(
            self,
            path,
            maps=[self.memory, self.planned],
            titles=("as it is", "within half"),
            budget_bytes=after,
        )


def _cost_text(report: Report) -> str:
    plain, compiled = report.baseline_cost_ns, report.compiled_cost_ns
    if plain and compiled is not None:
        change = f"{100 * (compiled / plain - 1):+.1f} % by estimate"
        return f"kernels {format_ns(plain)} -> {format_ns(compiled)}, {change}"
    return f"recompute costs +{100 * report.overhead_ratio:.1f} % by estimate"


def explain(
    fn: Callable[..., Any],
    *specs: Any,
    device: str | aot.Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: Sequence[int] = (),
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
        budgets: also compile it within half of its bytes, and find the least budget: a few more compiles.
        top: how many rows a table shows.

    Raises:
        UnsupportedError: the device is not known, or its compiler is not installed.
    """
    options: dict[str, Any] = {
        "device": device, "donate_argnums": donate_argnums, "static_argnums": tuple(static_argnums),
        "kwargs": kwargs,
    }  # fmt: skip
    with progress() as tell:
        tell("compiling the program as it is")
        plain = compile_plain(fn, specs, **options)
        found = Explanation(
            memory=inspect(plain.compiled),
            device_name=plain.device.name,
            donations=donations(plain.lowered),
            top=top,
        )
        return _with_budgets(found, plain, fn, specs, options, tell) if budgets else found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """A program without a budget: lowered, compiled, and the estimated time of its kernels."""

    lowered: Any
    compiled: Any
    device: DeviceModel

    @property
    def cost_ns(self) -> int:
        """Estimated time of all kernels."""
        return aot.kernels_ns(self.compiled, self.device)


def compile_plain(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    *,
    device: str | aot.Target | None,
    donate_argnums: int | Sequence[int],
    static_argnums: Sequence[int],
    kwargs: Mapping[str, Any] | None,
) -> Plain:
    """Compile a function without a budget; arguments are those of `explain`."""
    static, jitted = tuple(static_argnums), fn
    donate = aot.donated(fn, specs, donate_argnums=donate_argnums, kwargs=kwargs, static_argnums=static)
    if not hasattr(fn, "lower") or donate != aot.donated(fn, specs, kwargs=kwargs, static_argnums=static):
        jitted = jax.jit(fn, donate_argnums=donate, static_argnums=static or None)
    lowered = aot.lower_for(jitted, specs, device=device, kwargs=kwargs, static_argnums=static_argnums)
    if device is None:
        where = jax.local_devices()[0]
        model = aot.model_for(where.platform, where.device_kind)
    else:
        model = DEVICES[device if isinstance(device, str) else device.name]
    return Plain(lowered=lowered, compiled=lowered.compile(), device=model)


def report_beside(compiled: Any, plain: Plain) -> Report:
    """The report of a compiled program whose plain form was compiled as well."""
    return dataclasses.replace(
        report(compiled),
        baseline_total_bytes=aot.memory(plain.compiled).total_bytes,
        baseline_compiled=True,
        baseline_cost_ns=plain.cost_ns,
        compiled_cost_ns=aot.kernels_ns(compiled, plain.device),
    )


def _with_budgets(
    found: Explanation,
    plain: Plain,
    fn: Any,
    specs: Sequence[Any],
    options: dict[str, Any],
    tell: Callable[[str], None],
) -> Explanation:
    tell("compiling it within half of its bytes")
    total = found.memory.total_bytes
    try:
        compiled = compile_within(fn, *specs, budget=max(1, total // 2), **options)
    except InfeasibleBudgetError as error:
        refused = dataclasses.replace(found, half_refused=str(error).partition("\n")[0])
        tell("looking at the least budget that was found")
        return dataclasses.replace(refused, least=_least_of(error, fn, specs, options))
    else:
        half = report_beside(compiled, plain)
        found = dataclasses.replace(found, half=half, planned=inspect(compiled))
    tell("looking for the least budget")
    try:
        return dataclasses.replace(found, least=minimum_budget(fn, *specs, max_compiles=2, **options))
    except InfeasibleBudgetError:
        return found


def _least_of(
    error: InfeasibleBudgetError, fn: Any, specs: Sequence[Any], options: dict[str, Any]
) -> MinimumBudget | None:
    """The least budget that a refusal names, if the program is compiled within it."""
    if error.least_bytes is None:
        return None
    try:
        made = report(compile_within(fn, *specs, budget=error.least_bytes, **options))
    except InfeasibleBudgetError:
        return None
    return MinimumBudget(
        least_bytes=error.least_bytes, proved=error.proved, failed_bytes=error.budget_bytes,
        argument_bytes=made.argument_bytes, output_bytes=made.output_bytes, alias_bytes=made.alias_bytes,
        tightest=error.tightest, compiles=2,
    )  # fmt: skip


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
