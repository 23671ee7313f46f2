"""Stacks of scans that the planner sends to the host, because recompute alone does not fit or is dearer."""

from __future__ import annotations

import dataclasses
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import coop_jax as coop
from coop_jax import aot
from passes.backend import TPU
from passes.cost import DEVICES
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.constraints import constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.scans.host_choice import sent_to_host, waiting_for_stacks_ns
from passes.jaxpr.scans.host_stacks import stacks_of, with_host_stacks, with_stacks_on_host
from passes.jaxpr.values import Constraints
from passes.link import C2C, PCIE3
from passes.outcome import StageOutcome
from passes.pipeline import plan_program

LAYERS, ROWS, WIDTH = 16, 512, 128
SLICE = ROWS * WIDTH * 4
STACK = LAYERS * SLICE
SPECS = (h.spec(LAYERS, WIDTH, WIDTH), h.spec(ROWS, WIDTH))
FIXED = (2 * LAYERS * WIDTH * WIDTH + ROWS * WIDTH) * 4
HOST_BYTES = 1 << 30


def loss(ws: Any, x: Any) -> Any:
    """A chain of layers in a scan: the least that recompute alone must stack is a carry for every segment."""
    return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()


def program(function: Any = loss) -> Any:
    """The gradient as a closed jaxpr."""
    avals = [jax.typeof(jnp.ones(s.shape, s.dtype)) for s in SPECS]
    return inline_calls(compat.trace(lambda *args: [jax.grad(function)(*args)], avals))


def planned(temp_bytes: int, host_bytes: int = 0, **changes: Any) -> StageOutcome:
    """What the jaxpr stage makes of the gradient for some bytes of temporaries."""
    device = dataclasses.replace(DEVICES["h200"], **changes)
    request = JaxprRequest(
        budget_bytes=FIXED + temp_bytes, argument_bytes=FIXED, output_bytes=0, alias_bytes=0,
        device=device, host_bytes=host_bytes,
    )  # fmt: skip
    return plan_program(program(), request)[1]


def test_the_planner_sends_a_stack_to_the_host_where_recompute_alone_does_not_fit() -> None:
    alone = planned(9 * SLICE)
    assert alone.planned_temp_bytes > 9 * SLICE
    found = planned(9 * SLICE, HOST_BYTES)
    assert found.planned_temp_bytes <= 9 * SLICE
    assert [p.nbytes for p in found.paged] == [STACK]
    assert found.paged[0].source.startswith(__file__)


def test_a_stack_stays_where_the_program_fits_without_or_the_host_has_no_room() -> None:
    assert not planned(3 * STACK, HOST_BYTES).paged
    assert not planned(5 * SLICE, STACK - 1).paged


def test_a_quick_link_is_chosen_before_recompute_and_a_slow_one_after_it() -> None:
    """In the least bytes of segments, which run every layer twice."""
    least = planned(1).planned_temp_bytes
    alone = planned(least)
    slow = planned(least, HOST_BYTES, host_link=dataclasses.replace(PCIE3, from_host_bytes_per_second=1e6))
    quick = planned(least, HOST_BYTES, host_link=dataclasses.replace(C2C, latency_ns=0))
    assert alone.planned_temp_bytes == least
    assert (slow.recompute_ns, slow.paged) == (alone.recompute_ns, ())
    assert quick.paged
    assert quick.recompute_ns < alone.recompute_ns


