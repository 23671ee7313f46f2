"""What is rewritten before planning because XLA will: a scatter into zeros is added, repeats are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift, lift_seen
from passes.jaxpr.simplify import (
    gather_then_convert,
    scatter_in_place,
    simplified,
    without_repeats,
    without_rounding,
)
from passes.jaxpr.stage import prepare
from passes.jaxpr.straight import as_it_is

ROWS = jnp.arange(12.0).reshape(4, 3)
PICKED = jnp.array([0, 2, 2])


def rewritten(
    function: Callable[..., Any], *args: Any, by: Callable[[Any], Any] = scatter_in_place
) -> tuple[Any, Any]:
    """The open jaxpr before and after, checked to give the same values on `args`."""
    closed = inline_calls(jax.make_jaxpr(function)(*args))
    jaxpr, consts = compat.open_jaxpr(closed)
    after = by(jaxpr)
    values = compat.evaluate(compat.close_jaxpr(after, consts), jax.tree.leaves(args))
    for one, other in zip(values, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    return jaxpr, after


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name.replace("_", "-") for eqn in jaxpr.eqns]


def into_zeros(x: Any) -> Any:
    return jnp.zeros_like(x).at[PICKED].add(jnp.sin(x[PICKED]))


def test_gradient_of_an_indexed_read_is_scattered_into_the_other_gradient():
    def loss(x: Any) -> Any:
        return jnp.sum(x**2) + jnp.sum(x[PICKED] ** 3)

    before, after = rewritten(jax.grad(loss), ROWS)
    assert names(before).count("scatter-add") == names(after).count("scatter-add") == 1
    assert names(before).count("add-any") == 1
    assert "add-any" not in names(after)
    assert scatter_in_place(after) is after


def test_gradients_in_the_body_of_a_loop_are_scattered_in_place_too():
    def microbatches(x: Any, rows: Any) -> Any:
        def body(total: Any, rows: Any) -> Any:
            return total + jax.grad(lambda x: jnp.sum(x**2) + jnp.sum(x[rows] ** 3))(x), None

        return jax.lax.scan(body, jnp.zeros_like(x), rows)[0]

    rows = jnp.stack([PICKED, 1 + PICKED])
    before, after = rewritten(microbatches, ROWS, rows, by=simplified)
    bodies = [loop.params["jaxpr"].jaxpr for jaxpr in (before, after) for loop in jaxpr.eqns[-1:]]
    assert ["add-any" in names(inline_calls(compat.close_jaxpr(body, [])).jaxpr) for body in bodies] == [
        True, False,
    ]  # fmt: skip
    assert simplified(after) is after


LOW = ROWS.astype(jnp.bfloat16)


def gathered_from(jaxpr: Any) -> list[Any]:
    return [eqn.invars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "gather"]


def test_what_is_read_by_index_of_a_wider_copy_is_widened_after_it_is_read():
    """The cross entropy of bfloat16 logits: nothing but the gather would need all of them in float32."""

    def loss(x: Any, mode: str) -> Any:
        scores = x.astype(jnp.float32)
        picked = jnp.take_along_axis(scores, jnp.array([[0], [7], [2], [1]]), axis=-1, mode=mode)
        return jax.nn.logsumexp(scores, axis=-1) - picked[:, 0]

    for mode in ("fill", "clip"):
        before, after = rewritten(lambda x, mode=mode: loss(x, mode), LOW, by=gather_then_convert)
        assert (gathered_from(before), gathered_from(after)) == ([jnp.float32], [jnp.bfloat16])
        assert gather_then_convert(after) is after
    step = jax.value_and_grad(lambda x: loss(x, "clip").sum())
    work = prepare(inline_calls(jax.make_jaxpr(step)(LOW)))
    assert gathered_from(work.jaxpr) == [jnp.bfloat16]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.astype(jnp.int32)[PICKED],
        lambda x: x.astype(jnp.float32).at[PICKED].get(mode="fill", fill_value=0.1),
        lambda x: x.astype(jnp.float32)[jnp.zeros(9, int)],
        lambda x: x.astype(jnp.float16)[PICKED],
    ],
    ids=["to integers", "what is out of bounds is not NaN", "more is read than there is", "narrower"],
)
def test_what_is_read_by_index_stays_where_the_bits_or_bytes_would_be_others(read: Callable[[Any], Any]):
    before, after = rewritten(read, LOW, by=gather_then_convert)
    assert after is before


def test_two_scatters_become_one_chain():
    _, after = rewritten(lambda x: into_zeros(x) + jnp.zeros_like(x).at[0].add(1.0), ROWS)
    assert names(after).count("scatter-add") == 2
    assert "add" not in names(after)[names(after).index("scatter-add") :]


def test_a_scattered_value_that_is_read_twice_stays():
    def twice(x: Any) -> Any:
        scattered = into_zeros(x)
        return x + scattered, scattered * 2.0

    before, after = rewritten(twice, ROWS)
    assert after is before


def test_a_scatter_into_anything_but_zeros_stays():
    before, after = rewritten(lambda x: x + jnp.ones_like(x).at[PICKED].add(2.0), ROWS)
    assert after is before


def test_what_every_layer_computes_for_itself_is_computed_once():
    def layers(x: Any, t: Any) -> Any:
        for scale in (2.0, 2.0, -0.0, 0.0):
            x = jnp.sin(x * jnp.cos(t)) + scale * t
        return x

    before, after = rewritten(layers, ROWS, ROWS[0], by=without_repeats)
    assert names(before).count("cos") == 4
    assert names(after).count("cos") == 1
    assert names(after).count("sin") == 4
    assert names(before).count("mul") - names(after).count("mul") == 1, "twice by 2.0; -0.0 is not 0.0"
    assert without_repeats(after) is after


def test_what_must_stay_is_computed_twice():
    def twice(x: Any) -> Any:
        jax.debug.callback(lambda x: None, x)
        jax.debug.callback(lambda x: None, x)
        held = [jax.lax.optimization_barrier(x) for _ in range(2)]
        named = [checkpoint_name(x, "a") for _ in range(2)]
        return jnp.exp(x), jnp.exp(x), *held, *named

    before, after = rewritten(twice, ROWS, by=without_repeats)
    assert after is before, "effects, barriers, names, and results of the program"


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_repeats_are_no_bytes_and_no_time_of_a_program(device: str):
    """Of the tables of a traced model XLA makes one, so a plan may not count them for each layer."""

    def simulation(u: Any, k: Any) -> Any:
        for _ in range(8):
            u = jnp.fft.irfft(jnp.exp(-(k**2)) * jnp.fft.rfft(u), n=u.shape[-1])
        return (u**2).mean()

    u, k = jnp.ones((4, 64)), jnp.arange(33.0)
    jaxpr = prepare(inline_calls(jax.make_jaxpr(jax.grad(simulation))(u, k))).jaxpr
    lifted = lift(jaxpr, DEVICES[device], as_xla=True)
    once = lift_seen(jaxpr, DEVICES[device])
    assert once.as_seen is None
    if device == "cpu":
        assert lifted.program == once.program
    else:
        assert lifted.jaxpr.eqns == jaxpr.eqns, "planned as they are"
        assert lifted.seen == once.program
        assert len(once.program.ops) < len(lifted.program.ops)
    assert as_it_is(lifted).peak_bytes == as_it_is(once).peak_bytes


def test_rounding_to_the_precision_of_a_value_is_taken_out_and_any_other_stays():
    def saved(x: Any) -> Any:
        kept = jax.lax.reduce_precision(x * 2, 8, 23)
        return jax.lax.reduce_precision(kept + 1, 8, 7)

    before, after = rewritten(saved, ROWS.astype(jnp.float32), by=without_rounding)
    assert names(before).count("reduce-precision") == 2
    assert names(after).count("reduce-precision") == 1
    assert without_rounding(after) is after


def test_what_a_checkpoint_saves_is_not_stored_once_more_on_a_gpu():
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def loss(w: Any, x: Any) -> Any:
        policy = jax.checkpoint_policies.dots_saveable
        return jnp.sum(jax.checkpoint(block, policy=policy)(x, w))

    wide = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    closed = inline_calls(jax.make_jaxpr(jax.grad(loss))(wide, wide))
    jaxpr = compat.open_jaxpr(closed)[0]
    assert "reduce-precision" in names(jaxpr)
    stored = {op.name for op in lift(jaxpr, DEVICES["h200"], as_xla=True).program.ops}
    assert "reduce_precision" not in stored
