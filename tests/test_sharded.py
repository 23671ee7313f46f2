"""Eight devices: a data-parallel and a fully sharded step of a scanned model hold a budget per device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coop_jax import aot, mark
from coop_jax.remat import remat
from coop_jax.report import report
from passes.jaxpr import compat

ROOT = Path(__file__).resolve().parent.parent

STEP = """
import jax
import jax.numpy as jnp
from jax import lax

def layer(w, x):
    return x + jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1]) * jax.nn.sigmoid(x)

def step(w, x):
    loss = lambda w: (lax.scan(lambda h, w: (layer(w, h), None), x, w)[0] ** 2).mean()
    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value
"""

ON_CPUS = (
    STEP
    + """
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from coop_jax import aot
from coop_jax.remat import remat
from coop_jax.report import report

mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
for weights in (P(), P(None, None, "d")):
    place = NamedSharding(mesh, weights)
    w = jax.device_put(jax.random.normal(jax.random.key(0), (8, 2, 64, 64)) / 8, place)
    x = jax.device_put(jax.random.normal(jax.random.key(1), (4096, 64)), NamedSharding(mesh, P("d")))
    options = {"out_shardings": (place, None)}
    plain = jax.jit(step, **options).lower(w, x).compile()
    memory = aot.memory(plain)
    budget = memory.fixed_bytes + int(0.4 * memory.temp_bytes)
    limited = jax.jit(remat(step, budget=budget), **options).lower(w, x).compile()
    assert aot.memory(limited).total_bytes <= budget
    for a, b in zip(limited(w, x), plain(w, x)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

def mapped(layer, w, x):
    local = lambda w, x: jax.lax.pmean((lax.scan(layer, x, w)[0] ** 2).mean(), "d")
    value = lambda w: jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)
    return jax.value_and_grad(value)(w)

body = lambda h, w: (layer(w, h), None)
w = jax.device_put(w, NamedSharding(mesh, P()))
plain = jax.jit(lambda w, x: mapped(body, w, x)).lower(w, x).compile()
hand = jax.jit(lambda w, x: mapped(jax.checkpoint(body), w, x)).lower(w, x).compile()
budget = aot.memory(hand).total_bytes
limited = jax.jit(remat(lambda w, x: mapped(body, w, x), budget=budget)).lower(w, x).compile()
assert aot.memory(limited).total_bytes <= budget < aot.memory(plain).total_bytes
for a, b in zip(limited(w, x), plain(w, x)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

ws = [jax.random.normal(k, (64, 64)) / 8 for k in jax.random.split(jax.random.key(2), 6)]
ws = [jax.device_put(w, NamedSharding(mesh, P())) for w in ws]

def constrained(ws, x):
    def loss(ws):
        h = x
        for i, w in enumerate(ws):
            by = P("d") if i % 2 else P(None, "d")
            h = jax.lax.with_sharding_constraint(jnp.tanh(h @ w), NamedSharding(mesh, by))
        return (h ** 2).mean()
    return jax.grad(loss)(ws)

def noisy(ws, x, key):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.9, x.shape)
        return (h ** 2).mean()
    return jax.grad(loss)(ws)

key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
memory = aot.memory(jax.jit(noisy).lower(ws, x, key).compile())
budget = int(0.7 * memory.total_bytes)
assert aot.memory(jax.jit(remat(noisy, budget=budget)).lower(ws, x, key).compile()).total_bytes <= budget

total = aot.memory(jax.jit(constrained).lower(ws, x).compile()).total_bytes
for fraction in (0.6, 0.95):
    budget = int(fraction * total)
    assert aot.memory(jax.jit(remat(constrained, budget=budget)).lower(ws, x).compile()).total_bytes <= budget

