"""The primitive of a decorated function, and the rules by which every transformation carries it.

`coop_remat` is a call of a jaxpr that asks for a budget. Forward mode, batching, partial evaluation and
dead code give another `coop_remat`. Reverse mode is where memory goes, so there forward and backward
are made together, planned as one program and emitted as two parts:

    forward    coop_remat  args -> (*outs, *saved)
    tangent    coop_linear (*args, *saved, *tangents) -> tangents of outs
    backward   coop_remat  (*saved, *cotangents) -> gradients        (coop_linear, transposed)

Which outs get a cotangent is not known yet when the forward part is made. A function that returns
(scalar, anything), as under `has_aux`, is planned for a cotangent of the scalar alone; any other one
for cotangents of all that can have one. `coop_linear` is transposed with the planned backward part if
the cotangents that arrive are among these. Otherwise, and where it is evaluated or transformed again
instead, it starts from the arguments and computes everything anew: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from coop_jax import lowering
from coop_jax.lowering import Planned, RematConfig
from coop_jax.sizes import check_sizes
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls

compat.hide_frames(__file__)

coop_remat_p = compat.new_primitive("coop_remat")
coop_linear_p = compat.new_primitive("coop_linear")


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Pair:
    """A forward and a backward part that belong together. Compared by identity.

    Attributes:
        forward: args -> (*outs, *saved that are neither an argument nor an out).
        backward: (*saved, *cotangents) -> gradients of the nonzero arguments.
        saved: for every saved value where it comes from, as an index into (*forward's results, *args).
        differentiated: for every argument whether it has a tangent.
        tangents_out: for every out whether it has a tangent.
        cotangents: for every out whether backward takes its cotangent.
        planned: the plan's outcome.
    """

    forward: Any
    backward: Any
    saved: tuple[int, ...]
    differentiated: tuple[bool, ...]
    tangents_out: tuple[bool, ...]
    cotangents: tuple[bool, ...]
    planned: Planned

    def __repr__(self) -> str:
        return f"Pair({len(self.saved)} saved)"


def bind(jaxpr: Any, config: RematConfig, values: Sequence[Any], planned: Planned | None = None) -> list[Any]:
    """Apply `jaxpr` to `values` as a part of the program that asks for `config`."""
    jaxpr, consts = compat.hoist_consts(jaxpr)
    check_sizes([*consts, *values], config.name)
    return list(coop_remat_p.bind(*consts, *values, jaxpr=jaxpr, config=config, planned=planned))


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: Any,
    config: RematConfig,
    planned: Planned | None,
) -> tuple[list[Any], list[Any]]:
    nonzeros = [not compat.is_zero(t) for t in tangents]
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(jaxpr, nonzeros)
    results = bind(jvp_jaxpr, config, [*primals, *_where(tangents, nonzeros)], planned)
    n_outs = len(jaxpr.out_avals)
    return results[:n_outs], _with_zeros(jaxpr.out_avals, nonzeros_out, results[n_outs:])


def _linearize(
    for_transpose: bool,
    nonzeros: Sequence[bool],
    *primals: Any,
    jaxpr: Any,
    config: RematConfig,
    planned: Planned | None,
) -> tuple[Any, ...]:
    differentiated = tuple(
        nz and compat.has_tangents(aval) for nz, aval in zip(nonzeros, jaxpr.in_avals, strict=True)
    )
    if planned is not None or not for_transpose:
        return _linearize_in_place(differentiated, primals, jaxpr, config, planned)
    pair = _pair(jaxpr, differentiated, config)
    n_outs = len(jaxpr.out_avals)
    results = bind(pair.forward, config, primals, pair.planned)
    available = [*results, *primals]

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        values = [*residuals, *map(compat.instantiate, _where(tangents, differentiated))]
        found = coop_linear_p.bind(*values, jaxpr=jaxpr, config=config, pair=pair)
        return _with_zeros(jaxpr.out_avals, pair.tangents_out, found)

    residuals = [*primals, *(available[i] for i in pair.saved)]
    return results[:n_outs], list(pair.tangents_out), residuals, tangent


def _linearize_in_place(
    differentiated: tuple[bool, ...],
    primals: Sequence[Any],
    jaxpr: Any,
    config: RematConfig,
    planned: Planned | None,
) -> tuple[Any, ...]:
    """Linearize what is planned already (or will not be transposed) as the equations that it holds."""
    forward, pushforward, nonzeros_out, n_residuals = _linear_parts(jaxpr, differentiated)
    results = bind(forward, config, primals, planned)
    cut = len(results) - n_residuals

    def tangent(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        values = [*residuals, *map(compat.instantiate, _where(tangents, differentiated))]
        return _with_zeros(jaxpr.out_avals, nonzeros_out, compat.evaluate(pushforward, values))

    return results[:cut], list(nonzeros_out), results[cut:], tangent


@compat.cached_by_jaxpr
def _linear_parts(jaxpr: Any, differentiated: tuple[bool, ...]) -> tuple[Any, Any, tuple[bool, ...], int]:
    """args -> (*outs, *residuals); (*residuals, *tangents) -> nonzero tangents; which are nonzero."""
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(jaxpr, differentiated)
    n_args, n_outs = len(differentiated), len(nonzeros_out)
    unknown = [False] * n_args + [True] * sum(differentiated)
    known, rest, out_unknown, n_residuals = compat.split_jaxpr(jvp_jaxpr, unknown)
    assert not any(out_unknown[:n_outs]), "a result depends on a tangent"
    nonzeros = iter(out_unknown[n_outs:])
    # A tangent that is known does not depend on any input tangent: it is zero.
    really = tuple(nz and next(nonzeros) for nz in nonzeros_out)
    n_known_tangents = sum(nonzeros_out) - sum(really)

    def forward(*args: Any) -> list[Any]:
        found = compat.evaluate(known, args)
        return [*found[:n_outs], *found[n_outs + n_known_tangents :]]

    return compat.trace(forward, known.in_avals), rest, really, n_residuals


@compat.cached_by_jaxpr
def _pair(jaxpr: Any, differentiated: tuple[bool, ...], config: RematConfig) -> Pair:
    """Make, plan and name the parts of reverse mode."""
    tangents_out = tuple(map(compat.has_tangents, jaxpr.out_avals))
    cotangents = _expected_cotangents(jaxpr, tangents_out)
    forward, backward = _reverse_parts(jaxpr, differentiated, cotangents)
    n_outs = len(jaxpr.out_avals)
    joint, planned = lowering.plan_pair(forward, backward, n_outs, config)
    pruned, saved = _forwarded(joint.forward, n_outs)
    return Pair(
        forward=pruned,
        backward=joint.backward,
        saved=saved,
        differentiated=differentiated,
        tangents_out=tangents_out,
        cotangents=cotangents,
        planned=planned,
    )


def _expected_cotangents(jaxpr: Any, tangents_out: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which outs will get a cotangent: see this file's head."""
    first = jaxpr.out_avals[0] if jaxpr.out_avals else None
    if first is not None and tangents_out[0] and first.shape == ():
        return (True, *(False for _ in tangents_out[1:]))
    return tangents_out


def _reverse_parts(jaxpr: Any, differentiated: Sequence[bool], cotangents: Sequence[bool]) -> tuple[Any, Any]:
    """args -> (*outs, *residuals) and (*residuals, *cotangents) -> gradients, calls opened."""
    n_outs = len(jaxpr.out_avals)
    trees = []

    def forward(*args: Any) -> list[Any]:
        outs, pullback, rest = _vjp(jaxpr, differentiated, cotangents, args)
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        outs, rest = iter(outs), iter(rest)
        return [*(next(outs if ct else rest) for ct in cotangents), *residuals]

    def backward(*values: Any) -> list[Any]:
        cut = len(values) - sum(cotangents)
        return list(jax.tree.unflatten(trees[0], values[:cut])(list(values[cut:])))

    forward_jaxpr = compat.trace(forward, jaxpr.in_avals)
    out_avals = _where(jaxpr.out_avals, cotangents)
    avals = [*forward_jaxpr.out_avals[n_outs:], *map(compat.cotangent_aval, out_avals)]
    return inline_calls(forward_jaxpr), inline_calls(compat.trace(backward, avals))


def _vjp(
    jaxpr: Any, differentiated: Sequence[bool], cotangents: Sequence[bool], args: Sequence[Any]
) -> tuple[list[Any], Any, list[Any]]:
    """Outs that get a cotangent, their pullback, and the other outs."""

    def function(*some: Any) -> tuple[list[Any], list[Any]]:
        given = iter(some)
        values = [next(given) if d else arg for d, arg in zip(differentiated, args, strict=True)]
        outs = compat.evaluate(jaxpr, values)
        return _where(outs, cotangents), _where(outs, [not ct for ct in cotangents])

    outs, pullback, rest = jax.vjp(function, *_where(args, differentiated), has_aux=True)
    return outs, pullback, rest


def _forwarded(forward: Any, n_outs: int) -> tuple[Any, tuple[int, ...]]:
    """`forward` without saved results that are arguments or results already, and where all come from."""
    jaxpr, consts = compat.open_jaxpr(forward)
    outvars = list(jaxpr.outvars[:n_outs])
    place = {v: i for i, v in reversed(list(enumerate(outvars))) if not isinstance(v, compat.Literal)}
    arguments = {v: i for i, v in enumerate(jaxpr.invars)}
    saved: list[tuple[str, int]] = []
    for v in jaxpr.outvars[n_outs:]:
        if not isinstance(v, compat.Literal) and v in arguments:
            saved.append(("argument", arguments[v]))
            continue
        if isinstance(v, compat.Literal) or v not in place:
            if not isinstance(v, compat.Literal):
                place[v] = len(outvars)
            saved.append(("result", len(outvars)))
            outvars.append(v)
            continue
        saved.append(("result", place[v]))
    pruned = compat.close_jaxpr(compat.rebuild(jaxpr, eqns=jaxpr.eqns, outvars=outvars), consts)
    return pruned, tuple(i if kind == "result" else len(outvars) + i for kind, i in saved)


def _push(values: Sequence[Any], jaxpr: Any, pair: Pair) -> list[Any]:
    """Tangents of the outs, from the arguments: everything is computed anew."""
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(jaxpr, pair.differentiated)
    n_args, n_outs = len(pair.differentiated), len(nonzeros_out)
    tangents = values[len(values) - sum(pair.differentiated) :]
    found = compat.evaluate(jvp_jaxpr, [*values[:n_args], *tangents])[n_outs:]
    every = _with_zeros(jaxpr.out_avals, nonzeros_out, found)
    return [compat.instantiate(t) for t, has in zip(every, pair.tangents_out, strict=True) if has]


@compat.cached_by_jaxpr
def _push_jaxpr(jaxpr: Any, pair: Pair) -> Any:
    avals = [*jaxpr.in_avals, *map(compat.tangent_aval, _where(jaxpr.in_avals, pair.differentiated))]
    return compat.trace(lambda *values: _push(values, jaxpr, pair), avals)


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, config: RematConfig, pair: Pair
) -> tuple[list[Any], list[Any]]:
    """Saved values follow from the arguments, so their tangents are not looked at."""
    del config
    n_args, n_linear = len(pair.differentiated), sum(pair.differentiated)
    keep = [i < n_args or i >= len(primals) - n_linear for i in range(len(primals))]
    primals, tangents = _where(primals, keep), _where(tangents, keep)
    nonzeros = [not compat.is_zero(t) for t in tangents]
    push = _push_jaxpr(jaxpr, pair)
    jvp_jaxpr, nonzeros_out = compat.jvp_jaxpr(push, nonzeros)
    found = compat.evaluate(jvp_jaxpr, [*primals, *_where(tangents, nonzeros)])
    n_outs = len(push.out_avals)
    return found[:n_outs], _with_zeros(push.out_avals, nonzeros_out, found[n_outs:])


