"""Rewrite what XLA's simplifier rewrites on its way, where that decides which values are stored.

What is computed twice from the same operands XLA computes once: the mask and the tables of sines that every
layer of a traced model makes for itself are one value, which lives as long as all of them. That is for
estimates alone: a plan that reads each near its reader keeps less, and a convnet planned without its repeats
cost 6 % more on the CPU.

The gradient of an indexed read is a scatter into zeros that is then added to the other gradients. XLA
scatters into the other gradients instead (in place, as they die there), so neither the zeros nor the
scattered value are ever stored. A plan has to know: for the loss of a language model that is the
largest value of the program. Written down before planning, it also holds where XLA would not see it.

The same loss reads one float32 logit a token of logits that were computed in bfloat16. On a TPU a kernel that
reads by index reads from memory, so all of them are stored in float32 for it, twice the bytes of the others:
.21 of the .30 GiB that a GPT could not do without on a v5e. To convert what was read gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.backend import Backend
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, form_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import with_flat_bodies
from passes.jaxpr.primitives import MOVING, Kind, kind_of
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import with_equations, with_operands_in

SCATTER_ADD = "scatter-add"
ADDS = frozenset({"add", "add_any"})
GATHER, CONVERT = "gather", "convert_element_type"


def simplified(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, bodies of control flow included, with what is written down before it is planned.

    Returns:
        The same object if there is nothing to rewrite.
    """
    inside = with_equations(jaxpr, [with_flat_bodies(eqn, simplified) for eqn in jaxpr.eqns])
    return without_literal_barriers(scatter_in_place(gather_then_convert(inside)))


def scatter_in_place(jaxpr: Jaxpr) -> Jaxpr:
    """`x + scatter_add(zeros, indices, updates)` becomes `scatter_add(x, indices, updates)`.

    Only a scattered value that nothing else reads is taken; the same values are added in another order.

    Args:
        jaxpr: open; what its results do not need may stay in it.

    Returns:
        The same object if there is nothing to rewrite.
    """
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    n_reads = Counter(compat.variables([*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]))
    eqns, rewritten = [], False
    for eqn in jaxpr.eqns:
        if (scattered := _scattered_term(eqn, producer, n_reads)) is not None:
            scatter, other = scattered
            eqn = scatter.replace(invars=[other, *scatter.invars[1:]], outvars=eqn.outvars)
            producer[eqn.outvars[0]] = eqn
            rewritten = True
        eqns.append(eqn)
    if not rewritten:
        return jaxpr
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns))


def gather_then_convert(jaxpr: Jaxpr) -> Jaxpr:
    """`gather(convert(x), indices)` becomes `convert(gather(x, indices))`: the same bits, of fewer elements.

    Returns:
        The same open jaxpr if there is nothing to rewrite.
    """
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if (convert := _widened_before(eqn, producer)) is None:
            eqns.append(eqn)
            continue
        read = compat.fresh_var(eqn.outvars[0], dtype=array_of(convert.invars[0]).dtype)
        eqns.append(eqn.replace(invars=[convert.invars[0], *eqn.invars[1:]], outvars=[read]))
        eqns.append(convert.replace(invars=[read], outvars=eqn.outvars))
    if len(eqns) == len(jaxpr.eqns):
        return jaxpr
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns))


