"""Everything that differs between JAX versions, and every use of JAX's private modules.

Nothing else in this project names `jax._src`.
"""

# JAX's private modules are typed loosely; what leaves this module is not.
# mypy: disable-error-code="no-untyped-call,attr-defined,no-any-return,assignment"

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    ad_util,
    api_util,
    checkify,
    compiler,
    config,
    core,
    dispatch,
    monitoring,
    pjit,
    shard_map,
    source_info_util,
    stages,
    traceback_util,
)
from jax._src import linear_util as lu
from jax._src.ad_checkpoint import name_p
from jax._src.dtypes import float0
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.lax import optimization_barrier_p as optimization_barrier_p
from jax._src.lib import hlo as jaxlib_hlo
from jax._src.mesh import use_abstract_mesh
from jax._src.sharding_impls import UnspecifiedValue
from jax._src.state.discharge import discharge_state, register_discharge_rule
from jax._src.state.types import AbstractRef
from jax._src.util import weakref_lru_cache
from jax.experimental.key_reuse import _core as key_reuse
from jax.extend.core import ClosedJaxpr as ClosedJaxpr

_REPORTING_FRAMES = 6

# Before 0.12 XLA's total counts the scalars of reducers (a few bytes), asynchronous values live from their
# own instruction on, not the one that starts them, and products and library kernels go on differently.
OLD_RULES = jax.__version_info__ < (0, 12)

# Primitives of functions with derivative rules, those of JAX's higher-level primitives included.
_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_lin", "remat_opt", "call_hi_primitive",
          "coop_remat_part")  # fmt: skip

Var = core.Var
Literal = core.Literal
DropVar = core.DropVar
JaxprEqn = core.JaxprEqn
Jaxpr = core.Jaxpr
Atom = Var | Literal


