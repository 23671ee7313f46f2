"""One object for jaxprs that are alike, so that what is remembered of one holds for all.

Bodies of control flow are written anew on every level of a program's frontier, and mostly come out as on
another one. Alike are jaxprs of the same equations, literals, abstract values and lines of the source.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var

_known: WeakValueDictionary[Hashable, Jaxpr] = WeakValueDictionary()


def interned(jaxpr: Jaxpr) -> Jaxpr:
    """The first jaxpr that is alike, of those that are still in use; `jaxpr` itself where there is none."""
    return _known.setdefault(_said(jaxpr), jaxpr)


@compat.cached_by_jaxpr
def _said(jaxpr: Jaxpr) -> Hashable:
    """All that a jaxpr says, its variables by number.

    Large and unhashable values are told by their addresses: whatever is known lives as long as they do.
    """
    number: dict[Var, int] = {}

    def defined(variables: Sequence[Var]) -> Hashable:
        return tuple((number.setdefault(v, len(number)), type(v), v.aval) for v in variables)

    def read(atoms: Sequence[Atom]) -> Hashable:
        return tuple(number[v] if compat.is_variable(v) else _literal(v) for v in atoms)

    def equation(eqn: JaxprEqn) -> Hashable:
        source = eqn.source_info
        params = tuple((name, _value(eqn.params[name])) for name in sorted(eqn.params))
        return (
            eqn.primitive, read(eqn.invars), params, defined(eqn.outvars), frozenset(eqn.effects), eqn.ctx,
            source.name_stack, source.traceback,
        )  # fmt: skip

    opened = getattr(jaxpr, "jaxpr", jaxpr)
    inputs = defined([*opened.constvars, *opened.invars])
    equations = tuple(map(equation, opened.eqns))
    return tuple(map(id, getattr(jaxpr, "consts", ()))), inputs, equations, read(opened.outvars)


def _literal(literal: Any) -> Hashable:
    value = literal.val
    is_small = not np.shape(value) and isinstance(getattr(literal.aval, "dtype", None), np.dtype)
    return literal.aval, np.asarray(value).tobytes() if is_small else id(value)


def _value(value: Any) -> Hashable:
    if hasattr(value, "eqns"):
        return _said(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value, value))
    if isinstance(value, float | complex | np.inexact):
        return type(value), repr(value)  # zeros of both signs are equal
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
