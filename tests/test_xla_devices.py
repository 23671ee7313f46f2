"""Programs for a GPU that is not here, and programs over several devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coop_jax import aot, mark
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.remat import remat
from tests.models import chain_loss as loss
from tests.models import chain_step as step

N, LAYERS = 256, 4
PARAMS = [jax.ShapeDtypeStruct((N, N), jnp.float32) for _ in range(LAYERS)]
BATCH = jax.ShapeDtypeStruct((2048, N), jnp.float32)


def compiled_for(device: str, function: Any, **options: Any) -> Any:
    return aot.lower_for(jax.jit(function, **options), (PARAMS, BATCH), device=device).compile()


@pytest.mark.parametrize("taken", [False, True], ids=["step", "value_and_grad"])
def test_an_absent_gpu_keeps_the_budget(h200: str, taken: bool) -> None:
    plain = jax.value_and_grad(loss) if taken else step
    decorated = jax.value_and_grad(remat(loss, budget=0.75)) if taken else remat(step, budget=0.75)
    options = {} if taken else {"donate_argnums": 0}
    total = aot.memory(compiled_for(h200, plain, **options)).total_bytes
    compiled = compiled_for(h200, decorated, **options)
    record = mark.record_of(compiled)
    assert record is not None
    assert record.device_name == "h200"
    assert (record.baseline_total_bytes, record.baseline_compiled) == (total, True)
    assert aot.memory(compiled).total_bytes <= record.budget_bytes == int(0.75 * total)


def test_an_absent_gpu_refuses_the_impossible_with_the_class_itself(h200: str) -> None:
    fixed = 4 * (2 * LAYERS * N * N + 2048 * N + 1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        compiled_for(h200, remat(step, budget=fixed + 4096))
    assert caught.value.budget_bytes == fixed + 4096
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > fixed + 4096
    assert caught.value.tightest


def test_a_share_of_an_absent_gpu_is_a_share_of_its_memory(h200: str) -> None:
    record = mark.record_of(compiled_for(h200, remat(step, budget="50%")))
    assert record is not None
    assert record.budget_bytes == aot.target(h200).memory_bytes // 2


_SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from coop_jax import aot, mark
from coop_jax.remat import remat
from tests.models import chain_loss as loss
from tests.models import chain_step as step
mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
def step(w, x):
    def loss(w):
        h = x
        for _ in range(4):
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)
    value, gradient = jax.value_and_grad(loss)(w)
    return value, w - gradient
w = jax.device_put(jnp.eye(64), NamedSharding(mesh, P()))
x = jax.device_put(jnp.ones((4096, 64)), NamedSharding(mesh, P("rows")))
plain = jax.jit(step).lower(w, x).compile()
budget = int(0.8 * aot.memory(plain).total_bytes)
compiled = jax.jit(remat(step, budget=budget)).lower(w, x).compile()
assert aot.memory(compiled).total_bytes <= budget
stage = mark.record_of(compiled).jaxpr
assert stage is None or stage.planned_temp_bytes <= budget
for a, b in zip(compiled(w, x), plain(w, x)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
fraction = jax.jit(remat(step, budget=0.8)).lower(w, x).compile()
assert mark.record_of(fraction).baseline_total_bytes == aot.memory(plain).total_bytes
assert aot.memory(fraction).total_bytes <= budget
"""


def test_a_program_over_several_devices_is_enforced_per_device() -> None:
    root = str(Path(__file__).resolve().parent.parent)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    ran = subprocess.run(
        [sys.executable, "-c", _SHARDED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root, "XLA_FLAGS": flags},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
