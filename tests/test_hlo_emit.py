"""Plans written into scheduled modules: the same numbers, nothing that may not run twice, nothing dead."""

from __future__ import annotations

import dataclasses
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from passes.hlo import proto
from passes.hlo.prune import prune
from passes.ir import OpId, Program
from passes.jaxpr import compat
from passes.planners import plan
from passes.saved import SAVED
from passes.simulate import simulate
from passes.validate import validate


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))


def _integer_program() -> h.Example:
    """Every kind of op on small integers: no rounding, so results are bitwise equal whatever runs twice."""

    def fn(p: Any, x: Any) -> Any:
        a = jnp.maximum(x @ p["w"], 0.0)
        b = a - a.max(0)
        c = jnp.sort(b, axis=-1)[:, ::-1]
        y, sums = lax.scan(lambda s, r: (jnp.maximum(s - r, -3.0), s.sum()), c, jnp.stack([a, b, c]))
        z = lax.cond(y.sum() > 0, lambda v: v + p["b"], lambda v: v * 2.0, y)
        z = z.at[2:4].add(a[2:4])
        new = {"w": p["w"] - (z.T @ x).astype(jnp.float32), "b": p["b"] + z.sum(0)}
        return new, (z.sum(), sums, (c * a).sum(1))

    args = ({"w": h.spec(8, 8), "b": h.spec(8)}, h.spec(8, 8))
    return h.Example(name="integers", fn=fn, args=args, donate=(0,))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.7]))
def test_any_re_runs_give_the_same_bits_and_the_predicted_heap(seed: int, rate: float) -> None:
    example = _integer_program()
    args = h.data_for(example, exact=True)
    _, plain = h.scheduled(example)
    compiled, found, _ = h.with_steps(example, h.random_steps(seed, rate))
    assert h.predicted(found) == h.totals(compiled)
    assert _same(h.run(plain, args), h.run(compiled, args))


@pytest.mark.parametrize("model", ["mlp", "gpt", "conv", "lstm"])
def test_planned_modules_give_the_same_bits(model: str) -> None:
    example = dataclasses.replace(h.example(model, "grad"), optimized=True)
    args = h.data_for(example)
    _, plain = h.scheduled(example)

    def choose(program: Program) -> tuple[OpId, ...]:
        steps = program.order
        made = plan(program, int(0.7 * simulate(program, steps).peak_bytes))
        assert made.status.found
        assert made.recomputes()
        validate(program, made)
        return made.steps

    compiled, found, before = h.with_steps(example, choose)
    assert found.temp_bytes < before.prediction.temp_bytes
    assert h.predicted(found) == h.totals(compiled)
    assert _same(h.run(plain, args), h.run(compiled, args))


def _update_in_place() -> h.Example:
    def fn(p: Any, x: Any) -> Any:
        y = jnp.maximum(p, 0.0) @ x
        total = y.sum()
        new = p + total
        return new, (new @ y.T).sum(), y

    return h.Example(name="in-place", fn=fn, args=(h.spec(16, 16), h.spec(16, 16)), donate=(0,))


def _reader_and_writer(program: Program) -> tuple[OpId, int]:
    """An op that reads the donated argument, and the op that overwrites it."""
    reader = next(op for op in program.ops if op.deadline is not None and op.recomputable)
    assert reader.deadline is not None
    return reader.id, reader.deadline


@pytest.mark.parametrize("late", [0, 1])
def test_a_deadline_is_the_last_slot_that_gives_the_right_numbers(late: int) -> None:
    """A recompute that reads a donated argument is right up to its deadline, and wrong one slot later."""
    example = _update_in_place()
    args = h.data_for(example, exact=True)
    _, plain = h.scheduled(example)

    def choose(program: Program) -> list[OpId]:
        reader, writer = _reader_and_writer(program)
        assert program.ops[reader].can_recompute(writer)
        assert not program.ops[reader].can_recompute(writer + 1)
        steps = list(program.order)
        steps.insert(writer + late, reader)
        chain = [op.id for op in program.ops if reader < op.id < writer and op.recomputable]
        return steps[: writer + late + 1] + chain + steps[writer + late + 1 :]

    compiled, _, _ = h.with_steps(example, choose)
    assert _same(h.run(plain, args), h.run(compiled, args)) == (late == 0)


def test_what_writes_in_place_or_has_effects_runs_once() -> None:
    seen = []

    def fn(p: Any, x: Any) -> Any:
        y = x @ p
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum())
        z = lax.while_loop(lambda v: v.sum() < 10.0, lambda v: v + 1.0 + y * 0.0, x)
        z = lax.dynamic_update_slice(z, y[:2], (1, 0))
        return p + z.sum(), z.sum()

    example = h.Example(name="effects", fn=fn, args=(h.spec(8, 8), h.spec(8, 8)), donate=(0,))
    data, _ = h.scheduled(example)
    found = h.lifted(data)
    by_id = found.module.entry.by_id
    opcodes = {op.name: by_id[i] for op, i in zip(found.program.ops, found.instructions, strict=True)}
    once = [opcodes[op.name].opcode for op in found.program.ops if not op.recomputable]
    assert {"while", "call"} & set(once)
    assert {"custom-call", "fusion"} <= set(once)
    compiled, _, _ = h.with_steps(example, h.random_steps(3, 0.7))
    h.run(compiled, h.data_for(example, exact=True))
    jax.effects_barrier()
    assert len(seen) == 1


