"""A TPU's packing is steered: buffers that nothing reads fill holes while a value is placed."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import pytest

from passes.hlo import graph, proto
from passes.hlo.assign import Assigner, offloaded
from passes.hlo.heap import HeapPrediction, predict_assigned
from passes.hlo.steer import steered
from passes.jaxpr import compat

F32, TUPLE, SLOT = 11, 13, 16384
TENFOLD, TWOFOLD, SINGLE = (320, 128), (64, 128), (32, 128)  # ten slots, two, one


def _module(rows: list[tuple[int, str, list[int], tuple[int, ...]]]) -> Any:
    """A scheduled module of instructions: number, opcode, operands and dimensions; the last is its result."""
    module = proto.parse(b"")
    entry = module.computations.add(id=1)
    for row in rows:
        _add(entry, *row)
    module.entry_computation_id = 1
    module.schedule.sequences.add(key=1).value.instruction_ids.extend(row[0] for row in rows)
    return module


def _add(computation: Any, number: int, opcode: str, operands: list[int], dims: tuple[int, ...]) -> None:
    made = computation.instructions.add(id=number, name=f"{opcode}.{number}", opcode=opcode)
    made.operand_ids.extend(operands)
    made.shape.element_type = F32
    made.shape.dimensions.extend(dims)
    made.shape.layout.minor_to_major.extend(reversed(range(len(dims))))
    computation.root_id = number


def _spoilt() -> graph.Module:
    """A statistic takes a part of the hole in which the last large value could be.

    large.11 | large.12      large.11 is dead
    s.13 | 9 slots | large.12 | large.14      best fit; large.14 and s.13 fit into 11 slots beside large.12
    """
    rows = [
        (10, "parameter", [], (128,)), (11, "broadcast", [10], TENFOLD), (12, "reverse", [11], TENFOLD),
        (13, "reduce-precision", [10], (128,)), (14, "reverse", [12], TENFOLD),
        (15, "custom-call", [13, 14], (128,)),
    ]  # fmt: skip
    return graph.read(_module(rows))


def _predicted(view: graph.Module) -> HeapPrediction:
    return predict_assigned(Assigner(view, "tpu"))


def _operations(module: Any) -> list[Any]:
    """What a module computes, in order, without the buffers."""
    by_id = {i.id: i for c in module.computations for i in c.instructions}
    order = [by_id[i] for s in module.schedule.sequences for i in s.value.instruction_ids]
    return [(i.id, i.opcode, tuple(i.operand_ids)) for i in order if i.custom_call_target != "AllocateBuffer"]


def test_a_statistic_no_longer_spoils_the_hole_of_a_large_value() -> None:
    view = _spoilt()
    before = _predicted(view)
    assert (before.live_bytes, before.temp_bytes) == (20 * SLOT + 512, 30 * SLOT)
    module = steered(Assigner(view, "tpu"))
    assert module is not None
    assert _predicted(graph.read(module)).temp_bytes == 20 * SLOT + 512
    assert _operations(module) == _operations(view.proto)


def _results(count: int, rows: list[tuple[int, str, list[int], tuple[int, ...]]]) -> graph.Module:
    """A kernel with results 12, 13, ..., each of ten slots, and what reads them."""
    results = range(12, 12 + count)
    parts = [(n, "get-tuple-element", [11], TENFOLD) for n in results]
    module = _module([(10, "parameter", [], (128,)), (11, "custom-call", [10], ()), *parts, *rows])
    by_id = {i.id: i for i in module.computations[0].instructions}
    made = by_id[11].shape
    made.Clear()
    made.element_type = TUPLE
    for index, n in enumerate(results):
        by_id[n].tuple_index = index
        made.tuple_shapes.append(by_id[n].shape)
    return graph.read(module)


def test_of_two_results_of_one_kernel_each_finds_its_own_hole() -> None:
    """The second is placed first, in the lower of two equal holes.

    second.13 | first.12                                         second.13 is dead when the others are there
    single.15 | 9 slots | first.12 | twofold.14 | large.16       best fit
    first.12 | large.16 | twofold.14                             where second.13 was above first.12
    """
    rows: list[tuple[int, str, list[int], tuple[int, ...]]] = [
        (14, "custom-call", [13], TWOFOLD), (15, "custom-call", [10], SINGLE),
        (16, "custom-call", [12, 14, 15], TENFOLD), (17, "custom-call", [10, 16], (128,)),
    ]  # fmt: skip
    view = _results(2, rows)
    before = _predicted(view)
    assert (before.live_bytes, before.temp_bytes) == (23 * SLOT + 512, 33 * SLOT)
    module = steered(Assigner(view, "tpu"))
    assert module is not None
    # A slot keeps the holes apart.
    assert _predicted(graph.read(module)).temp_bytes == 24 * SLOT
    assert _operations(module) == _operations(view.proto)


def test_of_three_results_of_one_size_none_takes_the_hole_of_another() -> None:
    rows: list[tuple[int, str, list[int], tuple[int, ...]]] = [
        (15, "custom-call", [14], SINGLE), (16, "custom-call", [15], TWOFOLD),
        (17, "custom-call", [16, 13], TENFOLD), (18, "custom-call", [10, 12, 17], (128,)),
    ]  # fmt: skip
    view = _results(3, rows)
    before = _predicted(view)
    assert (before.live_bytes, before.temp_bytes) == (32 * SLOT + 512, 41 * SLOT)
    module = steered(Assigner(view, "tpu"))
    assert module is not None
    # Holes of ten, eleven and twelve slots, and one between each two.
    assert _predicted(graph.read(module)).temp_bytes < 39 * SLOT
    assert _operations(module) == _operations(view.proto)


def test_nothing_reads_a_buffer_but_the_call_that_ends_it() -> None:
    module = steered(Assigner(_spoilt(), "tpu"))
    assert module is not None
    buffers = [i for i in module.computations[0].instructions if i.custom_call_target == "AllocateBuffer"]
    ids = {b.id for b in buffers}
    readers = [i for i in module.computations[0].instructions if ids & set(i.operand_ids)]
    assert buffers
    assert readers
    assert all(r.id in ids and r.custom_call_has_side_effect for r in readers)


SLICES = """HloModule jit_program, is_scheduled=true
part { x = f32[64,128]{1,0:T(8,128)} parameter(0)
  at = s32[] parameter(1)
  zero = s32[] parameter(2)
  ROOT slice = f32[8,128]{1,0:T(8,128)} dynamic-slice(x, at, zero), dynamic_slice_sizes={8,128} }
