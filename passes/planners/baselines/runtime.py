"""An online runtime replayed on an address pool: what DTR, DTE and Coop do when memory runs out.

Ops arrive in schedule order and the future is unknown, but for one thing that a framework knows: a value
that the program will not name again has no references left and is freed at once ("eager eviction"). An
absent input is recomputed first, recursively; inputs and outputs of the op in hand are pinned. Where no
free block holds an output, the policy evicts. Fragmentation counts: bytes must be contiguous.
Invariant: no two live ranges that are alive at once overlap, so a finished replay keeps its capacity.
"""

from __future__ import annotations

import abc
from collections import Counter
from dataclasses import dataclass

from passes.liveness import Graph
from passes.offsets.pool import FREE, Pool

WORKSPACE = -2
MOST_STEPS_PER_OP = 100


class OutOfMemoryError(Exception):
    """Nothing may be evicted any more, or the runtime recomputes the same ops for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a runtime did: op ids, for every step the offset of each output, and how often it evicted."""

    steps: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    evictions: int


class Policy(abc.ABC):
    """Which values give way to a request. Reads the runtime; `Runtime.evict` does the rest."""

    in_place = False

    def from_top(self, runtime: Runtime, buffer: int) -> bool:
        """From which end of the pool a value is allocated."""
        return False

    @abc.abstractmethod
    def make_room(self, runtime: Runtime, nbytes: int) -> None:
        """Evict something towards `nbytes` contiguous bytes; called until a free block holds them."""

    def evicted(self, runtime: Runtime, buffer: int) -> None:  # noqa: B027
        """Told when a value is evicted, to keep books; nothing to keep by default."""

    def made(self, runtime: Runtime, buffer: int) -> None:  # noqa: B027
        """Told when a value is made, to keep books; nothing to keep by default."""


