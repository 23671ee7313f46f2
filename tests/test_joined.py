"""Kernels that XLA:GPU makes one of: foreseen as it makes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.joined import joined
from passes.jaxpr.lift import lift, lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.together import Group

H200 = DEVICES["h200"]
HALF, WIDE = 2048, 1024
SPECS = [jax.ShapeDtypeStruct((2 * HALF, WIDE), jnp.float32), jax.ShapeDtypeStruct((WIDE,), jnp.float32)]


def of_two_parts(x: Any, _: Any) -> Any:
    return jnp.sin(x[:HALF]), jnp.cos(x[HALF:])


def of_one_part(x: Any, _: Any) -> Any:
    return jnp.sin(x[:HALF]), jnp.cos(x[:HALF])


def of_a_part_and_all(x: Any, _: Any) -> Any:
    return jnp.sin(x[:HALF]) * x[HALF:], jnp.cos(x[HALF:])


def of_a_bias(x: Any, bias: Any) -> Any:
    return jnp.sin(x[:HALF] * bias), jnp.cos(x[HALF:] * bias)


def around(x: Any) -> Any:
    return jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0)


def of_neighbours(x: Any, _: Any) -> Any:
    """The neighbours of `y` are read where no thread has made it yet."""
    y = x - around(x)
    return y, y - around(y)


def of_its_own(x: Any, _: Any) -> Any:
    y = x - around(x)
    return y, y * y


@pytest.mark.parametrize(
    ("step", "kernels"),
    [
        (of_two_parts, 2),
        (of_one_part, 1),
        (of_a_part_and_all, 1),
        (of_a_bias, 1),
        (of_neighbours, 2),
        (of_its_own, 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_kernels_that_read_the_same_are_one_unless_each_reads_a_part_of_its_own(
    h200: str, step: Callable[..., Any], kernels: int
) -> None:
    text = aot.lower_for(jax.jit(step), SPECS, device=h200).compile().as_text()
    assert len(re.findall(r" fusion\(", text[text.index("ENTRY") :])) == kernels
    assert len(seen(step).program.ops) == kernels


def seen(step: Callable[..., Any]) -> LiftedJaxpr:
    jaxpr, _ = compat.open_jaxpr(inline_calls(jax.make_jaxpr(step)(*SPECS)))
    return lift_seen(compat.without_dead_code(jaxpr), H200)


def two_chains(x: Any, y: Any) -> Any:
    """Of sums: the second, 1, follows from the first, 0, and the fourth, 3, from the third, 2."""
    a, b = jnp.sum(x), jnp.sum(y)
    return jnp.sum(x * a), jnp.sum(y * b)


def in_kernels(*groups: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The two chains with some ops joined: for every op the sums that it makes, numbered as they come."""
    jaxpr, _ = compat.open_jaxpr(inline_calls(jax.make_jaxpr(two_chains)(SPECS[0], SPECS[0])))
    apart = lift(jaxpr, H200, as_xla=False)
    assert [op.name for op in apart.program.ops] == ["reduce_sum"] * 4
    number = {b: k for k, op in enumerate(apart.program.ops) for b in op.outputs}
    roots = [body[-1] for body in apart.bodies]
    kernels = [Group(place=1 << k) for k in range(len(groups))]
    found = joined(apart, {roots[op]: kernels[k] for k, group in enumerate(groups) for op in group})
    assert found.program.cost_ns == apart.program.cost_ns
    assert [set(body) for body in found.bodies] == [
        {i for b in op.outputs for i in apart.bodies[number[b]]} for op in found.program.ops
    ]
    return [tuple(number[b] for b in op.outputs) for op in found.program.ops]


def test_a_kernel_runs_once_all_that_its_parts_read_is_there() -> None:
    assert in_kernels() == [(0,), (1,), (2,), (3,)]
    assert in_kernels((0, 2)) == [(0, 2), (1,), (3,)]
    assert in_kernels((0, 3)) == [(2,), (0, 3), (1,)]


def test_kernels_that_would_wait_for_each_other_are_not_made() -> None:
    assert in_kernels((0, 3), (1, 2)) == [(2,), (0, 3), (1,)]


def test_what_only_its_own_kernel_reads_takes_nothing() -> None:
    jaxpr, _ = compat.open_jaxpr(inline_calls(jax.make_jaxpr(two_chains)(SPECS[0], SPECS[0])))
    apart = lift(jaxpr, H200, as_xla=False)
    kernel = Group(place=1)
    found = joined(apart, {apart.bodies[op][-1]: kernel for op in (0, 1)})
    (inner,) = apart.program.ops[0].outputs
    assert apart.program.buffers[inner].nbytes
    assert not found.program.buffers[inner].nbytes
