"""The abstract machine: it passes what is right, and says what is wrong in modules broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from coop_jax import aot
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.graph import HOST
from passes.hlo.xla_assignment import Address, Name
from tests.replay import predicted_addresses, replay

LAYERS = 6


def offloaded_scan() -> h.Example:
    """The residuals of a scan on the host, by JAX's own policy."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h")) + x, None

        last, _ = lax.scan(jax.checkpoint(layer, policy=policy), x, weights)
        return (last**2).mean()

    return h.Example(name="offloaded", fn=jax.grad(loss), args=(h.spec(LAYERS, 64, 64), h.spec(256, 64)))


OFFLOADED = offloaded_scan()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_stacks_on_the_host_are_written_before_they_are_read(h200: str, v5e: str, platform: str) -> None:
    """A forward scan fills a stack slice by slice, a reversed one reads it."""
    data, compiled = h.scheduled(OFFLOADED, platform)
    prediction = h.lifted(data, platform).prediction
    assert prediction.host_bytes == compiled.memory_analysis().host_temp_size_in_bytes
    seen = h.replayed(compiled) if platform == "cuda" else h.replayed_module(proto.parse(data), platform)
    assert not seen.problems
    assert (seen.to_host, seen.from_host, seen.iterations) == (LAYERS, LAYERS, 2 * LAYERS)


@functools.cache
def paged_bytes() -> bytes:
    """An MLP with pages, as it was written."""
    found = h.with_pages(h.example("mlp", "grad"), "tpu", seed=5)
    assert found.pages
    return proto.serialize(found.module)


def paged() -> tuple[Any, dict[Name, Address]]:
    """A module with pages, and its addresses."""
    module = proto.parse(paged_bytes())
    assigner = Assigner(graph.read(module), "tpu", old_rules=h.OLD_RULES)
    return module, predicted_addresses(assigner)


def entry_of(module: Any) -> tuple[Any, Any]:
    """The entry and its schedule."""
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    return entry, next(s.value for s in module.schedule.sequences if s.key == entry.id)


def test_host_buffers_that_share_bytes_are_found(v5e: str) -> None:
    module, addresses = paged()
    assert not replay(graph.read(module), addresses).problems
    entry, _ = entry_of(module)
    on_host = {i.name for i in entry.instructions if i.opcode == "copy-start"
               and i.shape.tuple_shapes[0].layout.memory_space == HOST}  # fmt: skip
    assert len(on_host) > 1
    same = {
        name: dataclasses.replace(a, offset=0) if name[0] in on_host and name[1] == (0,) else a
        for name, a in addresses.items()
    }
    assert any("something else was written" in p for p in replay(graph.read(module), same).problems)


def test_bytes_that_are_used_again_before_their_copy_is_done_are_found(v5e: str) -> None:
    """Every copy to the host is waited for at the very end, though its bytes are used again before."""
    module, addresses = paged()
    entry, schedule = entry_of(module)
    by_id = {i.id: i for i in entry.instructions}
    sent = [i.id for i in entry.instructions if i.opcode == "copy-done"
            and i.shape.layout.memory_space == HOST]  # fmt: skip
    back = {i.id for i in entry.instructions if i.opcode == "copy-start" and i.operand_ids[0] in sent}
    order = list(schedule.instruction_ids)
    for i in sent:
        last = min(order.index(b) for b in back if by_id[b].operand_ids[0] == i)
        order.remove(i)
        order.insert(last - 1, i)
    schedule.instruction_ids[:] = order
    assert any("overwritten before" in p for p in replay(graph.read(module), addresses).problems)


def test_a_copy_that_nobody_waits_for_is_found(v5e: str) -> None:
    module, addresses = paged()
    entry, schedule = entry_of(module)
    done = next(i for i in entry.instructions if i.opcode == "copy-done" and not i.shape.layout.memory_space)
    start = done.operand_ids[0]
    for instruction in entry.instructions:
        instruction.operand_ids[:] = [start if o == done.id else o for o in instruction.operand_ids]
    schedule.instruction_ids[:] = [i for i in schedule.instruction_ids if i != done.id]
    problems = replay(graph.read(module), addresses).problems
    assert any("before its copy is done" in p for p in problems)
    assert any("nothing waits for" in p for p in problems)


def test_a_slice_that_was_never_written_is_found(h200: str) -> None:
    """The reversed scan begins one slice too far."""
    _, compiled = h.scheduled(OFFLOADED, "cuda")
    module = proto.parse(aot.final_module(compiled))
    for computation in module.computations:
        for i in computation.instructions:
            if i.opcode == "constant" and list(i.literal.s32s) == [LAYERS - 1]:
                i.literal.s32s[:] = [LAYERS]
    problems = replay(graph.read(module), {}).problems
    assert any("not written yet" in p for p in problems)
