"""A program that is named on the command line: a function in a module or a file, and its arguments.

`train.py:step` or `package.module:step` is the function. Each `--spec` is an argument: "f32[1024,256]", or
the name of something in the same module: a pytree of arrays or shapes, or a function without arguments that
returns one, which is not run but traced, so that it takes no memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from coop_jax.errors import CoopError
from passes.checked import MOST, InputError

_SPEC = re.compile(r"([a-z][a-z0-9]*)\[((?: *[0-9]+ *,)*(?: *[0-9]+)? *)\]")
_TYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "bool": "bool",
    "pred": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "s8": "int8",
    "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "c64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProgram:
    """A function and its arguments."""

    function: Callable[..., Any]
    specs: tuple[Any, ...]


def load(target: str, specs: list[str]) -> NamedProgram:
    """Find a function and its arguments. What the user's code prints goes to stderr.

    Args:
        target: such as "train.py:step" or "package.module:step".
        specs: one for each positional argument.

    Raises:
        InputError: there is no such thing, or the user's own code failed; says which and how.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InputError(
            f"{reprlib.repr(target)} names no function; write train.py:step or package.module:step"
        )
    with redirect_stdout(sys.stderr):
        module = _module(place)
        function = _named(module, name)
        if not callable(function):
            raise InputError(f"{target} is a {type(function).__name__}, not a function")
        return NamedProgram(function=function, specs=tuple(_spec(module, text) for text in specs))


def _module(place: str) -> ModuleType:
    sys.path[:0] = [] if "" in sys.path else [""]
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise InputError(f"{place} does not exist")
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, "a .py file has a loader"
        assert spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"importing {place} failed: {_said(error)}") from error
    return module


def _named(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise InputError(f"{module.__name__} has no {name!r}")
        value = getattr(value, part)
    return value


def _spec(module: ModuleType, text: str) -> Any:
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        if not text.replace(".", "_").isidentifier():
            raise InputError(
                f"--spec is {reprlib.repr(text)}; write a shape such as f32[1024,256], or a name "
                "in the module"
            )
        value = _named(module, text)
        try:
            return jax.eval_shape(value) if callable(value) else value
        except Exception as error:
            raise InputError(f"--spec {text}: calling it failed: {_said(error)}") from error
    if match[1] not in _TYPES:
        raise InputError(f"--spec is {reprlib.repr(text)}; types are {', '.join(_TYPES)}")
    shape = tuple(int(n) for n in match[2].split(",") if n.strip())
    if any(n >= MOST for n in shape):
        raise InputError(f"--spec is {reprlib.repr(text)}; that is too large")
    return jax.ShapeDtypeStruct(shape, _TYPES[match[1]])


@contextmanager
def of_user(target: str) -> Iterator[None]:
    """What the user's function raises while it is traced or compiled is bad input, and what it prints goes to
    stderr.

    Raises:
        InputError: in the place of whatever is no error of this package.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (CoopError, InputError, OSError):
        raise
    except Exception as error:
        raise InputError(f"{target} could not be compiled: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
