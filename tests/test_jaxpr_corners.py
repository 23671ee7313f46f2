"""The lift and the emitters at the corners of primitives, and the names of primitives themselves."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.ad_checkpoint
import jax.extend.core.primitives
import jax.numpy as jnp
import jax.random
import jax.scipy.special
import numpy as np
import pytest
from corners import BODIES, STRAIGHT, N, corners, odd_results, traced
from jax import lax
from jax.extend.core import check_jaxpr

from benchmarks import models
from passes.cost import DEVICES
from passes.ir import OpId
from passes.jaxpr import compat, flops, in_place, inline, primitives, purity, simplify, stage, straight
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.emit import emit
from passes.jaxpr.freedom import emit_config, emit_configs
from passes.jaxpr.lift import lift
from passes.jaxpr.lifted import MOVES, LiftedJaxpr
from passes.jaxpr.scans import views
from passes.pipeline import plan_program
from passes.simulate import simulate

PROGRAMS = {**STRAIGHT, **BODIES}


def recompute_all(lifted: LiftedJaxpr) -> list[OpId]:
    """Steps in which every op makes all that it reads once more, as far as that may be recomputed."""
    producer, ops = lifted.program.producer, lifted.program.ops
    steps: list[OpId] = []
    for op in ops:
        makers = dict.fromkeys(producer[b] for b in op.inputs)
        steps += [maker for maker in makers if maker is not None and ops[maker].recomputable]
        steps.append(op.id)
    return steps


def emitted(jaxpr: Any, device: str) -> Any:
    """The jaxpr lifted in both ways, and written with all recomputes that there can be."""
    jaxpr = compat.without_dead_code(jaxpr)
    as_xla = lift(jaxpr, DEVICES[device], as_xla=True)
    lifted = lift(jaxpr, DEVICES[device], as_xla=False)
    simulate(as_xla.program)
    return emit(lifted, recompute_all(lifted), emit_config(lifted, as_xla, DEVICES[device]))


@pytest.mark.parametrize("name", [*STRAIGHT, *BODIES])
def test_every_corner_is_lifted_and_written_again(name: str):
    for what, jaxpr in corners(traced(*PROGRAMS[name])[0]):
        try:
            check_jaxpr(emitted(jaxpr, "h200"))
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")


@pytest.mark.parametrize("n", [N, 1, 0])
@pytest.mark.parametrize("name", [*STRAIGHT, *BODIES])
def test_programs_of_few_or_no_elements_are_lifted_for_every_device(name: str, n: int):
    if n == 0 and name in ("reduced", "sliced", "scattered"):
        pytest.skip("JAX has no such program")
    for _, jaxpr in odd_results(traced(*PROGRAMS[name], n=n)[0]):
        check_jaxpr(emitted(jaxpr, "cpu"))


@pytest.mark.parametrize("name", ["scan", "cond"])
def test_scans_and_conds_with_odd_operands_are_planned(name: str):
    jaxpr, consts = traced(*BODIES[name])
    odd = [variant for what, variant in corners(jaxpr) if "body" not in what and what.startswith(name)]
    for variant in [jaxpr, *odd[::2]]:
        request = JaxprRequest(
            budget_bytes=64, argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["h200"],
            planner="cut",
        )  # fmt: skip
        planned = plan_program(compat.close_jaxpr(variant, consts), request)[0]
        check_jaxpr(compat.open_jaxpr(planned)[0])


@pytest.mark.parametrize("name", ["barriers", "stacked"])
def test_numbers_are_the_same_at_the_corners(name: str):
    jaxpr, consts = traced(*STRAIGHT[name])
    chosen = [jaxpr for k, (_, jaxpr) in enumerate(corners(jaxpr)) if k % 12 == 0]
    values = [
        jnp.asarray(np.random.default_rng(k).integers(0, 3, v.aval.shape), v.aval.dtype)
        for k, v in enumerate(jaxpr.invars)
    ]
    for variant in chosen:
        closed = [compat.close_jaxpr(j, consts) for j in (variant, emitted(variant, "h200"))]
        expected, found = (compat.evaluate(c, values) for c in closed)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_barrier_keeps_a_literal_nowhere():
    def f(x: Any) -> Any:
        y, one = lax.optimization_barrier((jnp.tanh(x), 1.0))
        return y * one, one

    lifted = lift(compat.open_jaxpr(jax.make_jaxpr(f)(jnp.ones(N)))[0], DEVICES["h200"], as_xla=False)
    assert [len(e.invars) for e in lifted.jaxpr.eqns if e.primitive.name == "optimization_barrier"] == [1]
    assert not compat.is_variable(lifted.jaxpr.outvars[1])


def test_every_named_primitive_exists():
    known = {p.name for p in gc.get_objects() if isinstance(p, jax.extend.core.Primitive)}
    known |= {"polynomial"} if jax.__version_info__ < (0, 12) else set()
    tables = {
        "primitives": primitives.KINDS, "slicing": primitives.SLICING, "reshapes": primitives.RESHAPES,
        "control flow": primitives.CONTROL_FLOW, "in place": in_place.IN_PLACE, "adds": simplify.ADDS,
        "scatter": [simplify.SCATTER_ADD], "moves": MOVES, "calls": primitives.CALLS,
        "slices": views.ELEMENTWISE, "once": {n for n in purity.ONCE if not n.startswith("coop")},
    }  # fmt: skip
    assert not {table: missing for table, names in tables.items() if (missing := set(names) - known)}


def test_gelu_is_fused_as_xla_fuses_it():
    # Since JAX 0.12 `erf` is a polynomial; a primitive that is not known would keep its operands in memory.
    jaxpr = inline.inline_calls(jax.make_jaxpr(lambda x: jax.nn.gelu(x, approximate=False))(jnp.ones((N, N))))
    lifted = lift(compat.open_jaxpr(jaxpr)[0], DEVICES["h200"], as_xla=True)
    assert [op.name for op in lifted.program.ops if op.name != "copy"] == [lifted.program.ops[0].name]
    if hasattr(lax, "polynomial"):
        eqn = jax.make_jaxpr(lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]))(jnp.ones(N)).eqns[-1]
        assert flops.flops_per_element(eqn) == 4


def test_layer_norm_of_flax_is_planned_for_a_gpu():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):  # type: ignore[name-defined, misc]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
            return jnp.mean(x**2)

    x = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    jaxpr = jax.make_jaxpr(jax.grad(Net().apply))(params, x)
    request = JaxprRequest(
        budget_bytes=6 << 20, argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["h200"]
    )
    outcome = plan_program(inline.inline_calls(jaxpr), request)[1]
    assert outcome.planned_temp_bytes < outcome.before_temp_bytes


@pytest.mark.parametrize(("device", "strict", "stored"), [("v5e", True, 2), ("v5e", False, 0)])
def test_a_strict_plan_for_a_tpu_parts_each_dot_from_what_follows(device: str, strict: bool, stored: int):
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    jaxpr = jax.make_jaxpr(chain)(np.ones((N, N)), np.ones((N, N))).jaxpr
    as_xla, lifted = (lift(jaxpr, DEVICES[device], as_xla=as_xla) for as_xla in (True, False))
    config = emit_config(lifted, as_xla, DEVICES[device], strict=strict)
    made = emit(lifted, lifted.program.order, config)
    dots = {v for eqn in made.eqns if eqn.primitive.name == "dot_general" for v in eqn.outvars}
    barriers = [eqn for eqn in made.eqns if eqn.primitive is compat.optimization_barrier_p]
    assert len(dots) == 2
    assert sum(bool(dots & set(eqn.invars)) for eqn in barriers) == stored


@pytest.mark.parametrize(
    ("device", "deep", "stored"), [("v5e", True, 1), ("v5e", False, 0), ("h200", True, 0)]
)
def test_a_deep_plan_for_a_tpu_parts_a_gradient_from_its_update(device: str, deep: bool, stored: int):
    """The update is written over the weight, and waits for all that reads that again, with both operands."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return w - 0.1 * (jnp.tanh(x @ w).T @ x).T

    jaxpr = jax.make_jaxpr(step)(np.ones((64 * N, N)), np.ones((N, N))).jaxpr
    as_xla, lifted = (lift(jaxpr, DEVICES[device], as_xla=as_xla) for as_xla in (True, False))
    config = emit_config(lifted, as_xla, DEVICES[device], deep=deep)
    assert len(config.apart) == stored


