"""`save`, `recompute` and `policy`: what is run twice, what is kept, with the gradient inside and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from coop_jax import aot, mark
from coop_jax.errors import ConstraintError, InfeasibleBudgetError
from coop_jax.planning import plan
from coop_jax.remat import remat
from passes.jaxpr import compat
from passes.jaxpr.constraints import constrain_pair, constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.values import Constraints

KEY = jax.random.key(0)
WS = jax.random.normal(KEY, (5, 64, 64)) / 8
X = jax.random.normal(KEY, (512, 64))
LARGE = "1TiB"
policies = jax.checkpoint_policies


def layer(w: Any, x: Any) -> Any:
    """Of its three large values only the middle one has a name."""
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


def scanned(ws: Any, x: Any) -> Any:
    return (lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2).mean()


def accumulated(ws: Any, x: Any) -> Any:
    """A gradient inside the body of a scan."""
    total, _ = lax.scan(lambda t, rows: (t + jax.grad(scanned)(ws, rows), None), ws * 0, x.reshape(4, -1, 64))
    return total


def inside(f: Callable[..., Any], **options: Any) -> Any:
    """The gradient is a part of the decorated function."""
    return remat(jax.grad(f), **options)


def outside(f: Callable[..., Any], **options: Any) -> Any:
    """The decorated function is differentiated."""
    return jax.grad(remat(f, **options))


def compiled(f: Callable[..., Any]) -> Any:
    return jax.jit(f).lower(WS, X).compile()


def budget_for(f: Callable[..., Any], ratio: float) -> int:
    """Bytes that leave `f` some of the temporaries that it needs plainly."""
    memory = aot.memory(compiled(f))
    return memory.fixed_bytes + int(ratio * memory.temp_bytes)


def counts(program: Any, *words: str) -> tuple[int, ...]:
    """How many instructions of a compiled program are one of some operations, such as "tanh"."""
    return tuple(program.as_text().count(f" {word}(") for word in words)


def recompute(program: Any) -> set[str]:
    """What the plans of both stages recompute."""
    record = mark.record_of(program)
    assert record is not None
    stages = [stage for stage in (record.jaxpr, record.hlo) if stage is not None]
    return {r.op.split()[0] for stage in stages for r in stage.recomputed}


def same(found: Any, expected: Any) -> None:
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("way", [inside, outside])
def test_saved_values_are_not_computed_again(way: Any) -> None:
    budget = budget_for(jax.grad(loss), 0.75)
    held = compiled(way(loss, budget=budget, save="h"))
    assert not any(word in op for op in recompute(held) for word in ("tanh", "dot", "name"))
    assert recompute(held)
    assert counts(held, "tanh") == (len(WS),)
    assert aot.memory(held).total_bytes <= budget
    same(held(WS, X), compiled(jax.grad(loss))(WS, X))


@pytest.mark.parametrize("way", [inside, outside])
def test_the_enforcing_stage_keeps_what_is_saved(way: Any) -> None:
    """Five values of five layers do not fit, whichever stage plans; without them more is recomputed."""
    budget = budget_for(jax.grad(loss), 0.4)
    with pytest.raises(InfeasibleBudgetError, match=r"and save=\('h',\)\.") as refused:
        compiled(way(loss, budget=budget, save=["h"]))
    assert refused.value.constraints == "save=('h',)"
    assert any("save=('h',)" in sentence for sentence in refused.value.advice)
    assert refused.value.least_bytes > 5 * X.nbytes
    free = counts(compiled(way(loss, budget=budget)), "tanh", "dot")
    assert sum(free) > sum(counts(compiled(jax.grad(loss)), "tanh", "dot"))


@pytest.mark.parametrize("way", [inside, outside])
def test_recomputed_values_are_not_kept(way: Any) -> None:
    """Without any need for it, and in every form: neither the value, nor what is computed from it."""
    dropped = compiled(way(loss, budget=LARGE, recompute="h"))
    assert counts(dropped, "tanh") == (2 * len(WS),)
    assert counts(compiled(way(loss, budget=LARGE)), "tanh") == (len(WS),)
    same(dropped(WS, X), compiled(jax.grad(loss))(WS, X))


def shapes_saved(f: Any, constraints: Constraints) -> list[int]:
    """Sizes of what passes from a forward to a backward program, largest first."""

    def forward(ws: Any, x: Any) -> Any:
        out, pullback = jax.vjp(lambda ws: f(ws, x), ws)
        leaves, trees[0] = jax.tree.flatten(pullback)
        return [out, *leaves]

    trees: list[Any] = [None]
    first = jax.make_jaxpr(forward)(WS, X)
    avals = [*first.out_avals[1:], first.out_avals[0]]
    second = jax.make_jaxpr(lambda *v: jax.tree.leaves(jax.tree.unflatten(trees[0], v[:-1])(v[-1])))(*avals)
    held, _ = constrain_pair(inline_calls(first), inline_calls(second), 1, constraints)
    return sorted((compat.aval_nbytes(aval) for aval in held.out_avals[1:]), reverse=True)


@pytest.mark.parametrize("f", [loss, scanned])
def test_a_policy_decides_what_passes_to_the_backward_pass(f: Any) -> None:
    """Nothing but arguments, or a scan's carry; dots; or as without one."""
    stack = len(WS) * X.nbytes
    sizes = {
        name: sum(shapes_saved(f, Constraints(policy=getattr(policies, name))))
        for name in ("nothing_saveable", "dots_saveable", "everything_saveable")
    }
    free = sum(shapes_saved(f, Constraints()))
    arguments = WS.nbytes + X.nbytes
    carries = stack if f is scanned else 0
    assert sizes["nothing_saveable"] <= arguments + carries
    assert stack <= sizes["dots_saveable"] <= stack + arguments + carries + X.nbytes
    assert sizes["everything_saveable"] == free
    assert sum(shapes_saved(f, Constraints(recompute=("h",)))) < free


