"""`offload=` and policies that offload, straight-line and in scans, on devices that are not here."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import coop_jax as coop
from coop_jax import aot
from coop_jax.errors import InfeasibleBudgetError
from passes.hlo import graph, proto
from passes.jaxpr import compat
from passes.jaxpr.constraints import constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.scans.host_stacks import offloaded_bytes, with_host_stacks
from passes.jaxpr.values import Constraints

LAYERS, ROWS, WIDTH = 6, 4096, 256
STACK = LAYERS * ROWS * WIDTH * 4
POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device",
    offload_dst="pinned_host",
)  # fmt: skip
SPECS = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)


def layer(w: Any, x: Any) -> Any:
    """A kernel whose result has a name, and what is cheap to compute from it."""
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))


def looped(ws: Any, x: Any) -> Any:
    """The layers one by one."""
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


def scanned(ws: Any, x: Any) -> Any:
    """The layers in a scan."""
    return (lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2).mean()


def held(function: Any, device: str, **options: Any) -> Any:
    """A gradient compiled within a budget that is large; a TPU's values stay off the chip."""
    limited = coop.remat(jax.grad(function), budget="15GiB", device=device, **options)
    lowered = aot.lower_for(jax.jit(limited), SPECS, device=device)
    return lowered.compile(compiler_options={"xla_msa_enable": "DISABLED"} if device == "v5e" else None)


@pytest.mark.parametrize("options", [{"offload": "h"}, {"policy": POLICY}], ids=["name", "policy"])
def test_a_named_stack_waits_on_the_host(v5e: str, options: dict[str, Any]) -> None:
    compiled = held(scanned, "v5e", **options)
    found = coop.report(compiled)
    assert found.host.compiled_bytes == found.host.planned_bytes == STACK
    assert [p.nbytes for p in found.host.paged] == [STACK]
    assert found.host.paged[0].source.startswith(__file__)
    assert found.planned_total_bytes == found.compiled_total_bytes


def test_a_named_stack_is_written_before_it_is_read(h200: str) -> None:
    compiled = held(scanned, "h200", offload="h", host="1GiB")
    found = coop.report(compiled)
    assert found.host.compiled_bytes == found.host.planned_bytes == STACK
    seen = h.replayed(compiled)
    assert not seen.problems
    assert (seen.to_host, seen.from_host) == (LAYERS, LAYERS)


def test_named_values_wait_on_the_host(v5e: str) -> None:
    compiled = held(looped, "v5e", offload="h")
    found = coop.report(compiled)
    each = STACK // LAYERS
    # The last one is used at once.
    assert {p.nbytes for p in found.host.paged} == {each}
    assert len(found.host.paged) >= LAYERS - 1
    assert found.host.compiled_bytes == found.host.planned_bytes >= (LAYERS - 1) * each
    view = graph.read(proto.parse(aot.final_module(compiled)))
    starts = [i for i in view.entry.by_id.values() if i.opcode == "copy-start"]
    assert len(starts) >= 2 * len(found.host.paged)


@pytest.mark.parametrize("loss", [looped, scanned], ids=["straight-line", "scan"])
def test_forced_values_that_the_host_has_no_room_for_are_refused(h200: str, loss: Any) -> None:
    """They were left on the device without a word."""
    with pytest.raises(InfeasibleBudgetError, match="what a policy or `offload` sends there") as refused:
        coop.plan(jax.grad(loss), *SPECS, budget="15GiB", host="64KiB", device="h200", offload="h")
    assert refused.value.host_bytes > (LAYERS - 2) * STACK // LAYERS


def test_a_refusal_says_where_offload_sends_nothing(h200: str) -> None:
    """On a CPU; for a GPU a budget below all arguments is refused before any paging."""
    ws, xs = [h.spec(64, 64)] * 3, h.spec(256, 64)

    def named(ws: Any, x: Any) -> Any:
        for w in ws:
            x = checkpoint_name(jnp.tanh(x @ w), "h")
        return (x**2).sum()

    for device, budget, is_said in ((None, 0.6, True), (h200, 1000, False)):
        with pytest.raises(InfeasibleBudgetError) as refused:
            coop.plan(jax.grad(named), ws, xs, budget=budget, device=device, offload="h")
        assert ("nothing is paged on this platform" in str(refused.value)) == is_said


def test_what_one_turn_of_a_loop_makes_and_reads_is_not_sent_and_the_report_says_so(h200: str) -> None:
    """It said that nothing was sent since that is cheapest."""

    def microbatches(ws: Any, xs: Any) -> Any:
        zeros = [jnp.zeros_like(w) for w in ws]
        return lax.scan(
            lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(looped)(ws, x)), None), zeros, xs
        )

    ws, xs = [h.spec(64, 64)] * 3, h.spec(4, 256, 64)
    found = coop.plan(microbatches, ws, xs, budget="15GiB", device="h200", offload="h")
    assert not found.host.paged
    assert found.host.compiled_bytes == 0
    assert "what `offload` names is used at once, or in one turn of a loop" in str(found)


def test_what_is_computed_from_an_offloaded_value_is_computed_again() -> None:
    """Else it would be stacked on the device in its stead."""
    avals = [jax.typeof(jnp.ones(s.shape, s.dtype)) for s in SPECS]
    closed = inline_calls(compat.trace(lambda *args: [jax.grad(scanned)(*args)], avals))
    constrained = constrain_program(closed, Constraints(offload=("h",)))
    assert offloaded_bytes(compat.open_jaxpr(constrained)[0]) == STACK
    moved, paged = with_host_stacks(constrained)
    assert [p.nbytes for p in paged] == [STACK]
    forward = next(e for e in compat.open_jaxpr(moved)[0].eqns if e.primitive.name == "scan")
    stacks = [v.aval for v in forward.outvars[1:]]
    assert [a.memory_space for a in stacks].count(jax.memory.Space.Host) == 1
    assert len(stacks) == 2  # and the carry, which a weight's gradient needs
    args = [np.random.default_rng(0).normal(size=s.shape).astype(s.dtype) / 8 for s in SPECS]
    for one, other in zip(compat.evaluate(constrained, args), compat.evaluate(closed, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
