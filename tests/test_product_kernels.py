"""What XLA:GPU computes in the kernels of products: what is foreseen is what it compiles to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import flat_body
from passes.jaxpr.straight import lift_as_xla
from tests.hlo_support import kernels_for

N = 1024
WIDE = jax.ShapeDtypeStruct((N, N), jnp.float32)
NARROW = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((N,), jnp.float32)
LONG = jax.ShapeDtypeStruct((2 * N, 4 * N), jnp.float32)
PLACES = jax.ShapeDtypeStruct((4 * N,), jnp.int32)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
MASK = jax.ShapeDtypeStruct((N, N), jnp.bool_)
MANY = jax.ShapeDtypeStruct((2, 4, 256, 256), jnp.float32)


def both(x: Any) -> tuple[Any, Any]:
    return x + 1.0, x * 2.0


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    # Operands.
    "a function of an argument": (lambda x, w: jnp.exp(2 * x) @ w, (WIDE, WIDE), 1),
    "computed twice": (lambda x, w: (jnp.exp(x) @ w, jnp.exp(x)), (WIDE, WIDE), 2),
    "two in memory": (lambda x, y, w: (x * jnp.sin(y)) @ w, (WIDE, WIDE, WIDE), 2),
    "widened": (lambda x, w: x.astype(jnp.float32) @ w, (NARROW, WIDE), 1),
    "batches": (lambda x, w: jnp.exp(x) @ w, (MANY, MANY), 1),
    "a row that is made": (lambda x, w, s: (x - jnp.sort(s)) @ w, (WIDE, WIDE, ROW), 3),
    "a number that is computed": (lambda x, w, s: (x * jnp.exp(s)) @ w, (WIDE, WIDE, NUMBER), 2),
    "rows of two": (lambda x, y, w: jnp.concatenate([x * 2.0, y]) @ w, (WIDE, WIDE, WIDE), 1),
    "columns of two": (lambda x, y, w: jnp.concatenate([x * 2.0, y], 1) @ w, (WIDE, WIDE, LONG), 2),
    "rows of two turned": (lambda x, y, w: jnp.concatenate([x, y]).T @ w, (WIDE, WIDE, LONG), 2),
    "both": (lambda x, w: jnp.exp(x).T @ jnp.tanh(w), (WIDE, WIDE), 1),
    # Results.
    "a function of it": (lambda x, w: jnp.exp(x @ w), (WIDE, WIDE), 1),
    "with a row": (lambda x, w, b: jax.nn.relu(x @ w + b), (WIDE, WIDE, ROW), 1),
    "with an argument": (lambda x, g, p: p - 0.01 * (x.T @ g), (WIDE, WIDE, WIDE), 1),
    "with another product": (lambda x, w, y, z: x @ w + y @ z, (WIDE, WIDE, WIDE, WIDE), 2),
    "with what another kernel makes": (lambda x, w, y: x @ w + jnp.sort(y), (WIDE, WIDE, WIDE), 2),
    "with what could be computed there": (lambda x, w, y: x @ w + jnp.tanh(y), (WIDE, WIDE, WIDE), 2),
    "widened, too": (lambda x, w: jnp.exp((x @ w).astype(jnp.float32)), (NARROW, NARROW), 2),
    "two readers": (lambda x, w: both(x @ w), (WIDE, WIDE), 3),
    "two readers at its end": (lambda x, w: both(jnp.exp(x @ w)), (WIDE, WIDE), 3),
    "masked by an argument": (lambda x, w, m: jnp.where(m, x @ w, 0), (WIDE, WIDE, MASK), 1),
    "reduced": (lambda x, w: jnp.exp(x @ w).sum(1), (WIDE, WIDE), 2),
    "squared": (lambda x, w: (x @ w) ** 2, (WIDE, WIDE), 2),
    # What is scattered.
    "messages": (lambda x, i: jnp.zeros((N, N)).at[i].add(jnp.exp(x)[i[::-1]]), (WIDE, PLACES), 2),
    # One after the other.
    "between two": (lambda x, y, b, w: jax.nn.relu(x @ y + b) @ w, (WIDE, WIDE, ROW, WIDE), 2),
    "residual": (
        lambda x, c, v, w, b: (lambda h: h + (jax.nn.relu(h @ v) @ w + b))(x @ c),
        (WIDE, WIDE, WIDE, WIDE, ROW),
        3,
    ),
}  # fmt: skip

# Before JAX 0.12 nothing is added in a product's kernel that another kernel makes.
SINCE_0_12 = ("with another product", "with what another kernel makes", "residual")


@pytest.mark.parametrize("name", CASES)
def test_as_many_kernels_as_xla_makes(h200: str, name: str) -> None:
    function, specs, kernels = CASES[name]
    kernels += compat.OLD_RULES and name in SINCE_0_12
    found = lift_as_xla(flat_body(jax.make_jaxpr(function)(*specs)), DEVICES["h200"])
    assert len(found.program.ops) == kernels, [op.name for op in found.program.ops]
    made = kernels_for(h200, function, specs)
    assert len(made) == kernels, [i.name for i in made]


def test_a_product_in_parts_is_not_followed_in_its_kernel() -> None:
    """An LSTM's step on an H200: the sums of the parts are read by what follows."""
    deep = jax.ShapeDtypeStruct((64, 8192), jnp.float32), jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    jaxpr = flat_body(jax.make_jaxpr(lambda x, w: jnp.exp(x @ w))(*deep))
    assert len(lift_as_xla(jaxpr, DEVICES["h200"]).program.ops) == 2


def in_parts(kind: str, x: Any, y: Any) -> Any:
    product = x.T @ y
    if kind == "summed before":
        return product
    if kind == "behind a barrier":
        product = lax.optimization_barrier(product)
    return both(product) if kind == "read twice" else product - 0.1 * x[: N // 2]


@pytest.mark.parametrize("kind", ["summed before", "behind a barrier", "read once", "read twice"])
def test_parts_of_a_product_are_summed_by_what_reads_them(h200: str, kind: str) -> None:
    deep = jax.ShapeDtypeStruct((8 * N, N // 2), jnp.float32)
    function = partial(in_parts, kind)
    found = lift_as_xla(flat_body(jax.make_jaxpr(function)(deep, deep)), DEVICES["h200"]).program
    (dot,) = (op for op in found.ops if op.name == "dot_general")
    (made,) = (found.buffers[b].nbytes for b in dot.outputs)
    kernels = {i.name: i for i in kernels_for(h200, function, (deep, deep))}
    (product,) = (i for i in kernels.values() if "dot" in i.name)
    parts_bytes = 4 * math.prod(product.shape.dims)
    n_sums = sum("loop_reduce" in name or "wrapped_reduce" in name for name in kernels)
    apart = kind in ("summed before", "behind a barrier")
    assert (dot.workspace_bytes, made) == ((parts_bytes, made) if apart else (0, parts_bytes))
    assert n_sums == (1 if apart else 0), [*kernels]
