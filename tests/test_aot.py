"""Targets that are not here, and reading compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop
from coop_jax import aot
from coop_jax.errors import UnsupportedError
from passes.cost import DEVICES
from passes.jaxpr import compat

F32 = jnp.float32


def product_chain(x: jax.Array) -> jax.Array:
    """Two products, one temporary of x's size between them."""
    return jnp.tanh(x @ x) @ x


@pytest.mark.parametrize("name", aot.GPUS)
def test_shipped_targets_agree_with_the_cost_model(name: str) -> None:
    target = aot.target(name)
    assert target.name in DEVICES
    assert 79 * 2**30 < target.memory_bytes < 192 * 2**30
    bandwidth = int(target.text.split("memory_bandwidth: ")[1].split()[0])
    assert bandwidth == pytest.approx(DEVICES[name].bytes_per_second)
    smaller = target.with_memory(2**30)
    assert smaller.memory_bytes == 2**30
    assert "device_memory_size: 1073741824\n" in smaller.text
    assert smaller.text != target.text


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'h900' is not known; there are h200, h100, a100, b200"):
        aot.target("h900")


@pytest.mark.parametrize("name", aot.GPUS)
def test_every_target_compiles(h200: str, name: str) -> None:
    spec = jax.ShapeDtypeStruct((256, 256), F32)
    memory = aot.memory(aot.lower_for(product_chain, (spec,), device=name).compile())
    assert memory.argument_bytes == memory.output_bytes == 256 * 256 * 4
    assert memory.temp_bytes >= 256 * 256 * 4
    (device,) = aot.devices(name)
    assert aot.model_for(device.platform, device.device_kind).name == name
    assert aot.device_memory_bytes(device) == aot.target(name).memory_bytes


def test_several_absent_devices(h200: str) -> None:
    devices = aot.devices(h200, count=8)
    assert len(devices) == 8
    assert len(set(devices)) == 8


def test_lowering_takes_arrays_keys_scalars_keywords_and_static_arguments(h200: str) -> None:
    def fn(x: jax.Array, times: int, key: jax.Array, *, bias: float) -> jax.Array:
        for _ in range(times):
            x = x @ x
        return x + jax.random.normal(key, x.shape) + bias

    args = (jnp.ones((128, 128)), 2, jax.random.key(0))
    for device in (None, h200):
        lowered = aot.lower_for(fn, args, device=device, kwargs={"bias": 1.0}, static_argnums=(1,))
        assert aot.memory(lowered.compile()).output_bytes == 128 * 128 * 4


def test_a_jitted_function_keeps_its_donation(h200: str) -> None:
    jitted = jax.jit(product_chain, donate_argnums=0)
    spec = jax.ShapeDtypeStruct((256, 256), F32)
    memory = aot.memory(aot.lower_for(jitted, (spec,), device=h200).compile())
    assert memory.alias_bytes == 256 * 256 * 4
    assert memory.fixed_bytes == 256 * 256 * 4
    # Before JAX 0.12 XLA counts the scalars of the two reducers that add the parts of the products, too.
    scalar_bytes = 2 * 3 * 4 if compat.OLD_RULES else 0
    assert memory.total_bytes == memory.fixed_bytes + memory.temp_bytes + scalar_bytes


def test_memory_is_what_xla_says() -> None:
    compiled = jax.jit(product_chain).lower(jnp.ones((64, 64))).compile()
    memory, stats = aot.memory(compiled), compiled.memory_analysis()
    assert memory.total_bytes == stats.total_allocation_bytes
    assert memory.to_dict()["temp_bytes"] == stats.temp_size_in_bytes
    assert str(memory.total_bytes) in str(memory)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H200", "h200"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA B200", "b200"),
        ("gpu", "NVIDIA GeForce RTX 4090", "h100"),
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5e", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v5p", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU v4", "v4"),
        ("tpu", "TPU7x", "tpu7x"),
        ("tpu", "TPU v9", "v5e"),
        ("metal", "M9", "cpu"),
    ],
)
def test_cost_models(platform: str, kind: str, name: str) -> None:
    assert aot.model_for(platform, kind).name == name


def test_a_missing_plugin_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise NotImplementedError

    absent = aot.target("h200").with_memory(3 * 2**30)
    monkeypatch.setattr(aot.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install --no-deps jax-cuda13-plugin==\d") as caught:
        aot.devices(absent)
    assert f"jax-cuda13-pjrt=={jax.__version__}" in str(caught.value)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UnsupportedError, match="JAX_PLATFORMS=cpu"):
        aot.devices(absent)


def test_the_memory_of_this_machine_is_known() -> None:
    found = aot.device_memory_bytes(jax.devices("cpu")[0])
    assert found is not None
    assert found > 2**28


def test_what_calls_python_is_refused_for_a_device_that_is_absent(h200: str) -> None:
    def checked(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(UnsupportedError, match="calls back into Python"):
        aot.lower_for(checked, [jax.ShapeDtypeStruct((8,), "float32")], device=h200)


@pytest.mark.parametrize("static", [2, -1, (2,)])
def test_one_argument_is_named_static_as_under_jit(static: Any) -> None:
    def scaled(w: jax.Array, x: jax.Array, times: int) -> jax.Array:
        return sum(jnp.tanh(x @ w) for _ in range(times)).sum()

    args = jnp.ones((8, 8)), jnp.ones((4, 8)), 2
    report = coop.plan(scaled, *args, budget="1MiB", static_argnums=static)
    assert (
        report.compiled_total_bytes
        == aot.memory(jax.jit(scaled, static_argnums=2).lower(*args).compile()).total_bytes
    )
    assert coop.pareto(scaled, *args, budgets=[1.0], static_argnums=static, rivals={}).points


@pytest.mark.parametrize("ask", [coop.explain, coop.plan, coop.pareto])
def test_a_device_is_a_name(ask: Any) -> None:
    budget = {"budget": "1MiB"} if ask is coop.plan else {}
    with pytest.raises(coop.UnsupportedError, match="give the name of one"):
        ask(jnp.sin, jnp.ones(3), device=jax.devices()[0], **budget)
