"""Every error that `coop_jax` raises, and how an error survives as text.

XLA's callback can fail a compile with a message only. `CoopError.to_text` therefore appends one
machine-readable line to the message, and `error_from_text` finds that line in whatever JAX wrapped
around it and rebuilds the error with its class and fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from coop_jax.text import format_bytes
from passes.outcome import LiveValue, StageOutcome

_MARK = "[coop-error "
_SHOWN = 8
# Advice is given if it is worth this of what is missing: ten such savings together would be enough.
WORTH_RATIO = 0.1
# A value below this of the largest one is not among the largest.
LARGE_RATIO = 0.01


class CoopError(Exception):
    """Base class of everything that `coop_jax` raises on purpose.

    `kind` is its name, and `page` the page of the documentation that its message points to; what has a page
    has a name of its own.
    """

    kind: ClassVar[str] = "CoopError"
    page: ClassVar[str] = "errors/index"

    def __init_subclass__(cls) -> None:
        if "page" in vars(cls):
            cls.kind = cls.__name__
            _KINDS[cls.kind] = cls

    def __str__(self) -> str:
        return f"{super().__str__()}\n(docs: {self.page})"

    def fields(self) -> dict[str, Any]:
        """What is needed to build this error again, in JSON types."""
        return {"message": super().__str__()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Build an error from what `fields` returned."""
        return cls(fields["message"])

    def to_text(self) -> str:
        """The message and one machine-readable line; `error_from_text` reads it back."""
        return f"{self}\n{_MARK}{json.dumps({'kind': self.kind, **self.fields()})}]"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return error_from_text, (self.to_text(),)


_KINDS = {CoopError.kind: CoopError}


class BudgetError(CoopError, ValueError):
    """A budget that means nothing: a user's mistake, found before anything is traced."""

    page = "errors/budget"


class UnsupportedError(CoopError):
    """Something that cannot be done here, such as a device without its plugin; says what to do."""

    page = "errors/unsupported"


class ConstraintError(CoopError, ValueError):
    """`save`, `recompute` or `policy` name what is not there, contradict each other, or cannot hold."""

    page = "errors/constraint"


class ArgumentError(CoopError, ValueError):
    """An argument that a program cannot take: not hashable where it has to be, or changed in place."""

    page = "errors/argument"


class _WithNumbers(CoopError):
    """An error whose message is made of its attributes, which are what its class is called with."""

    def fields(self) -> dict[str, Any]:
        """See `CoopError.fields`."""
        return {name: value for name, value in vars(self).items() if name != "__notes__"}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """See `CoopError.from_fields`."""
        return cls(**fields)