def sequences(layer, ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = layer(h, w)
        return (h ** 2).mean()
    return jax.grad(loss)(ws)

def block(h, w):
    q, k = h @ w, h @ w.T
    return h + jax.nn.softmax(q @ k.transpose(0, 2, 1)) @ jnp.tanh(h @ w)

ws = [jax.device_put(w, NamedSharding(mesh, P(None, "d"))) for w in ws]
by_width = NamedSharding(mesh, P(None, None, "d"))
x = jax.device_put(jax.random.normal(jax.random.key(4), (8, 512, 64)), by_width)
hand = jax.jit(lambda ws, x: sequences(jax.checkpoint(block), ws, x)).lower(ws, x).compile()
limited = remat(lambda ws, x: sequences(block, ws, x), budget=aot.memory(hand).total_bytes)
limited = jax.jit(limited).lower(ws, x).compile()
joined = "f32[4096,64]"  # of batch and positions: no device needs all of it
assert not any(joined in line for line in limited.as_text().splitlines() if " all-gather(" in line)
"""
)


def test_eight_cpus_hold_a_budget_per_device() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ON_CPUS],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        },
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("weights", [P(), P(None, None, "d")], ids=["data parallel", "fully sharded"])
def test_eight_absent_gpus_hold_a_budget_per_device(h200: str, weights: P) -> None:
    scope: dict[str, Any] = {}
    exec(STEP, scope)
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    place = NamedSharding(mesh, weights)
    specs = (
        jax.ShapeDtypeStruct((8, 2, 256, 256), jnp.float32, sharding=place),
        jax.ShapeDtypeStruct((16384, 256), jnp.float32, sharding=NamedSharding(mesh, P("d"))),
    )

    def memory(f: Callable[..., Any]) -> aot.Memory:
        return aot.memory(jax.jit(f, out_shardings=(place, None)).lower(*specs).compile())

    plain = memory(scope["step"])
    budget = plain.fixed_bytes + int(0.5 * plain.temp_bytes)
    assert memory(remat(scope["step"], budget=budget, device=h200)).total_bytes <= budget


def test_values_of_eight_absent_gpus_wait_on_the_host_as_predicted(h200: str) -> None:
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    width = 16384  # so wide that a product takes as long as its result over the link
    weights = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16, sharding=NamedSharding(mesh, P()))] * 8
    x = jax.ShapeDtypeStruct((65536, width), jnp.bfloat16, sharding=NamedSharding(mesh, P("d")))

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            h = x
            for a, b in zip(weights[::2], weights[1::2], strict=True):
                h = h + jnp.tanh(jnp.tanh(h @ a) @ b)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def compiled(f: Callable[..., Any]) -> Any:
        jitted = jax.jit(f, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))
        return jitted.lower(weights, x).compile()

    plain = aot.memory(compiled(step))
    budget = plain.fixed_bytes + int(0.7 * plain.temp_bytes)
    kept, alone = (compiled(remat(step, budget=budget, host=host)) for host in ("16GiB", None))
    counted, said = aot.memory(kept), report(kept)
    assert counted.total_bytes == said.planned_total_bytes <= budget
    assert counted.host_bytes == said.host.planned_bytes > 0
    assert said.overhead_ratio < report(alone).overhead_ratio


def normalised_step(ws: list[Any], x: Any) -> Any:
    """An update by the gradients over their norm, for which all of them are summed."""

    def loss(ws: list[Any]) -> Any:
        h = x
        for w in ws:
            h = h + jnp.tanh(h @ w)
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(ws)
    scale = 1 / jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    return [w - 0.1 * scale * g for w, g in zip(ws, grads, strict=True)], value


@pytest.mark.parametrize("weights", [P(), P("d")], ids=["data parallel", "fully sharded"])
@pytest.mark.parametrize("said", [True, False], ids=["results said", "results left to XLA"])
def test_donated_places_are_known_when_it_is_planned(h200: str, weights: P, said: bool) -> None:
    """With results left to XLA JAX says only what is given away: budgets seemed tighter by all of it."""
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    place = NamedSharding(mesh, weights)
    ws = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)] * 4
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    shardings = {"out_shardings": ([place] * 4, None)} if said else {}
    step = remat(normalised_step, budget=0.6, device=h200)
    compiled = jax.jit(step, donate_argnums=0, **shardings).lower(ws, x).compile()
    record = mark.record_of(compiled)
    assert record is not None
    assert record.jaxpr is not None
    assert record.jaxpr.alias_bytes == aot.memory(compiled).alias_bytes > 0


def test_a_loss_that_fits_on_each_device_stays_as_it_is(h200: str) -> None:
    """Its parts are planned before anybody knows of the devices: for one's bytes with the values of all, it
    took 65 % more on eight CPUs within twice of what it needs, and kept its budget."""

    def step(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    def loss(ws: list[Any], x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    ws = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))] * 6
    x = jax.ShapeDtypeStruct((65536, 64), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    plain_bytes = aot.memory(jax.jit(step(loss)).lower(ws, x).compile()).total_bytes
    limited = remat(loss, budget=int(1.05 * plain_bytes), device=h200)
    made = report(jax.jit(step(limited)).lower(ws, x).compile())
    assert not made.changed
    assert made.compiled_total_bytes == plain_bytes


def tensor_parallel_step(ws: list[Any], x: Any) -> Any:
    def loss(ws: list[Any]) -> Any:
        h = x
        for up, down in ws:
            h = h + jnp.tanh(jnp.tanh(h @ up) @ down)
        return (h**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


@pytest.mark.parametrize("budget", [0.95, 0.75])
def test_what_a_split_batch_and_a_split_weight_make_is_split_by_both(h200: str, budget: float) -> None:
    """Inner values, the large ones, were taken for four times as large, and what is known for all devices'.

    What was expected is known where nothing needs to be planned, too: what XLA makes of it corrects it.
    """
    mesh = Mesh(np.array(aot.devices(h200, count=8)).reshape(2, 4), ("d", "t"))

    def spec(shape: tuple[int, ...], *by: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*by)))

    ws, x = [(spec((256, 2048), None, "t"), spec((2048, 256), "t", None))] * 4, spec((16384, 256), "d")
    step = jax.jit(remat(tensor_parallel_step, budget=budget, device=h200), donate_argnums=0)
    compiled = step.lower(ws, x).compile()
    record = mark.record_of(compiled)
    assert record is not None
    assert record.jaxpr is not None
    assert record.hlo is not None
    plain = aot.memory(jax.jit(tensor_parallel_step, donate_argnums=0).lower(ws, x).compile())
    assert 0.5 * plain.temp_bytes < record.jaxpr.before_temp_bytes < plain.temp_bytes
    assert 0.2 * record.hlo.cost_ns < record.jaxpr.cost_ns < record.hlo.cost_ns  # collectives are left out
    assert report(compiled).overhead_ratio < 0.1


@pytest.mark.parametrize("weights", [P(), P("d")], ids=["data parallel", "fully sharded"])
def test_collectives_that_nothing_runs_beside_have_no_tables(h200: str, weights: P) -> None:
    """XLA makes them synchronous after its callback: 512 B each were predicted beside what it counts."""
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    place, width = NamedSharding(mesh, weights), 256
    ws = [jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=place)] * 4
    x = jax.ShapeDtypeStruct((4096, width), jnp.float32, sharding=NamedSharding(mesh, P("d")))

    for host in (None, "1GiB"):
        limited = jax.jit(remat(normalised_step, budget=0.75, host=host, device=h200), donate_argnums=0)
        compiled = limited.lower(ws, x).compile()
        assert aot.memory(compiled).total_bytes == report(compiled).planned_total_bytes


@pytest.mark.parametrize(("seed", "by_tensors"), [(0, True), (1, True), (2, False)])
def test_what_a_synchronous_collective_reads_dies_with_it(h200: str, seed: int, by_tensors: bool) -> None:
    """Sharded by tensors, with pages and recomputes drawn: 3 KiB too many were predicted, 1 MiB too few.

    Of a batch that is sharded gradients are summed in their places, 256 B.
    """
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    split = (P(None, "d"), P("d", None)) if by_tensors else (P(), P())
    places = [NamedSharding(mesh, p) for p in split] * 4
    ws = [jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=place) for place in places]
    rows = NamedSharding(mesh, P() if by_tensors else P("d"))
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32, sharding=rows)

    example = h.Example(name="by tensors", fn=normalised_step, args=(ws, x), donate=(0,))
    for rate in (0.3, 1.0):
        found = h.with_pages(example, "cuda", seed=seed, rate=rate, again=0.1)
        assert h.predicted(found.prediction) == h.totals(found.compiled)


def test_a_stack_is_split_over_the_mesh_of_its_type_though_none_is_set() -> None:
    """Else a scan in parts has no type where arguments are split over a mesh with explicit axes."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, "d")))
    aval = jax.jit(lambda x: x).trace(split).jaxpr.in_avals[0]
    (made,) = jax.make_jaxpr(lambda: compat.zeros(aval))().out_avals
    assert made.sharding == aval.sharding
    assert "d" in aval.sharding.spec