def test_unread_outputs_of_re_run_fusions_are_dropped(h200: str) -> None:
    """A multi-output fusion is recomputed for one of its outputs: the clone makes only that one."""
    outputs: list[int] = []

    def choose(program: Program) -> list[OpId]:
        steps = list(program.order)
        for op in program.ops:
            uses = [[u.id for u in program.ops if b in u.inputs] for b in op.outputs]
            if op.recomputable and len(uses) > 1 and all(uses) and len({max(u) for u in uses}) > 1:
                outputs.append(len(op.outputs))
                steps.insert(max(max(u) for u in uses), op.id)
                return steps
        pytest.skip("this version of XLA makes no multi-output fusion here")

    compiled, prediction, _ = h.with_steps(h.example("conv", "grad"), choose, "cuda")
    assert h.predicted(prediction) == h.totals(compiled)
    final = proto.parse(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    entry = next(c for c in final.computations if c.id == final.entry_computation_id)
    clones = [i for i in entry.instructions if ".remat" in i.name and i.opcode == "fusion"]
    assert len(clones) == 1
    assert len(clones[0].shape.tuple_shapes) < outputs[0]


FOR_NOTHING = """HloModule m, is_scheduled=true
two {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  minus_x = f32[8] negate(x)
  minus_y = f32[8] negate(y)
  ROOT both = (f32[8], f32[8]) tuple(minus_x, minus_y)
}
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] sine(p)
  b = f32[8] cosine(p)
  c = f32[8] exponential(b)
  f = (f32[8], f32[8]) fusion(a, c), kind=kLoop, calls=two
  first = f32[8] get-tuple-element(f), index=0
  second = f32[8] get-tuple-element(f), index=1
  unread = f32[8] negate(second)
  ROOT r = f32[8] negate(first)
}"""


@pytest.mark.parametrize("kind", ["kLoop", "kInput", "kOutput"])
def test_what_only_an_unread_output_of_a_fusion_read_is_dropped_with_it(kind: str) -> None:
    """Random program 97: copies to the host and back, for an output that nobody read; a TPU's are kOutput."""
    module = proto.parse(compat.hlo_of_text(FOR_NOTHING.replace("kLoop", kind)))
    prune(module, module.entry_computation_id, once=())
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    assert [i.opcode for i in entry.instructions] == ["parameter", "sine", "fusion", "negate"]
    assert [*module.schedule.sequences[0].value.instruction_ids] == [i.id for i in entry.instructions]


def test_a_fusion_that_names_its_outputs_by_number_keeps_them() -> None:
    """A TPU's collectives that go on inside of kernels: an Adam step over four of them."""
    aliased = FOR_NOTHING.replace(
        "calls=two", "calls=two, output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}"
    )
    module = proto.parse(compat.hlo_of_text(aliased))
    prune(module, module.entry_computation_id, once=())
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    (fusion,) = (i for i in entry.instructions if i.opcode == "fusion")
    assert len(fusion.shape.tuple_shapes) == len(fusion.operand_ids) == 2


def test_a_run_whose_every_use_was_taken_over_disappears() -> None:
    def choose(program: Program) -> list[OpId]:
        return [step for op in program.ops for step in ([op.id, op.id] if op.recomputable else [op.id])]

    compiled, prediction, before = h.with_steps(h.example("mlp", "grad"), choose)
    entry = proto.parse(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    kernels = [i for c in entry.computations if c.id == entry.entry_computation_id for i in c.instructions]
    assert len(kernels) == len(before.module.entry.by_id)
    assert prediction.temp_bytes == before.prediction.temp_bytes


def test_control_flow_is_one_op_with_its_peak_inside() -> None:
    data, _ = h.scheduled(h.example("scan", "grad"))
    found = h.lifted(data)
    loops = [op for op in found.program.ops if op.name.startswith("while")]
    assert loops
    assert not any(op.recomputable for op in loops)
    assert all(op.workspace_bytes > 0 for op in loops)
    assert simulate(found.program).peak_bytes <= found.prediction.temp_bytes


@pytest.mark.parametrize("model", ["mlp", "gpt", "conv", "lstm", "mixed"])
def test_the_lift_tracks_live_bytes(model: str) -> None:
    """The simulated peak of the lifted program is XLA's live bytes, up to tables of pointers."""
    data, _ = h.scheduled(h.example(model, "donated"))
    found = h.lifted(data)
    peak = simulate(found.program).peak_bytes
    assert 0.97 * found.prediction.live_bytes <= peak <= 1.03 * found.prediction.live_bytes


def test_sources_point_at_the_user() -> None:
    data, _ = h.scheduled(h.example("mlp", "grad"))
    assert any("hlo_support.py:" in op.source for op in h.lifted(data).program.ops)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_a_user_keeps_runs_once(platform: str, request: pytest.FixtureRequest) -> None:
    """The label stays with the kernels of the value, also where XLA fuses it with its neighbours."""
    if platform == "cuda":
        request.getfixturevalue("h200")

    def fn(w: Any, x: Any) -> Any:
        with jax.named_scope(SAVED):
            y = jnp.tanh(x @ w)
        return jnp.sin((y + 1) @ w), y @ w.T

    args = (h.spec(64, 64), h.spec(256, 64))
    data, _ = h.scheduled(h.Example(name="kept", fn=fn, args=args), platform)
    ops = h.lifted(data, platform).program.ops
    kept = [op for op in ops if not op.recomputable]
    assert kept
    assert len(kept) < len(ops)
    first = next(op for op in ops if op.outputs and op.cost_ns)
    assert first in kept
