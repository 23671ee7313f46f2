"""Programs at their corners: operands that are literals, or twice the same; no elements, or one; odd results.

`corners` takes a jaxpr apart: each variant has one operand, or result, of one equation replaced, also inside
the bodies of control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import check_jaxpr

from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.jaxpr.rewrite import bodies_of, with_bodies

N = 4
Variants = Iterator[tuple[str, Any]]


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _norm(x: Any) -> Any:
    """As a layer norm computes its variance: the derivative of `maximum` selects among literals."""
    variance = jnp.maximum(0.0, jnp.mean(x**2, -1, keepdims=True) - jnp.mean(x, -1, keepdims=True) ** 2)
    return x * lax.rsqrt(variance + 1e-6)


def _barriers(x: Any, y: Any) -> Any:
    kept = lax.optimization_barrier((jnp.tanh(x), x, y))
    return [*kept, kept[0] @ lax.optimization_barrier((kept[0], kept[1]))[1]]


def _reshaped(x: Any) -> Any:
    y = x @ x
    return y.reshape(-1), lax.copy_p.bind(y), lax.squeeze(jnp.expand_dims(y, 0), [0]), y.T, lax.rev(y, [0])


def _converted(x: Any) -> Any:
    half = (x @ x).astype(jnp.bfloat16)
    return half, (jnp.sin(x) @ x).astype(jnp.bfloat16) @ half


def _sliced(x: Any, i: Any) -> Any:
    h = jnp.tanh(x)
    return (
        h[: h.shape[0] // 2],
        lax.dynamic_slice(jnp.sin(x), (i, i), x.shape),
        jnp.take(h, i, 0, mode="clip"),
    )


_ROW = lax.ScatterDimensionNumbers(
    update_window_dims=(0,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def _scattered(x: Any, y: Any, i: Any) -> Any:
    h, u = jnp.tanh(x), jnp.sin(y[:1])
    added = lax.scatter_add(jnp.zeros_like(x), i[None], u[0], _ROW) + h @ y
    return (
        added,
        lax.scatter(h, i[None], u[0], _ROW),
        lax.dynamic_update_slice(h, u, (i, i)),
        h.at[0].add(u[0]),
    )


def _convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(jnp.tanh(x), jnp.sin(w), (1, 1), "SAME").sum()


def _reduced(x: Any) -> Any:
    window = lax.reduce_window(x, 0.0, lax.add, (1, 1), (1, 1), "SAME")
    return jnp.tanh(x).sum(), jnp.cumsum(jnp.sin(x), 0), window, jnp.sort(x, 0), jnp.all(x > 0)


def _stacked(x: Any) -> Any:
    return jnp.tile(jnp.tanh(x), (2, 1)) @ x, jnp.stack([jnp.sin(x), x]).sum(0), jnp.concatenate([x, x]) @ x


def _keys(key: Any, x: Any) -> Any:
    again = jax.random.wrap_key_data(jax.random.key_data(key))
    return jax.random.normal(jax.random.fold_in(key, 1), x.shape) * x, jax.random.split(again)


def _named(x: Any) -> Any:
    return jax.grad(lambda x: (checkpoint_name(jnp.tanh(x), "h") @ checkpoint_name(x @ x, "k")).sum())(x)


def _chosen(x: Any, y: Any) -> Any:
    return jnp.where(x > 0, jnp.exp(x), y), lax.clamp(0.0, x, y), lax.nextafter(x, y)


def _cond(p: Any, x: Any, y: Any) -> Any:
    def loss(x: Any, y: Any) -> Any:
        return lax.cond(p > 0, lambda x, y: (jnp.sin(x) @ y).sum(), lambda x, y: jnp.exp(x).sum(), x, y)

    return jax.value_and_grad(loss, (0, 1))(x, y)


def _while(x: Any, n: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, jnp.sin(x)))


def _scan(ws: Any, x: Any, c: Any) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        def turn(h: Any, w: Any) -> tuple[Any, Any]:
            return (jnp.tanh(h[0] @ w) * jnp.exp(h[0]) * c, h[1] + 1), jnp.sin(h[0])

        h, ys = lax.scan(turn, (x, 0), ws)
        return h[0].sum() + ys.sum()

    return jax.value_and_grad(loss)(ws, x)


STRAIGHT: dict[str, tuple[Any, ...]] = {
    "elementwise": (
        lambda x, y: ((jnp.tanh(x) * y + jnp.exp(x - y)).sum(0), jnp.exp(x)),
        f32(N, N),
        f32(N, N),
    ),
    "softmax": (lambda x: (jax.nn.softmax(x @ x) ** 2).sum(), f32(N, N)),
    "norm": (lambda x: jax.grad(lambda x: (_norm(x) * jnp.exp(x)).sum())(x), f32(N, N)),
    "barriers": (_barriers, f32(N, N), f32(N, N)),
    "reshaped": (_reshaped, f32(N, N)),
    "converted": (_converted, f32(N, N)),
    "sliced": (_sliced, f32(N, N), i32()),
    "gathered": (lambda x, r: jax.grad(lambda x: (jnp.tanh(x)[r] * x).sum())(x), f32(N, N), i32(N)),
    "scattered": (_scattered, f32(N, N), f32(N, N), i32()),
    "dot": (lambda x, y: jnp.tanh(x) @ jnp.sin(y) @ x, f32(N, N), f32(N, N)),
    "convolved": (_convolved, f32(2, 3, N, N), f32(4, 3, 3, 3)),
    "reduced": (_reduced, f32(N, N)),
    "stacked": (_stacked, f32(N, N)),
    "keys": (_keys, jax.eval_shape(lambda: jax.random.key(0)), f32(N, N)),
    "named": (_named, f32(N, N)),
    "chosen": (_chosen, f32(N, N), f32(N, N)),
    "iota": (lambda x: lax.iota(jnp.float32, x.shape[0]) @ x, f32(N, N)),
    "factors": (lambda x: (jnp.linalg.cholesky(x), jnp.linalg.qr(x), jnp.fft.fft(x)), f32(N, N)),
    "effect": (lambda x: (jax.debug.print("{}", x.sum()), x @ x)[1], f32(N, N)),
    "call": (lambda x, y: jax.jit(lambda a, b: (a, b, 1.0, a @ b))(x, y), f32(N, N), f32(N, N)),
}
BODIES: dict[str, tuple[Any, ...]] = {
    "cond": (_cond, f32(), f32(N, N), f32(N, N)),
    "switch": (lambda i, x: lax.switch(i, [jnp.sin, lambda x: x @ x], jnp.tanh(x)), i32(), f32(N, N)),
    "while": (_while, f32(N, N), i32()),
    "scan": (_scan, f32(3, N, N), f32(N, N), f32()),
}


def traced(function: Callable[..., Any], *specs: Any, n: int = N) -> tuple[Any, list[Any]]:
    """An open jaxpr, calls inlined, and its constants; axes of `N` elements have `n`."""
    resized = [
        s if jnp.issubdtype(s.dtype, jax.dtypes.prng_key)
        else jax.ShapeDtypeStruct(tuple(n if k == N else k for k in s.shape), s.dtype)
        for s in specs
    ]  # fmt: skip
    return compat.open_jaxpr(inline_calls(jax.make_jaxpr(function)(*resized)))


def corners(jaxpr: Any) -> Variants:
    """(what was done, open jaxpr) for every operand of every equation, and for the program's results."""
    yield from _variants(jaxpr)
    yield from odd_results(jaxpr)