def open_jaxpr(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """(jaxpr, consts) of a closed jaxpr; before 0.12 these are two classes, since then one."""
    return closed.jaxpr, list(closed.consts)


def close_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """A closed jaxpr of `jaxpr` with `consts`."""
    return ClosedJaxpr(jaxpr, list(consts))


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The open jaxprs in an equation's parameters, in a fixed order."""
    return list(core.jaxprs_in_params(eqn.params))


def with_inner_jaxprs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """`eqn` with every open jaxpr in its parameters changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(v, core.Jaxpr) for v in value):
            return tuple(map(changed, value))
        if not isinstance(value, core.Jaxpr):
            return value
        jaxpr, consts = open_jaxpr(value)
        return close_jaxpr(change(jaxpr), consts)

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` without the equations that no result needs; inputs are kept."""
    return pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, such as "model.py:41 (attention)"; "" if unknown."""
    return _line_of(eqn.source_info.traceback)


@lru_cache(maxsize=4096)
def _line_of(traceback: Any) -> str:
    info = source_info_util.SourceInfo(traceback, source_info_util.NameStack())
    return str(source_info_util.summarize(info))


def called_from(caller: Any, info: Any) -> Any:
    """Where an equation comes from, `info`, with where the jaxpr that it is in is called; None: nowhere."""
    # JAX notes no frames of the caller inside the jaxpr of a call.
    if caller is None:
        return info
    frames = [i.traceback for i in (info, caller) if i.traceback is not None]
    traceback = sum(frames[1:], start=frames[0]) if frames else None
    return info.replace(traceback=traceback, name_stack=caller.name_stack + info.name_stack)


def at_source_of(eqn: JaxprEqn) -> Any:
    """A context in which whatever is traced comes from the line that `eqn` comes from."""
    return source_info_util.user_context(eqn.source_info.traceback)


def is_variable(atom: object) -> TypeGuard[Var]:
    """True for a variable, False for a literal."""
    return not isinstance(atom, core.Literal)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among `atoms`, in order, repeated ones too."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def of_variable[T](table: Mapping[Var, T], atom: Atom) -> T | None:
    """What `table` holds for a variable; None if it has nothing, and for a literal."""
    return None if isinstance(atom, core.Literal) else table.get(atom)


def literal(value: Any) -> Literal:
    """`value` as an operand of an equation."""
    return core.Literal(value, core.typeof(value))


def aval_nbytes(aval: Any) -> int:
    """Bytes of one array of abstract value `aval` (zero for tokens and other non-arrays)."""
    shape = getattr(aval, "shape", None)
    dtype = getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    itemsize = getattr(dtype, "itemsize", 0)
    return math.prod(shape) * int(itemsize)


def barrier_eqn(operands: Sequence[Any], results: Sequence[Atom]) -> JaxprEqn:
    """One `optimization_barrier` equation over all `operands`."""
    return core.new_jaxpr_eqn(list(operands), list(results), optimization_barrier_p, {}, core.no_effects)


def unary_eqn(primitive: Any, operand: Atom, result: Var, like: JaxprEqn, **params: Any) -> JaxprEqn:
    """`result` as `primitive` of `operand`, at the source line of equation `like`."""
    return core.new_jaxpr_eqn([operand], [result], primitive, params, core.no_effects, like.source_info)


def name_eqn(value: Any, result: Any, name: str, like: Any) -> JaxprEqn:
    """The equation of `checkpoint_name`, at the source line of equation `like`."""
    return core.new_jaxpr_eqn([value], [result], name_p, {"name": name}, core.no_effects, like.source_info)


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """What `checkpoint_name` calls the value of this equation; None for every other equation."""
    return str(eqn.params["name"]) if eqn.primitive is name_p else None


def has_custom_vjp(jaxpr: Jaxpr) -> bool:
    """True if an open jaxpr holds a function whose derivative rule is not traced yet."""
    inner = any(has_custom_vjp(j) for eqn in jaxpr.eqns for j in inner_jaxprs(eqn))
    return inner or any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in jaxpr.eqns)


@weakref_lru_cache
def has_rules(jaxpr: Jaxpr) -> bool:
    """True if a jaxpr may hold a function with a derivative rule of its own."""
    inner = any(has_rules(j) for eqn in jaxpr.eqns for j in inner_jaxprs(eqn))
    names = (eqn.primitive.name for eqn in jaxpr.eqns)
    return inner or any(name.startswith(_RULES) for name in names)


def in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    """`eqn` with `scope` in the name that XLA gives to its instructions."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


def is_in_scope(eqn: JaxprEqn, scope: str) -> bool:
    """True if `in_scope` said so."""
    return any(e.name == scope for e in eqn.source_info.name_stack.stack)


def is_transposed(eqn: JaxprEqn) -> bool:
    """True for an equation of a backward pass."""
    stack = eqn.source_info.name_stack.stack
    return any(isinstance(e, source_info_util.Transform) and e.name == "transpose" for e in stack)


def policy_saves(policy: Callable[..., Any], eqn: JaxprEqn) -> bool | None:
    """What a policy of `jax.checkpoint` says of an equation's results; None if they should be offloaded."""
    said = pe.ensure_enum(policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params))
    return None if isinstance(said, pe.Offloadable) else isinstance(said, pe.SaveableType)


def is_full_precision(eqn: JaxprEqn) -> bool:
    """True for a `reduce_precision` that reduces nothing: `jax.checkpoint` marks saved values with it."""
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def fresh_var(like: Any, **changes: Any) -> Var:
    """A new variable of the same abstract value, but for some `changes`, such as its dtype."""
    return core.Var(like.aval.update(**changes) if changes else like.aval)


def shaped_var(like: Var, shape: Sequence[int]) -> Var:
    """A new variable of the same dtype, with another shape."""
    return core.Var(core.ShapedArray(tuple(shape), like.aval.dtype))


def renamed(atom: Atom, rename: Mapping[Var, Atom]) -> Atom:
    """What `rename` gives for a variable, or the atom itself."""
    return atom if isinstance(atom, core.Literal) else rename.get(atom, atom)


def replaced(eqn: JaxprEqn, **changes: Any) -> JaxprEqn:
    """`eqn` with other operands, results, parameters, effects or source, by JAX's names for them."""
    return eqn.replace(**changes)


def as_call(eqn: JaxprEqn) -> JaxprEqn:
    """A call with parameters of its own as one that only groups its equations."""
    return replaced(eqn, primitive=core.eval_jaxpr_p, params={"call_jaxpr": eqn.params["jaxpr"]})


def rename_inputs(eqn: JaxprEqn, rename: Mapping[Var, Atom]) -> JaxprEqn:
    """`eqn` reading other variables."""
    return eqn.replace(invars=[renamed(v, rename) for v in eqn.invars])