@pytest.mark.parametrize(("policy", "way"), [("nothing_saveable", outside), ("dots_saveable", inside)])
@pytest.mark.parametrize("f", [loss, scanned])
def test_policies_keep_numbers_and_memory(policy: str, way: Any, f: Any) -> None:
    held = compiled(way(f, budget=LARGE, policy=getattr(policies, policy)))
    by_jax = compiled(jax.grad(jax.checkpoint(f, policy=getattr(policies, policy))))
    same(held(WS, X), by_jax(WS, X))
    assert aot.memory(held).temp_bytes <= 1.05 * aot.memory(by_jax).temp_bytes
    assert counts(held, "dot") >= counts(compiled(jax.grad(f)), "dot")


@pytest.mark.parametrize("way", [inside, outside])
def test_scans_stack_what_is_saved_and_not_what_is_recomputed(way: Any) -> None:
    gradient = compiled(jax.grad(scanned))
    budget = budget_for(jax.grad(scanned), 0.8)
    held = compiled(way(scanned, budget=budget, save="h"))
    assert not {"tanh", "dot_general"} & recompute(held)
    assert recompute(held)
    dropped = compiled(way(scanned, budget=LARGE, recompute="h"))
    assert aot.memory(dropped).temp_bytes < aot.memory(gradient).temp_bytes
    for program in (held, dropped):
        same(program(WS, X), gradient(WS, X))


def test_a_scan_with_saved_values_is_not_cut_into_segments() -> None:
    """Segments would run its first pass twice: what is saved has a stack, or the budget is refused."""
    ws, x = jnp.ones((32, 64, 64)) / 64, jnp.ones((512, 64))

    def lowered(f: Callable[..., Any]) -> Any:
        return jax.jit(f).lower(ws, x)

    fixed = aot.memory(lowered(jax.grad(scanned)).compile()).fixed_bytes
    budget = fixed + 20 * x.nbytes
    free = mark.record_of(lowered(inside(scanned, budget=budget)).compile())
    assert free is not None
    assert free.jaxpr is not None
    assert "segments" in free.jaxpr.planner
    with pytest.raises(InfeasibleBudgetError) as refused:
        lowered(inside(scanned, budget=budget, save="h")).compile()
    assert refused.value.least_bytes >= fixed + len(ws) * x.nbytes


def test_pairs_of_scans_inside_a_scan_are_constrained() -> None:
    plain, dropped = compiled(accumulated), compiled(remat(accumulated, budget=LARGE, recompute="h"))
    assert aot.memory(dropped).temp_bytes < aot.memory(plain).temp_bytes
    same(dropped(WS, X), plain(WS, X))


def nested(ws: Any, x: Any) -> Any:
    return lax.scan(lambda t, rows: (t + scanned(ws, rows), None), 0.0, x.reshape(4, -1, 64))[0]


@pytest.mark.parametrize("options", [{"recompute": "h"}, {"policy": policies.dots_saveable}])
def test_scans_inside_scans_are_constrained(options: dict[str, Any]) -> None:
    """One of the three values of a layer is stacked by both scans, beside the carry."""
    plain, dropped = compiled(jax.grad(nested)), compiled(outside(nested, budget=LARGE, **options))
    assert aot.memory(dropped).temp_bytes < 0.8 * aot.memory(plain).temp_bytes
    same(dropped(WS, X), plain(WS, X))


