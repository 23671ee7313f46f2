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
from collections import Counter
from dataclasses import dataclass

from passes.liveness import Graph
from passes.offsets.pool import FREE, Pool
from passes.planners.candidate import WorkLimit

WORKSPACE = -2


class NoWindowError(Exception):
    """Nothing that may be evicted is large enough, or the work limit is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What a walk made: op ids, and for every step the offset of each output."""

    steps: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


def walk(graph: Graph, capacity_bytes: int, exponent: float, work: WorkLimit) -> Walked | None:
    """Run the schedule in `capacity_bytes`; None if it does not fit or takes too much work.

    Args:
        exponent: a recompute that is needed `d` steps later counts with `d ** -exponent` of its cost.
    """
    try:
        return _Walk(graph, capacity_bytes, exponent, work).run()
    except NoWindowError:
        return None


class _Walk:
    """The state of one walk over the schedule."""

    def __init__(self, graph: Graph, capacity_bytes: int, exponent: float, work: WorkLimit) -> None:
        self.graph = graph
        self.pool = Pool(capacity_bytes, graph.argument_bytes)
        self.exponent = exponent
        self.work = work
        self.uses: list[list[int]] = [[] for _ in graph.nbytes]
        for op, inputs in enumerate(graph.inputs):
            for b in inputs:
                self.uses[b].append(op)
        for b in graph.program.outputs:
            self.uses[b].append(len(graph.cost_ns))
        self.present = [p < 0 for p in graph.producer]
        self.demanded: dict[int, None] = {}
        self.slot = 0
        self.pins: Counter[int] = Counter()
        self.steps: list[int] = []
        self.offsets: list[tuple[int, ...]] = []
        ratios = sorted(self._density(b) for b, p in enumerate(graph.producer) if p >= 0)
        self.restricted = any(not op.recomputable or op.deadline is not None for op in graph.program.ops)
        self.middle = ratios[len(ratios) // 2] if ratios else 0.0

    def run(self) -> Walked:
        graph = self.graph
        for op in range(len(graph.cost_ns)):
            self.slot = op
            self.bring(op)
            for b in graph.outputs[op]:
                if self.uses[b]:
                    self.demanded[b] = None
            self.demanded = {b: None for b in self.demanded if self.uses[b][-1] > op}
        self.slot = len(graph.cost_ns)
        wanted = [b for b in graph.program.outputs if graph.producer[b] >= 0]
        self.pins.update(wanted)
        for b in wanted:
            if not self.present[b]:
                self.bring(graph.producer[b])
        return Walked(steps=tuple(self.steps), offsets=tuple(self.offsets))

    def bring(self, op: int) -> None:
        """Run `op`, and before it whatever its missing inputs need; iterative, deepest first."""
        stack = [op]
        self.pins.update(self.graph.inputs[op])
        while stack:
            top = stack[-1]
            missing = [b for b in self.graph.inputs[top] if not self.present[b]]
            if missing:
                producer = self.graph.producer[missing[0]]
                stack.append(producer)
                self.pins.update(self.graph.inputs[producer])
                continue
            self.execute(top)
            stack.pop()
            self.pins.subtract(self.graph.inputs[top])

    def execute(self, op: int) -> None:
        """Give the outputs of `op` their places; its inputs are present and pinned."""
        graph = self.graph
        self.work.done += 10
        if op < self.slot and not graph.program.ops[op].can_recompute(self.slot):
            raise NoWindowError
        for b in graph.outputs[op]:
            if self.present[b]:
                self.present[b] = False
                if graph.nbytes[b]:
                    self.pool.release(b)
        placed = self._in_place(op)
        self.pins.update(graph.outputs[op])
        scratch = graph.workspace_bytes[op]
        for b in graph.outputs[op]:
            if b not in placed:
                placed[b] = self.allocate(b, graph.nbytes[b], self._density(b) > self.middle)
        if scratch:
            self.pins[WORKSPACE] += 1
            self.allocate(WORKSPACE, scratch, False)
            self.pool.release(WORKSPACE)
            self.pins[WORKSPACE] -= 1
        self.pins.subtract(graph.outputs[op])
        for b in graph.outputs[op]:
            self.present[b] = True
        self.steps.append(op)
        self.offsets.append(tuple(placed[b] for b in graph.outputs[op]))

    def _in_place(self, op: int) -> dict[int, int]:
        """Outputs that take the place of an input which nobody reads after `op`."""
        graph = self.graph
        placed: dict[int, int] = {}
        if not graph.shares[op]:
            return placed
        after = self.slot + 1 if op == self.slot else self.slot
        for out, inp in graph.shares[op]:
            fits = 0 < graph.nbytes[out] <= graph.nbytes[inp]
            free = self.pins[inp] <= 1 and bisect_left(self.uses[inp], after) == len(self.uses[inp])
            if fits and free and self.present[inp] and out not in placed:
                placed[out] = self.pool.hand_over(inp, out, graph.nbytes[out])
                self.present[inp] = False
        return placed

    def _density(self, buffer: int) -> float:
        """Cost of running a value's producer again, for each byte."""
        return self.graph.cost_ns[self.graph.producer[buffer]] / max(1, self.graph.nbytes[buffer])

    def allocate(self, owner: int, nbytes: int, from_top: bool) -> int:
        """An offset for `nbytes`, evicting the cheapest window if nothing is free."""
        if not nbytes:
            return 0
        index = self.pool.fit(nbytes, from_top=from_top)
        if index is None:
            low, high = self._cheapest_window(nbytes)
            for block in self.pool.blocks[low : high + 1]:
                if block.owner != FREE:
                    self.present[block.owner] = False
            index = self.pool.evict(low, high)
        return self.pool.take(index, nbytes, owner, from_top=from_top)

    def _cheapest_window(self, nbytes: int) -> tuple[int, int]:
        if not self.work.left:
            raise NoWindowError
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
            raise NoWindowError
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