def _linear_transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: Any, config: RematConfig, pair: Pair
) -> list[Any]:
    """Gradients by the planned backward part, or from the arguments if other cotangents arrive."""
    n_args, n_linear = len(pair.differentiated), sum(pair.differentiated)
    cut = len(operands) - n_linear
    every = _with_zeros(jaxpr.out_avals, pair.tangents_out, cotangents)
    arrived = tuple(not compat.is_zero(ct) for ct in every)
    if not any(arrived):
        gradients: list[Any] = [None] * n_linear
    elif all(planned or not here for planned, here in zip(pair.cotangents, arrived, strict=True)):
        values = [compat.instantiate(ct) for ct in _where(every, pair.cotangents)]
        gradients = bind(pair.backward, config, [*operands[n_args:cut], *values], pair.planned)
    else:
        pull = _pull_jaxpr(jaxpr, pair.differentiated, arrived)
        gradients = bind(pull, config, [*operands[:n_args], *_where(every, arrived)])
    wanted = map(compat.is_linear_input, operands[cut:])
    given = [
        (compat.zero_tangent(x.aval) if g is None else g) if w else None
        for x, g, w in zip(operands[cut:], gradients, wanted, strict=True)
    ]
    return [None] * cut + given


@compat.cached_by_jaxpr
def _pull_jaxpr(jaxpr: Any, differentiated: tuple[bool, ...], cotangents: tuple[bool, ...]) -> Any:
    """(*args, *cotangents) -> gradients."""
    n_args = len(differentiated)

    def pull(*values: Any) -> list[Any]:
        return list(_vjp(jaxpr, differentiated, cotangents, values[:n_args])[1](list(values[n_args:])))

    avals = map(compat.cotangent_aval, _where(jaxpr.out_avals, cotangents))
    return compat.trace(pull, [*jaxpr.in_avals, *avals])