def rebuild(
    jaxpr: Jaxpr,
    *,
    eqns: Sequence[JaxprEqn] | None = None,
    outvars: Sequence[Atom] | None = None,
    invars: Sequence[Any] | None = None,
    constvars: Sequence[Any] | None = None,
    rename: Mapping[Var, Atom] | None = None,
) -> Jaxpr:
    """`jaxpr` with other equations, results, inputs and constants, where these are given; `rename` says what
    its results are called now."""
    eqns = jaxpr.eqns if eqns is None else list(eqns)
    outvars = [renamed(v, rename or {}) for v in (jaxpr.outvars if outvars is None else outvars)]
    invars = jaxpr.invars if invars is None else list(invars)
    constvars = jaxpr.constvars if constvars is None else list(constvars)
    effects = core.join_effects(*(eqn.effects for eqn in eqns))
    unnamed = jaxpr.debug_info._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))
    return core.Jaxpr(constvars, invars, outvars, eqns, effects, debug_info=unnamed)


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants and how many are its carry."""
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def trace(
    function: Callable[..., Sequence[Any]], avals: Sequence[Any], user: tuple[Any, Any] | None = None
) -> ClosedJaxpr:
    """A closed jaxpr of `function`; the values that it closes over are its constants. JAX's errors of the
    trace name the function `user[0]`, and call its arguments `user[1]`."""
    info = api_util.debug_info("coop.remat", function, tuple(avals), {})
    if user is not None:
        info = info._replace(func_src_info=api_util.fun_sourceinfo(user[0]), arg_names=tuple(user[1]))
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(lu.wrap_init(function, debug_info=info), list(avals))
    return close_jaxpr(jaxpr, consts)


def hoist_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """`closed` with its constants as its first inputs, and the constants."""
    return pe.convert_constvars_jaxpr(closed), list(closed.consts)


@weakref_lru_cache
def without_unread(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """`closed` without the inputs that nothing in it reads, and which are read; the very same if all are.

    Args:
        closed: a jaxpr without constants.
    """
    pruned, read = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    return (closed if all(read) else close_jaxpr(pruned, [])), tuple(read)


def needed_inputs(closed: ClosedJaxpr, results: Sequence[bool]) -> tuple[bool, ...]:
    """For every input of `closed` whether these of its results, or an effect, depend on it."""
    return tuple(pe.dce_jaxpr(closed.jaxpr, list(results))[1])


def is_ref(aval: Any) -> bool:
    """True for the abstract value of a mutable reference (`jax.new_ref`)."""
    return isinstance(aval, AbstractRef)


def without_refs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` without mutable references: those that are inputs become values, and as many last results."""
    internal = any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects)
    return discharge_state(closed) if internal or any(map(is_ref, closed.in_avals)) else closed


def side_effects(eqn: JaxprEqn) -> frozenset[Any]:
    """The effects of an equation that are no mere use of a mesh axis, as collectives have."""
    return frozenset(e for e in eqn.effects if not isinstance(e, core.NamedAxisEffect))


@contextmanager
def inside_shard_map(eqn: JaxprEqn) -> Iterator[None]:
    """A context in which what is traced is part of the body of this `shard_map`."""
    mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    manual = use_abstract_mesh(shard_map._as_manual_mesh(mesh, axes))
    with shard_map._extend_axis_env(mesh, axes), manual, config._check_vma(eqn.params["check_vma"]):
        yield


def without_axis_effects(body: Jaxpr, eqn: JaxprEqn) -> Jaxpr:
    """The open body of a `shard_map` without the effects of naming the axes that this equation binds."""
    return core.remove_named_axis_effects(body, eqn.params["mesh"].axis_names)


