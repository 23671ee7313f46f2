"""Symbolic shapes are refused: a budget needs sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.export

from coop_jax.errors import UnsupportedError


def check_sizes(values: Sequence[Any], name: str) -> None:
    """Refuse arrays with symbolic dimensions, as `jax.export.symbolic_shape` makes them.

    Args:
        values: arrays or tracers.
        name: the decorated function's.

    Raises:
        UnsupportedError: with the first such shape.
    """
    for aval in map(jax.typeof, values):
        if any(map(jax.export.is_symbolic_dim, getattr(aval, "shape", ()))):
            shape = ", ".join(map(str, aval.shape))
            raise UnsupportedError(
                f"`{name}` is traced with an array of shape ({shape}): how many bytes that is, is not known "
                "before it runs, so no budget can be kept. Trace it with numbers for shapes, a program for "
                f"each size, or trace and export the undecorated function, `{name}.__wrapped__`."
            )
