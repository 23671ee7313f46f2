"""Questions about a function that is not compiled yet: what would a budget cost, and what is the least one?

Both are answered by compiling, for a device that is here or not, because only XLA's count counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from coop_jax import aot
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError
from coop_jax.least import unnamed
from coop_jax.remat import remat
from coop_jax.report import Report, report
from coop_jax.text import format_bytes
from passes.counts import Fixed
from passes.outcome import LiveValue

# The least budget is found when it is this close to one that is refused, as a share of it.
_CLOSE_RATIO = 0.02
# How often a program is compiled that XLA makes larger than was foreseen, held to less each time.
MOST_COMPILES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumBudget(Fixed):
    """The least budget of a function that was reached by compiling it.

    Attributes:
        least_bytes: a program within this many bytes was compiled, by XLA's count.
        proved: True if no plan goes below it.
        failed_bytes: the largest budget that was tried and not met.
        argument_bytes, output_bytes, alias_bytes: storage that no plan can remove.
        tightest: the largest values alive at the tightest point.
        compiles: how many times the function was compiled for this answer.
    """

    least_bytes: int
    proved: bool
    failed_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    tightest: tuple[LiveValue, ...]
    compiles: int

    @property
    def dominated_by(self) -> str:
        """What takes most of the least budget: "arguments and outputs" or the largest value's name."""
        if 2 * self.fixed_bytes >= self.least_bytes or not self.tightest:
            return "arguments and outputs"
        largest = self.tightest[0]
        return f"{largest.op} at {largest.source}" if largest.source else largest.op

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        return {**dataclasses.asdict(self), "dominated_by": self.dominated_by}

    def __str__(self) -> str:
        known = "proved" if self.proved else f"not proved; {format_bytes(self.failed_bytes)} was not met"
        return (
            f"least budget {format_bytes(self.least_bytes)} ({known}), dominated by {self.dominated_by}; "
            f"arguments {format_bytes(self.argument_bytes)}, outputs {format_bytes(self.output_bytes)}, "
            f"donated {format_bytes(self.alias_bytes)}; {self.compiles} compiles"
        )


def plan(
    fn: Callable[..., Any],
    *specs: Any,
    budget: Any,
    host: int | str | None = None,
    device: str | aot.Target | None = None,
    planner: str = "auto",
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    save: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    policy: Callable[..., bool] | None = None,
    offload: str | Sequence[str] = (),
    tune: int = 0,
    objective: str = "time",
    max_overhead: float | None = None,
) -> Report:
    """Compile a function within a budget, perhaps for a device that is not here, and report.

    Args:
        fn: the function, not yet decorated: the gradient is taken inside it. What the result of `jax.jit`
            donates is donated.
        specs: its positional arguments, as arrays or `jax.ShapeDtypeStruct` objects.
        budget: every form of `coop.remat`'s budget.
        device: such as "h200", "v5e" or "v6e:2x4"; None means the default device of this process.
        host, planner, save, recompute, policy, offload, tune, objective, max_overhead: as in `coop.remat`.
        donate_argnums, static_argnums: as in `jax.jit`.
        kwargs: keyword arguments of `fn`.

    Raises:
        InfeasibleBudgetError: no plan keeps the budget.
        BudgetError, ConstraintError, UnsupportedError: what was asked means nothing here.
    """
    return report(
        compile_within(
            fn, *specs, budget=budget, host=host, device=device, planner=planner,
            donate_argnums=donate_argnums, static_argnums=static_argnums, kwargs=kwargs, save=save,
            recompute=recompute, policy=policy, offload=offload, tune=tune, objective=objective,
            max_overhead=max_overhead,
        )
    )  # fmt: skip


