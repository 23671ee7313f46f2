"""`tune=N`: the best candidates of a search are run on the device that is here, and the fastest is taken.

Arguments are made up: zeros where integers, booleans or keys are asked for, else normal numbers from a fixed
seed. Donated ones are made anew for every run. The candidates run in turn, so that a change of the machine's
load meets them all, and the least time of each counts. A wall clock decides here, so two processes may take
different plans: what several processes compile together is not tuned, nor what would do something while it
is tried, such as a call into Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from coop_jax.errors import UnsupportedError

RUNS, WARM_RUNS = 5, 1
NUMBERS = 1 << 16


def refuse_what_cannot_run(device: jax.Device | None) -> None:
    """Refuse programs whose devices are not here, or not all.

    Args:
        device: one that the program is compiled for; None if that is not known.

    Raises:
        UnsupportedError: with what to do instead.
    """
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"`tune` measures in one process; here are {jax.process_count()}, and each would take the plan "
            "that was fastest there. Leave `tune` out."
        )
    try:
        here = device is not None and device in jax.local_devices(backend=device.platform)
    except RuntimeError:  # no such backend
        here = False
    if not here:
        name = "an unknown device" if device is None else device.device_kind
        raise UnsupportedError(
            f"`tune` runs programs, and {name} is not here. Leave `tune` out to compile for it."
        )


def refuse_what_acts(effects: Sequence[object], calls: Sequence[object]) -> None:
    """Refuse programs that do more than compute their results.

    Raises:
        UnsupportedError: with what to do instead.
    """
    if effects or calls:
        acts = ", ".join(sorted({type(e).__name__ for e in effects})) or f"{len(calls)} calls into Python"
        raise UnsupportedError(
            f"`tune` runs a program on made-up arguments, and this one would act outside of it ({acts}). "
            "Leave `tune` out, or callbacks and prints."
        )


def run_times(builds: Sequence[Callable[[], Compiled]]) -> list[int]:
    """What every program takes, in nanoseconds: the least time of a few runs.

    Args:
        builds: each compiles one.

    Raises:
        UnsupportedError: one of them does not run.
    """
    try:
        with jax.ensure_compile_time_eval():
            programs = [Runnable(build()) for build in builds]
            seconds = [[p.run() for p in programs] for _ in range(WARM_RUNS + RUNS)][WARM_RUNS:]
    except jax.errors.JaxRuntimeError as error:
        raise UnsupportedError(
            f"`tune` could not run a program: {str(error).strip().splitlines()[0]}. It needs its arguments a "
            "second time: compile before they are made (`jax.jit(f).lower(specs).compile()`), or "
            "leave `tune` out."
        ) from None
    return [round(1e9 * min(of_one)) for of_one in zip(*seconds, strict=True)]


class Runnable:
    """A compiled program with made-up arguments."""

    def __init__(self, compiled: Any) -> None:
        self._executable = compiled._executable
        specs = zip(self._executable.in_avals, self._executable._in_shardings, strict=True)
        self._arguments = [(spec, made_up(*spec)) for spec in specs]

    def run(self) -> float:
        """Seconds of one run."""
        self._arguments = [
            (spec, made_up(*spec) if value.is_deleted() else value) for spec, value in self._arguments
        ]
        given = jax.block_until_ready([value for _, value in self._arguments])
        begin = time.perf_counter()
        jax.block_until_ready(self._executable.call(*given))
        return time.perf_counter() - begin


def made_up(aval: Any, sharding: Any) -> jax.Array:
    """An array of the shape, dtype and sharding of an argument."""
    value: Any
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        value = jax.lax.full(aval.shape, 0, aval.dtype)
    elif jnp.issubdtype(aval.dtype, jnp.inexact):
        numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(aval.dtype)
        value = np.resize(numbers, aval.shape)
    else:
        value = np.zeros(aval.shape, aval.dtype)
    placed: jax.Array = jax.device_put(value, sharding)
    return placed