class Runtime:
    """The state of one replay.

    Attributes:
        graph: the program.
        capacity_bytes, policy: how much memory there is, and who gives way.
        pool: the memory.
        present: for every buffer whether it is in memory (arguments always are).
        ever: for every buffer whether it has been made.
        last_use_ns: for every buffer when it was last made or read.
        clock_ns: cost of all steps so far.
        recomputes: for every buffer how often it was recomputed.
        pins: how many reasons there are not to evict a buffer now.
    """

    def __init__(self, graph: Graph, capacity_bytes: int, policy: Policy) -> None:
        self.graph = graph
        self.capacity_bytes = capacity_bytes
        self.policy = policy
        self.pool = Pool(capacity_bytes, graph.argument_bytes)
        self.present = [p < 0 for p in graph.producer]
        self.ever = list(self.present)
        self.last_use_ns = [0] * len(graph.nbytes)
        self.recomputes = [0] * len(graph.nbytes)
        self.readers: list[list[int]] = [[] for _ in graph.nbytes]
        for op, inputs in enumerate(graph.inputs):
            for b in inputs:
                self.readers[b].append(op)
        self.references = [len(r) + out for r, out in zip(self.readers, graph.is_output, strict=True)]
        self.pins: Counter[int] = Counter()
        self.clock_ns = 0
        self.slot = 0
        self.steps: list[int] = []
        self.offsets: list[tuple[int, ...]] = []
        self.evictions = 0

    def run(self) -> Replayed:
        """Replay the schedule.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        graph = self.graph
        if graph.argument_bytes > self.capacity_bytes:
            raise OutOfMemoryError
        for op in range(len(graph.cost_ns)):
            self.slot = op
            self.bring(op)
            for b in graph.inputs[op]:
                self.references[b] -= 1
            for b in (*graph.inputs[op], *graph.outputs[op]):
                if not self.references[b] and self.present[b]:
                    self._free(b)
        self.slot = len(graph.cost_ns)
        wanted = [b for b in graph.program.outputs if graph.producer[b] >= 0]
        self.pins.update(wanted)
        for b in wanted:
            if not self.present[b]:
                self.bring(graph.producer[b])
        return Replayed(steps=tuple(self.steps), offsets=tuple(self.offsets), evictions=self.evictions)

    def bring(self, op: int) -> None:
        """Run `op` after whatever its missing inputs need; iterative, deepest first."""
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
                self._execute(done)
                self.pins.subtract(self.graph.inputs[done])

    def evictable(self, buffer: int) -> bool:
        """True if a value lies in the pool, is not pinned, and may be recomputed."""
        if buffer < 0 or not self.present[buffer] or self.pins[buffer] > 0:
            return False
        if not self.graph.nbytes[buffer]:
            return False
        return self._returns(buffer)

    def evict(self, buffer: int) -> None:
        """Take a value out of memory."""
        self._free(buffer)
        self.evictions += 1
        self.policy.evicted(self, buffer)

    def _returns(self, buffer: int) -> bool:
        """True if an effect or a deadline does not stand in the way of making a value again."""
        op = self.graph.program.ops[self.graph.producer[buffer]]
        return op.recomputable and op.deadline is None

    def _free(self, buffer: int) -> None:
        self.present[buffer] = False
        if self.graph.nbytes[buffer]:
            self.pool.release(buffer)

    def _execute(self, op: int) -> None:
        graph = self.graph
        if len(self.steps) >= MOST_STEPS_PER_OP * len(graph.cost_ns):
            raise OutOfMemoryError
        if op < self.slot and not graph.program.ops[op].can_recompute(self.slot):
            raise OutOfMemoryError
        for b in graph.outputs[op]:
            if self.present[b]:
                self._free(b)
        placed = self._in_place(op) if self.policy.in_place else {}
        self.pins.update(graph.outputs[op])
        for b in graph.outputs[op]:
            if b not in placed:
                placed[b] = self._allocate(b, graph.nbytes[b], self.policy.from_top(self, b))
        if graph.workspace_bytes[op]:
            self._allocate(WORKSPACE, graph.workspace_bytes[op], False)
            self.pool.release(WORKSPACE)
        self.clock_ns += graph.cost_ns[op]
        for b in graph.inputs[op]:
            self.last_use_ns[b] = self.clock_ns
        for b in graph.outputs[op]:
            self.present[b] = True
            self.recomputes[b] += self.ever[b]
            self.ever[b] = True
            self.last_use_ns[b] = self.clock_ns
            self.policy.made(self, b)
        self.pins.subtract(graph.outputs[op])
        self.steps.append(op)
        self.offsets.append(tuple(placed[b] for b in graph.outputs[op]))

    def _in_place(self, op: int) -> dict[int, int]:
        """Outputs that take the place of an input with no further reference (Coop's in-place rule)."""
        graph = self.graph
        placed: dict[int, int] = {}
        for out, inp in graph.shares[op]:
            last = self.references[inp] == (op == self.slot) and self.pins[inp] == 1
            fits = 0 < graph.nbytes[out] <= graph.nbytes[inp]
            if last and fits and self.present[inp] and out not in placed:
                placed[out] = self.pool.hand_over(inp, out, graph.nbytes[out])
                self.present[inp] = False
        return placed

    def _allocate(self, owner: int, nbytes: int, from_top: bool) -> int:
        if not nbytes:
            return 0
        index = self.pool.fit(nbytes, from_top=from_top)
        while index is None:
            before = self.evictions
            self.policy.make_room(self, nbytes)
            if self.evictions == before:
                raise OutOfMemoryError
            index = self.pool.fit(nbytes, from_top=from_top)
        return self.pool.take(index, nbytes, owner, from_top=from_top)


def adjacent_free_bytes(pool: Pool, index: int) -> int:
    """Free bytes right beside a block."""
    near = [pool.blocks[k] for k in (index - 1, index + 1) if 0 <= k < len(pool.blocks)]
    return sum(block.nbytes for block in near if block.owner == FREE)
