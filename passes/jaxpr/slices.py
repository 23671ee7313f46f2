"""The body of a scan with the slices that it takes from stacks, and those that it puts there, written out.

XLA computes a slice in the kernels that read it, and in the kernel that writes one what is written, as far as
these can. What slices cost is then what kernels cost, as it is of any other program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
from jax import Array, lax

from passes.backend import BACKENDS
from passes.cost import DeviceModel, kernel_ns, kernel_pj
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, form_of, size_of
from passes.jaxpr.compat import Atom, Jaxpr, Var
from passes.jaxpr.inline import inline_calls, named

FILLING_PASSES = {"not": 0, "together": 1, "by copies": 2}
"""How often the bytes of one more stack of a form are written or read to fill it, by how XLA does that."""

# Of a stack: slices are taken of it, so it has several.
_LENGTH = 2


def with_slices(body: Jaxpr, n_consts: int, n_carry: int) -> tuple[Jaxpr, tuple[int, int]]:
    """What one iteration does.

    Args:
        body: the open jaxpr of a scan.
        n_consts, n_carry: how many of its inputs are constants, and carried.

    Returns:
        An open jaxpr of the constants, the stacks that are read, the carry, the number of the iteration, and
        the stacks that are written; and how many of its inputs are constants, and carried.
    """
    index = jax.ShapeDtypeStruct((), "uint32")  # of which JAX knows that it is not negative
    first, xs = n_consts + n_carry, body.invars[n_consts + n_carry :]
    ys = body.outvars[n_carry:]

    def read(at: Array, *stacks: Array) -> list[Array]:
        return [at + at.dtype.type(1), *(lax.dynamic_index_in_dim(s, at, keepdims=False) for s in stacks)]

    def write(at: Array, *operands: Array) -> list[Array]:
        stacks, slices = operands[: len(ys)], operands[len(ys) :]
        return [lax.dynamic_update_index_in_dim(s, y, at, 0) for s, y in zip(stacks, slices, strict=True)]

    reading = inline_calls(jax.make_jaxpr(read)(index, *map(_stack, xs))).jaxpr
    writing = inline_calls(jax.make_jaxpr(write)(index, *map(_stack, ys), *map(_slice, ys))).jaxpr
    at, *read_stacks = reading.invars
    following, *taken = compat.variables(reading.outvars)
    written = compat.variables(writing.outvars)
    written_stacks = writing.invars[1 : 1 + len(ys)]
    eqns = [
        *named(reading, dict(zip(taken, xs, strict=True))),
        *body.eqns,
        *named(writing, dict(zip(writing.invars, [at, *written_stacks, *ys], strict=True))),
    ]
    return compat.rebuild(
        body,
        eqns=eqns,
        invars=[*body.invars[:n_consts], *read_stacks, *body.invars[n_consts:first], at, *written_stacks],
        outvars=[*body.outvars[:n_carry], following, *written],
    ), (n_consts + len(xs), n_carry + 1 + len(ys))


def filling(stacks: Sequence[Var], device: DeviceModel) -> tuple[int, int]:
    """Time and energy of what XLA writes to a scan's stacks before it, which is all written over."""
    rule = BACKENDS[device.platform].fills_stacks
    if rule == "not":
        return 0, 0
    ns = pj = 0
    one_of = {form_of(v): v for v in stacks}
    for form, count in Counter(map(form_of, stacks)).items():
        one = one_of[form]
        nbytes = compat.aval_nbytes(one.aval)
        passes = 1 + FILLING_PASSES[rule] * (count - 1)
        ns += kernel_ns(device, nbytes=passes * nbytes, elements=size_of(one))
        pj += kernel_pj(device, nbytes=passes * nbytes)
    return ns, pj


def _slice(v: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array_of(v).shape, array_of(v).dtype)


def _stack(v: Atom) -> jax.ShapeDtypeStruct:
    one = _slice(v)
    return jax.ShapeDtypeStruct((_LENGTH, *one.shape), one.dtype)
