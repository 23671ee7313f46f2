"""What tells programs apart: all that their equations say, the same in every process.

Two programs of one mark would be taken for each other: what is chosen for the one would go on in the place of
the other, as long as both take and return the same.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr

# Of a decorated function: how it was asked for, which a mark tells itself, and what follows from its jaxpr.
_OWN = ("config", "planned", "source", "pair")


@compat.cached_by_jaxpr
def digest(program: ClosedJaxpr) -> str:
    """Equal for two programs if all equations are: operations, operands, literals, constants and shapes."""
    return _hashed(_said_of_jaxpr(program))


@compat.cached_by_jaxpr
def unplanned_digest(program: ClosedJaxpr) -> str:
    """Equal for two programs if they do the same operations on the same shapes, whatever was planned in them.

    What a planned part saves is carried by all that holds equations, such as a scan: of these only what they
    hold counts.
    """
    return _hashed(_said_of_operations(program))


def _hashed(parts: Iterator[str | bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part if isinstance(part, bytes) else part.encode())
        made.update(b"|")
    return made.hexdigest()


def _said_of_jaxpr(jaxpr: Any) -> Iterator[str | bytes]:
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> Iterator[str | bytes]:
        if compat.is_variable(atom):
            yield str(numbers.setdefault(atom, len(numbers)))
        else:
            yield from _said_of(atom.val)

    for constant in getattr(jaxpr, "consts", ()):
        yield from _said_of(constant)
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    for v in (*opened.constvars, *opened.invars):
        yield f"{numbers.setdefault(v, len(numbers))}:{v.aval}"
    for eqn in opened.eqns:
        yield eqn.primitive.name
        for atom in eqn.invars:
            yield from name(atom)
        yield from _said_of_params(eqn, _said_of_jaxpr)
        for v in eqn.outvars:
            yield f"{numbers.setdefault(v, len(numbers))}:{v.aval}"
    for atom in opened.outvars:
        yield from name(atom)


def _said_of_operations(jaxpr: Any) -> Iterator[str | bytes]:
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in opened.eqns:
        yield eqn.primitive.name
        planned = eqn.params.get("planned")
        inner = compat.inner_jaxprs(eqn) if planned is None else [planned.forward, planned.backward]
        for one in inner:
            yield from _said_of_operations(one)
        if inner:
            yield str(eqn.params.get("length"))
        else:
            yield from _said_of_params(eqn, _said_of_operations)
            yield from (str(v.aval) for v in eqn.outvars)


def _said_of_params(eqn: Any, of_jaxpr: Callable[[Any], Iterator[str | bytes]]) -> Iterator[str | bytes]:
    for key, value in sorted(eqn.params.items()):
        if key not in _OWN:
            yield key
            yield from _said_of(value, of_jaxpr)


def _said_of(
    value: Any, of_jaxpr: Callable[[Any], Iterator[str | bytes]] = _said_of_jaxpr
) -> Iterator[str | bytes]:
    """A value of an equation without what differs between processes, such as an address or a set's order."""
    if hasattr(value, "eqns"):
        yield from of_jaxpr(value)
    elif isinstance(value, frozenset | set):
        yield from sorted(map(str, value))
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for one in value:
            yield from _said_of(one, of_jaxpr)
    elif isinstance(value, dict):
        yield from _said_of(sorted(value.items(), key=lambda item: str(item[0])), of_jaxpr)
    elif _is_array(value):
        yield str(jax.typeof(value))
        yield _bytes_of(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for one in dataclasses.fields(value):
            yield from _said_of(getattr(value, one.name), of_jaxpr)
    else:
        yield str(value) if isinstance(value, _PLAIN) else type(value).__name__


_PLAIN = (
    str, bytes, bool, int, float, complex, type(None), enum.Enum, np.dtype, np.generic, type,
    jax.sharding.Sharding, jax.sharding.PartitionSpec, jax.sharding.Mesh, jax.sharding.AbstractMesh,
    jax.core.ShapedArray,
)  # fmt: skip


def _is_array(value: Any) -> bool:
    """True for a constant, as users, numpy and JAX write it."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")


def _bytes_of(constant: Any) -> bytes:
    """What a constant holds; nothing of what is spread over other processes, or of keys."""
    try:
        return np.ascontiguousarray(constant).tobytes()
    except (RuntimeError, TypeError):
        return b""
