"""Compiled programs as bytes: written out, put back in, and with a note attached.

`jax.stages.Compiled` has no public way to run other bytes than its own; what is private about it is here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from passes.backend import BACKENDS, backend_of

_LIBRARIES = (".so", ".dylib", ".pyd", ".dll")


def proto_library(platform: str) -> str:
    """The shared library that compiles for a platform: the descriptions of its messages are in it.

    Args:
        platform: the name of a backend.

    Raises:
        FileNotFoundError: there is none.
    """
    package = BACKENDS[platform].library
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    libraries = [p for place in places for suffix in _LIBRARIES for p in Path(place).glob(f"*{suffix}")]
    if not libraries:
        raise FileNotFoundError(f"{package} has no shared library")
    return str(max(libraries, key=lambda p: (p.stat().st_size, p.name)))


def platform_of(compiled: Compiled) -> str:
    """The platform that a program was compiled for, such as "cpu"."""
    return str(_unloaded(compiled).backend.platform)


def kind_of(compiled: Compiled) -> str:
    """Whose rules lay out the program's memory: the name of a backend.

    Raises:
        KeyError: XLA's rules are not known for that platform.
    """
    platform = platform_of(compiled)
    backend = backend_of(platform)
    if backend is None:
        raise KeyError(platform)
    return backend.name


def is_loaded(compiled: Compiled) -> bool:
    """True if the program can run: the devices that it was compiled for are here."""
    return hasattr(compiled.runtime_executable(), "execute_sharded")


def kept_arguments(compiled: Compiled) -> list[int]:
    """Which of the flat arguments the compiled program has as parameters: unused ones are dropped."""
    return sorted(_unloaded(compiled).kept_var_idx)


def n_devices(compiled: Compiled) -> int:
    """How many devices the program runs on."""
    return len(_unloaded(compiled).device_list)


def has_callbacks(compiled: Compiled) -> bool:
    """True if the program calls back into Python: the bytes of such a program hold addresses."""
    return bool(_unloaded(compiled).host_callbacks)


def runtime(compiled: Compiled) -> Any:
    """The executable of a compiled program, as its runtime has it."""
    executable = compiled.runtime_executable()
    assert executable is not None, "JAX has loaded what it compiled"
    return executable


def to_bytes(compiled: Compiled) -> bytes:
    """The bytes of a compiled program as its runtime writes them; XLA raises if it cannot."""
    executable = runtime(compiled)
    if hasattr(executable, "serialize"):
        return bytes(executable.serialize())
    return bytes(executable.client.serialize_executable(executable))


def with_bytes(compiled: Compiled, data: bytes) -> Any:
    """`compiled` running other bytes than its own: same arguments, results, devices and donation."""
    unloaded = _unloaded(compiled)
    loaded = unloaded.backend.deserialize_executable(data, executable_devices=unloaded.device_list)
    return _rebuilt(compiled, dataclasses.replace(unloaded, xla_executable=loaded))


def with_note(compiled: Compiled, note: Any) -> Any:
    """The same program, which keeps `note` for `note_of`."""
    unloaded = _unloaded(compiled)
    kept = [k for k in unloaded.keepalive or () if type(k) is not type(note)]
    return _rebuilt(compiled, dataclasses.replace(unloaded, keepalive=[*kept, note]))


def note_of[T](compiled: Compiled, kind: type[T]) -> T | None:
    """The note of type `kind` that the program keeps; None if it has none."""
    unloaded = getattr(getattr(compiled, "_executable", None), "_unloaded_executable", None)
    kept = getattr(unloaded, "keepalive", None) or ()
    return next((k for k in kept if isinstance(k, kind)), None)


def _unloaded(compiled: Any) -> Any:
    return compiled._executable._unloaded_executable


def _rebuilt(compiled: Compiled, unloaded: Any) -> Any:
    params = compiled._params
    return type(compiled)(
        unloaded.load(), params.const_args, compiled.args_info, compiled.out_tree,
        no_kwargs=compiled._no_kwargs, in_types=params.in_types, out_types=params.out_types,
    )  # fmt: skip
