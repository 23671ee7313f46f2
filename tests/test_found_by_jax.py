"""Defects that JAX's own tests of `jax.checkpoint` found (`benchmarks.jax_tests`), in a few lines each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import coop_jax as coop


def position(x: Any) -> Any:
    return jnp.sin(jnp.sin(x) * jax.lax.axis_index("i")) + jax.lax.psum(jnp.cos(x), "i")


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_plain_program_around_shard_map_is_found_from_within_it(differentiated: bool) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))

    def program(function: Any) -> Any:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        return jax.jit(jax.grad(lambda x: mapped(x).sum()) if differentiated else mapped)

    x = jnp.arange(8.0)
    compiled = program(coop.remat(position, budget=1.0)).lower(x).compile()
    np.testing.assert_allclose(compiled(x), program(position)(x), rtol=1e-6)
    report = coop.report(compiled)
    assert report.baseline_compiled
    assert report.budget_bytes == report.baseline_total_bytes


def test_the_whole_peak_is_met_where_the_forward_part_is_a_program_of_its_own() -> None:
    def sines(x: Any) -> Any:
        return jnp.sin(jnp.sin(jnp.sin(x)))

    x = jnp.arange(256.0)
    found, pull = jax.vjp(coop.remat(sines, budget=1.0), x)
    expected, plain = jax.vjp(sines, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(pull(x)[0], plain(x)[0], rtol=1e-5, atol=1e-5)