def compile_within(
    fn: Callable[..., Any],
    *specs: Any,
    budget: Any,
    device: str | aot.Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Compiled:
    """The compiled program that `plan` reports on; arguments and errors are `plan`'s.

    Where passes that follow the planning (XLA:TPU has some) make more of a program than was foreseen, it is
    compiled again, held to so much less.
    """
    static = aot.places(static_argnums, specs)
    name = _cost_model(device)
    donate = aot.donated(fn, specs, donate_argnums=donate_argnums, kwargs=kwargs, static_argnums=static)
    for left in reversed(range(MOST_COMPILES)):
        limited = remat(fn, budget=budget, static_argnums=static, device=name, **options)
        jitted = jax.jit(limited, donate_argnums=donate, static_argnums=static or None)
        lowered: Lowered = aot.lower_for(jitted, specs, device=device, kwargs=kwargs, static_argnums=static)
        try:
            return lowered.compile()
        except BudgetExceededError as over:
            if over.held_bytes is None or not left:
                raise
    raise AssertionError("the last compile returns or raises")


def minimum_budget(
    fn: Callable[..., Any],
    *specs: Any,
    device: str | aot.Target | None = None,
    max_compiles: int = 6,
    **options: Any,
) -> MinimumBudget:
    """The least budget that a function can be compiled within.

    Asks for an impossible budget and compiles within what the refusal names; then for ever less, in steps
    that double, and once something is refused between that and what was met, until both are within 2 %, or
    no compile is left.

    Args:
        fn, specs, device: as in `plan`.
        max_compiles: how many times the function may be compiled; at least 2.
        options: other options of `plan`.

    Raises:
        InfeasibleBudgetError: no budget was met within `max_compiles`.
    """
    asked, failed, compiles, step = 1, 0, 0, 0
    refusals: list[int] = []
    best: Report | None = None
    error: InfeasibleBudgetError | None = None
    while compiles < max(2, max_compiles):
        compiles += 1
        try:
            with nullcontext() if best is None else unnamed():
                planned = plan(fn, *specs, budget=asked, device=device, **options)
        except InfeasibleBudgetError as refused:
            error = refused
            refusals.append(asked)
        else:
            best, step = planned, 2 * step or int(_CLOSE_RATIO * _met_bytes(planned))
        # A larger budget can be refused though a smaller one is met: the planners are not monotone.
        failed = max((n for n in refusals if best is None or n < _met_bytes(best)), default=0)
        if best is not None and (error is None or error.proved or _close(failed, _met_bytes(best))):
            break
        asked = _next(error, best, failed, step)
    if best is None:
        assert error is not None, "a compile either succeeds or fails"
        raise error
    return _answer(best, error, failed, compiles)


def _next(error: InfeasibleBudgetError | None, best: Report | None, failed: int, step: int) -> int:
    """The next budget to try: the planners' own least while none was met, then `step` below what was met, or
    the middle between that and what was not."""
    assert error is not None, "the first budget is impossible"
    if best is not None:
        met = _met_bytes(best)
        return max((max(failed, error.fixed_bytes) + met) // 2, met - step)
    least = error.least_bytes or 2 * error.fixed_bytes
    return least if least > failed else failed + failed // 8 + 1


def _answer(best: Report, error: InfeasibleBudgetError | None, failed: int, compiles: int) -> MinimumBudget:
    least = _met_bytes(best)
    proved = error is None or (error.proved and error.least_bytes is not None and error.least_bytes >= least)
    return MinimumBudget(
        least_bytes=least,
        proved=proved,
        failed_bytes=failed,
        argument_bytes=best.argument_bytes,
        output_bytes=best.output_bytes,
        alias_bytes=best.alias_bytes,
        tightest=() if error is None else error.tightest,
        compiles=compiles,
    )


def _met_bytes(made: Report) -> int:
    """What is met, as a compile shows: that needs no more, and maybe less than it was given."""
    return min(made.budget_bytes, made.compiled_total_bytes)


def _close(failed: int, met: int) -> bool:
    return met - failed <= _CLOSE_RATIO * met


def _cost_model(device: str | aot.Target | None) -> str | None:
    if device is None:
        return None
    return (device if isinstance(device, aot.Target) else aot.target(device)).name