def odd_results(jaxpr: Any) -> Variants:
    """The program as it is, and with other results."""
    yield "as it is", jaxpr
    literal = compat.literal(np.float32(3))
    outs, eqns = list(jaxpr.outvars), jaxpr.eqns
    every = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, compat.DropVar)]
    for k in range(len(outs)):
        yield f"result {k} unread", compat.rebuild(jaxpr, eqns=eqns, outvars=[*outs[:k], *outs[k + 1 :]])
    odd = [*outs, literal, *outs, *jaxpr.invars, *jaxpr.invars]
    yield "results twice, with arguments and a literal", compat.rebuild(jaxpr, eqns=eqns, outvars=odd)
    yield "every value a result", compat.rebuild(jaxpr, eqns=eqns, outvars=every)
    yield "no equations", compat.rebuild(jaxpr, eqns=[], outvars=[*jaxpr.invars, literal])
    yield "no results", compat.rebuild(jaxpr, eqns=eqns, outvars=[])


def _variants(jaxpr: Any) -> Variants:
    for i, eqn in enumerate(jaxpr.eqns):
        for what, new in (*_operands(eqn), *_bodies(eqn)):
            eqns = [*jaxpr.eqns[:i], new, *jaxpr.eqns[i + 1 :]]
            variant = compat.rebuild(jaxpr, eqns=eqns, outvars=jaxpr.outvars)
            if _is_well_typed(variant):
                yield f"{eqn.primitive.name} {i}: {what}", variant


def _operands(eqn: Any) -> Variants:
    literals = [_literal(v) for v in eqn.invars]
    for k, literal in enumerate(literals):
        if literal is not eqn.invars[k]:
            yield f"operand {k} a literal", _with(eqn, {k: literal})
    if len(literals) > 1:
        yield "all operands literals", eqn.replace(invars=literals)
    for j, k in combinations(range(len(eqn.invars)), 2):
        one, other = eqn.invars[j], eqn.invars[k]
        if compat.is_variable(one) and one is not other and str(one.aval) == str(other.aval):
            yield f"operand {k} as {j}", _with(eqn, {k: one})


def _bodies(eqn: Any) -> Variants:
    bodies = list(bodies_of(eqn)) if eqn.primitive.name in CONTROL_FLOW else []
    for b, body in enumerate(bodies):
        inner, consts = compat.open_jaxpr(body)
        for what, variant in (*_variants(inner), *_results(inner)):
            closed = compat.close_jaxpr(variant, consts)
            yield f"body {b}: {what}", with_bodies(eqn, [*bodies[:b], closed, *bodies[b + 1 :]])


def _results(body: Any) -> Variants:
    """A body's results: literals, its own inputs, and the same value twice."""
    outs = list(body.outvars)
    for k, v in enumerate(outs):
        alike = [u for u in (*body.invars[:3], *outs) if u is not v and str(u.aval) == str(v.aval)]
        for n, new in enumerate([_literal(v), *alike][:3]):
            outvars = [*outs[:k], new, *outs[k + 1 :]]
            yield f"result {k} another {n}", compat.rebuild(body, eqns=body.eqns, outvars=outvars)


def _literal(atom: Any) -> Any:
    """A literal in the place of a variable; the atom itself for a literal or a key."""
    dtype = getattr(atom.aval, "dtype", None)
    if not compat.is_variable(atom) or dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return atom
    return compat.literal(np.ones(atom.aval.shape, dtype))


def _with(eqn: Any, changed: dict[int, Any]) -> Any:
    return eqn.replace(invars=[changed.get(k, v) for k, v in enumerate(eqn.invars)])


def _is_well_typed(jaxpr: Any) -> bool:
    """False where JAX itself does not take the variant."""
    try:
        check_jaxpr(jaxpr)
    except Exception:  # whatever a primitive's own rule raises
        return False
    return True
