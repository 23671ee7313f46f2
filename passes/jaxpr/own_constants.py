"""Constants that XLA would spread out in memory for several kernels.

On a CPU for those of its library:

    a = sum(2 * x)      XLA writes 2 as an array of the shape of x, merges it with the one of the other sum,
    b = sum(2 * y)      and has to store it: a kernel takes in only what no other reads. Waiting for what its
                        own kernel reads anyway, each 2 is an array of its own, which is never stored.

The gradient of every variance has such a 2. A DenseNet's step within .6 of its bytes kept 4.0 MiB of them, of
9.6 in all.

On a GPU for the gradient of a maximum over windows. XLA scatters it into an array of zeros, and since that
has to be in memory, so are the zeros of the rectifier before it and of its gradient, which are the same: a
ResNet-50's step kept 392 MiB of zeros all the time, and wrote them three times. Zeros that wait for what is
scattered are of their own, and are not there before.
"""

from __future__ import annotations

from collections.abc import Hashable, Set

import jax
import jax.numpy as jnp
from jax import Array, lax

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Literal, Var
from passes.jaxpr.inline import traced_for
from passes.jaxpr.library_kernels import LibraryKernels, is_computed_in_them
from passes.jaxpr.primitives import kind_of
from passes.jaxpr.rewrite import with_changed_bodies
from passes.jaxpr.softmax import DataflowGraph


@compat.cached_by_jaxpr
def with_own_constants(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, bodies of control flow included, whose library kernels share no constants.

    Returns:
        The same object if they share none.
    """
    eqns = [with_changed_bodies(eqn, with_own_constants) for eqn in jaxpr.eqns]
    graph = DataflowGraph.of(jaxpr, [kind_of(eqn.primitive.name) for eqn in jaxpr.eqns])
    library = LibraryKernels(graph, compat.variables(jaxpr.outvars))
    readers: dict[Hashable, set[int]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in _spread(eqn):
            readers.setdefault(_key(v, eqn), set()).add(i)
    barriers: dict[int, JaxprEqn] = {}
    for kernel in library.kernels.values():
        shared = {i: [v for v in _spread(eqns[i]) if not readers[_key(v, eqns[i])] <= kernel] for i in kernel}
        constants = [v for i in sorted(kernel) for v in shared[i]]
        if not constants:
            continue
        start = min(i for i in kernel if shared[i])
        read = _dispensable(graph, kernel, start)
        if read is None or _nbytes(read) > _nbytes(eqns[start].outvars[0]):
            continue
        place = min(i for i in kernel if read in graph.operands[i])
        before = [*constants, read]
        after = [compat.fresh_var(v) for v in before]
        barriers[place] = compat.barrier_eqn(before, after)
        own = {id(v): new for v, new in zip(before, after, strict=True)}
        for i in kernel:
            eqns[i] = compat.replaced(eqns[i], invars=[own.get(id(v), v) for v in eqns[i].invars])
    if eqns == jaxpr.eqns:
        return jaxpr
    written = [
        each for i, eqn in enumerate(eqns) for each in ((barriers[i], eqn) if i in barriers else (eqn,))
    ]
    return compat.rebuild(jaxpr, eqns=written)


@compat.cached_by_jaxpr
def with_own_zeros(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, bodies of control flow included, whose gradients of maxima over windows are scattered
    into zeros of their own.

    Returns:
        The same object if it has none.
    """
    eqns = [new for eqn in jaxpr.eqns for new in _into_own_zeros(with_changed_bodies(eqn, with_own_zeros))]
    return jaxpr if eqns == jaxpr.eqns else compat.rebuild(jaxpr, eqns=eqns)


def _into_own_zeros(eqn: JaxprEqn) -> list[JaxprEqn]:
    """`eqn`, or what does the same as its gradient of a maximum over windows, as JAX writes it for a GPU."""
    of_variables = all(map(compat.is_variable, eqn.invars))
    if eqn.primitive is not lax.select_and_scatter_add_p or not of_variables:
        return [eqn]
    params = eqn.params
    is_max = params["select_prim"] is lax.ge_p

    def scattered(source: Array, operand: Array) -> Array:
        dtype, scalar = source.dtype, jnp.zeros((), source.dtype)
        zero, source = lax.optimization_barrier((scalar, source))
        least = lax.full((), -jnp.inf if is_max else jnp.inf, dtype)
        padded = lax.pad(operand, least, [(low, high, 0) for low, high in params["padding"]])
        select = jax.make_jaxpr(params["select_prim"].bind)(scalar, scalar)
        add = jax.make_jaxpr(lax.add)(scalar, scalar)
        made = lax.select_and_scatter_p.bind(
            padded, source, zero,
            select_jaxpr=select.jaxpr, select_consts=(), scatter_jaxpr=add.jaxpr, scatter_consts=(),
            window_dimensions=params["window_dimensions"], window_strides=params["window_strides"],
            padding=((0, 0),) * operand.ndim,
        )  # fmt: skip
        starts = [low for low, _ in params["padding"]]
        return lax.slice(made, starts, [low + n for low, n in zip(starts, operand.shape, strict=True)])

    return traced_for(eqn, scattered)


def _dispensable(graph: DataflowGraph, kernel: Set[int], end: int) -> Var | None:
    """What equations of a kernel up to `end` read from memory: what no other kernel reads, and the smallest.

    What waits is another value to XLA, which may be given another layout, and then is copied.
    """
    read = [v for i in sorted(kernel) if i <= end for v in graph.operands[i]]
    outside = [v for v in read if graph.producer.get(v) not in kernel]
    return min(outside, key=lambda v: (not kernel >= {*graph.readers[v]}, _nbytes(v)), default=None)


def _nbytes(v: Var) -> int:
    return compat.aval_nbytes(v.aval)


def _spread(eqn: JaxprEqn) -> list[Literal]:
    """The scalar literals that an equation takes for an array of the shape of its result."""
    if not is_computed_in_them(eqn):
        return []
    result = array_of(eqn.outvars[0])
    literals = [v for v in eqn.invars if isinstance(v, compat.Literal)] if result.ndim else []
    return [v for v in literals if not array_of(v).ndim and array_of(v).dtype == result.dtype]


def _key(v: Literal, eqn: JaxprEqn) -> Hashable:
    """The same for what XLA writes as the same array."""
    return repr(v.val), dtype_name(v), array_of(eqn.outvars[0]).shape
