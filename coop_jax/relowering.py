"""The program around a decorated function, asked for again: as it is without a budget, or planned deeper.

JAX traces and lowers a program once, and a decorated function sees only itself. What the whole program needs
without a budget, and what it would be with another plan, is found by lowering the whole program once more
with a **wish**: a setting that every cache of JAX's knows of, and that decorated functions obey.

Nothing here runs a program. Where parts were planned as they were differentiated, the user's Python code is
traced once more for each wish.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.stages import Compiled, Lowered, Traced

from coop_jax import aot, mark, module
from coop_jax.digests import digest
from coop_jax.errors import BudgetExceededError, CoopError
from coop_jax.record import UNLIMITED_BYTES, Record, with_hlo
from coop_jax.replacing import Calls, signature
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.calibration import UNCALIBRATED, Calibration
from passes.jaxpr.compat import BeingLowered, ClosedJaxpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How decorated functions should be written.

    Attributes:
        plain: True for the program without `coop.remat`.
        budget_bytes: what the enforcing stage holds the program to.
        aim_bytes: what the jaxpr stage is asked for instead, in the place of the user's budget.
        temp_ratio: the jaxpr stage aims for that part of a function's own temporaries.
        calibration: what it should know of XLA.
        policy: of `jax.checkpoint`, that the blocks of functions are under instead of a plan; "" for none.
        alone: without the host's memory, whatever the user gives of it.
        traced: True where the program is traced for the wish, so that what is differentiated is planned for
            it; else the plans that are in it already can only stay as they are.
        whole: True for the whole program as the one decorated function, in the place of those in it.
        compared: True for a trace that is only compared with another one.
    """

    plain: bool = False
    budget_bytes: int = UNLIMITED_BYTES
    aim_bytes: int | None = None
    temp_ratio: float | None = None
    calibration: Calibration = UNCALIBRATED
    policy: str = ""
    alone: bool = False
    traced: bool = False
    whole: bool = False
    compared: bool = False

    @property
    def replans(self) -> bool:
        """True if something else is wished for than the plans that are in the program already."""
        return self.plain or self.aim_bytes is not None or self.temp_ratio is not None


PLAIN = Wish(plain=True)
_WISH = jax.make_user_context(None)


def wish() -> Wish | None:
    """What is wished for in this thread; None for what the user asked for."""
    wished: Wish | None = _WISH.value
    return wished


def nothing_wished() -> AbstractContextManager[None]:
    """In it nothing is wished for: what is known of a jaxpr is known whatever was wished."""
    context: AbstractContextManager[None] = _WISH(None)
    return context


class PlannedAlreadyError(Exception):
    """A jaxpr in which plans are written already cannot be lowered with other plans."""


