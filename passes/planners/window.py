"""The sliding-window planner: run the schedule on an address-ordered pool of the budget's size.

When an allocation does not fit, the cheapest window of contiguous blocks gives way: the cost of a window
is what recomputing the union of its closures costs (shared ancestors once), discounted by the distance
to the next use, which is known. Dead values stay where they are until a window takes them for nothing,
so a closure that still finds them stops there. Values that are cheap to recompute grow from the bottom,
expensive ones from the top; in-place outputs keep their address. Follows Coop (NeurIPS 2023), with the
future known. Invariant: no two live ranges that are alive at once overlap, so the peak is within the pool.
"""

from __future__ import annotations

from bisect import bisect_left

from passes.liveness import Graph
from passes.offsets.pool import FREE
from passes.planners.candidate import WorkLimit
from passes.planners.pool_run import NoRoomError, PoolRun, Walked, byte_ns, median_byte_ns


def walk(graph: Graph, capacity_bytes: int, exponent: float, work: WorkLimit) -> Walked | None:
    """Run the schedule in `capacity_bytes`; None if it does not fit or takes too much work.

    Args:
        exponent: a recompute that is needed `d` steps later counts with `d ** -exponent` of its cost.
    """
    try:
        return _Walk(graph, capacity_bytes, exponent, work).run()
    except NoRoomError:
        return None


class _Walk(PoolRun):
    """The state of one walk over the schedule.

    Attributes:
        uses: for every buffer its readers, and for outputs the end.
        demanded: what is needed later.
        middle: values that are dearer to recompute for their bytes than this grow from the top.
        restricted: whether some op may not be recomputed at any time.
    """

    def __init__(self, graph: Graph, capacity_bytes: int, exponent: float, work: WorkLimit) -> None:
        super().__init__(graph, capacity_bytes)
        self.exponent = exponent
        self.work = work
        self.uses = self.readers
        for b in graph.program.outputs:
            self.uses[b].append(len(graph.cost_ns))
        self.demanded: dict[int, None] = {}
        self.restricted = any(not op.recomputable or op.deadline is not None for op in graph.program.ops)
        self.middle = median_byte_ns(graph)

    def execute(self, op: int) -> None:
        self.work.done += 10
        super().execute(op)

    def _passed(self, op: int) -> None:
        """What has a later use is demanded; what has none stays until a window takes it."""
        for b in self.graph.outputs[op]:
            if self.uses[b]:
                self.demanded[b] = None
        self.demanded = {b: None for b in self.demanded if self.uses[b][-1] > op}

    def _is_last(self, op: int, buffer: int) -> bool:
        after = self.slot + 1 if op == self.slot else self.slot
        return self.pins[buffer] <= 1 and bisect_left(self.uses[buffer], after) == len(self.uses[buffer])

    def _is_from_top(self, buffer: int) -> bool:
        return byte_ns(self.graph, buffer) > self.middle

    def _evicted(self, nbytes: int, from_top: bool) -> int:
        low, high = self._cheapest_window(nbytes)
        for block in self.pool.blocks[low : high + 1]:
            if block.owner != FREE:
                self.present[block.owner] = False
        return self.pool.evict(low, high)

    def _cheapest_window(self, nbytes: int) -> tuple[int, int]:
        if not self.work.left:
            raise NoRoomError
        needs = self._needs()
        pinned = [b for b, count in sorted(self.pins.items()) if count > 0]
        stuck: list[int] = []
        if self.restricted:
            stuck = [b for b in sorted(needs) if self.present[b] and not self._can_return(b, needs[b])]
        best, chosen = float("inf"), None
        weights = {b: self._weight(need) for b, need in needs.items() if self.present[b]}
        least = [self._own_ns(block.owner) * weights.get(block.owner, 1e-9) for block in self.pool.blocks]
        for low, high in self.pool.windows(nbytes, frozenset((*pinned, *stuck))):
            if max(least[low : high + 1]) < best:
                score = self._score(low, high, weights, best)
                if score < best:
                    best, chosen = score, (low, high)
        self.work.done += 2 * len(least)
        if chosen is None:
            raise NoRoomError
        return chosen

    def _weight(self, need: int) -> float:
        return float(max(1, need - self.slot + 1) ** -self.exponent)

    def _own_ns(self, owner: int) -> int:
        return 0 if owner == FREE else self.graph.cost_ns[self.graph.producer[owner]]

    def _needs(self) -> dict[int, int]:
        """When every value is needed next, for its own uses or to run missing ones again."""
        needs: dict[int, int] = {}
        stack: list[tuple[int, int]] = []
        for b in self.demanded:
            k = bisect_left(self.uses[b], self.slot)
            if k < len(self.uses[b]):
                stack.append((b, self.uses[b][k]))
        while stack:
            b, need = stack.pop()
            if needs.get(b, need + 1) <= need:
                continue
            needs[b] = need
            if not self.present[b]:
                self.work.done += 1
                stack.extend((i, need) for i in self.graph.inputs[self.graph.producer[b]])
        return needs

    def _can_return(self, buffer: int, need: int) -> bool:
        """True if the value may be recomputed from what is present, in time for `need`."""
        ops = self.graph.program.ops
        stack = [buffer]
        seen: set[int] = set()
        while stack:
            producer = self.graph.producer[stack.pop()]
            if not ops[producer].can_recompute(need):
                return False
            if producer not in seen:
                seen.add(producer)
                stack.extend(b for b in self.graph.inputs[producer] if not self.present[b])
        return True

    def _score(self, low: int, high: int, weights: dict[int, float], enough: float) -> float:
        """Discounted cost of the union of the closures of a window's values, or something over `enough`."""
        graph = self.graph
        owners = [b.owner for b in self.pool.blocks[low : high + 1] if b.owner != FREE]
        wanted = sorted(((weights[b], -b) for b in owners if b in weights), reverse=True)
        seen: set[int] = set()
        score = 0.0
        for weight, root in wanted:
            stack = [-root]
            while stack and score < enough:
                producer = graph.producer[stack.pop()]
                if producer not in seen:
                    seen.add(producer)
                    score += graph.cost_ns[producer] * weight
                    stack.extend(b for b in graph.inputs[producer] if not self.present[b] or b in owners)
        self.work.done += 2 + len(owners) + len(seen)
        return score + 1e-9 * sum(self._own_ns(b) for b in owners)
