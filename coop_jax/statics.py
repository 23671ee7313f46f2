"""Values that are no arrays, as parts of a program: what makes two of them the same program.

A static value is compared as a dictionary's key is, with its type, so that 1, 1.0 and True are three values.
An object that Python compares by identity, such as `self` of a plain class, counts together with what its
attributes hold: give one of them another value, and the program is traced anew.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from coop_jax.errors import ArgumentError
from passes.jaxpr import compat

compat.hide_frames(__file__)

_NUMBERS = (bool, int, float, complex)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, functools.partial)
_DEPTH = 3
_MANY = 256


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
        return cls(value, _look(value, set(), _DEPTH), changes=True)

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
    if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return False
    if not hasattr(value, "__dict__") and not _slots(value):
        return False
    hashed: Any = type(value).__hash__
    if hashed is object.__hash__:
        return True
    try:
        hash(value)
    except TypeError:
        return True
    return False


def attributes(value: Any) -> dict[str, Any]:
    """What an object's attributes hold, by name."""
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots(value: Any) -> list[str]:
    by_class = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for slots in by_class for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _look(value: Any, seen: set[int], depth: int) -> Any:
    """What can be seen of a value, hashable; arrays and whatever lies deeper than `depth` by identity."""
    if value is None or isinstance(value, (*_NUMBERS, str, bytes)):
        return (type(value), repr(value))
    if depth and type(value) in (list, tuple) and len(value) <= _MANY:
        return (type(value), *(_look(x, seen, depth - 1) for x in value))
    if depth and type(value) is dict and len(value) <= _MANY:
        return (dict, *((_look(k, seen, 0), _look(x, seen, depth - 1)) for k, x in value.items()))
    if depth and id(value) not in seen and has_attributes(value):
        seen.add(id(value))
        return (Same(value), *((k, _look(x, seen, depth - 1)) for k, x in attributes(value).items()))
    return Same(value)


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
