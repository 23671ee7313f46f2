"""`shard_map` is planned inside: a forward and a backward one are one body for one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from coop_jax import aot, remat
from coop_jax.module import ModuleFacts
from coop_jax.requests import devices_of
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.shards import Inside, enter

N_DEVICES, N_LAYERS, ROWS, WIDTH = 8, 4, 512, 64
SPECS = (
    jax.ShapeDtypeStruct((N_LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return h + jnp.tanh(jnp.tanh(h @ w) @ w.T), None


def step(mesh: Any, w: Any, x: Any, *, inside: bool, check: bool = True, layer: Any = layer) -> Any:
    """Value and gradient of a scanned net in a `shard_map`; the loss is taken inside of it, or outside."""

    def local(w: Any, x: Any) -> Any:
        h = lax.scan(layer, x, w)[0]
        return lax.pmean((h**2).mean(), "d") if inside else h

    def loss(w: Any) -> Any:
        out = P() if inside else P("d")
        found = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=out, check_vma=check)(w, x)
        return found if inside else (found**2).mean()

    return jax.value_and_grad(loss)(w)


def entered(**how: Any) -> Inside:
    mesh = AbstractMesh((N_DEVICES,), ("d",), axis_types=(AxisType.Auto,))
    found = enter(inline_calls(jax.make_jaxpr(lambda w, x: step(mesh, w, x, **how))(*SPECS)))
    assert found is not None
    return found


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


@pytest.mark.parametrize("check", [True, False])
def test_forward_and_backward_are_one_body_of_one_devices_sizes(check: bool):
    found = entered(inside=True, check=check)
    check_jaxpr(found.jaxpr)
    assert names(found.jaxpr).count("shard_map") == 1
    assert names(found.body).count("scan") == 2
    assert (ROWS // N_DEVICES, WIDTH) in [v.aval.shape for v in found.body.invars]
    check_jaxpr(found.written(found.body))


@pytest.mark.parametrize("check", [True, False])
def test_a_forward_part_that_the_cotangent_needs_stays_and_is_planned_with_the_other(check: bool):
    found = entered(inside=False, check=check)
    check_jaxpr(found.jaxpr)
    assert names(found.jaxpr).count("shard_map") == 2
    assert names(found.body).count("scan") == 2
    assert found.pair is not None
    assert len(found.pair.joint.kept) == 1, "what the loss reads; the rest is passed on inside"


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_shard_map_splits_is_one_devices_part_though_its_caller_says_nothing(inside: bool):
    mesh = AbstractMesh((N_DEVICES,), ("d",), axis_types=(AxisType.Auto,))
    plain = inline_calls(jax.make_jaxpr(lambda w, x: step(mesh, w, x, inside=inside))(*SPECS))
    arguments, outputs = (
        tuple(map(compat.aval_nbytes, avals)) for avals in (plain.in_avals, plain.out_avals)
    )
    facts = ModuleFacts(
        argument_nbytes=arguments, output_nbytes=outputs, argument_on_host=(False,) * len(arguments),
        output_on_host=(False,) * len(outputs), argument_parts=(1,) * len(arguments),
        output_parts=(1,) * len(outputs), finest_parts=1, aliased=(None,) * len(arguments),
        num_devices=N_DEVICES, platforms=("cpu",), device=None,
    )  # fmt: skip
    devices = devices_of(facts, plain)
    assert devices.argument_bytes == arguments[0] + arguments[1] // N_DEVICES
    assert devices.output_bytes == sum(outputs) + facts.table_bytes


def test_collectives_may_run_again_at_the_price_of_what_they_send():
    found = entered(inside=True, check=False)
    ops = lift(found.body, DEVICES["h200"], as_xla=False).program.ops
    reduced = max((op for op in ops if op.name == "psum"), key=lambda op: op.cost_ns)
    sent = 2 * N_LAYERS * WIDTH * WIDTH * 4
    assert reduced.recomputable
    assert reduced.cost_ns > 1e9 * sent / DEVICES["h200"].link_bytes_per_second


@pytest.mark.parametrize("inside", [True, False])
def test_a_decorated_shard_map_needs_no_more_than_a_checkpoint_inside_it(inside: bool):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def compiled(budget: int | None, layer: Any = layer) -> Any:
        def run(w: Any, x: Any) -> Any:
            return step(mesh, w, x, inside=inside, check=False, layer=layer)

        return jax.jit(run if budget is None else remat(run, budget=budget)).lower(*SPECS).compile()

    plain, hand = compiled(None), compiled(None, jax.checkpoint(layer))
    budget = aot.memory(hand).total_bytes
    limited = compiled(budget)
    assert aot.memory(limited).total_bytes <= budget < aot.memory(plain).total_bytes
    values = [jax.random.normal(jax.random.key(0), spec.shape) / 8 for spec in SPECS]
    for found, expected in zip(limited(*values), plain(*values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
