"""How a random function is decorated, transformed, placed and asked for: the rest of a random program.

A way takes a recipe's function and a decorator, and gives the whole program, so that the undecorated
program is the same way with a decorator that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from coop_jax.remat import remat
from tests import programs
from tests.programs import Choices, Recipe

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[..., Any]

DEVICES = 8
SHARDED_ROWS = 128
PLACES = ("one",) * 7 + ("data", "tensor", "inside shard_map", "around shard_map")
DTYPES = ("float32",) * 6 + ("bfloat16",)
CONSTRAINTS = ("", "", "", "", "save", "recompute", "policy")
RATIOS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A function, and all that is asked of it.

    Attributes:
        recipe: see `tests.programs`.
        way: one of `WAYS`.
        ratio: the budget: of the plain program's temporary bytes, beside its arguments and outputs; or of all
            its bytes if `of_total`.
        of_total: what `ratio` is of.
        larger: where between a budget that was kept and the plain program's total a second one lies.
        constraint: "", or the option of `coop.remat` to give.
        place: one of `PLACES`: a device, or how eight are used.
        dtype: of weights and rows.
        fraction: a budget that is asked for as a fraction of the plain program; None for none.
        cached: whether what is refused is asked for again, with JAX's compilation cache at hand.
        exported: whether the program is exported, too, and an exported one decorated.
    """

    recipe: Recipe
    way: str
    ratio: float
    of_total: bool = False
    larger: float = 0.5
    constraint: str = ""
    place: str = "one"
    dtype: str = "float32"
    fraction: float | None = None
    cached: bool = False
    exported: bool = False


def case_of(choices: Choices, depth: int = 2, most: int = 4) -> Case:
    """Any function in any way within any budget."""
    place = choices.one_of(PLACES)
    return Case(
        recipe=programs.recipe_of(choices, depth, most),
        way=choices.one_of(tuple(WAYS)),
        ratio=choices.one_of(RATIOS),
        of_total=choices.integer(0, 1) == 1,
        larger=choices.integer(1, 10) / 10,
        constraint=choices.one_of(CONSTRAINTS),
        place=place,
        dtype=choices.one_of(DTYPES),
        fraction=choices.one_of((None, None, 1.0, 0.5)),
        cached=choices.integer(0, 3) == 0,
        exported=place == "one" and choices.integer(0, 7) == 0,
    )


@st.composite
def cases(draw: st.DrawFn, depth: int = 2, most: int = 4, ways: Sequence[str] = ()) -> Case:
    """Any function on one device, in any way (or one of `ways`) within any budget."""
    drawn = case_of(programs.Drawn(draw), depth, most)
    way = draw(st.sampled_from(ways)) if ways else drawn.way
    return Case(
        recipe=drawn.recipe, way=way, ratio=drawn.ratio, of_total=drawn.of_total,
        constraint=drawn.constraint, dtype=drawn.dtype,
    )  # fmt: skip


def program(case: Case, decorate: Decorator) -> Program:
    """The whole program of a case, a function of `arguments(case)`."""
    whole = WAYS[case.way]
    if case.place == "inside shard_map":
        return _sharded(whole(case.recipe, programs.loss, decorate))
    if case.place == "around shard_map":
        return whole(case.recipe, _mean_over_shards, decorate)
    return whole(case.recipe, programs.loss, decorate)


def donated(case: Case) -> tuple[int, ...]:
    """Which arguments are donated: a step's weights."""
    return (0,) if case.way == "donated step" else ()


def arguments(case: Case) -> tuple[Any, ...]:
    """Weights, rows, row numbers and a key, placed; a copy of the weights where they are donated."""
    ws, x, rows, key = programs.inputs(case.dtype, programs.ROWS if case.place == "one" else SHARDED_ROWS)
    if case.place != "one":
        mesh, split = _mesh(case.place)
        weights = PartitionSpec(None, None, "m") if case.place == "tensor" else PartitionSpec()
        ws = jax.device_put(ws, NamedSharding(mesh, weights))
        x, rows = jax.device_put((x, rows), NamedSharding(mesh, split))
        key = jax.device_put(key, NamedSharding(mesh, PartitionSpec()))
    return ws + 0 if donated(case) else ws, x, rows, key


def decorator(budget: int | float, case: Case) -> Decorator:
    """The decorator of a case."""
    options: dict[str, Any] = {}
    if case.constraint == "policy":
        options["policy"] = jax.checkpoint_policies.dots_saveable
    elif case.constraint and any(step[0] == "name" and step[3] % 2 == 0 for step in case.recipe):
        options[case.constraint] = "h"
    return lambda f: remat(f, budget=budget, **options)


