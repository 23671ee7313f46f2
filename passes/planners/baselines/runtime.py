"""An online runtime replayed on an address pool: what DTR, DTE and Coop do when memory runs out.

Ops arrive in schedule order and the future is unknown, but for one thing that a framework knows: a value
that the program will not name again has no references left and is freed at once ("eager eviction"). An
absent input is recomputed first, recursively; inputs and outputs of the op in hand are pinned. Where no
free block holds an output, the policy evicts. Fragmentation counts: bytes must be contiguous.
Invariant: no two live ranges that are alive at once overlap, so a finished replay keeps its capacity.
"""

from __future__ import annotations

import abc

from passes.liveness import Graph
from passes.offsets.pool import FREE, Pool
from passes.planners.pool_run import NoRoomError, PoolRun, Walked

# A runtime that takes more is lost in recomputes of recomputes, and is ended.
MOST_STEPS_PER_OP = 100


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


class Runtime(PoolRun):
    """The state of one replay.

    Attributes:
        capacity_bytes, policy: how much memory there is, and who gives way.
        ever: for every buffer whether it has been made.
        last_use_ns: for every buffer when it was last made or read.
        clock_ns: cost of all steps so far.
        recomputes: for every buffer how often it was recomputed.
    """

    def __init__(self, graph: Graph, capacity_bytes: int, policy: Policy) -> None:
        super().__init__(graph, capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.policy = policy
        self.ever = list(self.present)
        self.last_use_ns = [0] * len(graph.nbytes)
        self.recomputes = [0] * len(graph.nbytes)
        self.references = [len(r) + out for r, out in zip(self.readers, graph.is_output, strict=True)]
        self.clock_ns = 0
        self.evictions = 0

    def run(self) -> Walked:
        """The whole run. Raises `NoRoomError` where the arguments alone fill the pool."""
        if self.graph.argument_bytes > self.capacity_bytes:
            raise NoRoomError
        return super().run()

    def _passed(self, op: int) -> None:
        """What the program will not name again is freed."""
        for b in self.graph.inputs[op]:
            self.references[b] -= 1
        for b in (*self.graph.inputs[op], *self.graph.outputs[op]):
            if not self.references[b] and self.present[b]:
                self.free(b)

    def evictable(self, buffer: int) -> bool:
        """True if a value lies in the pool, is not pinned, and may be recomputed."""
        if buffer < 0 or not self.present[buffer] or self.pins[buffer] > 0:
            return False
        if not self.graph.nbytes[buffer]:
            return False
        return self._returns(buffer)

    def evict(self, buffer: int) -> None:
        """Take a value out of memory."""
        self.free(buffer)
        self.evictions += 1
        self.policy.evicted(self, buffer)

    def _returns(self, buffer: int) -> bool:
        """True if an effect or a deadline does not stand in the way of making a value again."""
        op = self.graph.program.ops[self.graph.producer[buffer]]
        return op.recomputable and op.deadline is None

    def execute(self, op: int) -> None:
        """Run an op (again). Raises `NoRoomError` where the replay recomputes without end."""
        if len(self.steps) >= MOST_STEPS_PER_OP * len(self.graph.cost_ns):
            raise NoRoomError
        super().execute(op)

    def _ran(self, op: int) -> None:
        self.clock_ns += self.graph.cost_ns[op]
        for b in self.graph.inputs[op]:
            self.last_use_ns[b] = self.clock_ns
        for b in self.graph.outputs[op]:
            self.present[b] = True
            self.recomputes[b] += self.ever[b]
            self.ever[b] = True
            self.last_use_ns[b] = self.clock_ns
            self.policy.made(self, b)

    def _is_last(self, op: int, buffer: int) -> bool:
        """Coop's in-place rule: an input with no further reference."""
        last = self.references[buffer] == (op == self.slot) and self.pins[buffer] == 1
        return self.policy.in_place and last

    def _is_from_top(self, buffer: int) -> bool:
        return self.policy.from_top(self, buffer)

    def _evicted(self, nbytes: int, from_top: bool) -> int:
        index = None
        while index is None:
            before = self.evictions
            self.policy.make_room(self, nbytes)
            if self.evictions == before:
                raise NoRoomError
            index = self.pool.fit(nbytes, from_top=from_top)
        return index


def adjacent_free_bytes(pool: Pool, index: int) -> int:
    """Free bytes right beside a block."""
    near = [pool.blocks[k] for k in (index - 1, index + 1) if 0 <= k < len(pool.blocks)]
    return sum(block.nbytes for block in near if block.owner == FREE)
