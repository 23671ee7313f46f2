"""Loops wait for the host as late as they can, and never longer than the copies' storage allows."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from passes.backend import BACKENDS
from passes.cost import DEVICES
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.cost import computation_times_ns, host_transfer
from passes.hlo.graph import Computation, Module
from passes.hlo.waits import with_later_waits
from tests.test_replay import OFFLOADED

DEVICE = {"cuda": "h200", "tpu": "v5e"}


def later(data: bytes, platform: str) -> tuple[Module, Module]:
    """A module as XLA's scheduler left it, and with later waits; the same twice where nothing moves."""
    view = graph.read(proto.parse(data))
    moved = with_later_waits(Assigner(view, platform, old_rules=h.OLD_RULES).flow)
    return view, view if moved is None else graph.read(moved)


def kernels_beside(view: Module, *, to_host: bool) -> int:
    """How many kernels run while slices of loops are on their way in one direction."""
    found = 0
    for body in view.computations.values():
        if body.scheduled and body.id != view.entry.id:
            found += sum(_between(body, i, view) for i in body.order if _sends(view, body, i, to_host))
    return found


def _sends(view: Module, body: Computation, i: int, to_host: bool) -> bool:
    transfer = host_transfer(view, body.by_id[i])
    return transfer is not None and transfer[0] == to_host


def _between(body: Computation, start: int, view: Module) -> int:
    done = next(i for i in body.order if start in body.by_id[i].operands and "done" in body.by_id[i].opcode)
    inside = body.order[body.order.index(start) : body.order.index(done)]
    kernels = [body.by_id[i] for i in inside if body.by_id[i].opcode in ("fusion", "custom-call", "dot")]
    return len(kernels)


def carrying() -> h.Example:
    """A scan that sends what it carries before it makes the next of it, and one that brings all back."""

    def loss(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), jax.device_put(x, jax.memory.Space.Host)

        last, stack = lax.scan(layer, x, ws)
        back = lax.scan(lambda s, x: (s + jax.device_put(x, jax.memory.Space.Device), None), last, stack)
        return (back[0] ** 2).sum()

    return h.Example(name="carrying", fn=loss, args=(h.spec(6, 64, 64), h.spec(256, 64)))


CARRYING = carrying()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("example", [CARRYING, OFFLOADED], ids=lambda e: e.name)
def test_loops_wait_later_for_the_host_and_their_numbers_stay(
    h200: str, v5e: str, platform: str, example: h.Example
) -> None:
    """XLA takes the module, its count is the prediction's, and what is read at its addresses is there.

    On a GPU the slice on its way is the carry itself, whose place the iteration's own result takes.
    """
    data, _ = h.scheduled(example, platform)
    before, after = later(data, platform)
    device = DEVICES[DEVICE[platform]]
    waits = [computation_times_ns(view, view.entry, device)[1] for view in (before, after)]
    assert waits[1] <= waits[0]
    assert kernels_beside(after, to_host=True) >= kernels_beside(before, to_host=True)
    compiled = h.compile_with(example, lambda _: proto.serialize(after.proto), platform)
    predicted, counted = h.predicted(h.predict(after.proto, platform)), h.totals(compiled)
    if platform == "cuda":
        seen = h.replayed(compiled)
        assert predicted == counted
        assert (seen.to_host, seen.from_host) == (6, 6)
    else:
        seen = h.replayed_module(after.proto, platform)
        assert abs(predicted["total"] - counted["total"]) <= BACKENDS["tpu"].late_bytes
    assert not seen.problems
