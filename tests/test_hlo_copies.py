"""Copies that nothing needs: XLA:TPU takes them out after its callback, the enforcing stage where a budget is
not kept with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coop_jax import aot
from passes.backend import TPU
from passes.hlo import graph, proto
from passes.hlo.copies import without_copies
from passes.hlo.enforce import EnforceRequest, enforce
from passes.jaxpr import compat
from passes.outcome import StageOutcome
from tests.nightly_pages import example_of

# `again` copies a copy, `before` is read when its source is overwritten, `both` beside its source.
COPIES = """HloModule jit_program, is_scheduled=true
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


def _checkpointed(params: Any, moments: Any, x: Any) -> Any:
    """A step with donated weights, which XLA:CPU copies: it does not know yet that updates come last."""

    def layer(p: Any, y: Any) -> Any:
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return y + jnp.tanh(y @ p[0]) @ p[1]

    def loss(params: Any) -> Any:
        y = x
        for p in params:
            y = jax.checkpoint(layer)(p, y)
        return (y**2).mean()

    flat, tree = jax.tree.flatten(jax.grad(loss)(params))
    moments = [(0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g) for (m, v), g in zip(moments, flat, strict=True)]
    steps = jax.tree.unflatten(tree, [m / (jnp.sqrt(v) + 1e-3) for m, v in moments])
    return jax.tree.map(lambda p, s: p - 0.1 * s, params, steps), moments


def _example() -> h.Example:
    layers = ((h.spec(64, 128), h.spec(128, 64)),) * 6
    moments = [(w, w) for layer in layers for w in layer]
    args = (layers, moments, h.spec(32, 64))
    return h.Example(name="checkpointed", fn=_checkpointed, args=args, donate=(0, 1))


@pytest.mark.parametrize("expected_bytes", [None, 1 << 20])
def test_a_program_that_was_planned_loses_needless_copies_where_it_fits_too(
    expected_bytes: int | None,
) -> None:
    """Of a BiLSTM within .75 of its bytes, on the CPU, they are estimated at 2.7 % of its time."""
    data, plain = h.scheduled(_example())
    request = EnforceRequest(
        budget_bytes=h.totals(plain)["total"], device=h.MODEL["cpu"], platform="cpu",
        old_rules=h.OLD_RULES, expected_bytes=expected_bytes,
    )  # fmt: skip
    returned, outcome = enforce(data, request)
    assert outcome.status.found
    assert not outcome.recomputed
    assert bool(_copies(graph.read(proto.parse(returned)))) == (expected_bytes is None)
    assert (returned is data) == (expected_bytes is None)
    assert (outcome.run_ns < outcome.cost_ns) == (expected_bytes is not None)


def test_needless_copies_go_before_anything_runs_again() -> None:
    example = _example()
    data, plain = h.scheduled(example)
    assert _copies(graph.read(proto.parse(data)))
    budget_bytes = h.totals(plain)["total"] - 16384
    request = EnforceRequest(
        budget_bytes=budget_bytes, device=h.MODEL["cpu"], platform="cpu", old_rules=h.OLD_RULES
    )
    outcomes: list[StageOutcome] = []

    def transform(data: bytes) -> bytes:
        changed, outcome = enforce(data, request)
        outcomes.append(outcome)
        assert not _copies(graph.read(proto.parse(changed)))
        return changed

    compiled = h.compile_with(example, transform, "cpu")
    assert outcomes[0].status.found
    assert not outcomes[0].recomputed
    assert outcomes[0].planned_total_bytes == h.totals(compiled)["total"] <= budget_bytes
    h.replayed(compiled)
    values = h.data_for(example)
    for a, b in zip(h.run(plain, values), h.run(compiled, values), strict=True):
        np.testing.assert_array_equal(a, b)