def constrained(case: Case) -> bool:
    """True if more than a budget is asked of the program."""
    return case.constraint == "policy" or (
        case.constraint != "" and any(step[0] == "name" and step[3] % 2 == 0 for step in case.recipe)
    )


def _mesh(place: str) -> tuple[jax.sharding.Mesh, PartitionSpec]:
    """Eight devices, and how rows are split over them."""
    auto = jax.sharding.AxisType.Auto
    if place == "tensor":
        return jax.make_mesh((DEVICES // 2, 2), ("d", "m"), axis_types=(auto, auto)), PartitionSpec("d")
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(auto,)), PartitionSpec("d")


def _sharded(whole: Program) -> Program:
    """`whole` on each device's own rows, its results side by side."""
    mesh, split = _mesh("")
    specs = (PartitionSpec(), split, split, PartitionSpec())
    return jax.shard_map(
        lambda *args: jax.tree.map(lambda leaf: leaf[None], whole(*args)),
        mesh=mesh, in_specs=specs, out_specs=split,
    )  # fmt: skip


def _mean_over_shards(recipe: Recipe, *args: Any) -> Any:
    """The loss by `shard_map`, each device with its own rows."""
    mesh, split = _mesh("")
    return jax.shard_map(
        lambda *args: lax.pmean(programs.loss(recipe, *args), "d"),
        mesh=mesh, in_specs=(PartitionSpec(), split, split, PartitionSpec()), out_specs=PartitionSpec(),
    )(*args)  # fmt: skip


Loss = Callable[..., Any]


def _of(recipe: Recipe, loss: Loss) -> Program:
    return lambda ws, x, rows, key: loss(recipe, ws, x, rows, key)


def _inside(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return decorate(jax.value_and_grad(_of(recipe, loss), argnums=(0, 1)))


def _outside(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return jax.value_and_grad(decorate(_of(recipe, loss)), argnums=(0, 1))


def _step(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    def step(ws: Any, *rest: Any) -> Any:
        value, gradient = jax.value_and_grad(_of(recipe, loss))(ws, *rest)
        return ws - gradient / 8, value

    return decorate(step)


def _aux(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    def f(ws: Any, x: Any, rows: Any, key: Any) -> Any:
        value = loss(recipe, ws, x, rows, key)
        return value, {"twice": 2 * value, "row": x[rows[0]], "nothing": None, "three": 3}

    return lambda *args: jax.value_and_grad(decorate(f), has_aux=True)(*args)


def _optimizer(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    def whole(ws: Any, *rest: Any) -> Any:
        gradient = jax.grad(decorate(_of(recipe, loss)))(ws, *rest)
        return ws - jnp.tanh(gradient) * jnp.sqrt(jnp.vdot(gradient, gradient) + 1e-3)

    return whole


def _jvp(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = decorate(_of(recipe, loss))
    return lambda ws, x, *rest: jax.jvp(lambda ws, x: f(ws, x, *rest), (ws, x), (ws, x))


def _linearize(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = decorate(_of(recipe, loss))

    def whole(ws: Any, x: Any, *rest: Any) -> Any:
        value, pushforward = jax.linearize(lambda ws, x: f(ws, x, *rest), ws, x)
        return value, pushforward(ws, x), pushforward(ws, 2 * x)

    return whole


def _vmap(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = decorate(_of(recipe, loss))
    return lambda ws, x, *rest: jax.vmap(f, in_axes=(None, 0, None, None))(ws, _pair(x), *rest)


def _vmap_of_grad(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = jax.grad(decorate(_of(recipe, loss)))
    return lambda ws, x, *rest: jax.vmap(f, in_axes=(None, 0, None, None))(ws, _pair(x), *rest)


def _grad_of_vmap(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = jax.vmap(decorate(_of(recipe, loss)), in_axes=(None, 0, None, None))
    return lambda ws, x, *rest: jax.grad(lambda ws: f(ws, _pair(x), *rest).sum())(ws)


def _pair(x: Any) -> Any:
    return jnp.stack([x, -x])


def _in_turns(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = jax.grad(decorate(_of(recipe, loss)))
    return _accumulated(f)


def _turns_inside(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return decorate(_accumulated(jax.grad(_of(recipe, loss))))


def _accumulated(gradient: Program) -> Program:
    """The sum of gradients over batches, in a scan."""

    def whole(ws: Any, x: Any, *rest: Any) -> Any:
        batches = jnp.stack([x, -x, x / 2])
        return lax.scan(lambda c, x: (c + gradient(ws, x, *rest), None), jnp.zeros_like(ws), batches)[0]

    return whole


def _layers(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    """A scan over decorated layers; `loss` is not looked at, so under `shard_map` it is each device's own."""
    f = decorate(lambda h, w, *outer: programs.layer(recipe, h, w, outer))

    def deep(ws: Any, x: Any, *rest: Any) -> Any:
        last = lax.scan(lambda h, w: (f(h, w, ws, *rest), None), x, ws)[0]
        return jnp.mean(last.astype(jnp.float32) ** 2)

    return jax.grad(deep)


def _scaled(recipe: Recipe, loss: Loss) -> Program:
    """A function of one number for each layer."""
    return lambda s, ws, *rest: loss(recipe, ws * s[:, None, None].astype(ws.dtype), *rest)


def _ones() -> Any:
    return jnp.ones(programs.LAYERS)


def _jacrev(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = decorate(lambda *args: loss(recipe, *args) * jnp.arange(1.0, 4.0))
    return lambda *args: jax.jacrev(f)(*args)


def _jacfwd(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return lambda *args: jax.jacfwd(decorate(_scaled(recipe, loss)))(_ones(), *args)


def _hessian(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return lambda *args: jax.hessian(decorate(_scaled(recipe, loss)))(_ones(), *args)


def _forward_over_reverse(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    gradient = jax.grad(decorate(_of(recipe, loss)))
    return lambda ws, *rest: jax.jvp(lambda ws: gradient(ws, *rest), (ws,), (ws,))[1]


def _reverse_over_reverse(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    gradient = jax.grad(decorate(_of(recipe, loss)))
    return lambda ws, *rest: jax.grad(lambda ws: jnp.vdot(gradient(ws, *rest), jnp.cos(ws)))(ws)


def _reverse_over_forward(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = decorate(_of(recipe, loss))
    return lambda ws, *rest: jax.grad(lambda ws: jax.jvp(lambda ws: f(ws, *rest), (ws,), (ws,))[1])(ws)


def _second_inside(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return decorate(_forward_over_reverse(recipe, loss, lambda f: f))


def _two(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = _of(recipe, loss)
    first, second = jax.grad(decorate(f)), jax.grad(decorate(lambda *args: f(*args) ** 2))
    return lambda ws, x, *rest: (first(ws, x, *rest), second(ws, x / 2, *rest))


def _nested(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return decorate(jax.grad(decorate(_of(recipe, loss))))


def _in_cond(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    gradient = jax.grad(decorate(_of(recipe, loss)))
    return lambda ws, x, *rest: lax.cond(
        x.sum() > 0, lambda: gradient(ws, x, *rest), lambda: gradient(ws, -x, *rest)
    )


def _jit_in_jit(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    f = jax.jit(decorate(jax.jit(_of(recipe, loss))))
    return jax.jit(jax.grad(f))


def _in_checkpoint(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    return jax.grad(jax.checkpoint(decorate(_of(recipe, loss))))


def _statistics(recipe: Recipe, loss: Loss, decorate: Decorator) -> Program:
    """A reference among the arguments, which counts what goes by."""

    def f(ws: Any, ref: Any, *rest: Any) -> Any:
        ref[...] += lax.stop_gradient(ws).sum().astype(jnp.float32)
        return loss(recipe, ws, *rest)

    def whole(ws: Any, *rest: Any) -> Any:
        ref = jax.new_ref(jnp.float32(1))
        gradient = jax.grad(decorate(f))(ws, ref, *rest)
        return gradient, ref[...]

    return whole


WAYS: dict[str, Callable[[Recipe, Loss, Decorator], Program]] = {
    "value": lambda recipe, loss, decorate: decorate(_of(recipe, loss)),
    "grad inside": _inside,
    "grad outside": _outside,
    "donated step": _step,
    "has_aux": _aux,
    "optimizer around": _optimizer,
    "jvp": _jvp,
    "linearize": _linearize,
    "vmap": _vmap,
    "vmap of grad": _vmap_of_grad,
    "grad of vmap": _grad_of_vmap,
    "accumulation outside": _in_turns,
    "accumulation inside": _turns_inside,
    "scanned layers": _layers,
    "jacrev": _jacrev,
    "jacfwd": _jacfwd,
    "hessian": _hessian,
    "forward over reverse": _forward_over_reverse,
    "reverse over reverse": _reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
    "second order inside": _second_inside,
    "two functions": _two,
    "nested": _nested,
    "in cond": _in_cond,
    "jit in jit": _jit_in_jit,
    "in jax.checkpoint": _in_checkpoint,
    "reference argument": _statistics,
}
