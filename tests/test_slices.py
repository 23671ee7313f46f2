"""What the slices of scans cost, and what fills their stacks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from coop_jax import aot
from passes.cost import DEVICES
from passes.hlo import cost, graph, proto
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import inner_work, lift_seen
from passes.jaxpr.slices import filling, with_slices
from passes.jaxpr.stage import prepare
from passes.jaxpr.straight import lift_as_xla

LAYERS, WIDTH = 6, 256
STACKS = jax.ShapeDtypeStruct((LAYERS, 1024, WIDTH), jnp.float32)


def layer(x: Any, w: Any) -> Any:
    h = jax.nn.gelu(x @ w["up"])
    return x + jnp.tanh(h @ w["down"]) * jax.nn.sigmoid(x) + w["bias"], None


def gradient(*, checkpointed: bool) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, ws)[0] ** 2)

    return jax.value_and_grad(loss)


def arguments(rows: int) -> tuple[Any, Any]:
    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    ws = {
        "up": spec(LAYERS, WIDTH, 2 * WIDTH),
        "down": spec(LAYERS, 2 * WIDTH, WIDTH),
        "bias": spec(LAYERS, WIDTH),
    }
    return ws, spec(rows, WIDTH)


def scan_of(function: Any, *args: Any) -> Any:
    closed = inline_calls(jax.make_jaxpr(function)(*args))
    return next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")


def test_a_body_with_its_slices_does_what_an_iteration_does():
    def body(carry: Any, x: Any) -> Any:
        return carry * 2 + x["a"], (carry, jax.random.uniform(x["key"], (2,)), carry > x["a"])

    xs = {"a": jnp.arange(12.0).reshape(4, 3), "key": jax.random.split(jax.random.key(0), 4)}
    function = lambda c, xs: lax.scan(body, c, xs)  # noqa: E731
    want = jax.tree.leaves(function(jnp.ones(3), xs))
    scan = scan_of(function, jnp.ones(3), xs)
    closed = scan.params["jaxpr"]
    sliced, carried = with_slices(closed.jaxpr, *compat.scan_sizes(scan))
    assert carried == (2, 1 + 1 + 3)
    stacks = [v[:2] for v in jax.tree.leaves(xs)]  # it is written for stacks of two
    state = [jnp.ones(3), jnp.uint32(0), *(jnp.zeros_like(v[:2]) for v in want[1:])]
    for _ in range(2):
        state = jax.core.eval_jaxpr(sliced, [], *stacks, *state)
    assert int(state[1]) == 2
    for stack, whole in zip(state[2:], want[1:], strict=True):
        np.testing.assert_allclose(stack, whole[:2], rtol=1e-6)


def test_what_is_computed_elementwise_is_written_to_its_stack_by_the_kernel_that_computes_it():
    spec = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def kernels(slice_of: Any) -> list[str]:
        scan = scan_of(lambda x: lax.scan(lambda c, _: (c * 0.5, slice_of(c)), x, length=4), spec)
        body, carried = with_slices(scan.params["jaxpr"].jaxpr, *compat.scan_sizes(scan))
        return [op.name for op in lift_seen(body, DEVICES["h200"], carried=carried).program.ops]

    counter = ["add"]
    assert sorted(kernels(jnp.sin)) == sorted([*counter, "mul", "dynamic_update_slice"])
    assert sorted(kernels(lambda c: c @ c)) == sorted(
        [*counter, "mul", "dot_general", "dynamic_update_slice"]
    )


def test_a_slice_that_a_barrier_holds_is_copied_once():
    def body(c: Any, w: Any) -> Any:
        held = lax.optimization_barrier(w)
        return c @ held, None

    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    scan = scan_of(lambda c, ws: lax.scan(body, c, ws), spec, jax.ShapeDtypeStruct((4, 64, 64), jnp.float32))
    sliced, carried = with_slices(scan.params["jaxpr"].jaxpr, *compat.scan_sizes(scan))
    ops = lift_seen(sliced, DEVICES["h200"], carried=carried).program.ops
    assert {op.name: op.cost_ns > 0 for op in ops if op.name in ("dynamic_slice", "squeeze")} == {
        "dynamic_slice": True, "squeeze": False,
    }  # fmt: skip


def test_stacks_of_one_form_are_filled_together_or_by_copies():
    def fill(device: str, count: int) -> int:
        stack = scan_of(lambda x: lax.scan(lambda c, _: (c, c), x, length=6), STACKS).outvars[-1]
        return filling([stack] * count, DEVICES[device])[0]

    one = fill("cpu", 1)
    assert fill("cpu", 3) == pytest.approx(5 * one, rel=0.01), "a copy reads and writes"
    assert fill("h200", 1) < fill("h200", 3) <= 3 * fill("h200", 1) - 2 * DEVICES["h200"].launch_ns
    assert fill("v5e", 3) == 0


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("device", "rows"), [("cpu", 1024), ("h200", 65536)])
def test_scans_cost_what_their_kernels_do(device: str, rows: int, checkpointed: bool, request: Any):
    function, args, model = gradient(checkpointed=checkpointed), arguments(rows), DEVICES[device]
    if device == "cpu":
        compiled = jax.jit(function).lower(*args).compile()
    else:
        compiled = aot.lower_for(function, args, device=request.getfixturevalue(device)).compile()
    scheduled = graph.read(proto.parse(aot.final_module(compiled)))
    kernels_ns = cost.computation_ns(scheduled, scheduled.entry, model)
    jaxpr = prepare(inline_calls(jax.make_jaxpr(function)(*args))).jaxpr
    assert lift_as_xla(jaxpr, model).program.cost_ns == pytest.approx(kernels_ns, rel=0.06)


def test_a_loop_without_stacks_costs_what_its_iterations_do():
    scan = scan_of(lambda x: lax.fori_loop(0, 5, lambda _, c: jnp.sin(c), x), STACKS)
    body, device = scan.params["jaxpr"].jaxpr, DEVICES["h200"]
    once = lift_seen(body, device, carried=compat.scan_sizes(scan)).program.cost_ns
    # Their number is counted by a kernel of its own.
    assert 0 <= inner_work(body, device, compat.scan_sizes(scan)).cost_ns - once <= 1.1 * device.launch_ns
