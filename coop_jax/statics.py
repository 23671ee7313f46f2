"""Values that are no arrays, as parts of a program: what makes two of them the same program.

A static value is compared as a dictionary's key is, with its type, so that 1, 1.0 and True are three values.
An object that Python compares by identity, such as `self` of a plain class, counts together with what its
attributes hold, and what these hold: change any of that, and the program is traced anew.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from coop_jax.errors import ArgumentError
from passes.jaxpr import compat

compat.hide_frames(__file__)

_NUMBERS = (bool, int, float, complex)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# An object that holds more values is not remembered: to look at all of them would take long.
_MOST_LOOKS = 10_000


class Same:
    """An object that equals itself only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Static:
    """A value that is a part of a program, compared by its type and by `key`.

    Attributes:
        value: the value.
        key: hashable; equal where a program for one value serves the other.
        changes: true if `key` holds what the value's attributes were when it was made.
    """

    __slots__ = ("changes", "key", "value")

    def __init__(self, value: Any, key: Any, *, changes: bool = False) -> None:
        self.value, self.key, self.changes = value, key, changes

    @classmethod
    def of(cls, value: Any) -> Static:
        """Raises: TypeError: the value is not hashable, and has no attributes to go by."""
        if isinstance(value, types.MethodType):
            owner = cls.of(value.__self__)
            return cls(value, (Same(value.__func__), owner), changes=owner.changes)
        if isinstance(value, _NUMBERS):  # as text: -0.0 equals 0.0, and nan does not equal itself
            return cls(value, repr(value))
        if not has_attributes(value):
            hash(value)
            return cls(value, value)
        return cls(value, _looked_at(value), changes=True)

    @classmethod
    def itself(cls, value: Any) -> Static:
        """A value that is compared by identity whatever it is."""
        return cls(value, Same(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        return type(self.value) is type(other.value) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


def has_attributes(value: Any) -> bool:
    """True for an object of a Python class that is compared by identity, or cannot be hashed."""
    if _is_opaque(value) or not _has_own(value):
        return False
    hashed: Any = type(value).__hash__
    if hashed is object.__hash__:
        return True
    try:
        hash(value)
    except TypeError:
        return True
    return False


def _is_opaque(value: Any) -> bool:
    return isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _has_own(value: Any) -> bool:
    return hasattr(value, "__dict__") or bool(_slots(value))


def attributes(value: Any) -> dict[str, Any]:
    """What an object's attributes hold, by name."""
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots(value: Any) -> list[str]:
    names = []
    for cls in type(value).__mro__:
        slots = getattr(cls, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                names.append(name)
            elif not name.endswith("__"):  # as Python calls a private one
                names.append(f"_{cls.__name__.lstrip('_')}{name}")
    return names


class _TooMuch(Exception):
    """More is held than is looked at."""


def _looked_at(value: Any) -> Hashable:
    """What can be seen of a value; what equals nothing where that is too much, so that it is traced anew."""
    try:
        return _Look().at(value)
    except (_TooMuch, RecursionError):
        return Same(object())


class _Look:
    """Containers and NumPy's arrays are seen by what they hold, objects by themselves and what their
    attributes hold, and what holds nothing that can be seen, a function or an array of JAX, by itself.
    """

    def __init__(self) -> None:
        # With the values: an address of one that is gone may be another's.
        self._places: dict[int, tuple[int, Any]] = {}
        self._looks = 0

    def at(self, value: Any) -> Hashable:
        """Equal for two values if they are the same, or hold the same.

        Raises:
            _TooMuch: they hold too much.
        """
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise _TooMuch
        if isinstance(value, Same):
            return value
        if value is None or isinstance(value, (*_NUMBERS, str, bytes)):
            return type(value), repr(value)
        parts = _parts(value)
        if parts is None:
            return Same(value)
        if (known := self._places.get(id(value))) is not None:
            return "seen", known[0]
        self._places[id(value)] = len(self._places), value
        inside = map(self.at, parts)
        return type(value), (frozenset(inside) if isinstance(value, set | frozenset) else tuple(inside))


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value holds, as far as it can be seen; None if nothing."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return Same(value.__func__), value.__self__
    if _is_opaque(value):
        return None
    held = attributes(value)
    if isinstance(value, np.ndarray | np.generic):
        numbers = value.tolist() if value.dtype.hasobject else hashlib.blake2b(value.tobytes()).digest()
        return str(value.dtype), value.shape, numbers, held or None
    if isinstance(value, bytearray):
        return (bytes(value),)
    if isinstance(value, Mapping):
        return *itertools.chain.from_iterable(value.items()), held or None
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return *value, held or None
    return (Same(value), *itertools.chain.from_iterable(held.items())) if _has_own(value) else None


@dataclass(frozen=True, slots=True)
class Named:
    """An argument that the user named static: a leaf, whatever it holds."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticArguments:
    """Which arguments are static, by `static_argnums` and `static_argnames` as `jax.jit` reads them."""

    positions: tuple[int, ...]
    names: frozenset[str]

    @classmethod
    def of(
        cls, function: Callable[..., Any], argnums: int | Sequence[int], argnames: str | Iterable[str]
    ) -> StaticArguments:
        """Raises: TypeError, ValueError: not numbers or names of arguments of `function`."""
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        names = {argnames} if isinstance(argnames, str) else set(argnames)
        if not nums and not names:
            return cls(positions=(), names=frozenset())
        # Only for its checks; where nothing is named, None lets it find the numbers of names and the reverse.
        jax.jit(function, static_argnums=nums or None, static_argnames=tuple(sorted(names)) or None)
        if not nums or not names:
            known = list(enumerate(parameters_of(function)))
            if nums:
                chosen = {i % len(known) if i < 0 else i for i in nums} if known else set()
                names = {p.name for i, p in known if i in chosen and p.kind is p.POSITIONAL_OR_KEYWORD}
            else:
                nums = tuple(i for i, p in known if p.name in names and p.kind is p.POSITIONAL_OR_KEYWORD)
        return cls(positions=nums, names=frozenset(names))

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with each static one in a `Named`.

        Raises:
            ArgumentError: a static value that is not hashable.
        """
        if not self.positions and not self.names:
            return args, kwargs
        chosen = {i + len(args) if i < 0 else i for i in self.positions}
        marked = tuple(_named(f"argument {i}", x) if i in chosen else x for i, x in enumerate(args))
        return marked, {k: _named(f"`{k}`", x) if k in self.names else x for k, x in kwargs.items()}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; none where Python does not tell them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _named(where: str, value: Any) -> Named:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{where} is static and a {type(value).__name__}, which is not hashable. Static values are a "
            "program's name: pass a tuple, a string or a frozen dataclass, or do not name it static."
        ) from None
    return Named(value)
