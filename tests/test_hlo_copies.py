"""Copies that nothing needs: taken out where XLA:TPU takes them out after its callback, and only there."""

from __future__ import annotations

import dataclasses

import hlo_support as h
import jax
import pytest

from coop_jax import aot
from passes.backend import CPU, TPU
from passes.hlo import graph, proto
from passes.hlo.copies import without_copies
from passes.jaxpr import compat
from tests.nightly_pages import example_of

# `again` copies a copy, `before` is read when its source is overwritten, `both` beside its source.
COPIES = """HloModule jit_program, is_scheduled=true
add { x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y) }
ENTRY e {
  p = f32[8,128]{1,0:T(8,128)} parameter(0)
  row = f32[1,128]{1,0:T(1,128)} parameter(1)
  zero = s32[]{:T(128)} constant(0)
  given = f32[8,128]{1,0:T(8,128)} copy(p)
  sines = f32[8,128]{1,0:T(8,128)} sine(given)
  made = f32[8,128]{1,0:T(8,128)} copy(sines)
  again = f32[8,128]{1,0:T(8,128)} copy(made)
  tanhs = f32[8,128]{1,0:T(8,128)} tanh(again)
  both = f32[8,128]{1,0:T(8,128)} copy(tanhs)
  double = f32[8,128]{1,0:T(8,128)} add(tanhs, both)
  before = f32[8,128]{1,0:T(8,128)} copy(tanhs)
  written = f32[8,128]{1,0:T(8,128)} dynamic-update-slice(tanhs, row, zero, zero)
  other = f32[8,128]{0,1:T(8,128)} copy(written)
  turned = f32[128,8]{1,0:T(8,128)} bitcast(other)
  sum = f32[8,128]{1,0:T(8,128)} add(before, double)
  result = f32[8,128]{1,0:T(8,128)} copy(sum)
  last = f32[8,128]{1,0:T(8,128)} negate(sum)
  ROOT all = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}, f32[128,8]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(result, last, turned, sum)
}"""  # noqa: E501


def _copies(module: graph.Module) -> list[str]:
    return sorted(i.name for i in module.entry.by_id.values() if i.opcode == "copy")


def test_copies_that_xla_drops_are_dropped(v5e: str) -> None:
    """What is overwritten, a result and another layout need theirs."""
    example = h.Example(
        name="copies",
        fn=lambda p, row: (p + row, p * row, p.T * 2.0, p - row),
        args=(h.spec(8, 128), h.spec(1, 128)),
    )
    compiled = h.compile_with(
        example, lambda _: proto.serialize(proto.parse(compat.hlo_of_text(COPIES))), "tpu"
    )
    final = graph.read(proto.parse(aot.final_module(compiled)))
    given = graph.read(proto.parse(compat.hlo_of_text(COPIES)))
    assert _copies(given) == ["again", "before", "both", "given", "made", "other", "result"]
    left = without_copies(given, TPU)
    assert _copies(left) == ["before", "other", "result"]
    assert _copies(final) == ["before", "copy", "other"]  # a result's is made anew
    sources = {i.name: [o.name for o in left.entry.operands(i)] for i in left.entry.by_id.values()}
    assert (sources["sines"], sources["tanhs"]) == (["p"], ["sines"])
    assert h.predict(left.proto, "tpu").total_bytes == compiled.memory_analysis().total_allocation_bytes
    assert without_copies(left, TPU) is left
    assert without_copies(given, CPU) is given


DONATED = """HloModule jit_program, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }
ENTRY e {
  p = f32[8,128]{1,0:T(8,128)} parameter(0)
  q = f32[8,128]{1,0:T(8,128)} parameter(1)
  over = f32[8,128]{1,0:T(8,128)} copy(p)
  beside = f32[8,128]{1,0:T(8,128)} copy(q)
  sum = f32[8,128]{1,0:T(8,128)} add(over, q)
  turned = f32[8,128]{1,0:T(8,128)} reverse(beside), dimensions={0}
  ROOT both = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(sum, turned)
}"""  # noqa: E501


def test_a_copy_that_a_result_is_written_over_is_dropped(v5e: str) -> None:
    """A U-Net's step within .7 has 15 of them, 2.6 MiB, where its weights are donated."""
    example = h.Example(
        name="donated", fn=lambda p, q: (p + q, q[::-1]), args=(h.spec(8, 128),) * 2, donate=(0, 1)
    )
    compiled = h.compile_with(
        example, lambda _: proto.serialize(proto.parse(compat.hlo_of_text(DONATED))), "tpu"
    )
    final = graph.read(proto.parse(aot.final_module(compiled)))
    left = without_copies(graph.read(proto.parse(compat.hlo_of_text(DONATED))), TPU)
    assert _copies(left) == ["beside"]
    assert len(_copies(final)) == 1
    assert h.predict(left.proto, "tpu").total_bytes == compiled.memory_analysis().total_allocation_bytes


@pytest.mark.parametrize("seed", [2134, 2141])
def test_programs_whose_pages_make_copies_needless_are_predicted(v5e: str, seed: int) -> None:
    """Counters of loops begin with a copy of a constant, which waits on the host, and so needs no copy.

    XLA's total was 16 KiB less than predicted for 2141. For 2134 it was 16 KiB more: what a loop's condition
    says is in the device's memory, though it is a scalar.
    """
    drawn = example_of(seed)
    specs = dataclasses.replace(drawn, args=jax.eval_shape(lambda: drawn.args))
    found = h.with_pages(specs, "tpu", seed=seed, again=0.1)
    assert found.pages
    assert found.prediction.total_bytes == found.compiled.memory_analysis().total_allocation_bytes