def test_levels_between_two_depths_and_dots_that_are_not_merged_are_looked_at_before_much_is_recomputed():
    """Coupling layers of small dots, which XLA:GPU merges with those that run again: 2.04 without either."""

    def coupled(weights: Any, x: Any) -> Any:
        for mixed, one, two in weights:
            kept, moved = jnp.split(x @ mixed, 2, -1)
            scale, shift = jnp.split(jax.nn.relu(kept @ one) @ two, 2, -1)
            x = jnp.concatenate([kept, moved * jnp.exp(jnp.tanh(scale)) + shift], -1)
        return jnp.sum(x**2)

    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(spec(256, 256), spec(128, 512), spec(512, 256))] * 8
    closed = inline.inline_calls(jax.make_jaxpr(jax.grad(coupled))(weights, spec(4096, 256)))
    as_is = lift(compat.without_dead_code(compat.open_jaxpr(closed)[0]), DEVICES["h200"], as_xla=True)
    request = JaxprRequest(
        budget_bytes=straight.as_it_is(as_is).peak_bytes // 4,
        argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["h200"],
    )  # fmt: skip
    found = straight.search(as_is, request, 1)
    assert found.peak_bytes <= request.budget_bytes
    assert found.cost_ns <= 1.4 * as_is.seen.cost_ns
    assert found.config.one_at_a_time


def test_the_sums_of_a_batch_norms_gradient_stay_one_kernel(monkeypatch: pytest.MonkeyPatch):
    """What a plan for a DenseNet stores for them XLA:GPU would compute inside; a barrier there parts them."""
    pytest.importorskip("optax", reason="needs optax: pip install -e '.[examples]'")
    step = models.program(models.find("densenet121"), "h200")
    work = stage.prepare(inline.inline_calls(jax.make_jaxpr(step.step)(*step.specs())))
    as_is = lift(work.jaxpr, DEVICES["h200"], as_xla=True)
    request = JaxprRequest(
        budget_bytes=simulate(as_is.program).peak_bytes * 3 // 5,
        argument_bytes=0, output_bytes=0, alias_bytes=0, device=DEVICES["h200"],
    )  # fmt: skip
    fused = straight.search(as_is, request, 1)
    monkeypatch.setattr(straight, "emit_configs", lambda *args, **kwargs: emit_configs(*args, **kwargs)[-1:])
    parted = straight.search(as_is, request, 1)
    assert max(fused.peak_bytes, parted.peak_bytes) <= request.budget_bytes
    assert parted.cost_ns > 1.01 * fused.cost_ns
