"""Temporaries at addresses of our own: a compiled program rewritten to need less memory.

XLA packs temporaries by best fit, and keeps some of them longer than they are used. `pin` packs them anew in
the finished executable. The rewritten program is proved to move the same bytes through the same kernels
before it is loaded (`passes.hlo.pin`); where that cannot be done XLA's own program is kept, and the report
says why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

from coop_jax.errors import UnsupportedError
from passes.hlo.pin import PinError
from passes.hlo.pin import pin as pin_bytes
from passes.hlo.schema import SchemaError, schema
from passes.jaxpr import executables


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOutcome:
    """What `pin` did to a program.

    Attributes:
        pinned: True if its temporaries were moved.
        reason: why not, in a sentence; "" if they were.
        temp_bytes_before, temp_bytes: bytes of temporaries without and with it.
        live_bytes: no packing needs less; None if it is not known.
        buffers, moved: groups of addresses that move together, and how many of them were moved.
        seconds: time that it took.
    """

    pinned: bool
    reason: str
    temp_bytes_before: int
    temp_bytes: int
    live_bytes: int | None = None
    buffers: int = 0
    moved: int = 0
    seconds: float = 0.0


def pin(program: Any) -> Any:
    """Pack the temporaries of a compiled program as tightly as can be found.

    Args:
        program: what `jax.jit(f).lower(*args).compile()` returned. A CPU's: on other platforms, and where
            rewriting would gain nothing or cannot be proved right, XLA's own program is returned.

    Returns:
        A `jax.stages.Compiled` with the same arguments, results, donation and shardings that computes the
        same bits; `coop.report` says what was done to it.

    Raises:
        UnsupportedError: `program` is no compiled program.
    """
    if not isinstance(program, jax.stages.Compiled):
        raise UnsupportedError(
            f"`program` is a {type(program).__name__}; addresses exist in a compiled program only: "
            "coop.pin(jax.jit(f).lower(*args).compile())."
        )
    begin = time.perf_counter()
    before = program.memory_analysis().temp_size_in_bytes
    try:
        found, result = _pinned(program)
    except _Kept as kept:
        outcome = PinOutcome(
            pinned=False, reason=str(kept), temp_bytes_before=before, temp_bytes=before,
            seconds=time.perf_counter() - begin,
        )  # fmt: skip
        return executables.with_note(program, outcome)
    changed = result is not program
    outcome = PinOutcome(
        pinned=changed,
        reason="" if changed else "XLA's own packing is as good as the best that was found",
        temp_bytes_before=before,
        temp_bytes=result.memory_analysis().temp_size_in_bytes,
        live_bytes=found.live_bytes, buffers=found.buffers, moved=found.moved,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip
    return executables.with_note(result, outcome)


class _Kept(Exception):
    """XLA's own program is kept; the text says why."""


def _pinned(program: Any) -> tuple[Any, Any]:
    platform = executables.platform_of(program)
    if platform != "cpu":
        raise _Kept(f"programs for {platform} are not pinned, only a CPU's")
    if executables.has_callbacks(program):
        raise _Kept("the program calls back into Python, and its bytes would keep stale addresses")
    try:
        data = executables.serialized(program)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise _Kept(f"XLA cannot write the program out: {_first_line(error)}") from error
    try:
        found = pin_bytes(data, schema(executables.proto_library(platform)))
        if found.data is data:
            return found, program
        return found, executables.with_bytes(program, found.data)
    except (PinError, SchemaError, FileNotFoundError) as error:
        raise _Kept(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise _Kept(f"XLA does not read the rewritten program: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def outcome_of(compiled: Any) -> PinOutcome | None:
    """What `pin` did to a program; None if it was never asked to."""
    return executables.note_of(compiled, PinOutcome)
