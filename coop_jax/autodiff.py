"""The primitives of a decorated function, and the rules by which every transformation carries them.

`coop_remat` is a call of a jaxpr that asks for a budget. Forward mode, batching, partial evaluation and
dead code give another `coop_remat`. Reverse mode is where memory goes, so there forward and backward
are made together, planned as one program and emitted as two parts (`coop_jax.pairs`):

    forward    coop_remat_part  args -> (*outs, *saved)
    tangent    coop_linear      (*args, *saved, *tangents) -> tangents of outs
    backward   coop_remat_part  (*args, *saved, *cotangents) -> gradients        (coop_linear, transposed)

**Derivatives of derivatives.** In a planned part no rule of a derivative is left, so it is never
differentiated itself: what it stands for is (`coop_jax.source`), from the arguments, the forward part as the
function and the backward part as the function's pullback, each a `coop_remat` of its own. Its derivative
is planned like that of any other function. Saved values follow from the arguments: they have no tangents.

`coop_linear` is transposed with the planned backward part if the cotangents that arrive are among those that
were expected. Otherwise, and where it is evaluated or transformed again instead, it starts from the
arguments and computes everything anew: slower, never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from coop_jax import lowering
from coop_jax.call import bind, coop_remat_p
from coop_jax.config import RematConfig
from coop_jax.lowering import Planned
from coop_jax.pairs import Pair, Pullback, make_pair, once_more, pull_jaxpr, where
from coop_jax.sizes import check_sizes
from coop_jax.source import Source
from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr

__all__ = ["bind"]

compat.hide_frames(__file__)

coop_part_p = compat.new_primitive("coop_remat_part")
coop_linear_p = compat.new_primitive("coop_linear")


def _bind_part(
    jaxpr: ClosedJaxpr, config: RematConfig, planned: Planned, source: Source | None, values: Sequence[Any]
) -> list[Any]:
    """Apply what is planned already; without its source it is not differentiated any more."""
    jaxpr, consts = compat.hoist_consts(jaxpr)
    check_sizes([*consts, *values], config.name)
    moved = None if source is None else source.behind(len(consts))
    return list(coop_part_p.bind(*consts, *values, jaxpr=jaxpr, config=config, planned=planned, source=moved))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, config: RematConfig
) -> tuple[list[Any], list[Any]]:
    nonzeros = [not compat.is_zero(t) for t in tangents]
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(jaxpr, nonzeros)
    results = bind(jvp_jaxpr, config, [*primals, *where(tangents, nonzeros)])
    n_outs = len(jaxpr.out_avals)
    return results[:n_outs], _with_zeros(jaxpr.out_avals, nonzeros_out, results[n_outs:])


def _linearize(
    for_transpose: bool, nonzeros: Sequence[bool], *primals: Any, jaxpr: ClosedJaxpr, config: RematConfig
) -> tuple[Any, ...]:
    differentiated = tuple(
        nz and compat.has_tangents(aval) for nz, aval in zip(nonzeros, jaxpr.in_avals, strict=True)
    )
    through_refs = any(compat.is_ref(aval) for aval in where(jaxpr.in_avals, differentiated))
    if not for_transpose or through_refs or not any(differentiated):
        return _linearize_in_place(for_transpose, differentiated, primals, jaxpr, config)
    pair = make_pair(jaxpr, differentiated, config)
    n_outs = len(jaxpr.out_avals)
    results = _bind_part(pair.forward, config, pair.planned, pair.forward_source(jaxpr), primals)
    available = [*results, *primals]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        values = [*residuals, *map(compat.instantiate, where(tangents, differentiated))]
        outs = coop_linear_p.bind(*values, jaxpr=jaxpr, config=config, pair=pair)
        return _with_zeros(jaxpr.out_avals, pair.tangents_out, outs)

    residuals = [*primals, *(available[i] for i in pair.saved)]
    return results[:n_outs], list(pair.tangents_out), residuals, tangent


def _linearize_in_place(
    for_transpose: bool,
    differentiated: tuple[bool, ...],
    primals: Sequence[Any],
    jaxpr: ClosedJaxpr,
    config: RematConfig,
) -> tuple[Any, ...]:
    """Linearize what will not be transposed, or not as a whole, as the equations that it holds."""
    parts = compat.linearize_jaxpr(jaxpr, differentiated, for_transpose)
    results = bind(parts.forward, config, primals)
    n_outs = len(jaxpr.out_avals)
    made = iter(results[n_outs:])
    residuals = [next(made) if i is None else primals[i] for i in parts.forwarded]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        values = [*residuals, *map(compat.instantiate, where(tangents, differentiated))]
        return _with_zeros(jaxpr.out_avals, parts.nonzeros, compat.evaluate(parts.pushforward, values))

    return results[:n_outs], list(parts.nonzeros), residuals, tangent


def _part_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    planned: Planned,
    source: Source,
) -> tuple[list[Any], list[Any]]:
    saved = _saved(primals, jaxpr, config, planned, source)
    closed, consts = source.closed()
    values, dots = source.of(primals), source.of(tangents)
    dots = [*(compat.zero_tangent(jax.typeof(c)) for c in consts), *dots]
    results, pushed = _jvp([*consts, *values], dots, jaxpr=closed, config=_derived(config))
    return [*results, *saved], [*pushed, *map(_no_tangent, saved)]


def _part_linearize(
    for_transpose: bool,
    nonzeros: Sequence[bool],
    *primals: Any,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    planned: Planned,
    source: Source,
) -> tuple[Any, ...]:
    saved = _saved(primals, jaxpr, config, planned, source)
    closed, consts = source.closed()
    nonzeros = [*(False for _ in consts), *source.of(nonzeros)]
    values = [*consts, *source.of(primals)]
    results, nonzeros_out, residuals, push = _linearize(
        for_transpose, nonzeros, *values, jaxpr=closed, config=_derived(config)
    )
    zeros = [compat.zero_tangent(jax.typeof(c)) for c in consts]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        return [*push(residuals, *zeros, *source.of(tangents)), *map(_no_tangent, saved)]

    return [*results, *saved], [*nonzeros_out, *(False for _ in saved)], residuals, tangent


def _saved(
    operands: Sequence[Any], jaxpr: ClosedJaxpr, config: RematConfig, planned: Planned, source: Source
) -> list[Any]:
    """The results of a part that its source does not give; references stay as they are."""
    if len(jaxpr.out_avals) == source.n_results:
        return []
    copies = [jax.new_ref(x[...]) if compat.is_ref(jax.typeof(x)) else x for x in operands]
    return _bind_part(once_more(jaxpr), config, planned, source, copies)[source.n_results :]


def _derived(config: RematConfig) -> RematConfig:
    return dataclasses.replace(config, derived=True)


def _no_tangent(value: Any) -> Any:
    return compat.zero_tangent(jax.typeof(value))


@compat.cached_by_jaxpr
def _push_jaxpr(jaxpr: ClosedJaxpr, pair: Pair) -> Any:
    """(*args, *what references held, *tangents) -> tangents of the outs: everything is recomputed."""
    jaxpr = once_more(jaxpr)
    n_args, n_refs = len(pair.differentiated), len(pair.references)

    def push(*values: Any) -> list[Any]:
        args, rest = list(values[:n_args]), values[n_args:]
        for i, held in zip(pair.references, rest[:n_refs], strict=True):
            args[i] = jax.new_ref(held)
        jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(jaxpr, pair.differentiated)
        pushed = compat.evaluate(jvp_jaxpr, [*args, *rest[n_refs:]])[len(nonzeros_out) :]
        every = _with_zeros(jaxpr.out_avals, nonzeros_out, pushed)
        return [compat.instantiate(t) for t, has in zip(every, pair.tangents_out, strict=True) if has]

    held = [jaxpr.in_avals[i].inner_aval for i in pair.references]
    tangents = map(compat.tangent_aval, where(jaxpr.in_avals, pair.differentiated))
    return compat.trace(push, [*jaxpr.in_avals, *held, *tangents])


def _pushed(operands: Sequence[Any], pair: Pair) -> list[Any]:
    """The operands of `coop_linear`, or what goes with them, without the planned saved values."""
    n_args = len(pair.differentiated)
    n_last = len(pair.references) + sum(pair.differentiated)
    return [*operands[:n_args], *operands[len(operands) - n_last :]]


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, config: RematConfig, pair: Pair
) -> tuple[list[Any], list[Any]]:
    """Saved values follow from the arguments, so their tangents are not looked at."""
    del config
    primals, tangents = _pushed(primals, pair), _pushed(tangents, pair)
    nonzeros = [not compat.is_zero(t) for t in tangents]
    push = _push_jaxpr(jaxpr, pair)
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(push, nonzeros)
    pushed = compat.evaluate(jvp_jaxpr, [*primals, *where(tangents, nonzeros)])
    n_outs = len(push.out_avals)
    return pushed[:n_outs], _with_zeros(push.out_avals, nonzeros_out, pushed[n_outs:])


def _linear_transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr, config: RematConfig, pair: Pair
) -> tuple[list[Any], Any]:
    """Gradients by the planned backward part, or from the arguments if other cotangents arrive; and logs."""
    n_args, n_linear = len(pair.differentiated), sum(pair.differentiated)
    cut = len(operands) - n_linear
    every = _with_zeros(jaxpr.out_avals, pair.tangents_out, cotangents)
    arrived = tuple(not compat.is_zero(ct) for ct in every)
    logs: Any = None
    if not any(arrived):
        gradients: list[Any] = [None] * n_linear
    elif all(planned or not here for planned, here in zip(pair.cotangents, arrived, strict=True)):
        values = [*operands[:cut], *map(compat.instantiate, where(every, pair.cotangents))]
        pulled = _bind_part(pair.backward, config, pair.planned, pair.backward_source(jaxpr), values)
        gradients, logs = pulled[:n_linear], jax.tree.unflatten(pair.logs, pulled[n_linear:])
    else:
        asked = Pullback(differentiated=pair.differentiated, cotangents=arrived, references=pair.references)
        pull, tree = pull_jaxpr(jaxpr, asked)
        held = operands[cut - len(pair.references) : cut]
        pulled = bind(pull, config, [*operands[:n_args], *held, *where(every, arrived)])
        gradients, logs = pulled[:n_linear], jax.tree.unflatten(tree, pulled[n_linear:])
    wanted = map(compat.is_linear_input, operands[cut:])
    given = [
        (compat.zero_tangent(x.aval) if g is None else g) if w else None
        for x, g, w in zip(operands[cut:], gradients, wanted, strict=True)
    ]
    return [None] * cut + given, logs


def _transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr, config: RematConfig
) -> tuple[list[Any], Any]:
    """A call that is linear in some operands: split it there, run the one part, transpose the other."""
    del config
    linear = list(map(compat.is_linear_input, operands))
    known, rest, out_unknown, n_residuals = compat.split_jaxpr(jaxpr, linear)
    values = compat.evaluate(known, where(operands, [not lin for lin in linear]))
    residuals = values[len(values) - n_residuals :]
    pulled, logs = compat.transpose_linear(rest, residuals, where(cotangents, out_unknown))
    gradients = iter(pulled)
    return [next(gradients) if lin else None for lin in linear], logs


def _part_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    planned: Planned,
    source: Source,
) -> tuple[list[Any], Any]:
    del jaxpr, planned
    closed, consts = source.closed()
    values = [*consts, *source.of(operands)]
    pulled, logs = _transpose(cotangents[: source.n_results], *values, jaxpr=closed, config=config)
    return source.spread(pulled[len(consts) :], len(operands)), logs


def _batch(
    axis: Any, values: Sequence[Any], dims: Sequence[Any], *, jaxpr: ClosedJaxpr, config: RematConfig
) -> tuple[list[Any], list[int | None]]:
    batched, on_axis = compat.batch_jaxpr(jaxpr, axis, dims)
    return bind(batched, config, values), [0 if b else None for b in on_axis]


def _part_batch(
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    planned: Planned,
    source: Source | None,
) -> tuple[list[Any], list[int | None]]:
    batched, on_axis = compat.batch_jaxpr(jaxpr, axis, dims)
    # A part inside of a part has no source: derivatives are taken of the outer one's.
    moved = None if source is None else source.batched(axis, dims, on_axis)
    return _bind_part(batched, config, planned, moved, values), [0 if b else None for b in on_axis]


def _linear_batch(
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    pair: Pair,
) -> tuple[list[Any], list[int | None]]:
    del config
    batched, on_axis = compat.batch_jaxpr(_push_jaxpr(jaxpr, pair), axis, _pushed(dims, pair))
    return compat.evaluate(batched, _pushed(values, pair)), [0 if b else None for b in on_axis]


def _linear_lower(ctx: Any, *operands: Any, jaxpr: ClosedJaxpr, config: RematConfig, pair: Pair) -> Any:
    del config
    return compat.lower_inline(ctx, _push_jaxpr(jaxpr, pair), _pushed(operands, pair))


def _part_checked(
    apply: Callable[..., Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    config: RematConfig,
    planned: Planned,
    source: Source,
) -> list[Any]:
    """Under `checkify` what a part stands for is checked, from the arguments; saved values are not."""
    closed, consts = source.closed()
    results = apply([*consts, *source.of(operands)], jaxpr=closed, config=config)
    return [*results, *_saved(operands, jaxpr, config, planned, source)]


def _with_keys(*, source: Source, config: RematConfig, **_: Any) -> Any:
    """What uses random keys as a part should: a plan uses them again to compute anew, the function once.

    A forward part stands for the function; a backward part, and what a transformation made, for nothing.
    """
    as_it_was = not source.steps and source.operands == tuple(range(len(source.operands)))
    return source.jaxpr if as_it_was and not config.derived else None


def _part_lower(ctx: Any, *operands: Any, source: Source | None, **params: Any) -> Any:
    del source
    return lowering.lower(ctx, *operands, **params)


def _with_zeros(avals: Sequence[Any], nonzeros: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """`values` where nonzero, symbolic zeros elsewhere."""
    given = iter(values)
    return [next(given) if nz else compat.zero_tangent(a) for a, nz in zip(avals, nonzeros, strict=True)]


for _primitive in (coop_remat_p, coop_part_p):
    compat.define_abstract(_primitive, lambda jaxpr, **_: (jaxpr.out_avals, jaxpr))
compat.define_abstract(
    coop_linear_p,
    lambda jaxpr, pair, **_: (map(compat.tangent_aval, where(jaxpr.out_avals, pair.tangents_out)), None),
)
compat.register_autodiff(coop_remat_p, jvp=_jvp, transpose=_transpose, linearize=_linearize)
compat.register_autodiff(coop_part_p, jvp=_part_jvp, transpose=_part_transpose, linearize=_part_linearize)
compat.register_autodiff(coop_linear_p, jvp=_linear_jvp, transpose=_linear_transpose)
compat.register_batching(coop_remat_p, _batch)
compat.register_batching(coop_part_p, _part_batch)
compat.register_batching(coop_linear_p, _linear_batch)
compat.register_call_rules(coop_remat_p)
compat.register_key_reuse(coop_remat_p, lambda jaxpr, config: None if config.derived else jaxpr)
compat.register_key_reuse(coop_part_p, _with_keys)
compat.register_key_reuse(coop_linear_p, lambda **_: None)
compat.register_part_rules(coop_part_p, stands_for=coop_remat_p, checked=_part_checked)
compat.register_lowering(coop_remat_p, functools.partial(lowering.lower, planned=None))
compat.register_lowering(coop_part_p, _part_lower)
compat.register_lowering(coop_linear_p, _linear_lower)