def test_the_fewest_bytes_that_are_enough_are_sent() -> None:
    def three(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y + jnp.tanh(y @ w).astype(jnp.bfloat16).astype(jnp.float32), None

        return (lax.scan(layer, x, ws)[0] ** 2).mean()

    jaxpr = compat.open_jaxpr(program(three))[0]
    sizes = sorted(s.nbytes for s in stacks_of(jaxpr))
    assert len(sizes) > 2
    device = DEVICES["h200"]

    def excess_of(written: Any) -> int:
        here = {s.key for s in stacks_of(written)}
        return sizes[0] - sum(s.nbytes for s in stacks_of(jaxpr) if s.key not in here)

    found = sent_to_host(jaxpr, device, HOST_BYTES, excess_of)
    assert found is not None
    assert [p.nbytes for p in found.paged] == sizes[:1]
    everything = sent_to_host(jaxpr, device, HOST_BYTES, lambda _: 1)
    assert everything is not None
    assert sorted(p.nbytes for p in everything.paged) == sizes
    assert everything.waiting_ns == waiting_for_stacks_ns(stacks_of(jaxpr), device) > found.waiting_ns


def test_a_stack_inside_a_loop_over_microbatches_can_wait_on_the_host() -> None:
    def batches(ws: Any, x: Any) -> Any:
        parts = x.reshape(4, ROWS // 4, WIDTH)
        return lax.scan(lambda total, x: (total + jax.grad(loss)(ws, x), None), ws, parts)[0].sum()

    avals = [jax.typeof(jnp.ones(s.shape, s.dtype)) for s in SPECS]
    jaxpr = compat.open_jaxpr(inline_calls(compat.trace(lambda *args: [batches(*args)], avals)))[0]
    inner = [s for s in stacks_of(jaxpr) if s.iterations == 4]
    assert inner
    moved, paged = with_stacks_on_host(jaxpr, {s.key for s in inner})
    assert len(paged) == len(inner)
    assert not stacks_of(moved)


def test_a_forced_value_of_a_scan_in_a_scan_waits_on_the_host() -> None:
    """The inner stack is a slice of the outer one, which goes to the host."""

    def inner(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")), None), x, ws)[0], None

    def nested(ws: Any, x: Any) -> Any:
        return (lax.scan(inner, x, ws.reshape(4, LAYERS // 4, WIDTH, WIDTH))[0] ** 2).mean()

    constrained = constrain_program(program(nested), Constraints(offload=("h",)))
    _, paged = with_host_stacks(constrained)
    assert [p.nbytes for p in paged] == [STACK]


@pytest.mark.parametrize("shared", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_stacks_of_a_partitioned_program_wait_on_the_host(
    request: pytest.FixtureRequest, platform: str, shared: bool
) -> None:
    """Each device has its part of the stack on the host, and keeps less than recompute alone can."""
    device = request.getfixturevalue({"cuda": "h200", "tpu": "v5e"}[platform])
    places = aot.devices(device, count=4) if platform == "cuda" else aot.devices("v5e:2x2")
    mesh = Mesh(np.array(places), ("d",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
    specs = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.float32, sharding=split),
    )

    def local(ws: Any, x: Any) -> Any:
        return lax.pmean(loss(ws, x), "d")

    def mapped(ws: Any, x: Any) -> Any:
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(ws, x)

    budget = FIXED + 8 * SLICE
    limited = coop.remat(jax.grad(mapped if shared else loss), budget=budget, host="1GiB", device=device)
    options = {"cuda": {"xla_gpu_autotune_level": "0"}, "tpu": {"xla_msa_enable": "DISABLED"}}[platform]
    compiled = jax.jit(limited).lower(*specs).compile(compiler_options=options)
    found = coop.report(compiled)
    assert found.compiled_total_bytes <= budget
    assert found.compiled_total_bytes <= found.planned_total_bytes
    assert found.host.compiled_bytes == found.host.planned_bytes == STACK
    assert [p.nbytes for p in found.host.paged] == [STACK]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_scanned_program_keeps_a_budget_below_what_recompute_alone_can(
    request: pytest.FixtureRequest, platform: str
) -> None:
    device = request.getfixturevalue({"cuda": "h200", "tpu": "v5e"}[platform])
    budget = FIXED + 8 * SLICE
    limited = jax.jit(coop.remat(jax.grad(loss), budget=budget, host="1GiB", device=device))
    options = {"cuda": {"xla_gpu_autotune_level": "0"}, "tpu": {"xla_msa_enable": "DISABLED"}}[platform]
    compiled = aot.lower_for(limited, SPECS, device=device).compile(compiler_options=options)
    found = coop.report(compiled)
    assert found.compiled_total_bytes <= budget
    assert found.planned_total_bytes == found.compiled_total_bytes
    assert found.host.compiled_bytes == found.host.planned_bytes == STACK
    assert found.host.waiting_ns > 0
    assert "on the host: " in str(found)
    assert "waiting for the link: estimated" in str(found)
    assert type(found).from_dict(found.to_dict()) == found
    module = proto.parse(aot.final_module(compiled))
    seen = h.replayed(compiled) if platform == "cuda" else h.replayed_module(module, platform)
    assert not seen.problems
    if platform == "tpu":
        assert _context_spaces(module) == {TPU.context_space}, "where XLA puts them after its callback"


def _context_spaces(module: Any) -> set[int]:
    """The memory spaces of contexts of slices to and from the host, found where XLA has not said them yet."""
    given = proto.parse(proto.serialize(module))
    slices = [i for c in given.computations for i in c.instructions if i.opcode == "async-start"]
    for instruction in slices:
        instruction.shape.tuple_shapes[2].layout.memory_space = 0
    assigner = Assigner(graph.read(given), "tpu")
    flow = assigner.flow
    values = [v for v in flow.values if v.home.index == (2,) and v.home.instruction in {i.id for i in slices}]
    assert values
    return {assigner.space_of(flow.class_of[v.id]) for v in values}
