"""Copies between a loop's slices and the host: begun as early as they can be, waited for as late.

The jaxpr stage leaves it to XLA when an iteration waits for the slice that it sends to the host, or brings
back. Here a wait moves down to just before its first reader, and the start of a copy back moves up to what it
needs, so that kernels run in between.

Invariant: a wait never passes an instruction that writes what the copy still reads or writes. A loop keeps
what it carries in one place, so the iteration's own result may overwrite the slice that is on its way. Nor
does it pass what XLA made wait for it by a control dependence, as XLA:TPU does with the kernel behind a slice
on its way to the host.

Not done: bringing back the next iteration's slice, which would have to be carried.
"""

from __future__ import annotations

from typing import Any

from passes.hlo import proto
from passes.hlo.cost import host_transfer
from passes.hlo.dataflow import Dataflow
from passes.hlo.graph import Computation

_DONE = frozenset({"copy-done", "async-done"})
_VIEWS = frozenset({"bitcast", "get-tuple-element"})
_CALLS = frozenset({"while", "conditional", "call"})


def with_later_waits(flow: Dataflow) -> Any | None:
    """The parsed module whose loops wait later for the host; None where nothing moves."""
    orders: dict[int, list[int]] = {}
    for computation in flow.module.computations.values():
        if computation.scheduled and computation.id != flow.module.entry.id:
            order = _Body(flow, computation).order()
            if order != list(computation.order):
                orders[computation.id] = order
    if not orders:
        return None
    module = proto.copy(flow.module.proto)
    for sequence in module.schedule.sequences:
        if sequence.key in orders:
            sequence.value.instruction_ids[:] = orders[sequence.key]
    return module


class _Body:
    """One scheduled computation that is no entry."""

    def __init__(self, flow: Dataflow, computation: Computation) -> None:
        self.flow, self.computation = flow, computation
        by_id = computation.by_id
        transfers = {i: host_transfer(flow.module, by_id[i]) for i in computation.order}
        self.to_host = {i: transfer[0] for i, transfer in transfers.items() if transfer is not None}
        self.waits = {
            i: by_id[i].operands[0]
            for i in computation.order
            if by_id[i].opcode in _DONE and by_id[i].operands[0] in self.to_host
        }

    def order(self) -> list[int]:
        """The instructions as they should run."""
        by_id, order = self.computation.by_id, list(self.computation.order)
        if not self.waits:
            return order
        late = {*self.waits, *self._views_of_waits()}
        for i in reversed(self.computation.order):
            if i in late:
                place = order.index(i)
                order.insert(self._latest(order, place) - 1, order.pop(place))
        before = set[int]()  # copies stay in their order
        for i in self.to_host:
            if not self.to_host[i]:
                needed = before.union(by_id[i].operands, by_id[i].control)
                order.remove(i)
                order.insert(max((k + 1 for k, other in enumerate(order) if other in needed), default=0), i)
            before.add(i)
        return order

    def _views_of_waits(self) -> set[int]:
        """Views of what was waited for: they move with it."""
        views: set[int] = set()
        for i in self.computation.order:
            instruction = self.computation.by_id[i]
            if instruction.opcode in _VIEWS and instruction.operands[0] in {*self.waits, *views}:
                views.add(i)
        return views

    def _latest(self, order: list[int], place: int) -> int:
        """The place of the first instruction behind a wait, or a view, that it must not pass."""
        moved = order[place]
        held = self._classes(self.waits[moved]) if moved in self.waits else frozenset[int]()
        for k in range(place + 1, len(order)):
            other = self.computation.by_id[order[k]]
            reads = moved in other.operands or moved in other.control
            if reads or order[k] == self.computation.root or held & self._written(order[k]):
                return k
        return len(order)

    def _classes(self, start: int) -> frozenset[int]:
        """Storage that a copy reads or writes."""
        tree = self.flow.trees[self.computation.id, start]
        return frozenset(self.flow.class_of[v] for v in tree.values())

    def _written(self, i: int) -> frozenset[int]:
        """Storage that an instruction writes, or what it calls may write."""
        tree = self.flow.trees[self.computation.id, i]
        if self.computation.by_id[i].opcode in _CALLS:
            return frozenset(self.flow.class_of[v] for v in tree.values())
        homes = ((v, self.flow.values[v].home) for v in tree.values())
        here = (self.computation.id, i)
        return frozenset(self.flow.class_of[v] for v, h in homes if (h.computation, h.instruction) == here)
