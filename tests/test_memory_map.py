"""A program's memory as data: its sums are XLA's, whatever it is grouped by, on a CPU and an absent GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax import aot
from coop_jax.tables import memory_blocks
from examples.models import adam_init, adam_step
from passes.hlo.describe import scope_of_name
from passes.memory_map import (
    KEPT,
    PACKING,
    RECOMPUTED,
    MemoryMap,
    kind_of,
    scope_of,
    source_of,
    why,
)
from tests.models import small_mlp

SPEC = jax.ShapeDtypeStruct
X = SPEC((1024, 64), jnp.float32)


def layers(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(layers)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def scanned(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    return ws - 0.1 * grads, value


def adam(problem: Any) -> tuple[Any, tuple[Any, Any]]:
    params, batch = problem.specs()
    return adam_step(problem.loss), (jax.eval_shape(adam_init, params), batch)


WS = [SPEC((64, 64), jnp.float32)] * 8
PROGRAMS: dict[str, Any] = {
    "layers": lambda: (step, (WS, X), ()),
    "donated layers": lambda: (step, (WS, X), (0,)),
    "scan": lambda: (scanned, (SPEC((6, 64, 64), jnp.float32), X), ()),
    "mlp": lambda: (*adam(small_mlp()), (0,)),
    "layers within a budget": lambda: (coop.remat(step, budget=0.55), (WS, X), ()),
}


@functools.cache
def compiled(name: str, device: str | None) -> Any:
    function, specs, donated = PROGRAMS[name]()
    return aot.lower_for(jax.jit(function, donate_argnums=donated), specs, device=device).compile()


@pytest.fixture(params=["cpu", "h200"])
def device(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "cpu" else request.getfixturevalue("h200")


NAMES = [name for name in PROGRAMS if name != "mlp"]


@pytest.mark.parametrize("name", NAMES)
def test_every_grouping_sums_to_what_xla_counts(name: str, device: str | None) -> None:
    program = compiled(name, device)
    found, memory = coop.inspect(program), aot.memory(program)
    assert found.counted
    assert found.total_bytes == memory.total_bytes
    profile = found.profile()
    assert max(map(sum, zip(*profile.values(), strict=True))) == memory.total_bytes
    for label in (kind_of, source_of, scope_of):
        assert sum(row.nbytes for row in found.by(label)) == memory.total_bytes
    alive = sum(v.nbytes for v in found.at(found.peak_step))
    assert 0 <= profile[PACKING][0] == memory.total_bytes - alive
    assert profile[PACKING][0] < 0.2 * memory.total_bytes


@pytest.mark.parametrize("name", NAMES)
def test_addresses_are_xlas_and_no_two_values_meet(name: str, device: str | None) -> None:
    found = coop.inspect(compiled(name, device))
    placed = [v for v in found.values if v.offset is not None]
    assert placed
    assert max(v.offset + v.nbytes for v in placed) <= found.temp_bytes  # type: ignore[operator]
    for i, a in enumerate(placed):
        for b in placed[:i]:
            apart_in_time = a.stop <= b.start or b.stop <= a.start
            assert a.offset is not None
            assert b.offset is not None
            assert apart_in_time or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset


def test_layers_are_told_apart_by_scope_and_kept_for_the_backward_pass(device: str | None) -> None:
    found = coop.inspect(compiled("layers", device))
    kept = [v for v in found.values if v.kind == KEPT]
    assert {v.scope for v in kept} == {f"layer_{i}" for i in range(8)}
    assert all("test_memory_map.py" in v.source for v in kept)
    assert "kept for the backward pass; read last by" in why(kept[0])
    assert {"arguments", "layer_0"} <= {row.label for row in found.by(scope_of)}
    assert any(v.name == "ws[0]" for v in found.values)


def test_what_a_scan_stacks_is_kept(device: str | None) -> None:
    found = coop.inspect(compiled("scan", device))
    stacks = [v for v in found.at(found.peak_step) if v.nbytes == 6 * 1024 * 64 * 4]
    assert stacks
    assert {v.kind for v in stacks} == {KEPT}
    # What is stacked beside the carry is named after the operation in the body, and its line.
    assert any(v.op in ("mul", "sub", "tanh", "integer_pow") for v in stacks)
    assert all("test_memory_map.py" in v.source for v in stacks)


def test_what_a_plan_recomputes_is_marked_and_so_is_what_it_evicts(device: str | None) -> None:
    found = coop.inspect(compiled("layers within a budget", device))
    assert any(v.kind == RECOMPUTED for v in found.values)
    evicted = [v for v in found.values if v.evicted]
    assert evicted
    assert all(v.kind != KEPT for v in evicted)
    assert "it is recomputed later" in why(evicted[0])


def test_a_map_survives_json(device: str | None) -> None:
    found = coop.inspect(compiled("layers", device))
    assert MemoryMap.from_json(found.to_json()) == found


def test_scopes_are_read_out_of_transformations() -> None:
    assert scope_of_name("jit(f)/jit(g)/transpose(jvp(block_0))/attn/dot_general") == "block_0/attn"
    assert scope_of_name("jit(f)/jvp(model/encoder)/while/body/closed_call/mlp/add") == "model/encoder/mlp"
    assert scope_of_name("jit(f)/add") == ""
    assert scope_of_name("state['w']") == ""


def test_tables_are_a_hundred_columns_wide_at_most() -> None:
    from coop_jax.screen import as_text

    found = coop.inspect(compiled("mlp", None))
    text = as_text(memory_blocks(found))
    assert max(map(len, text.split("\n"))) <= 100
    assert text.count(str(found.total_bytes)) >= 4


@pytest.mark.parametrize("device", ["v5e", "v6e"])
def test_what_the_other_cores_of_a_tpu_work_on_is_shown(v5e: str, device: str) -> None:
    """XLA:TPU gives them memory that no value lies in, and starts some of their work with nothing."""

    def products(ws: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    def rows(table: Any, places: Any) -> Any:
        return jnp.sum(jnp.take(table, places, axis=0).astype(jnp.float32) ** 2)

    wide = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 4096), (4096, 1024))]
    places = jax.ShapeDtypeStruct((16384,), jnp.int32)
    for function, specs in (
        (products, (wide, wide[1])),
        (rows, (jax.ShapeDtypeStruct((65536, 512), jnp.bfloat16), places)),
    ):
        compiled = aot.lower_for(jax.jit(jax.grad(function)), specs, device=device).compile()
        assert coop.inspect(compiled).total_bytes == aot.memory(compiled).total_bytes