def _widened_before(eqn: JaxprEqn, producer: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The conversion whose result a gather reads a part of, if every value, NaN too, is the same after it."""
    if eqn.primitive.name != GATHER:
        return None
    fill = eqn.params["fill_value"]
    if fill is not None and not np.isnan(fill):
        return None
    convert = compat.of_variable(producer, eqn.invars[0])
    if convert is None or convert.primitive.name != CONVERT or convert.params["sharding"] is not None:
        return None
    before, after = array_of(convert.invars[0]), array_of(eqn.invars[0])
    is_wider = before.dtype != after.dtype and jnp.promote_types(before.dtype, after.dtype) == after.dtype
    floats = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (before, after))
    return convert if is_wider and floats and array_of(eqn.outvars[0]).size < after.size else None


def without_repeats(jaxpr: Jaxpr) -> Jaxpr:
    """Equations that compute the same as an earlier one are left out; results of the program keep theirs.

    Returns:
        The same open jaxpr if there is none.
    """
    results = set(compat.variables(jaxpr.outvars))
    # What an equation computes is dear to write down, and few have an outline in common.
    outlines: dict[Hashable, JaxprEqn] = {}
    seen: dict[Hashable, JaxprEqn] = {}

    def kept(eqn: JaxprEqn, rename: dict[Var, Atom]) -> JaxprEqn | None:
        if not results.isdisjoint(eqn.outvars):
            return eqn
        like = outlines.setdefault((eqn.primitive, *compat.variables(eqn.invars)), eqn)
        if like is eqn:
            return eqn
        seen.setdefault(_computation(like), like)
        first = seen.setdefault(_computation(eqn), eqn)
        if first is eqn:
            return eqn
        rename.update(zip(eqn.outvars, first.outvars, strict=True))
        return None

    return _renaming(jaxpr, kept)


def _renaming(jaxpr: Jaxpr, rewritten: Callable[[JaxprEqn, dict[Var, Atom]], JaxprEqn | None]) -> Jaxpr:
    """A jaxpr with its equations rewritten, or left out, and what their results are called from then on.

    Args:
        rewritten: from an equation, and a mapping that it adds renamed results to, to what stays of it.

    Returns:
        The same open jaxpr if nothing was renamed.
    """
    rename: dict[Var, Atom] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        kept = rewritten(compat.rename_inputs(eqn, rename) if rename else eqn, rename)
        eqns += [] if kept is None else [kept]
    return compat.rebuild(jaxpr, eqns=eqns, rename=rename) if rename else jaxpr


def with_wide_operands(jaxpr: Jaxpr) -> Jaxpr:
    """Operands with dimensions of 1 that an elementwise equation spreads are broadcast by equations of their
    own, as they are for XLA.

    Returns:
        The same open jaxpr if there is none.
    """
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _is_elementwise(eqn) and len(eqn.invars) > 1:
            rename: dict[Var, Atom] = {}
            for v in compat.variables(eqn.invars):
                if v not in rename and _is_spread(v, eqn.outvars[0]):
                    shape = array_of(eqn.outvars[0]).shape
                    rename[v] = wide = compat.shaped_var(v, shape)
                    params = {"shape": shape, "broadcast_dimensions": tuple(range(len(shape)))}
                    eqns.append(
                        compat.unary_eqn(lax.broadcast_in_dim_p, v, wide, eqn, sharding=None, **params)
                    )
            eqn = compat.rename_inputs(eqn, rename) if rename else eqn
        eqns.append(eqn)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else compat.rebuild(jaxpr, eqns=eqns)


def with_converted_operands(jaxpr: Jaxpr, backend: Backend) -> Jaxpr:
    """Operands of products of two types, which most platforms multiply in that of the result, are converted
    by equations of their own, as JAX converts them when it lowers these.

    Returns:
        The same open jaxpr if there are none.
    """
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_converted(eqn, backend):
            conversions, eqn = with_operands_in(eqn, array_of(eqn.outvars[0]).dtype)
            eqns += conversions
        eqns.append(eqn)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else compat.rebuild(jaxpr, eqns=eqns)


def _is_converted(product: JaxprEqn, backend: Backend) -> bool:
    """True if JAX converts the operands of a product to the type of its result."""
    dtypes = [array_of(v).dtype for v in product.invars]
    if dtypes[0] == dtypes[1] or says_types(product):
        return False
    if backend.multiplies_mixed:
        return not all(jnp.issubdtype(d, jnp.floating) or jnp.issubdtype(d, jnp.integer) for d in dtypes)
    return not all(str(d).startswith("float8") for d in dtypes)


def says_types(product: JaxprEqn) -> bool:
    """True for a product whose precision is an algorithm: it says itself which types are multiplied."""
    return isinstance(product.params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _is_elementwise(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return kind_of(name) is Kind.FUSIBLE and name not in MOVING and len(eqn.outvars) == 1


def _is_spread(v: Var, result: Var) -> bool:
    """True if `v` has the rank of `result` and is shorter only where its own length is 1."""
    pairs = list(zip(array_of(v).shape, array_of(result).shape, strict=False))
    same_rank = len(array_of(v).shape) == len(array_of(result).shape)
    return same_rank and all(n in (1, m) for n, m in pairs) and any(n != m for n, m in pairs)


def _computation(eqn: JaxprEqn) -> Hashable:
    """Equal for two equations that compute the same; only an equation's own for one that must stay, or that
    cannot be told."""
    if eqn_kind(eqn) in (Kind.OPAQUE, Kind.BARRIER) or compat.checkpoint_name_of(eqn) is not None:
        return eqn
    if any(isinstance(v, compat.DropVar) for v in eqn.outvars):
        return eqn
    params = tuple((name, type(value), value) for name, value in sorted(eqn.params.items()))
    key = eqn.primitive, params, tuple(map(_operand, eqn.invars))
    try:
        hash(key)
    except TypeError:
        return eqn
    return key


def _operand(atom: Atom) -> Hashable:
    if isinstance(atom, compat.Literal):
        return atom.aval, np.asarray(atom.val).tobytes()
    return atom


def without_literal_barriers(jaxpr: Jaxpr) -> Jaxpr:
    """A barrier's result for a literal is that literal: it takes no memory and waits for nothing.

    Returns:
        The same open jaxpr if no barrier has a literal operand.
    """

    def kept(eqn: JaxprEqn, rename: dict[Var, Atom]) -> JaxprEqn | None:
        if kind_of(eqn.primitive.name) is not Kind.BARRIER:
            return eqn
        pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
        rename.update({result: v for v, result in pairs if not compat.is_variable(v)})
        waiting = [pair for pair in pairs if compat.is_variable(pair[0])]
        if len(waiting) < len(pairs):
            eqn = compat.barrier_eqn([v for v, _ in waiting], [result for _, result in waiting])
        return eqn if eqn.outvars else None

    return _renaming(jaxpr, kept)


def without_rounding(jaxpr: Jaxpr) -> Jaxpr:
    """Rounding to the precision that a value has anyway, as `jax.checkpoint` writes it, gives that value.

    Returns:
        The same open jaxpr if nothing is rounded so.
    """

    def kept(eqn: JaxprEqn, rename: dict[Var, Atom]) -> JaxprEqn | None:
        if not (compat.is_full_precision(eqn) and compat.is_variable(eqn.invars[0])):
            return eqn
        rename[eqn.outvars[0]] = eqn.invars[0]
        return None

    return _renaming(jaxpr, kept)


def _scattered_term(
    eqn: JaxprEqn, producer: Mapping[Var, JaxprEqn], n_reads: Mapping[Var, int]
) -> tuple[JaxprEqn, Atom] | None:
    """The scatter into zeros that `eqn` adds to something, and that something; None if none."""
    if eqn.primitive.name in ADDS:
        for term, other in (eqn.invars, eqn.invars[::-1]):
            made = compat.of_variable(producer, term)
            if made is None or made.primitive.name != SCATTER_ADD:
                continue
            if compat.of_variable(n_reads, term) != 1:
                continue
            if form_of(other) == form_of(term) and _is_zeros(made.invars[0], producer):
                return made, other
    return None


def _is_zeros(atom: Atom, producer: Mapping[Var, JaxprEqn]) -> bool:
    """True for a zero and for what broadcasting or converting makes of it."""
    if isinstance(atom, compat.Literal):
        return bool(atom.val == 0) if getattr(atom.aval, "shape", None) == () else False
    made = producer.get(atom)
    if made is None or made.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    return _is_zeros(made.invars[0], producer)
