"""Hypothesis strategies for small JAX functions: nested control flow, calls, rules, names, effects, keys.

A function is drawn as a recipe, a nested tuple, so that failures shrink and print as something that can be
pasted into a test: `check(Case(...))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from coop_jax import aot
from coop_jax.errors import ConstraintError, InfeasibleBudgetError
from coop_jax.remat import remat

ROWS, WIDTH, LAYERS = 32, 16, 3
NAMES = ("h", "k")

# (kind, first operand, second operand, variant, steps of the body): operands count back from the latest.
Step = tuple[str, int, int, int, tuple[Any, ...]]
Recipe = tuple[Step, ...]

PLAIN = ("unary", "unary", "binary", "dot", "dot", "norm", "name", "rows", "random", "host", "rule", "effect")
NESTED = (
    "scan", "scan", "stacks", "map", "cond", "switch", "fori", "while", "jit", "checkpoint", "checkpoint",
    "grad", "vmap",
)  # fmt: skip


@st.composite
def recipes(
    draw: st.DrawFn, depth: int = 2, most: int = 4, plain: tuple[str, ...] = (*PLAIN, "ordered")
) -> Recipe:
    """A function of one to `most` steps, whose bodies nest at most `depth` times.

    JAX itself allows ordered effects at the outermost level only.
    """
    steps = []
    for _ in range(draw(st.integers(1, most))):
        nested = depth > 0 and draw(st.integers(0, 2)) == 0
        kind = draw(st.sampled_from(NESTED if nested else plain))
        body = draw(recipes(depth=depth - 1, most=2, plain=PLAIN)) if nested else ()
        steps.append((kind, draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 2)), body))
    return tuple(steps)


def inputs() -> tuple[Any, ...]:
    """Weights, rows, row numbers and a key."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4
    return ws, jax.random.normal(keys[1], (ROWS, WIDTH)), jnp.arange(ROWS)[::-1], keys[2]


SEEN: list[int] = []


def loss(recipe: Recipe, ws: Any, x: Any, rows: Any, key: Any) -> Any:
    """A scalar that depends on every value of the recipe's outermost level."""
    values = _values(recipe, x, (ws, rows, key))
    return sum(jnp.mean(v**2) for v in values)


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
    """Any number of turns, which JAX cannot differentiate in reverse: its values are constants there."""
    body = functools.partial(body, outer=jax.tree.map(lax.stop_gradient, outer))
    return (
        b + lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), (0, lax.stop_gradient(a)))[1]
    )


def _effect(a: Any, n: int) -> Any:
    jax.debug.callback(_see, jnp.int32(n))
    return a * 0.9


def _ordered(a: Any, n: int) -> Any:
    io_callback(_see, None, jnp.int32(n), ordered=True)
    return a * 0.9


_STEPS: dict[str, Callable[..., Any]] = {
    "unary": lambda a, b, n, body, outer: UNARY[n](a),
    "binary": lambda a, b, n, body, outer: ((a + b) / 2, a * jnp.tanh(b), jnp.maximum(a, b))[n],
    "dot": lambda a, b, n, body, outer: a @ outer[0][n],
    "norm": lambda a, b, n, body, outer: a / jnp.sqrt(1 + (b**2).sum(axis=-1, keepdims=True)),
    "name": lambda a, b, n, body, outer: checkpoint_name(jnp.sin(a), NAMES[n % 2]),
    "rows": lambda a, b, n, body, outer: a[outer[1]] + b,
    "random": lambda a, b, n, body, outer: jnp.where(jax.random.bernoulli(outer[2], 0.7, a.shape), a, b / 2),
    "host": lambda a, b, n, body, outer: _host_sin(a),
    "rule": lambda a, b, n, body, outer: (_ruled, _pushed, jax.nn.gelu)[n](a),
    "effect": lambda a, b, n, body, outer: _effect(a, n),
    "ordered": lambda a, b, n, body, outer: _ordered(a, n),
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


WAYS = ("inside", "outside", "value", "jvp", "vmap")
RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2)
CONSTRAINTS = ("", "", "", "save", "recompute", "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function, how it is decorated and transformed, and how many of its temporary bytes it may have."""

    recipe: Recipe
    way: str
    ratio: float
    constraint: str = ""


@st.composite
def cases(draw: st.DrawFn, depth: int = 2, most: int = 4) -> Case:
    """Any function in any way within any budget."""
    return Case(
        recipe=draw(recipes(depth=depth, most=most)),
        way=draw(st.sampled_from(WAYS)),
        ratio=draw(st.sampled_from(RATIOS)),
        constraint=draw(st.sampled_from(CONSTRAINTS)),
    )


def check(case: Case) -> str:
    """Compare a case with the undecorated function: values, gradients, effects, bytes.

    Returns:
        "kept", "kept its least" or "refused": whether the budget, or else the least one that the refusal
        names, was kept; "not for JAX" for what JAX itself refuses, such as forward mode through `custom_vjp`.

    Raises:
        AssertionError: something differs, or a budget is broken.
    """
    try:
        plain = _compiled(_transformed(case, lambda f: f))
    except (TypeError, NotImplementedError):
        return "not for JAX"
    expected, seen = _outcome(plain)
    memory = aot.memory(plain)
    budget = memory.fixed_bytes + int(case.ratio * memory.temp_bytes)
    for verdict in ("kept", "kept its least"):
        try:
            compiled = _compiled(_transformed(case, remat_within(budget, case)))
        except InfeasibleBudgetError as refused:
            if refused.least_bytes is None:
                break
            budget = refused.least_bytes
            continue
        except ConstraintError:
            break
        assert aot.memory(compiled).total_bytes <= budget
        found, seen_now = _outcome(compiled)
        assert seen_now == seen
        _assert_same(found, expected)
        return verdict
    return "refused"


def _compiled(f: Callable[..., Any]) -> Any:
    """Compiled without LLVM's optimisations: kernels and buffers are the same."""
    return jax.jit(f).lower(*inputs()).compile({"xla_backend_optimization_level": "0"})


def remat_within(budget: int, case: Case) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of a case."""
    options: dict[str, Any] = {}
    if case.constraint == "policy":
        options["policy"] = jax.checkpoint_policies.dots_saveable
    elif case.constraint and any(step[0] == "name" and step[3] % 2 == 0 for step in case.recipe):
        options[case.constraint] = "h"
    return lambda f: remat(f, budget=budget, **options)


def _transformed(
    case: Case, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    def f(ws: Any, x: Any, rows: Any, key: Any) -> Any:
        return loss(case.recipe, ws, x, rows, key)

    if case.way == "inside":
        return decorate(jax.value_and_grad(f, argnums=(0, 1)))
    if case.way == "outside":
        return jax.value_and_grad(decorate(f), argnums=(0, 1))
    if case.way == "jvp":
        return lambda ws, x, *rest: jax.jvp(lambda ws, x: decorate(f)(ws, x, *rest), (ws, x), (ws, x))
    if case.way == "vmap":
        return lambda ws, x, *rest: jax.vmap(jax.grad(decorate(f)), in_axes=(None, 0, None, None))(
            ws, jnp.stack([x, -x]), *rest
        )
    return decorate(f)


def _outcome(compiled: Any) -> tuple[Any, list[int]]:
    """Results, and what effects reported."""
    SEEN.clear()
    results = jax.block_until_ready(compiled(*inputs()))
    jax.effects_barrier()
    return results, sorted(SEEN)


def _assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale + 1e-9)
