"""Small random JAX functions: nested control flow, calls, derivative rules, names, effects, references, keys.

A function is drawn as a recipe, a nested tuple, so that failures shrink and print as something that can be
pasted into a test: `check(Case(...))`. Who chooses is left open: Hypothesis, which shrinks
(`tests.nightly`), or a seeded generator, from which a number alone brings a program back
(`benchmarks.random_programs`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

ROWS, WIDTH, LAYERS = 32, 16, 3
NAMES = ("h", "k")

# (kind, first operand, second operand, variant, steps of the body): operands count back from the latest.
Step = tuple[str, int, int, int, tuple[Any, ...]]
Recipe = tuple[Step, ...]


class Choices(Protocol):
    """Where a program's choices come from."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""

    def one_of[T](self, options: Sequence[T]) -> T:
        """One of the options."""


class Seeded:
    """The choices that belong to a text, the same in every process."""

    def __init__(self, text: str) -> None:
        self._random = random.Random(text)

    def integer(self, low: int, high: int) -> int:
        """See `Choices`."""
        return self._random.randint(low, high)

    def one_of[T](self, options: Sequence[T]) -> T:
        """See `Choices`."""
        return self._random.choice(options)


class Drawn:
    """The choices that Hypothesis makes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        """See `Choices`."""
        return self._draw(st.integers(low, high))

    def one_of[T](self, options: Sequence[T]) -> T:
        """See `Choices`."""
        return self._draw(st.sampled_from(options))


PLAIN = (
    "unary", "unary", "binary", "dot", "dot", "norm", "name", "rows", "random", "host", "rule", "rule",
    "effect", "chain", "chain", "layernorm", "attention", "literal", "ints", "ref",
)  # fmt: skip
NESTED = (
    "scan", "scan", "stacks", "map", "cond", "switch", "fori", "while", "jit", "checkpoint", "checkpoint",
    "grad", "vmap",
)  # fmt: skip


def recipe_of(
    choices: Choices, depth: int = 2, most: int = 4, plain: tuple[str, ...] = (*PLAIN, "ordered")
) -> Recipe:
    """A function of one to `most` steps, whose bodies nest at most `depth` times.

    JAX itself allows ordered effects at the outermost level only.
    """
    steps = []
    for _ in range(choices.integer(1, most)):
        nested = depth > 0 and choices.integer(0, 2) == 0
        kind = choices.one_of(NESTED if nested else plain)
        body = recipe_of(choices, depth - 1, 2, PLAIN) if nested else ()
        first, second = choices.integer(0, 3), choices.integer(0, 3)
        steps.append((kind, first, second, choices.integer(0, len(RULES) - 1 if kind == "rule" else 2), body))
    return tuple(steps)


def kinds_in(recipe: Recipe) -> set[str]:
    """The kinds of all steps, bodies included."""
    return {step[0] for step in recipe}.union(*(kinds_in(step[4]) for step in recipe))


@functools.cache
def inputs(dtype: str = "float32", rows: int = ROWS) -> tuple[Any, ...]:
    """Weights, rows, row numbers and a key."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4
    x = jax.random.normal(keys[1], (rows, WIDTH))
    return ws.astype(dtype), x.astype(dtype), jnp.arange(rows)[::-1], keys[2]


SEEN: list[int] = []


def loss(recipe: Recipe, ws: Any, x: Any, rows: Any, key: Any) -> Any:
    """A scalar that depends on every value of the recipe's outermost level."""
    return sum(means(recipe, ws, x, rows, key))


def means(recipe: Recipe, ws: Any, x: Any, rows: Any, key: Any) -> list[Any]:
    """Scalars, one of every value of the recipe's outermost level."""
    return [jnp.mean(v.astype(jnp.float32) ** 2) for v in _values(recipe, x, (ws, rows, key))]


def layer(recipe: Recipe, h: Any, w: Any, outer: Any) -> Any:
    """One layer that holds the recipe: rows to rows."""
    return _last(recipe, jnp.tanh(h @ w), outer)


def _values(recipe: Recipe, x: Any, outer: Any) -> list[Any]:
    values = [x]
    for step in recipe:
        a, b = values[-1 - step[1] % len(values)], values[-1 - step[2] % len(values)]
        values.append(_STEPS[step[0]](a, b, step[3], functools.partial(_last, step[4], outer=outer), outer))
    return values