def _transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: Any, config: RematConfig, planned: Planned | None
) -> list[Any]:
    """A call that is linear in some operands: split it there, run the one part, transpose the other."""
    del config, planned
    linear = list(map(compat.is_linear_input, operands))
    known, rest, out_unknown, n_residuals = compat.split_jaxpr(jaxpr, linear)
    values = compat.evaluate(known, _where(operands, [not lin for lin in linear]))
    residuals = values[len(values) - n_residuals :]
    gradients = iter(compat.transpose_linear(rest, residuals, _where(cotangents, out_unknown)))
    return [next(gradients) if lin else None for lin in linear]


def _batch(
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: Any,
    config: RematConfig,
    planned: Planned | None,
) -> tuple[list[Any], list[int | None]]:
    batched, on_axis = compat.batch_jaxpr(jaxpr, axis, dims)
    return bind(batched, config, values, planned), [0 if b else None for b in on_axis]


def _linear_batch(
    axis: Any, values: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, config: RematConfig, pair: Pair
) -> tuple[list[Any], list[int | None]]:
    del config
    n_args, n_linear = len(pair.differentiated), sum(pair.differentiated)
    keep = [i < n_args or i >= len(values) - n_linear for i in range(len(values))]
    batched, on_axis = compat.batch_jaxpr(_push_jaxpr(jaxpr, pair), axis, _where(dims, keep))
    return compat.evaluate(batched, _where(values, keep)), [0 if b else None for b in on_axis]