class TracedOtherwiseError(Exception):
    """Each trace of a function gives another program: what it reads in Python changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A program without `coop.remat`, compiled.

    Attributes:
        memory: XLA's count.
        cost_ns, energy_pj: estimated time and energy of its kernels.
        signature: what it takes and returns, see `coop_jax.replacing`.
    """

    memory: aot.Memory
    cost_ns: int
    energy_pj: int
    signature: list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A program as it is with a wish, looked at.

    Attributes:
        record: what the jaxpr stage did, and the enforcing stage.
        module: the scheduled module.
        calls: the Python functions that it calls, by number.
    """

    record: Record
    module: bytes
    calls: Calls = ()


_PLAIN: WeakKeyDictionary[Any, dict[Any, Plain | None]] = WeakKeyDictionary()
_TRACED_ALIKE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def plain_program(program: BeingLowered, device: str) -> Plain | None:
    """The program without `coop.remat`; None where it cannot be had. Remembered as long as its jaxpr.

    Args:
        device: name of the cost model.
    """
    by_device = _PLAIN.setdefault(program.jaxpr, {})
    options = compat.compiler_options()
    key = (device, compat.trace_context(), str(options))
    if key not in by_device:
        by_device[key] = _plain(program, device, options)
    return by_device[key]


def _plain(program: BeingLowered, device: str, options: dict[str, Any] | None) -> Plain | None:
    lowered = _lowered(program, PLAIN)
    if lowered is None:
        return None
    try:
        compiled = _quietly(lambda: lowered.compile(compiler_options=options))
    except jax.errors.JaxRuntimeError:
        return None
    cost_ns, energy_pj = aot.run_cost(compiled, DEVICES[device])
    return Plain(
        memory=aot.memory(compiled),
        cost_ns=cost_ns,
        energy_pj=energy_pj,
        signature=signature(aot.final_module(compiled)),
    )


def written_bytes(program: BeingLowered) -> int:
    """Bytes in total of the program with the plans that are written in it, and no more; 0 where unknown."""
    written = variant(program, Wish(), None, scheduled={}, skip=lambda _: False)
    return 0 if written is None else _came_with_bytes(written)


def foreseen_bytes(program: BeingLowered, record: Record, scheduled: MutableMapping[str, bytes]) -> int:
    """Bytes in total of the program without `coop.remat`, by XLA's schedule of it; 0 where unknown.

    Args:
        record, scheduled: as in `variant`.
    """
    whole = dataclasses.replace(record, jaxpr=None, budget_bytes=UNLIMITED_BYTES)
    found = variant(program, PLAIN, whole, scheduled=scheduled, skip=lambda _: False)
    return 0 if found is None else _came_with_bytes(found)


def _came_with_bytes(found: Variant) -> int:
    hlo = found.record.hlo
    return 0 if hlo is None else hlo.fixed_bytes + hlo.before_temp_bytes


def variant(
    program: BeingLowered, asked: Wish, plain_record: Record | None,
    *, scheduled: MutableMapping[str, bytes], skip: Callable[[Record], bool],
) -> Variant | None:  # fmt: skip
    """The program as it is with a wish, compiled as far as XLA's schedule; None where it cannot be had.

    Args:
        plain_record: the record of the program without `coop.remat`, which has no mark; None where that is
            not what is wished for.
        scheduled: what XLA made of the program with other wishes (see `coop_jax.mark.look`); it grows.
        skip: says of a record that what the jaxpr stage did need not be looked at.
    """
    lowered = _lowered(program, asked)
    if lowered is None:
        return None
    record = plain_record if asked.plain else mark.record_of_lowered(lowered)
    if record is None or skip(record):
        return None
    trial = _quietly(lambda: mark.look(lowered, record, scheduled))
    if trial is None:
        return None
    calls = module.python_calls_of(lowered)
    return Variant(record=with_hlo(record, trial.outcome), module=trial.module, calls=calls)


def planned(program: BeingLowered, asked: Wish, plain_record: Record | None) -> Record | None:
    """The record of the program as it is with a wish; nothing is compiled for it. None as for `variant`."""
    lowered = _lowered(program, asked)
    if lowered is None:
        return None
    return plain_record if asked.plain else mark.record_of_lowered(lowered)


def compiled(program: BeingLowered, asked: Wish, record: Record) -> Compiled:
    """The program of a wish, whose variant has this record, compiled to the end.

    Raises:
        jax.errors.JaxRuntimeError: as any compile.
    """
    lowered = _lowered(program, asked)
    assert lowered is not None, "it was lowered so when it was looked at"
    return _alone(lowered, record)


def _alone(lowered: Lowered, record: Record) -> Compiled:
    return _quietly(lambda: mark.compile_alone(lowered, dataclasses.replace(record, hlo=None)))


def count(program: BeingLowered, asked: Wish, record: Record) -> int | None:
    """XLA's count of the program of a wish, whose variant has this record; None where it cannot be had."""
    if not record.is_changed and (plain := plain_program(program, record.device_name)) is not None:
        return plain.memory.total_bytes
    lowered = _lowered(program, asked)
    if lowered is None:
        return None
    try:
        return aot.memory(_alone(lowered, record)).total_bytes
    except BudgetExceededError as over:
        return over.compiled_bytes if over.memory == "device" else None
    except (jax.errors.JaxRuntimeError, CoopError):
        return None


def _lowered(program: BeingLowered, asked: Wish) -> Lowered | None:
    """The program lowered with a wish; None where that fails: it is only an alternative.

    Its jaxpr is lowered once more, so that all that is known of it counts; it is traced once more where plans
    are written in it already.
    """
    try:
        return module.with_own_module(_quietly(lambda: _lowered_as(program, asked)))
    except Exception:  # refused by us, or by the user's code, which is traced a second time
        return None


def _lowered_as(program: BeingLowered, asked: Wish) -> Lowered:
    def written(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        if not asked.whole:
            return jaxpr
        assert program.as_one is not None, "it is asked for where there is a way"
        return program.as_one(jaxpr)

    lowered: Lowered
    try:
        with _WISH(asked):
            lowered = program.inside(lambda: program.lower(written(program.jaxpr)))
            return lowered
    except PlannedAlreadyError:
        if program.trace is None:
            raise
    if not _is_traced_alike(program):
        raise TracedOtherwiseError
    traced = _traced(program, dataclasses.replace(PLAIN if asked.whole else asked, traced=True))
    with _WISH(dataclasses.replace(asked, traced=True)):
        lowered = program.inside(lambda: module.with_jaxpr(traced, written(traced.jaxpr)).lower())
    return lowered


def _traced(program: BeingLowered, asked: Wish) -> Traced:
    assert program.trace is not None, "it is asked for where there is a way"
    with _WISH(asked):
        traced: Traced = program.inside(program.trace)
    return traced


def _is_traced_alike(program: BeingLowered) -> bool:
    """True if two more traces of a program are one: else none may go on in the place of the first."""
    if program.jaxpr not in _TRACED_ALIKE:
        asked = dataclasses.replace(PLAIN, traced=True)
        ways = (asked, dataclasses.replace(asked, compared=True))
        one, other = (digest(_traced(program, way).jaxpr) for way in ways)
        _TRACED_ALIKE[program.jaxpr] = one == other
    return _TRACED_ALIKE[program.jaxpr]


def _quietly[R](run: Callable[[], R]) -> R:
    """What `run` returns; its warnings were given when the program was lowered first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run()
