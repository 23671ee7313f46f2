"""Lines that reports, errors and outcomes name: always the user's, never this package's or JAX's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coop_jax
import passes
from coop_jax import aot
from coop_jax.errors import InfeasibleBudgetError
from coop_jax.remat import remat
from coop_jax.report import report
from passes.hlo import graph, proto
from passes.hlo.lift import source_of
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls

OURS = tuple(f"{Path(str(package.__file__)).parent}/" for package in (coop_jax, passes, jax))
W = jax.ShapeDtypeStruct((6, 32, 32), jnp.float32)
X = jax.ShapeDtypeStruct((256, 32), jnp.float32)


@jax.custom_vjp
def wave(x: Any) -> Any:
    return jnp.sin(x)


wave.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (g * cos,))


def scanned(w: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * jnp.sin(x), jnp.sum(x)

    x, sums = jax.lax.scan(layer, x, w)
    return jnp.mean(x**2) + sums[0]


def branching(w: Any, x: Any) -> Any:
    for v in w:
        x = jax.lax.cond(x[0, 0] > 0, lambda x, v: jnp.tanh(x @ v), lambda x, v: jnp.sin(x @ v), x, v)
    return jnp.mean(x**2)


def with_own_rule(w: Any, x: Any) -> Any:
    for v in w:
        x = wave(x @ v)
    return jnp.mean(x**2)


def step_of(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """One step of gradient descent."""

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    return step


def named_files(compiled: Any) -> tuple[list[str], list[str]]:
    """Sources of a compiled program's kernels that have one, and of its loops and branches."""
    data = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    module = graph.read(proto.parse(data))
    every = [i for computation in module.computations.values() for i in computation.by_id.values()]
    found = [(i.opcode, source_of(module.proto, i)) for i in every]
    return (
        [source for _, source in found if source.startswith("/")],
        [source for opcode, source in found if opcode in ("while", "conditional")],
    )


def lowered_within(loss: Callable[[Any, Any], Any], ratio: float, device: Any) -> Any:
    """A step that has a part of its plain temporaries, lowered for a device."""
    step, specs = step_of(loss), aot.sharded_specs((W, X), device)
    memory = aot.memory(jax.jit(step).lower(*specs).compile())
    budget = memory.fixed_bytes + int(ratio * memory.temp_bytes)
    return jax.jit(remat(step, budget=budget)).lower(*specs)


def check_sources(compiled: Any) -> None:
    """All of them are lines of this file; loops and branches have one."""
    named, loops = named_files(compiled)
    assert len(named) > 10
    assert [source for source in [*named, *loops] if not source.startswith(__file__)] == []


@pytest.mark.parametrize(
    ("loss", "ratio"),
    [(scanned, 0.7), (branching, 0.8), (with_own_rule, 0.7)],
    ids=["scan", "cond", "custom_vjp"],
)
def test_sources_of_a_program_within_budget(loss: Any, ratio: float) -> None:
    compiled = lowered_within(loss, ratio, jax.devices()[0]).compile()
    check_sources(compiled)
    for item in report(compiled).recomputed:
        assert item.source == "" or item.source.startswith(__file__)


def test_sources_of_a_program_over_eight_absent_gpus(h200: str) -> None:
    mesh = Mesh(aot.devices(h200, count=8), ("d",))
    places = (W, P()), (X, P("d"))
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, p)) for s, p in places]
    check_sources(jax.jit(remat(step_of(scanned), budget="170 KiB", device=h200)).lower(*specs).compile())


@pytest.mark.parametrize("loss", [scanned, branching, with_own_rule])
def test_sources_in_a_refusal(loss: Any) -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        jax.jit(remat(step_of(loss), budget="8 KiB")).lower(W, X).compile()
    large = [value for value in refused.value.tightest if value.nbytes > 1024]
    assert large
    assert all(value.source.startswith(__file__) for value in large)


def test_what_is_inside_of_a_librarys_jit_comes_from_the_line_that_calls_it() -> None:
    traced = inline_calls(compat.trace(lambda x: [jax.nn.gelu(x)], [jax.typeof(1.0)]))
    jaxpr, _ = compat.open_jaxpr(traced)
    assert len(jaxpr.eqns) > 5
    assert all(compat.source_line(eqn).startswith(__file__) for eqn in jaxpr.eqns)


@pytest.mark.parametrize("folder", ["{}_models", "{}.old/nn", "{}/../examples"])
def test_a_users_folder_with_a_name_like_ours_is_named(folder: str) -> None:
    path = os.path.normpath(folder.format(Path(coop_jax.__file__).parent)) + "/model.py"
    scope: dict[str, Any] = {}
    exec(compile("import jax\ndef f(x):\n    return jax.lax.sin(x)", path, "exec"), scope)
    jaxpr, _ = compat.open_jaxpr(compat.trace(lambda x: [scope["f"](x)], [jax.typeof(1.0)]))
    assert compat.source_line(jaxpr.eqns[0]).startswith(f"{path}:3")