def _linear_lower(ctx: Any, *operands: Any, jaxpr: Any, config: RematConfig, pair: Pair) -> Any:
    del config
    n_args, n_linear = len(pair.differentiated), sum(pair.differentiated)
    values = [*operands[:n_args], *operands[len(operands) - n_linear :]]
    return compat.lower_inline(ctx, _push_jaxpr(jaxpr, pair), values)


def _where(values: Sequence[Any], keep: Sequence[bool]) -> list[Any]:
    return [v for v, k in zip(values, keep, strict=True) if k]


def _with_zeros(avals: Sequence[Any], nonzeros: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """`values` where nonzero, symbolic zeros elsewhere."""
    given = iter(values)
    return [next(given) if nz else compat.zero_tangent(a) for a, nz in zip(avals, nonzeros, strict=True)]


compat.define_abstract(coop_remat_p, lambda jaxpr, **_: (jaxpr.out_avals, jaxpr))
compat.define_abstract(
    coop_linear_p,
    lambda jaxpr, pair, **_: (map(compat.tangent_aval, _where(jaxpr.out_avals, pair.tangents_out)), None),
)
compat.register_autodiff(coop_remat_p, jvp=_jvp, transpose=_transpose, linearize=_linearize)
compat.register_autodiff(coop_linear_p, jvp=_linear_jvp, transpose=_linear_transpose)
compat.register_batching(coop_remat_p, _batch)
compat.register_batching(coop_linear_p, _linear_batch)
compat.register_call_rules(coop_remat_p)
# What is planned was checked for keys that are used twice before, and uses them again to compute anew.
compat.register_key_reuse(coop_remat_p, lambda jaxpr, planned, **_: jaxpr if planned is None else None)
compat.register_key_reuse(coop_linear_p, lambda **_: None)
compat.register_lowering(coop_remat_p, lowering.lower)
compat.register_lowering(coop_linear_p, _linear_lower)
