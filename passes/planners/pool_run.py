"""A program run op by op on an address-ordered pool, where what is missing is recomputed before it is read.

What gives way where nothing is free, and what may share a place, is for those who run: the window planner,
which knows the future (`passes.planners.window`), and the runtimes that do not (`passes.planners.baselines`).
Invariant: no two live ranges that are alive at once overlap, so the peak is within the pool.
"""

from __future__ import annotations

import abc
from collections import Counter
from dataclasses import dataclass

from passes.liveness import Graph
from passes.offsets.pool import Pool

WORKSPACE = -2


def byte_ns(graph: Graph, buffer: int) -> float:
    """Cost of running a value's producer again, for each byte."""
    return graph.cost_ns[graph.producer[buffer]] / max(1, graph.nbytes[buffer])


def median_byte_ns(graph: Graph) -> float:
    """The median of that over all values but arguments: above it a value is expensive."""
    prices = sorted(byte_ns(graph, b) for b, producer in enumerate(graph.producer) if producer >= 0)
    return prices[len(prices) // 2] if prices else 0.0


class NoRoomError(Exception):
    """What is asked for cannot be had in the pool: nothing may be evicted, or it takes too much work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What a run made: op ids, and for every step the offset of each output."""

    steps: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


class PoolRun(abc.ABC):
    """The state of one run.

    Attributes:
        graph: the program.
        pool: the memory.
        present: for every buffer whether it is in memory (arguments always are).
        readers: for every buffer the ops that read it, ascending.
        pins: how many reasons there are not to evict a buffer now.
        slot: the op whose first run is next, or under way.
    """

    def __init__(self, graph: Graph, capacity_bytes: int) -> None:
        self.graph = graph
        self.pool = Pool(capacity_bytes, graph.argument_bytes)
        self.present = [p < 0 for p in graph.producer]
        self.readers = graph.readers()
        self.pins: Counter[int] = Counter()
        self.slot = 0
        self.steps: list[int] = []
        self.offsets: list[tuple[int, ...]] = []

    def run(self) -> Walked:
        """Run the schedule, and bring the program's outputs back at its end.

        Raises:
            NoRoomError: it does not fit.
        """
        graph = self.graph
        for op in range(len(graph.cost_ns)):
            self.slot = op
            self.bring(op)
            self._passed(op)
        self.slot = len(graph.cost_ns)
        self.pins.update(graph.results)
        for b in graph.results:
            if not self.present[b]:
                self.bring(graph.producer[b])
        return Walked(steps=tuple(self.steps), offsets=tuple(self.offsets))

    def bring(self, op: int) -> None:
        """Run `op`, and before it whatever its missing inputs need; iterative, deepest first."""
        stack = [op]
        self.pins.update(self.graph.inputs[op])
        while stack:
            missing = [b for b in self.graph.inputs[stack[-1]] if not self.present[b]]
            if missing:
                producer = self.graph.producer[missing[0]]
                stack.append(producer)
                self.pins.update(self.graph.inputs[producer])
            else:
                done = stack.pop()
                self.execute(done)
                self.pins.subtract(self.graph.inputs[done])

    def execute(self, op: int) -> None:
        """Give the outputs of `op` their places; its inputs are present and pinned."""
        graph = self.graph
        if op < self.slot and not graph.program.ops[op].can_recompute(self.slot):
            raise NoRoomError
        for b in graph.outputs[op]:
            if self.present[b]:
                self.free(b)
        placed = self._in_place(op)
        self.pins.update(graph.outputs[op])
        for b in graph.outputs[op]:
            if b not in placed:
                placed[b] = self._allocate(b, graph.nbytes[b], self._is_from_top(b))
        if graph.workspace_bytes[op]:
            self.pins[WORKSPACE] += 1
            self._allocate(WORKSPACE, graph.workspace_bytes[op], False)
            self.pool.release(WORKSPACE)
            self.pins[WORKSPACE] -= 1
        self._ran(op)
        self.pins.subtract(graph.outputs[op])
        self.steps.append(op)
        self.offsets.append(tuple(placed[b] for b in graph.outputs[op]))

    def free(self, buffer: int) -> None:
        """Take a value out of memory."""
        self.present[buffer] = False
        if self.graph.nbytes[buffer]:
            self.pool.release(buffer)

    def _in_place(self, op: int) -> dict[int, int]:
        """Outputs that take the place of an input which nobody reads after `op`."""
        graph = self.graph
        placed: dict[int, int] = {}
        for out, inp in graph.shares[op]:
            fits = 0 < graph.nbytes[out] <= graph.nbytes[inp]
            if fits and self.present[inp] and out not in placed and self._is_last(op, inp):
                placed[out] = self.pool.hand_over(inp, out, graph.nbytes[out])
                self.present[inp] = False
        return placed

    def _allocate(self, owner: int, nbytes: int, from_top: bool) -> int:
        """An offset for `nbytes`, evicting something if nothing is free."""
        if not nbytes:
            return 0
        index = self.pool.fit(nbytes, from_top=from_top)
        index = self._evicted(nbytes, from_top) if index is None else index
        return self.pool.take(index, nbytes, owner, from_top=from_top)

    def _ran(self, op: int) -> None:
        """What an op made is there."""
        for b in self.graph.outputs[op]:
            self.present[b] = True

    @abc.abstractmethod
    def _passed(self, op: int) -> None:
        """An op of the schedule has run: what it was the last to read may go."""

    @abc.abstractmethod
    def _is_last(self, op: int, buffer: int) -> bool:
        """True if an output of `op` may take the place of a buffer that it reads."""

    @abc.abstractmethod
    def _is_from_top(self, buffer: int) -> bool:
        """From which end of the pool a value is allocated."""

    @abc.abstractmethod
    def _evicted(self, nbytes: int, from_top: bool) -> int:
        """The index of a free block of so many bytes, after an eviction.

        Raises:
            NoRoomError: nothing may give way.
        """