def _last(recipe: Recipe, x: Any, outer: Any) -> Any:
    return _values(recipe, x, outer)[-1]


def _see(tag: Any) -> None:
    SEEN.append(int(np.max(tag)))


@jax.custom_jvp
def _host_sin(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


_host_sin.defjvp(lambda p, t: (_host_sin(*p), jnp.cos(p[0]) * t[0]))


@jax.custom_vjp
def _ruled(x: Any) -> Any:
    return jnp.sin(x)


_ruled.defvjp(lambda x: (jnp.sin(x), (x, checkpoint_name(jnp.cos(x), "h"))), lambda r, g: (g * r[1],))


@jax.custom_jvp
def _pushed(x: Any) -> Any:
    return jnp.tanh(x)


_pushed.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * (1 - jnp.tanh(p[0]) ** 2)))


@jax.custom_vjp
def _straight_through(x: Any) -> Any:
    return jnp.round(x * 8) / 8


_straight_through.defvjp(lambda x: (_straight_through(x), None), lambda _, g: (g,))


@jax.custom_jvp
def _twice(x: Any) -> Any:
    """Its rule is not its derivative, so that a rule that is lost shows, at every order."""
    return jnp.sin(x)


_twice.defjvp(lambda p, t: (_twice(*p), 2 * jnp.cos(p[0]) * t[0]))


@jax.custom_jvp
def _guarded_sqrt(x: Any) -> Any:
    return jnp.sqrt(x)


def _guarded(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    root = _guarded_sqrt(jnp.where(x > 0, x, 1))
    return _guarded_sqrt(x), jnp.where(x > 0, t / (2 * root), 0)


_guarded_sqrt.defjvp(_guarded)


@jax.custom_vjp
def _optimized(x: Any) -> Any:
    return jnp.tanh(x)


_optimized.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),), optimize_remat=True)

RULES = (
    _ruled, _pushed, jax.nn.gelu, _straight_through, _twice, _optimized, jax.nn.relu6,
    lambda x: _guarded_sqrt(jnp.maximum(x, 0) ** 2),
)  # fmt: skip
POLICIES = (
    None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("h")
)  # fmt: skip
UNARY = (jnp.tanh, jnp.sin, lambda x: jnp.exp(-(x**2)))
Body = Callable[[Any], Any]


def _scan(a: Any, b: Any, n: int, body: Body, outer: Any) -> Any:
    def turn(h: Any, w: Any) -> tuple[Any, None]:
        return body(jnp.tanh(h @ w) + b / 2), None

    return lax.scan(turn, a, outer[0], reverse=n == 1, unroll=2 if n == 2 else 1)[0]


def _stacks(a: Any, b: Any, n: int, body: Body, outer: Any) -> Any:
    """A scan without interesting carry whose stacks are read twice."""
    keys = jax.random.split(outer[2], LAYERS)

    def turn(count: Any, wk: Any) -> tuple[Any, Any]:
        w, key = wk
        return count + 1, body(a @ w * jax.random.bernoulli(key, 0.8, a.shape))

    count, ys = lax.scan(turn, n, (outer[0], keys))
    return jnp.sin(ys[0]) + ys[1] * b + ys.mean(0) * count


def _while(a: Any, b: Any, n: int, body: Body, outer: Any) -> Any:
    """Any number of iterations, which JAX cannot differentiate in reverse: its values are constants there."""
    body = functools.partial(body, outer=jax.tree.map(lax.stop_gradient, outer))
    return (
        b + lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), (0, lax.stop_gradient(a)))[1]
    )


def _tag(a: Any, n: int) -> Any:
    """`n`, read from data: JAX itself moves effects on constants out of scans that are differentiated."""
    return jnp.where(lax.stop_gradient(a)[0, 0] > 1e9, 3, jnp.int32(n))


def _effect(a: Any, n: int) -> Any:
    jax.debug.callback(_see, _tag(a, n))
    return a * 0.9


def _ordered(a: Any, n: int) -> Any:
    io_callback(_see, None, _tag(a, n), ordered=True)
    return a * 0.9


def _chain(a: Any, b: Any, n: int, outer: Any) -> Any:
    """What memory is spent on: layers, each of whose values the backward pass reads."""
    for w in outer[0]:
        a = UNARY[n](a @ w) + b / 2
    return a


