"""What a kernel of a lifted jaxpr writes over what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr.inline import flat_body
from passes.jaxpr.straight import lift_as_xla
from passes.simulate import simulate
from tests.test_jaxpr_lift import NBYTES, WIDE, lifted

HEADS = jax.ShapeDtypeStruct((4, 1024, 8, 64), jnp.bfloat16)


def assert_peak_is_that_of_xla(device: str, function: Callable[..., Any], specs: Sequence[Any]) -> None:
    compiled = aot.lower_for(jax.jit(function), specs, device=device).compile()
    found = lift_as_xla(flat_body(jax.make_jaxpr(function)(*specs)), DEVICES[device]).program
    assert simulate(found).peak_bytes == pytest.approx(aot.memory(compiled).temp_bytes, rel=0.1)


def test_what_is_transposed_on_the_way_is_written_over_its_operand_on_a_gpu(h200: str) -> None:
    """Dimensions of another order are the same bytes: XLA chooses the layout that makes them so."""

    def gradient(q: Any, k: Any, v: Any, do: Any) -> Any:
        scores, likely = (jnp.einsum("bthd,bshd->bhts", *pair) for pair in ((q, k), (do, v)))
        turned, given = jnp.transpose(scores, (2, 0, 1, 3)), jnp.transpose(likely, (2, 0, 1, 3))
        return jnp.einsum("tbhs,bshd->bthd", turned * jnp.exp(turned) * given, k)

    assert_peak_is_that_of_xla(h200, gradient, [HEADS] * 4)


@pytest.mark.parametrize("other", [False, True])
def test_a_softmax_is_written_over_nothing_that_it_reads_on_a_gpu(h200: str, other: bool) -> None:
    """What runs all of an attention again for its gradient needs three arrays of scores, not two."""

    def gradient(q: Any, k: Any, v: Any, do: Any) -> Any:
        scores, likely = (jnp.einsum("bthd,bshd->bhts", *pair) for pair in ((q, k), (do, v)))
        weights = jax.nn.softmax(scores, axis=-1)
        if other:
            weights *= likely - jnp.sum(likely * weights, axis=-1, keepdims=True)
        return jnp.einsum("bhts,bshd->bthd", weights, k)

    assert_peak_is_that_of_xla(h200, gradient, [HEADS] * 4)


def test_a_rounded_value_is_not_written_over_a_whole_one():
    def function(x: Any, y: Any) -> Any:
        whole = x @ y
        return jnp.tanh(whole) @ y

    def shares(*, rounded: bool) -> bool:
        ops = lifted(function, WIDE, WIDE, rounded=rounded, device="v5e").program.ops
        (made,) = (op for op in ops if op.name == "tanh")
        return bool(made.may_share)

    assert shares(rounded=False)
    assert not shares(rounded=True)


def test_a_loop_writes_its_carry_over_what_it_started_from():
    def accumulated(x: Any, ws: Any) -> Any:
        return lax.scan(lambda total, w: (total + x @ w, None), x * 2.0, ws)[0] @ x

    stacks = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    for device, product in (("v5e", NBYTES), ("h200", 0)):
        program = lifted(accumulated, WIDE, stacks, as_xla=True, device=device).program
        op = next(op for op in program.ops if op.name == "scan")
        assert op.workspace_bytes == product, "the sum takes the place of the one before"
        assert simulate(program).peak_bytes <= NBYTES + product


def test_what_a_result_is_reshaped_from_has_no_bytes_of_its_own():
    assert not any(b.nbytes for b in lifted(lambda x: (x @ x).reshape(32, 128), WIDE).program.buffers)