def varies_over_mesh(aval: Any) -> bool:
    """True inside `shard_map` for a value that differs from device to device."""
    return bool(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def lower_high(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with JAX's higher-level primitives written out in plain ones, derivative rules dropped."""
    return pe.lower_jaxpr2(closed) if closed.is_high else closed


def is_tracing() -> bool:
    """True inside of a transformation or a `jit` that is being traced."""
    return not core.trace_state_clean()


def is_traced_eagerly() -> bool:
    """True inside of transformations that are in no `jit`, such as a derivative outside of it."""
    trace = core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        trace = trace.parent_trace
    return isinstance(trace, core.EvalTrace) and is_tracing()


def trace_context() -> Any:
    """What settings of JAX a trace depends on, hashable."""
    return config.trace_context()


def evaluate(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Run or trace `closed` on `values`, equation by equation."""
    return list(core.jaxpr_as_fun(closed)(*values))


def new_primitive(name: str) -> Any:
    """A primitive with several results that runs outside `jit` as a compiled program of its own.

    Its parameter `jaxpr` is what it calls; JAX's higher-level primitives in it are lowered to plain ones.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(partial(dispatch.apply_primitive, primitive))

    def to_lojax(*values: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        plain, consts = hoist_consts(pe.lower_jaxpr2(jaxpr))
        lowered = [low for aval, x in zip(jaxpr.in_avals, values, strict=True) for low in aval.lower_val(x)]
        return primitive.bind(*consts, *lowered, jaxpr=plain, **params)

    primitive.to_lojax = to_lojax
    return primitive


def define_abstract(primitive: Any, avals_of: Callable[..., tuple[Iterable[Any], Any]]) -> None:
    """`avals_of(**params)` gives the results' abstract values and the jaxpr whose effects count."""

    def rule(*_: Any, **params: Any) -> tuple[list[Any], Any]:
        avals, jaxpr = avals_of(**params)
        return list(avals), core.no_effects if jaxpr is None else core.positional_effects(jaxpr)

    primitive.def_effectful_abstract_eval(rule)


def is_zero(tangent: Any) -> bool:
    """True for a symbolic zero tangent or cotangent."""
    return type(tangent) is ad.Zero


def zero_tangent(aval: Any) -> Any:
    """The symbolic zero tangent of a value of abstract value `aval`."""
    return ad.Zero(aval.to_tangent_aval())


def tangent_aval(aval: Any) -> Any:
    """The abstract value of a tangent of a value of abstract value `aval`."""
    return aval.to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """The abstract value of a cotangent of a value of abstract value `aval`."""
    return aval.to_ct_aval()


def instantiate(tangent: Any) -> Any:
    """`tangent` as an array, zeros included."""
    return ad.instantiate_zeros(tangent)


def zeros(aval: Any) -> Any:
    """An array of abstract value `aval`, all zeros; split over its mesh, which need not be set."""
    with jax.sharding.use_abstract_mesh(aval.sharding.mesh):
        return ad_util.zeros_like_aval(aval)


def has_tangents(aval: Any) -> bool:
    """True if values of `aval` can be differentiated (neither integers nor keys)."""
    return getattr(aval.to_tangent_aval(), "dtype", float0) != float0


def jvp_jaxpr(closed: ClosedJaxpr, nonzeros: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """(primals, nonzero tangents) -> (results, nonzero result tangents), and which results have one."""
    jaxpr, nonzeros_out = ad.jvp_jaxpr(closed, list(nonzeros), False)
    return jaxpr, list(nonzeros_out)


def batch_jaxpr(closed: ClosedJaxpr, axis: Any, dims: Sequence[Any]) -> tuple[ClosedJaxpr, list[bool]]:
    """`closed` over batched inputs, and which results are batched (on axis 0)."""
    dest = [batching.zero_if_mapped] * len(closed.out_avals)
    jaxpr, batched = batching.batch_jaxpr_axes(closed, axis, list(dims), dest)
    return jaxpr, list(batched)


def split_jaxpr(closed: ClosedJaxpr, unknown: Sequence[bool]) -> tuple[Jaxpr, Jaxpr, list[bool], int]:
    """Known part, unknown part (residuals first), which results are unknown, how many residuals."""
    known, rest, out_unknown, residuals = pe.partial_eval_jaxpr_nounits(closed, list(unknown), False)
    return known, rest, list(out_unknown), len(residuals)


def transpose_linear(
    closed: ClosedJaxpr, residuals: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Cotangents of the inputs of `closed` that follow its residuals, in which it is linear; and logs."""
    linear = [ad.UndefinedPrimal(aval) for aval in closed.in_avals[len(residuals) :]]
    values = [*residuals, *linear]
    pulled, logs = ad.backward_pass(closed, False, closed.consts, values, list(cotangents), return_logs=True)
    return list(pulled[len(residuals) :]), logs


def is_linear_input(value: Any) -> bool:
    """True in a transpose rule for an operand whose cotangent is asked for."""
    return bool(ad.is_undefined_primal(value))


def register_autodiff(
    primitive: Any,
    *,
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    linearize: Callable[..., Any] | None = None,
) -> None:
    """Register rules: `jvp(primals, tangents, **params)`, `transpose(cotangents, *operands, **params)`, which
    gives the operands' cotangents and what backward rules log, and
    `linearize(for_transpose, nonzeros, *primals, **params)`, which gives
    (results, nonzeros_out, residuals, function)."""
    ad.primitive_jvps[primitive] = jvp

    def accumulate(cotangents: Sequence[Any], *operands: Any, **params: Any) -> Any:
        linear = [isinstance(x, ad.GradAccum) for x in operands]
        pairs = zip(operands, linear, strict=True)
        given = [ad.UndefinedPrimal(x.aval) if lin else x for x, lin in pairs]
        pulled, logs = transpose(cotangents, *given, **params)
        for x, lin, cotangent in zip(operands, linear, pulled, strict=True):
            if lin:
                x.accum(cotangent)
        return logs

    ad.fancy_transposes[primitive] = accumulate
    if linearize is None:
        return

    def rule(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, ...]:
        results, nonzeros_out, residuals, function = linearize(is_vjp, nonzeros, *primals, **params)
        return results, nonzeros_out, residuals, None, lambda res, _, *tangents: function(res, *tangents)

    ad.primitive_linearizations[primitive] = rule


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearParts:
    """A jaxpr in two.

    Attributes:
        forward: args -> (*results, *residuals that are no arguments).
        pushforward: (*residuals, *tangents) -> nonzero tangents of results.
        nonzeros: for every result whether it has a tangent.
        forwarded: for every residual the argument that it is, or None.
    """

    forward: ClosedJaxpr
    pushforward: Any
    nonzeros: tuple[bool, ...]
    forwarded: tuple[int | None, ...]


def linearize_jaxpr(closed: ClosedJaxpr, nonzeros: Sequence[bool], for_transpose: bool) -> LinearParts:
    """Linearize a jaxpr without constants."""
    forward, results, nonzeros_out, forwarded, pushforward = ad.linearize_jaxpr(
        closed, list(nonzeros), is_vjp=for_transpose
    )
    assert not len(results.unpack()[2]), "structured residuals are of JAX's higher-level primitives"
    return LinearParts(
        forward=forward, pushforward=pushforward, nonzeros=tuple(nonzeros_out), forwarded=tuple(forwarded)
    )


def register_batching(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register `rule(axis, values, dims, **params) -> (results, dims)`."""
    batching.fancy_primitive_batchers[primitive] = rule


def register_call_rules(primitive: Any) -> None:
    """Partial evaluation and dead code for a primitive that is a call of `params["jaxpr"]`."""

    def partial_eval(tracer_trace: Any, *tracers: Any, jaxpr: Jaxpr, **params: Any) -> list[Any]:
        unknown = [not t.is_known() for t in tracers]
        known, rest, out_unknown, n_residuals = split_jaxpr(jaxpr, unknown)
        known, consts = hoist_consts(known)
        values = [t.pval.get_known() for t in tracers if t.is_known()]
        results = primitive.bind(*consts, *values, jaxpr=known, **params)
        cut = len(results) - n_residuals
        residuals = [tracer_trace.new_instantiated_const(r) for r in results[cut:]]
        with core.set_current_trace(tracer_trace):
            rest_out = iter(
                evaluate(rest, [*residuals, *(t for t, u in zip(tracers, unknown, strict=True) if u)])
            )
        known_out = iter(results[:cut])
        return [next(rest_out if u else known_out) for u in out_unknown]

    pe.custom_partial_eval_rules[primitive] = partial_eval
    pe.partial_eval_jaxpr_custom_rules[primitive] = partial(
        pe.closed_call_partial_eval_custom_rule, "jaxpr", lambda *args: (args[-2], args[-1])
    )
    pe.dce_rules[primitive] = _call_dce
    register_discharge_rule(primitive)(partial(_call_discharge, primitive))

    def error_check(ctx: Any, error: Any, enabled: Any, *args: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        errors, tree = jax.tree.flatten(error)
        values = [*errors, *args]
        results = checkify.jaxpr_to_checkify_jaxpr(ctx, jaxpr, enabled, tree, *map(core.typeof, values))
        checked, consts = hoist_consts(results[0])
        return jax.tree.unflatten(results[1], primitive.bind(*consts, *values, jaxpr=checked, **params))

    checkify.error_checks[primitive] = error_check


def register_part_rules(primitive: Any, *, stands_for: Any, checked: Callable[..., list[Any]]) -> None:
    """Dead code and references for a call of `params["jaxpr"]` whose derivatives are those of
    `params["source"]` (see `coop_jax.source`). Partial evaluation leaves it whole.

    Args:
        stands_for: the primitive of what `checkify` checks instead.
        checked: the part with a function that applies that primitive with checks.
    """
    pe.dce_rules[primitive] = _call_dce
    register_discharge_rule(primitive)(partial(_call_discharge, primitive))

    def impl(*args: Any, **params: Any) -> Any:
        needed, params = _without_source(params)
        values = [x for x, keep in zip(args, needed, strict=True) if keep]
        return dispatch.apply_primitive(primitive, *values, **params)

    primitive.def_impl(impl)

    def error_check(ctx: Any, error: Any, enabled: Any, *args: Any, **params: Any) -> Any:
        errors = [error]

        def apply(values: Sequence[Any], **inner: Any) -> Any:
            errors[0], results = checkify.error_checks[stands_for](ctx, errors[0], enabled, *values, **inner)
            return results

        results = checked(apply, *args, **params)
        return errors[0], results

    checkify.error_checks[primitive] = error_check


def _without_source(params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
    """Which operands a part needs that is not differentiated any more, and its parameters."""
    jaxpr, needed = pe.dce_jaxpr(params["jaxpr"], [True] * len(params["jaxpr"].out_avals))
    return list(needed), {**params, "jaxpr": jaxpr, "source": None}


def is_forward_part(eqn: JaxprEqn) -> bool:
    """True for a part (see `register_part_rules`) that gives saved values to a backward part."""
    source = eqn.params.get("source")
    return source is not None and len(eqn.outvars) > source.n_results


def without_source(eqn: JaxprEqn) -> JaxprEqn:
    """A backward part that is not differentiated any more; other equations as they are."""
    if eqn.params.get("source") is None or is_forward_part(eqn):
        return eqn
    needed, params = _without_source(eqn.params)
    invars = [v for v, keep in zip(eqn.invars, needed, strict=True) if keep]
    return eqn.replace(invars=invars, params=params, effects=core.eqn_effects(params["jaxpr"], invars))


def _call_discharge(
    primitive: Any, ctx: Any, *args: Any, jaxpr: Jaxpr, **params: Any
) -> tuple[list[Any], list[Any]]:
    """References become values when nothing is differentiated any more."""
    if "source" in params:
        params["source"] = None
    plain, consts = hoist_consts(discharge_state(jaxpr))
    results = primitive.bind(*consts, *args, jaxpr=plain, **params)
    outs, refs = results[: len(jaxpr.out_avals)], iter(results[len(jaxpr.out_avals) :])
    return [next(refs) if is_ref(aval) else None for aval in ctx.in_avals], outs


def _call_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    eqn = live_and_eqn[-1]
    if not any(used) and not pe.has_effects(eqn):
        return [False] * len(eqn.invars), None
    params = dict(eqn.params)
    source = params.get("source")
    source = None if source is None else source.pruned(used)
    keep = False if source is None else source.needs(len(eqn.invars))
    params["jaxpr"], used_inputs = pe.dce_jaxpr(params["jaxpr"], list(used), keep)
    if all(used) and all(used_inputs):
        return list(used_inputs), eqn
    if source is not None:
        params["source"] = source.moved(used_inputs)
    invars = [v for v, keep in zip(eqn.invars, used_inputs, strict=True) if keep]
    outvars = [v for v, keep in zip(eqn.outvars, used, strict=True) if keep]
    effects = core.eqn_effects(params["jaxpr"], invars)
    new = core.new_jaxpr_eqn(invars, outvars, eqn.primitive, params, effects, eqn.source_info, eqn.ctx)
    return list(used_inputs), new


def register_key_reuse(primitive: Any, called: Callable[..., Any]) -> None:
    """JAX's search for random keys that are used twice (`jax_debug_key_reuse`) looks into a call, too.

    Args:
        primitive: the call.
        called: `called(**params)` gives the closed jaxpr, without constants, whose use of keys counts as the
            call's; None where keys were accounted for elsewhere: then the call uses none, and makes new ones.
    """

    def signature(eqn: JaxprEqn) -> Any:
        closed = called(**eqn.params)
        if closed is not None:
            return key_reuse.jaxpr_type_signature(open_jaxpr(closed)[0])
        return key_reuse.KeyReuseSignature(*map(key_reuse.Source, range(len(eqn.outvars))))

    key_reuse.key_reuse_signatures[primitive] = key_reuse.dynamic_key_reuse_signature(signature)


def is_pinned(eqn: JaxprEqn) -> bool:
    """True if a call asks for shardings or layouts of its own."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    return any(not isinstance(s, UnspecifiedValue) for s in shardings) or any(x is not None for x in layouts)


def register_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register `rule(ctx, *operands, **params) -> results`, called anew for every equation."""
    mlir.register_lowering(primitive, rule, cacheable=False)


def lower_inline(ctx: Any, closed: ClosedJaxpr, operands: Sequence[Any]) -> Sequence[Any]:
    """Lower `closed` in place, into the function that `ctx` is in."""
    if (
        closed.consts
        or getattr(closed, "is_high", False)
        or any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects)
    ):
        return mlir.lower_fun(core.jaxpr_as_fun(closed))(ctx, *operands)
    results, tokens = mlir.jaxpr_subcomp(
        ctx.module_context, closed.jaxpr, ctx.name_stack, ctx.tokens_in, (), *operands,
        dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering, outer_traceback=ctx.traceback,
    )  # fmt: skip
    ctx.set_tokens_out(tokens)
    return results


def register_error_conversion(convert: Callable[[Exception], BaseException | None]) -> None:
    """`convert` may turn XLA's error of a failed compile into another error."""
    compiler.register_xla_runtime_error_handler(convert)  # type: ignore[arg-type]


def on_compiled(listener: Callable[[Any], None]) -> None:
    """Call `listener(executable)` after every compile, in its thread; what it raises fails the compile."""

    def receive(event: str, *_: Any, **__: Any) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            executable = _of_callers("xla_executable", _REPORTING_FRAMES)
            if executable is not None:
                listener(executable)

    monitoring.register_event_duration_secs_listener(receive)


def compiler_options() -> dict[str, Any] | None:
    """The options of the compile that called back into the caller; None if it has none, or there is none."""
    return dict(_of_callers("compiler_options_kvs", sys.getrecursionlimit()) or ()) or None


def _of_callers(name: str, most_frames: int) -> Any:
    """The local variable of that name in the nearest calling function that has one; None if none has.

    JAX's functions hold a compile's options and result, and it has no hook for them with absent devices.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and most_frames and name not in frame.f_locals:
        frame, most_frames = frame.f_back, most_frames - 1
    return frame.f_locals.get(name) if frame is not None else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeingLowered:
    """The program whose lowering is under way.

    Attributes:
        jaxpr: the program; the same object for as long as JAX remembers its trace.
        lower: lowers a jaxpr, such as that one, under the settings of now: a `jax.stages.Lowered`.
        trace: traces what was given to `jit` once more: a `jax.stages.Traced`; None where it is not known, or
            closes over values, which another trace may order differently.
        inside: runs what it is given under mesh, axis names and checks as at the call of `jit`.
        as_one: makes one decorated function of its jaxpr; None where that is not asked for.
    """

    jaxpr: Jaxpr
    lower: Callable[[ClosedJaxpr], Any]
    trace: Callable[[], Any] | None
    inside: Callable[[Callable[[], Any]], Any]
    as_one: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None


def being_lowered() -> BeingLowered | None:
    """The innermost program that is being lowered around the caller; None where that cannot be told.

    A lowering rule is told nothing about the program around it, and JAX has no hook that is. So the frames
    of `jax.jit`'s call and of its `lower` are looked at: they hold the function and its arguments.
    """
    frames = _frames_to_jit(sys._getframe(1))
    if "_resolve_and_lower" not in frames:
        return None
    given = frames["_resolve_and_lower"].f_locals
    parameters = {name: given[name] for name in inspect.signature(pjit._resolve_and_lower).parameters}
    jaxpr, mesh = given["jaxpr"], given["ctx_mesh"]
    return BeingLowered(
        jaxpr=jaxpr,
        lower=lambda to: stages.Lowered(pjit._resolve_and_lower(**{**parameters, "jaxpr": to}), None, None),
        trace=None if core.jaxpr_const_args(jaxpr) else _retraced(frames),
        inside=partial(_outside, mesh),
    )


def _retraced(frames: dict[str, Any]) -> Callable[[], Any] | None:
    """Traces what was given to `jit`; None where that is not known, or closes over values."""
    traced = frames["lower"].f_locals.get("self") if "lower" in frames else None
    if "jit_lower" in frames and isinstance(traced, stages.Traced):
        given, consts = frames["jit_lower"].f_locals, traced._consts
        jitted = given["jit_func"]
    elif "cache_miss" in frames and "_run_python_pjit" in frames:
        given = frames["cache_miss"].f_locals
        consts = given["p"].consts
        jitted = SimpleNamespace(_fun=given["fun"], _jit_info=given["jit_info"])
    else:
        return None
    args, kwargs = _as_specs(given["args"]), _as_specs(given["kwargs"])
    return None if consts else partial(pjit.jit_trace, jitted, *args, **kwargs)


def _outside(mesh: Any, run: Callable[[], Any]) -> Any:
    """`run()` with mesh, axis names and checks as at the call of `jit`: `shard_map` sets its own."""
    axes = core.get_axis_env()
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), config._check_vma(False):
            return run()
    finally:
        core.trace_ctx.set_axis_env(axes)


def _frames_to_jit(frame: Any) -> dict[str, Any]:
    """JAX's frames from the one that lowers to the user's call of `jit`, by the names of their functions."""
    files = {pjit.__file__, stages.__file__}
    while frame is not None and frame.f_code.co_name != "_resolve_and_lower":
        frame = frame.f_back
    frames: dict[str, Any] = {}
    for _ in range(_REPORTING_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename in files:
            frames.setdefault(frame.f_code.co_name, frame)
        frame = frame.f_back
    return frames


def _as_specs(tree: Any) -> Any:
    """`tree` with shapes in the place of arrays, committed to a device as the arrays are."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, core.Tracer):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
        )

    return jax.tree.map(spec, tree)


def hide_frames(path: str) -> None:
    """Leave the functions of the file `path` out of the tracebacks that JAX shows."""
    traceback_util.register_exclusion(path)


def hide_lines(folder: Path) -> None:
    """Never name a file in `folder` as the line that an operation comes from."""
    # The separator keeps other folders whose names begin with this one's.
    source_info_util.register_exclusion(f"{folder}{os.sep}")


def cached_by_jaxpr[F: Callable[..., Any]](function: F, most: int = 2048) -> F:
    """Remember results as long as the jaxpr that is the first argument lives, and no more than so many."""
    cached: F = weakref_lru_cache(function, maxsize=most)
    return cached


def hlo_of_text(text: str) -> bytes:
    """The serialized HloModuleProto of a module's text; XLA raises if it is none."""
    return jaxlib_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThunkModule:
    """A GPU program in the form that `coop_jax.embedded` calls.

    Attributes:
        message: its thunks, serialized.
        buffer_bytes: sizes of its arguments, of the results that have storage of their own, and of everything
            else that it needs, temporaries included.
        constants: bytes of its constants.
    """

    message: bytes
    buffer_bytes: tuple[int, ...]
    constants: tuple[np.ndarray, ...]


def thunk_module(data: bytes) -> ThunkModule:
    """Read a serialized GPU executable.

    Raises:
        NotImplementedError: before 0.12.
    """
    try:
        from jax._src.thunky import thunky
    except ImportError as error:
        raise NotImplementedError("thunks can be inlined from JAX 0.12 on") from error
    with thunky.make_ir_context() as context:
        module = thunky._thunky.jax_executable_to_mlir(data, context)
        main = next(op.operation for op in module.body.operations if op.operation.name == "func.func")
        types = [str(argument.type) for argument in main.regions[0].blocks[0].arguments]
        return ThunkModule(
            message=thunky._thunky.mlir_module_to_gpu_executable_proto(module),
            buffer_bytes=tuple(int(t[t.index("<") + 1 : t.index(">")]) for t in types),
            constants=tuple(np.frombuffer(c, np.uint8) for c in thunky._collect_constant_bytes(main)),
        )


hide_lines(Path(__file__).parent.parent)