def _layernorm(a: Any) -> Any:
    centred = a - a.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3)


def _attention(a: Any, b: Any, n: int) -> Any:
    return jax.nn.softmax(a @ b.T / (1 + n), axis=-1) @ b


def _literal(a: Any, n: int) -> Any:
    """Equations that read literals, also twice or alone."""
    if n == 0:
        return lax.select_n(a > 0, lax.mul(a, a), lax.full_like(a, 0.5))
    return (
        jnp.clip(a, -1.0, 1.0) * 2.0 if n == 1 else lax.pad(a, jnp.zeros((), a.dtype), [(0, 0, 0)] * 2) ** 2
    )


def _ints(a: Any, b: Any, n: int, rows: Any) -> Any:
    """Integers on the way: the largest of a row, its sum into other rows, its place in the order."""
    best = lax.stop_gradient(b).argmax(-1)
    if n == 0:
        return a * jax.nn.one_hot(best, WIDTH, dtype=a.dtype) + b
    return b.at[best].add(a) / 4 if n == 1 else jnp.cumsum(a, 0) / (1 + rows[:, None] % 4 + best[:, None])


def _ref(a: Any, b: Any, n: int) -> Any:
    """A reference that is made, written in iterations and read."""
    ref = jax.new_ref(jnp.sin(a))
    for _ in range(n):
        ref[...] = ref[...] * b
    ref[0] = b[0]
    return ref[...] + a


_STEPS: dict[str, Callable[..., Any]] = {
    "unary": lambda a, b, n, body, outer: UNARY[n](a),
    "binary": lambda a, b, n, body, outer: ((a + b) / 2, a * jnp.tanh(b), jnp.maximum(a, b))[n],
    "dot": lambda a, b, n, body, outer: a @ outer[0][n],
    "norm": lambda a, b, n, body, outer: a / jnp.sqrt(1 + (b**2).sum(axis=-1, keepdims=True)),
    "name": lambda a, b, n, body, outer: checkpoint_name(jnp.sin(a), NAMES[n % 2]),
    "rows": lambda a, b, n, body, outer: a[outer[1] % len(a)] + b,
    "random": lambda a, b, n, body, outer: jnp.where(jax.random.bernoulli(outer[2], 0.7, a.shape), a, b / 2),
    "host": lambda a, b, n, body, outer: _host_sin(a),
    "rule": lambda a, b, n, body, outer: RULES[n](a),
    "effect": lambda a, b, n, body, outer: _effect(a, n),
    "ordered": lambda a, b, n, body, outer: _ordered(a, n),
    "chain": lambda a, b, n, body, outer: _chain(a, b, n, outer),
    "layernorm": lambda a, b, n, body, outer: _layernorm(a) + b,
    "attention": lambda a, b, n, body, outer: _attention(a, b, n),
    "literal": lambda a, b, n, body, outer: _literal(a, n),
    "ints": lambda a, b, n, body, outer: _ints(a, b, n, outer[1]),
    "ref": lambda a, b, n, body, outer: _ref(a, b, n),
    "scan": _scan,
    "stacks": _stacks,
    "map": lambda a, b, n, body, outer: lax.map(lambda w: body(a @ w), outer[0]).mean(0) + b,
    "cond": lambda a, b, n, body, outer: lax.cond(a.sum() > 0, body, lambda x: x * 2, b),
    "switch": lambda a, b, n, body, outer: lax.switch(
        outer[1][-1] + n, [body, jnp.sin, lambda x: x @ outer[0][0]], a
    ),
    "fori": lambda a, b, n, body, outer: lax.fori_loop(0, n + 1, lambda i, h: body(h) + outer[0][i].sum(), a),
    "while": _while,
    "jit": lambda a, b, n, body, outer: jax.jit(lambda x, y: body(x) * y)(a, b),
    "checkpoint": lambda a, b, n, body, outer: jax.checkpoint(body, policy=POLICIES[n])(a) + b,
    "grad": lambda a, b, n, body, outer: jax.grad(lambda x: (body(x) * b).sum())(a),
    "vmap": lambda a, b, n, body, outer: jax.vmap(body)(jnp.stack([a, b])).sum(0),
}
