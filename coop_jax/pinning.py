"""Temporaries at addresses of our own: a compiled program rewritten to need less memory.

XLA packs temporaries by best fit, and keeps some of them longer than they are used. `pin` packs them anew in
the finished executable. The rewritten program is proved to move the same bytes through the same kernels
before it is loaded (`passes.pinning.pin`); where that cannot be done XLA's own program is kept, and the
report says why. For GPUs this is experimental: rewritten programs were read by XLA, but never run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from coop_jax import aot, embedded, mark, serialized
from coop_jax.callback import check_total, nests
from coop_jax.errors import UnsupportedError
from coop_jax.record import Record
from coop_jax.registry import REGISTRY, PinMode
from coop_jax.text import format_bytes
from passes.backend import BACKENDS, backend_of
from passes.hlo.schema import SchemaError, schema
from passes.jaxpr import compat
from passes.pinning.gpu_executable import read_gpu_executable
from passes.pinning.mentions import ThunkError
from passes.pinning.pin import READABLE, PinError, Pinned
from passes.pinning.pin import pin as pin_bytes

# A default, said aloud: a program that keeps its budget only after pinning must have a key of its own in the
# compilation cache, where a compile without pinning must not find it.
_OWN_KEY = {"xla_embed_ir_in_executable": False}


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


def pin(program: Any, *, compiler_options: Mapping[str, Any] | None = None) -> Any:
    """Pack the temporaries of a compiled program as tightly as can be found.

    Args:
        program: what `jax.jit(f).lower(*args)` returned, with or without `.compile()`. A CPU's, or a CUDA
            GPU's (experimental): on other platforms, for a GPU that is not here, and where rewriting would
            gain nothing or cannot be proved right, XLA's own program is returned. Where `f` contains a
            function that `coop.remat(on_fragmentation="pin")` decorates, a program that is not compiled yet
            is compiled for what pinning leaves of its temporaries.
        compiler_options: for a program that is not compiled yet, as in its `.compile()`.

    Returns:
        A `jax.stages.Compiled` with the same arguments, results, donation and shardings that computes the
        same bits; `coop.report` says what was done to it.

    Raises:
        UnsupportedError: `program` is neither lowered nor compiled.
        InfeasibleBudgetError, BudgetExceededError: as in any compile of a program with a budget.
    """
    if isinstance(program, jax.stages.Lowered):
        return _compile_and_pin(program, dict(compiler_options or {}))
    if not isinstance(program, jax.stages.Compiled):
        raise UnsupportedError(
            f"`program` is a {type(program).__name__}; addresses exist in a compiled program only: "
            "coop.pin(jax.jit(f).lower(*args).compile())."
        )
    begin = time.perf_counter()
    before = _temp_bytes(program)
    try:
        pinned, result = _pinned(program)
    except _Kept as kept:
        outcome = PinOutcome(
            pinned=False, reason=str(kept), temp_bytes_before=before, temp_bytes=before,
            seconds=time.perf_counter() - begin,
        )  # fmt: skip
        return serialized.with_note(program, outcome)
    changed = result is not program
    outcome = PinOutcome(
        pinned=changed,
        reason="" if changed else "XLA's own packing is as good as the best that was found",
        temp_bytes_before=before,
        temp_bytes=_temp_bytes(result),
        live_bytes=pinned.live_bytes, buffers=pinned.buffers, moved=pinned.moved,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip
    return serialized.with_note(result, outcome)


def inlined(compiled: Compiled) -> Callable[..., Any]:
    """A compiled GPU program, pinned, as a function that may be called in other programs.

    XLA puts the program's own kernels in the place of the call, and their temporaries, as they were packed,
    in one buffer. Experimental: XLA compiles such programs, for a GPU that is not here, too, but they were
    never run.

    Args:
        compiled: what `jax.jit(f).lower(*args).compile()` returned for one CUDA GPU.

    Returns:
        A function of the same arguments and results, which cannot be differentiated. Results take the storage
        of donated arguments where the program's own did, after a copy of what is still needed.

    Raises:
        UnsupportedError: this program's thunks cannot be inlined.
    """
    if not isinstance(compiled, jax.stages.Compiled) or serialized.n_devices(compiled) != 1:
        raise UnsupportedError("`compiled` must be a program that was compiled for one CUDA GPU.")
    try:
        kind = _kind_of(compiled)
        if not BACKENDS[kind].takes_thunks:
            raise _Kept("a CPU's program has no thunks that XLA takes into another one")
        described = schema(serialized.proto_library(kind))
        data = pin_bytes(_data_of(compiled), described, kind).data
        aliases = read_gpu_executable(data, described).aliases()
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(compiled.out_info)]
        run = embedded.inlined(data, results, aliases)
    except (_Kept, PinError, ThunkError, SchemaError, FileNotFoundError, NotImplementedError) as error:
        raise UnsupportedError(f"this program cannot be inlined: {error}") from error
    kept, avals = serialized.kept_arguments(compiled), jax.tree.leaves(compiled.in_avals)
    expected: Any = compiled.in_tree
    if any(jax.numpy.issubdtype(x.dtype, jax.dtypes.extended) for x in (*avals, *results)):
        raise UnsupportedError("this program cannot be inlined: typed random keys; pass jax.random.key_data.")

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        given = [(jax.typeof(x).shape, jax.typeof(x).dtype) for x in leaves]
        if tree != expected or given != [(a.shape, a.dtype) for a in avals]:
            raise UnsupportedError("the arguments differ from those that the program was compiled for.")
        return jax.tree.unflatten(compiled.out_tree, run(*(leaves[n] for n in kept)))

    return call


class PinnedCalls:
    """Calls of a function as a program: each signature is compiled and pinned once.

    While JAX traces, a call is one of the jitted function itself, which becomes part of what is traced. A
    copy in another process compiles anew.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._jitted = jax.jit(function, inline=True)
        self._programs: dict[Any, Any] = {}

    def __reduce__(self) -> Any:
        return PinnedCalls, (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if compat.is_tracing() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._jitted(*args, **kwargs)
        key = (tree, tuple(map(_signature, leaves)), compat.trace_context())
        if key not in self._programs:
            self._programs[key] = pin(self._jitted.lower(*args, **kwargs))
        return self._programs[key](*args, **kwargs)


def _signature(leaf: Any) -> tuple[Any, ...]:
    """What a compiled program depends on of an argument."""
    aval = jax.typeof(leaf)
    place = (getattr(leaf, "sharding", None), getattr(leaf, "committed", False))
    return (aval.shape, aval.dtype, getattr(aval, "weak_type", False), *place)


def _compile_and_pin(lowered: Lowered, options: dict[str, Any]) -> Any:
    """Compile and pin; the budget is checked afterwards, and met by recompute where pinning is not enough."""
    record = mark.record_of_lowered(lowered)
    if record is None:
        return pin(lowered.compile(compiler_options=options))
    if record.on_fragmentation == "pin":
        # As it is, if pinning is enough; else with as much recompute as the packing of XLA's values needs (at
        # once, where pinning does no better than that packing); else with as much as XLA's own packing needs.
        for mode in (PinMode.KEEP, PinMode.CHECK_AFTER):
            compiled = _compiled_as(mode, lowered, record, {**options, **_OWN_KEY})
            pinned = pin(compiled)
            if aot.memory(pinned).total_bytes <= record.budget_bytes:
                return pinned
            if not nests(aot.final_module(compiled)):  # then nothing was kept for pinning
                break
        return pin(lowered.compile(compiler_options=options))
    pinned = pin(_compiled_as(PinMode.CHECK_AFTER, lowered, record, options))
    check_total(mark.record_of(pinned) or record, pinned.memory_analysis())
    return pinned


def _compiled_as(mode: PinMode, lowered: Lowered, record: Record, options: dict[str, Any]) -> Any:
    """Compile, with the check put off."""
    with REGISTRY.pinned(record, mode):
        return lowered.compile(compiler_options=options)


class _Kept(Exception):
    """XLA's own program is kept; the text says why."""


def _kind_of(program: Any) -> str:
    """The kind of executable that a program has, as `passes.pinning.pin` calls it."""
    platform = serialized.platform_of(program)
    backend = backend_of(platform)
    if backend is None or backend.name not in READABLE:
        raise _Kept(f"programs for {platform} are not pinned, only a CPU's and a CUDA GPU's")
    return backend.name


def _data_of(program: Any) -> bytes:
    """A program's executable as bytes."""
    if serialized.has_callbacks(program):
        raise _Kept("the program calls back into Python, and its bytes would keep stale addresses")
    try:
        return serialized.to_bytes(program)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise _Kept(f"XLA cannot write the program out: {_first_line(error)}") from error


def _pinned(program: Any) -> tuple[Any, Any]:
    """What was found for a program, and the program with it, which is the very same if nothing is gained."""
    kind = _kind_of(program)
    data = _data_of(program)
    try:
        pinned = pin_bytes(data, schema(serialized.proto_library(kind)), kind)
        return pinned, program if pinned.data is data else _loaded(program, pinned)
    except (PinError, SchemaError, FileNotFoundError) as error:
        raise _Kept(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise _Kept(f"XLA does not read the rewritten program: {_first_line(error)}") from error


def _loaded(program: Any, changes: Pinned) -> Any:
    """`program` with the rewritten executable, which XLA must count as many bytes fewer as were saved."""
    saved = changes.temp_bytes_before - changes.temp_bytes
    if not serialized.is_loaded(program):
        raise _Kept(
            f"its device is not here to load it; pinned it would take {format_bytes(changes.temp_bytes)} for "
            f"temporaries, {format_bytes(saved)} less"
        )
    pinned = serialized.with_bytes(program, changes.data)
    counted = _temp_bytes(program) - _temp_bytes(pinned)
    if counted != saved:
        raise _Kept(f"XLA counts {counted} bytes saved in the rewritten program, not {saved}")
    return pinned


def _temp_bytes(program: Any) -> int:
    return int(program.memory_analysis().temp_size_in_bytes)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def outcome_of(compiled: Compiled) -> PinOutcome | None:
    """What `pin` did to a program; None if it was never asked to."""
    return serialized.note_of(compiled, PinOutcome)
