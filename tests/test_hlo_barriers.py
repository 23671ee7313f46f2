"""Barriers are taken out of a scheduled module: the numbers stay, and its heap is predicted to the byte."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from coop_jax.remat import remat
from passes.hlo import graph, proto
from passes.hlo.barriers import drop_barriers
from passes.jaxpr import compat


def _straight(x: Any, ws: Any) -> Any:
    for n in range(3):
        y, x = lax.optimization_barrier((x @ ws[n], x))
        x = jnp.tanh(y) + x
    return lax.optimization_barrier((x @ ws[0], x + 1.0))


def _loop(x: Any, ws: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        y, x = lax.optimization_barrier((jnp.sin(x @ w), x))
        return jnp.sin(y + x) @ w, (y @ w).sum()

    return lax.scan(body, x, ws)


def _twice(x: Any, ws: Any) -> Any:
    y = jnp.concatenate([x[:32] @ w for w in ws[:2]], 1)[:, :32] @ ws[2]
    behind = lax.optimization_barrier(y)
    return (jnp.sin(y) + behind.T) @ ws[3]


def _together(x: Any, ws: Any) -> Any:
    """Behind the barrier the same value, read at the same places: XLA makes one operand of the two."""
    y = x @ ws[0]
    behind = lax.optimization_barrier(y)
    return (jnp.sin(y) + behind) @ ws[3]


def _results(x: Any, ws: Any) -> Any:
    """A constant and an argument among the results: for a GPU XLA takes all of them through a tuple."""
    return jnp.sin(x @ ws[0]) @ ws[1], jnp.int32(3), x


ARGS = (h.spec(256, 32), h.spec(4, 32, 32))
STRAIGHT = h.Example(name="straight", fn=_straight, args=ARGS)
LOOP = h.Example(name="loop", fn=_loop, args=ARGS)
TWICE = h.Example(name="twice", fn=_twice, args=ARGS)
RESULTS = h.Example(name="results", fn=_results, args=ARGS)
TOGETHER = h.Example(name="together", fn=_together, args=ARGS)


def _unchanged(example: h.Example, platform: str) -> tuple[bytes, Any]:
    seen: list[bytes] = []
    compiled = h.compile_with(example, lambda data: seen.append(data) or data, platform, barriers=True)
    return seen[0], compiled


def _count(module: Any) -> int:
    return sum(i.opcode in graph.BARRIERS for c in module.computations for i in c.instructions)


def test_every_barrier_is_removed_once_in_every_computation() -> None:
    data, _ = _unchanged(LOOP, "cpu")
    module = proto.parse(data)
    assert _count(module) == 1
    before = {i.id for c in module.computations for i in c.instructions}
    assert drop_barriers(module)
    assert _count(module) == 0
    assert not drop_barriers(module)
    left = {i.id for c in module.computations for i in c.instructions}
    assert left < before
    for computation in graph.read(module).computations.values():
        assert {*computation.order} == {*computation.by_id}
        assert all(o in computation.by_id for i in computation.by_id.values() for o in i.operands)


def test_a_module_without_barriers_stays_as_it_is() -> None:
    data, _ = h.scheduled(h.example("mlp", "grad"))
    module = proto.parse(data)
    assert not drop_barriers(module)
    assert module == proto.parse(data)


@pytest.mark.parametrize("example", [TWICE, TOGETHER], ids=lambda e: e.name)
def test_no_kernel_reads_an_operand_twice_that_it_read_behind_a_barrier(example: h.Example) -> None:
    """XLA would write the kernel's result over it, looking at one of the two reads only."""
    data, _ = _unchanged(example, "cpu")
    module = proto.parse(data)
    drop_barriers(module)
    assert _count(module) == 0
    for computation in module.computations:
        for i in computation.instructions:
            assert i.opcode != "fusion" or len({*i.operand_ids}) == len(i.operand_ids)


TWINS = """HloModule m, is_scheduled=true
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] sine(p)
  t = (f32[8], f32[8]) tuple(a, p)
  o = (f32[8], f32[8]) opt-barrier(t)
  first = f32[8] get-tuple-element(o), index=0
  second = f32[8] get-tuple-element(o), index=1
  s = f32[8] add(first, a)
  ROOT r = f32[8] add(s, second)
}"""


def test_an_operand_that_no_fusion_reads_twice_is_read_once_through_a_bitcast() -> None:
    """Through the tuple that a barrier leaves XLA looks after us, in 0.12: random program 58."""
    module = proto.parse(compat.hlo_of_text(TWINS))
    drop_barriers(module)
    by_name = {i.name: i for i in module.computations[0].instructions}
    assert {name: i.opcode for name, i in by_name.items()} == {
        "p": "parameter", "a": "sine", "first": "bitcast", "s": "add", "r": "add"
    }  # fmt: skip
    assert [*by_name["s"].operand_ids] == [by_name["first"].id, by_name["a"].id]


def test_a_third_derivative_through_barriers_is_right() -> None:
    """A fusion of it read three values twice each, and wrote over one of them."""
    vector = jnp.array([0.5, -0.2, 0.1])

    def solved(w: Any) -> Any:
        matrix = jnp.eye(3) * 3 + jnp.outer(w, w)
        times = lambda x: matrix @ x  # noqa: E731
        invert = lambda _, b: jnp.linalg.inv(matrix) @ b  # noqa: E731
        return lax.custom_linear_solve(times, jnp.sin(w), solve=invert, symmetric=True).sum()

    def third(f: Any) -> Any:
        second = jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), vector))
        return jax.jit(lambda w: jax.jvp(second, (w,), (vector,)))(jnp.array([0.3, 1.1, -0.7]))

    policy = jax.checkpoint_policies.nothing_saveable
    for a, b in zip(third(remat(solved, budget="1TiB", policy=policy)), third(solved), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("example", [STRAIGHT, LOOP, TWICE, TOGETHER], ids=lambda e: e.name)
def test_without_barriers_xla_computes_the_same_in_no_more_bytes(example: h.Example) -> None:
    _, with_barriers = _unchanged(example, "cpu")
    data, without = h.scheduled(example)
    assert h.predicted(h.predict(proto.parse(data), "cpu")) == h.totals(without)
    assert h.totals(without)["total"] <= h.totals(with_barriers)["total"]
    args = h.data_for(example)
    for a, b in zip(h.run(with_barriers, args), h.run(without, args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("example", [STRAIGHT, LOOP, TWICE, TOGETHER, RESULTS], ids=lambda e: e.name)
def test_without_barriers_prediction_is_what_xla_allocates_on_h200(h200: str, example: h.Example) -> None:
    data, compiled = h.scheduled(example, "cuda")
    assert h.predicted(h.predict(proto.parse(data), "cuda")) == h.totals(compiled)