ENTRY e {
  p = f32[64,128]{1,0:T(8,128)} parameter(0)
  zero = s32[]{:T(128)} constant(0)
  x = f32[64,128]{1,0:T(8,128)} negate(p)
  start = ((f32[64,128]{1,0:T(8,128)}, s32[], s32[]), f32[8,128]{1,0:T(8,128)}, u32[]) async-start(x, zero, zero), calls=part
  done = f32[8,128]{1,0:T(8,128)} async-done(start), calls=part
  ROOT y = f32[8,128]{1,0:T(8,128)} negate(done)
}"""  # noqa: E501


def test_a_slice_that_is_started_ahead_is_no_work_of_another_core() -> None:
    """XLA does so in loops on a TPU7x. No memory was taken, but a buffer of no rows made."""
    view = graph.read(proto.parse(compat.hlo_of_text(SLICES)))
    assigner = Assigner(view, "tpu")
    assert offloaded(view) == []
    assert assigner.scratch_held == 0
    module = steered(assigner)
    assert module is not None
    assert _operations(module) == _operations(view.proto)


def _normed(params: Any, x: Any) -> Any:
    """Convolutions with batch norm: statistics live from the forward to the backward pass."""
    for w in params:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    return jnp.mean(x**2)


def test_xla_packs_what_was_steered_as_foreseen(v5e: str) -> None:
    specs = tuple(h.spec(3, 3, 16, 16) for _ in range(6)), h.spec(32, 32, 32, 16)
    example = h.Example(name="normed", fn=jax.value_and_grad(_normed), args=specs)
    seen: list[int] = []

    def steer(data: bytes) -> bytes:
        module = steered(Assigner(graph.read(proto.parse(data)), "tpu"))
        assert module is not None
        seen.append(_predicted(graph.read(module)).total_bytes)
        made = proto.serialize(module)
        assert b"AllocateBuffer" in made
        return made

    total_bytes = h.compile_with(example, steer, "tpu").memory_analysis().total_allocation_bytes
    # With libtpu 0.0.52 it is exact; 0.0.50 counts .07 % more.
    assert seen[0] == pytest.approx(total_bytes, rel=1e-3)