def test_what_a_checkpoint_inside_saves_is_saved() -> None:
    """The planner neither keeps what it recomputes, nor runs again what its policy saves."""

    def checkpointed(ws: Any, x: Any) -> Any:
        return jax.checkpoint(loss, policy=policies.save_only_these_names("h"))(ws, x)

    plain = compiled(jax.grad(checkpointed))
    memory = aot.memory(plain)
    for way in (inside, outside):
        held = compiled(way(checkpointed, budget=memory.total_bytes))
        assert aot.memory(held).total_bytes <= memory.total_bytes
        assert not {"name", "reduce_precision"} & recompute(held)
        same(held(WS, X), plain(WS, X))
        with pytest.raises(InfeasibleBudgetError, match=r"without what a policy of `jax\.checkpoint` inside"):
            compiled(way(checkpointed, budget=memory.fixed_bytes + 4 * X.nbytes))
    free = compiled(outside(loss, budget=memory.fixed_bytes + 5 * X.nbytes))
    assert recompute(free)


def test_views_of_arguments_may_stand_before_a_checkpoint() -> None:
    def transposed(ws: Any, x: Any) -> Any:
        return jax.checkpoint(loss)(ws.transpose(0, 2, 1), x.reshape(64, -1).T)

    budget = budget_for(jax.grad(transposed), 0.9)
    same(compiled(inside(transposed, budget=budget))(WS, X), jax.jit(jax.grad(transposed))(WS, X))


def test_nothing_asked_changes_nothing() -> None:
    closed = inline_calls(jax.make_jaxpr(jax.grad(loss))(WS, X))
    assert constrain_program(closed, Constraints()) is closed
    assert constrain_program(closed, Constraints(recompute=("k",))) is closed


def test_forward_programs_take_constraints() -> None:
    f = jax.jit(remat(loss, budget=LARGE, save="h", policy=policies.nothing_saveable))
    np.testing.assert_allclose(f(WS, X), loss(WS, X), rtol=1e-5)
    hessian = jax.hessian(remat(lambda s: loss(WS * s, X), budget=LARGE, recompute="h"))(1.0)
    np.testing.assert_allclose(hessian, jax.hessian(lambda s: loss(WS * s, X))(1.0), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "k"}, "no checkpoint_name in the function gives this name; it gives 'h'"),
        ({"recompute": ["h", "k"]}, "'k' in recompute="),
        ({"save": ["h"], "recompute": "h"}, "'h' cannot be in `save` and in `recompute`"),
        ({"save": [1]}, "names are strings"),
        ({"save": 3}, "names are strings"),
        ({"policy": "dots"}, "not callable"),
        ({"offload": ["h"], "save": "h"}, "'h' cannot be in `save` and in `offload`"),
        ({"offload": "k"}, r"'k' in offload=\('k',\): no checkpoint_name"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        jax.jit(outside(loss, budget=LARGE, **options)).lower(WS, X)


def test_a_value_that_cannot_be_computed_twice_is_refused() -> None:
    @jax.custom_jvp
    def from_host(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    from_host.defjvp(lambda p, t: (from_host(*p), jnp.cos(p[0]) * t[0]))

    def f(ws: Any, x: Any) -> Any:
        return (checkpoint_name(from_host(x @ ws[0]), "h") ** 2).sum()

    with pytest.raises(ConstraintError, match=r"pure_callback at .* cannot be recomputed"):
        jax.jit(outside(f, budget=LARGE, recompute="h")).lower(WS, X)


def test_names_of_a_derivative_rule_are_known_to_it_alone() -> None:
    @jax.custom_vjp
    def squared(x: Any) -> Any:
        return x**2

    def forward(x: Any) -> Any:
        return x**2, checkpoint_name(jnp.exp(x), "inner")

    squared.defvjp(forward, lambda e, g: (g * 2 * jnp.log(e),))
    gradient = jax.jit(outside(lambda ws, x: squared(x @ ws[0]).sum(), budget=LARGE, recompute="inner"))
    same(gradient(WS, X), jax.grad(lambda ws: ((X @ ws[0]) ** 2).sum())(WS))


def test_reports_and_plans_name_what_was_asked() -> None:
    def never(*_: Any, **__: Any) -> bool:
        return False

    found = plan(jax.grad(loss), WS, X, budget=LARGE, save="h", policy=never)
    assert found.constraints == "save=('h',), policy=test_reports_and_plans_name_what_was_asked.never"
    assert str(found).startswith("budget 1.00 TiB (1099511627776 B) and save=('h',), policy=")
