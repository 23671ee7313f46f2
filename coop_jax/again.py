"""The program around a decorated function, asked for again: as it is without a budget, or planned deeper.

JAX traces and lowers a program once, and a decorated function sees only itself. What the whole program needs
without a budget, and what it would be with another plan, is found by tracing and lowering the whole program
once more with a **wish**: a setting that every cache of JAX's knows of, and that decorated functions obey.

Nothing here runs a program; the user's Python code is traced once more for each wish.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from coop_jax import aot, xla
from coop_jax.errors import CoopError
from coop_jax.record import Record
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.compat import BeingLowered


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How decorated functions should be written.

    Attributes:
        plain: True for the program without `coop.remat`.
        budget_bytes: what the enforcing stage holds the program to.
        aim_bytes: what the jaxpr stage is asked for instead, in the place of the user's budget.
        temp_ratio: the jaxpr stage aims for that part of a function's own temporaries; nothing is tried out.
    """

    plain: bool = False
    budget_bytes: int = xla.UNLIMITED_BYTES
    aim_bytes: int | None = None
    temp_ratio: float | None = None


PLAIN = Wish(plain=True)
_WISH = jax.make_user_context(None)


def wish() -> Wish | None:
    """What is wished for in this thread; None for what the user asked for."""
    found: Wish | None = _WISH.value
    return found


class NotPlainError(Exception):
    """A program that begins from a jaxpr in which plans are written already has no plain form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A program without `coop.remat`, compiled.

    Attributes:
        memory: XLA's count.
        cost_ns: estimated time of its kernels.
        trial: its scheduled module; None if it came from JAX's compilation cache.
    """

    memory: aot.Memory
    cost_ns: int
    trial: xla.Trial | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A program as it is with a wish, looked at.

    Attributes:
        record: what the jaxpr stage did, and the enforcing stage.
        module: the scheduled module.
    """

    record: Record
    module: bytes


def plain_program(program: BeingLowered, device: str) -> Plain | None:
    """The program without `coop.remat`; None where it cannot be had. Remembered as long as the program.

    Args:
        device: name of the cost model.
    """
    return _plain(program.jaxpr, _ByIdentity(program), device)


@dataclass(frozen=True, slots=True)
class _ByIdentity:
    """A program as an argument that a cache keyed by its jaxpr does not look at."""

    program: BeingLowered

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity)

    def __hash__(self) -> int:
        return 0


@compat.cached_by_jaxpr
def _plain(jaxpr: Any, key: _ByIdentity, device: str) -> Plain | None:
    del jaxpr
    lowered = _lowered(key.program, PLAIN)
    if lowered is None:
        return None
    record = Record(budget="none", budget_bytes=xla.UNLIMITED_BYTES, planner="auto", device_name=device)
    try:
        compiled, trial = _quietly(lambda: xla.compile_and_look(lowered, record))
    except jax.errors.JaxRuntimeError:
        return None
    return Plain(memory=aot.memory(compiled), cost_ns=aot.kernels_ns(compiled, DEVICES[device]), trial=trial)


def variant(program: BeingLowered, asked: Wish, *, skip: Callable[[Record], bool]) -> Variant | None:
    """The program as it is with a wish, compiled as far as XLA's schedule; None where it cannot be had.

    Args:
        skip: says of what the jaxpr stage did that it need not be looked at.
    """
    lowered = _lowered(program, asked)
    record = None if lowered is None else xla.record_of_lowered(lowered)
    if record is None or skip(record):
        return None
    trial = _quietly(lambda: xla.look(lowered, record))
    if trial is None:
        return None
    return Variant(record=xla.with_hlo(record, trial.outcome), module=trial.module)


def _lowered(program: BeingLowered, asked: Wish) -> Any:
    """The program lowered with a wish; None where that fails: it is only an alternative."""
    try:
        with _WISH(asked):
            return _quietly(program.lower)
    except (CoopError, NotPlainError):
        return None
    except Exception:  # the user's code is traced a second time, and may refuse
        return None


def _quietly[R](run: Callable[[], R]) -> R:
    """What `run` returns; its warnings were given when the program was lowered first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()
