"""What is known of a value of a jaxpr before it is computed: its shape and dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

from jax.core import ShapedArray

from passes.jaxpr.compat import Atom, JaxprEqn


def array_of(atom: Atom) -> ShapedArray:
    """An atom's aval, where it is an array's or a reference's and so has a shape."""
    return cast(ShapedArray, atom.aval)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype)  # NumPy puts it together anew every time


def dtype_name(atom: Atom) -> str:
    """The name of an array's dtype, such as "float32"."""
    return _name_of(array_of(atom).dtype)


def size_of(atom: Atom) -> int:
    """The number of elements of an array; 0 of what is none, such as a token."""
    shape = getattr(atom.aval, "shape", None)
    return 0 if shape is None else math.prod(shape)


def form_of(atom: Atom) -> tuple[tuple[int, ...] | None, Any]:
    """Shape and dtype of an atom; (None, None) for what has none, such as a token."""
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)


def is_bitcast(shape: Sequence[int], permutation: Sequence[int]) -> bool:
    """True if an array lies in memory as it did, since only dimensions of 1 change places."""
    moved = [d for d in permutation if shape[d] != 1]
    return moved == sorted(moved)


def is_placed(product: JaxprEqn) -> bool:
    """True for a product whose result the user spreads over explicit axes of a mesh; of others JAX notes the
    mesh alone, in gradients."""
    sharding = product.params["out_sharding"]
    return sharding is not None and not sharding.mesh.are_all_axes_auto