class BudgetExceededError(_WithNumbers):
    """XLA's own count of a compiled program is above its budget.

    Attributes:
        budget_bytes: what was asked for.
        compiled_bytes: what XLA counted.
        memory: whose bytes these are, "device" or "host".
        held_bytes: what the next compile of the program in this process is held to, so that it keeps the
            budget; None where that would not help.
    """

    page = "errors/budget-exceeded"

    def __init__(
        self, *, budget_bytes: int, compiled_bytes: int, memory: str = "device", held_bytes: int | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.compiled_bytes = compiled_bytes
        self.memory = memory
        self.held_bytes = held_bytes
        remedy = (
            "Another budget, smaller or larger, leads to another plan, which may be kept; please report "
            "this program."
            if held_bytes is None
            else "Compile it again in this process: it is planned for "
            f"{format_bytes(held_bytes)} then, so that it keeps the budget."
        )
        where = "" if memory == "device" else f" on the {memory}"
        super().__init__(
            f"the compiled program needs {format_bytes(compiled_bytes)}{where}, which is "
            f"{format_bytes(compiled_bytes - budget_bytes)} over its budget of {format_bytes(budget_bytes)}"
            f"{where}. "
            f"XLA made something larger of the plan than was foreseen. {remedy}"
        )


class InfeasibleBudgetError(_WithNumbers):
    """No plan for the budget was found. All bytes are per device and of the whole program.

    Attributes:
        budget_bytes: what was asked for.
        least_bytes: the least budget that a plan was found for or that is proved to be needed; None if
            not known.
        proved: True if it is proved that no plan goes below `least_bytes`; False means not found.
        argument_bytes, output_bytes, alias_bytes, constant_bytes: storage that no plan can remove.
        tightest: the largest values alive at the tightest point, largest first.
        advice: what would help, one sentence each.
        constraints: what was asked about single values, such as "save=('h',)"; "" if nothing was.
        estimated: True if `least_bytes` is an estimate made before XLA was asked.
        host_budget_bytes: what might wait in the host's memory; 0 for no paging.
        host_bytes: what the program keeps there by itself, before anything is paged.
    """

    page = "errors/infeasible-budget"

    def __init__(
        self,
        *,
        budget_bytes: int,
        least_bytes: int | None,
        proved: bool,
        argument_bytes: int,
        output_bytes: int,
        alias_bytes: int,
        tightest: Sequence[LiveValue] = (),
        advice: Sequence[str] = (),
        constraints: str = "",
        estimated: bool = False,
        host_budget_bytes: int = 0,
        host_bytes: int = 0,
        constant_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.proved = proved
        self.argument_bytes = argument_bytes
        self.output_bytes = output_bytes
        self.alias_bytes = alias_bytes
        self.tightest = tuple(tightest)
        self.advice = tuple(advice)
        self.constraints = constraints
        self.estimated = estimated
        self.host_budget_bytes = host_budget_bytes
        self.host_bytes = host_bytes
        self.constant_bytes = constant_bytes
        super().__init__(_infeasible_text(self))

    @property
    def fixed_bytes(self) -> int:
        """Arguments, outputs and constants, donated storage counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.constant_bytes

    @classmethod
    def from_outcome(cls, outcome: StageOutcome) -> Self:
        """The error for a stage that did not find a plan."""
        return cls(
            budget_bytes=outcome.budget_bytes,
            least_bytes=outcome.least_total_bytes,
            proved=outcome.least_proved,
            argument_bytes=outcome.argument_bytes,
            output_bytes=outcome.output_bytes,
            alias_bytes=outcome.alias_bytes,
            tightest=outcome.tightest,
            advice=_advice(outcome),
            constraints=outcome.constraints,
            estimated=_is_estimate(outcome),
            host_budget_bytes=outcome.host_budget_bytes,
            host_bytes=outcome.host_bytes,
            constant_bytes=outcome.constant_bytes,
        )

    def fields(self) -> dict[str, Any]:
        """See `CoopError.fields`."""
        return {**super().fields(), "tightest": [[v.op, v.source, v.nbytes] for v in self.tightest]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """See `CoopError.from_fields`."""
        tightest = [LiveValue(op=op, source=source, nbytes=n) for op, source, n in fields["tightest"]]
        return cls(**{**fields, "tightest": tightest})


def error_from_text(text: str) -> CoopError | None:
    """The error that `CoopError.to_text` wrote somewhere in `text`; None if there is none.

    The last one wins: a message that quotes an earlier failure ends with the current one.
    """
    start = text.rfind(_MARK)
    if start < 0:
        return None
    try:
        fields, _ = json.JSONDecoder().raw_decode(text, start + len(_MARK))
        kind = _KINDS[fields.pop("kind")]
        return kind.from_fields(fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_estimate(outcome: StageOutcome) -> bool:
    """True if XLA has not scheduled what `least_total_bytes` is of."""
    return outcome.stage == "jaxpr" and outcome.least_total_bytes is not None and not outcome.least_proved


def _advice(outcome: StageOutcome) -> tuple[str, ...]:
    """What would help, most effective first; every sentence names bytes.

    A sentence about something that saves bytes is left out if they are less than `WORTH_RATIO` of what is
    missing: of what the best known program needs beyond the budget.
    """
    advice = []
    needed = max(outcome.least_total_bytes or outcome.planned_total_bytes, outcome.fixed_bytes)
    worth = max(1, int(WORTH_RATIO * (needed - outcome.budget_bytes)))
    if outcome.least_total_bytes is not None:
        least = format_bytes(outcome.least_total_bytes)
        if outcome.least_proved:
            advice.append(f"a budget of {least} is the least that can be met")
        elif _is_estimate(outcome):
            advice.append(f"a budget of about {least}: the best plan is estimated to need so much")
        else:
            advice.append(
                f"a budget of {least}, or a little more: the best program that was tried needs so much"
            )
    if outcome.apart:
        advice.append(
            "`jax.jit` around the whole gradient, as in jax.jit(jax.grad(f)): outside of it forward and "
            "backward are programs of their own, and what passes from one to the other is among the "
            f"{format_bytes(outcome.fixed_bytes)} of arguments and outputs"
        )
    if outcome.needs_pinning:
        over = outcome.planned_total_bytes - outcome.budget_bytes
        advice.append(
            f"only XLA's packing of the temporaries breaks the budget, by {format_bytes(over)}: "
            'on_fragmentation="recompute" recomputes values for that, on_fragmentation="pin" with coop.pin '
            "packs them tighter"
        )
    if outcome.constraints and outcome.budget_bytes >= outcome.fixed_bytes:
        advice.append(f"without {outcome.constraints}, which must hold as it is, less may be enough")
    if outcome.stage == "hlo" and "offload=" in outcome.constraints and not outcome.host_budget_bytes:
        advice.append(
            "nothing is paged on this platform, where `offload` keeps values in the device's memory as "
            "`save` does: name them in neither, or compile for a device that pages"
        )
    donatable = min(outcome.argument_bytes, outcome.output_bytes) - outcome.alias_bytes
    if donatable >= worth:
        advice.append(
            "donate the arguments that the outputs replace, as in jax.jit(step, donate_argnums=0): "
            f"saves up to {format_bytes(donatable)}"
        )
    if outcome.constant_bytes >= worth:
        advice.append(
            "pass the arrays that the function closes over as arguments: they are constants of the program, "
            f"which XLA keeps in every form that it reads, {format_bytes(outcome.constant_bytes)}"
        )
    if (over := outcome.fixed_bytes - outcome.budget_bytes) > 0:
        advice.append(
            f"smaller arguments and outputs, or more devices to spread them over: they alone are "
            f"{format_bytes(over)} over the budget"
        )
    elif (temp := needed - outcome.fixed_bytes - outcome.constant_bytes) >= worth:
        advice.append(
            "a smaller batch, or a shorter sequence, if the temporaries shrink with it: "
            f"{format_bytes(temp)} of them are left"
        )
    return tuple(advice)


def _infeasible_text(error: InfeasibleBudgetError) -> str:
    impossible = error.proved or error.budget_bytes < error.fixed_bytes
    word = "no plan can keep" if impossible else "no plan was found that keeps"
    kept = f" and {error.constraints}" if error.constraints else ""
    if error.host_budget_bytes:
        kept = f", with {format_bytes(error.host_budget_bytes)} on the host" + kept
    if 0 < error.host_budget_bytes < error.host_bytes:
        return (
            f"this program keeps {format_bytes(error.host_bytes)} on the host by itself, which is "
            f"{format_bytes(error.host_bytes - error.host_budget_bytes)} over its budget of "
            f"{format_bytes(error.host_budget_bytes)} there. Give it more, or keep less there: arguments in "
            "pinned host memory, and what a policy or `offload` sends there, count."
        )
    lines = [f"{word} this program within its budget of {format_bytes(error.budget_bytes)}{kept}."]
    if error.least_bytes is None:
        lines.append("The least feasible budget is not known.")
    elif error.proved:
        lines.append(f"Least feasible budget: {format_bytes(error.least_bytes)} (proved).")
    elif error.estimated:
        lines.append(
            f"Least budget by estimate: {format_bytes(error.least_bytes)} (nothing was compiled for it)."
        )
    else:
        lines.append(
            f"Least budget found: {format_bytes(error.least_bytes)} (not proved: a smaller one may exist)."
        )
    constants = f"+ constants {format_bytes(error.constant_bytes)} " if error.constant_bytes else ""
    lines.append(
        f"Arguments {format_bytes(error.argument_bytes)} + outputs {format_bytes(error.output_bytes)} "
        f"{constants}- donated {format_bytes(error.alias_bytes)} = {format_bytes(error.fixed_bytes)}, "
        "which no plan can remove."
    )
    if error.tightest:
        lines.append("Largest values alive at the tightest point:")
        shown = sum(v.nbytes >= LARGE_RATIO * error.tightest[0].nbytes for v in error.tightest[:_SHOWN])
        lines += [f"  {_value_text(value)}" for value in error.tightest[:shown]]
        if rest := error.tightest[shown:]:
            lines.append(f"  and {len(rest)} more, {format_bytes(sum(v.nbytes for v in rest))} together")
    if error.advice:
        lines.append("What would help:")
        lines += [f"  - {sentence}" for sentence in error.advice]
    return "\n".join(lines)


def _value_text(value: LiveValue) -> str:
    return f"{format_bytes(value.nbytes)}  {value.op}" + (f"  at {value.source}" if value.source else "")
