"""A proof that no plan keeps a budget, by walking executions backwards.

Where an op runs, all its inputs are alive at once. The one of them that was made last was made while the
others were alive, beside its own inputs: a larger set that was alive at once, some time before. Going on
like that, every execution leads back to the time when nothing had been made. If all ways back from some op
(or from the program's outputs) pass a moment that does not fit the budget, no plan keeps it.

It relaxes in the plans' favour: ops run in any order and as often as they like, and in-place ops save all
they could. States are sets of buffers as bit masks. Deterministic; gives up after a number of states.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from passes.liveness import Graph
from passes.planners.bounds import last_needs


def is_impossible(graph: Graph, budget_bytes: int, max_states: int, op_states: int) -> bool:
    """True if it is proved that no plan's peak is within `budget_bytes`; False says nothing.

    Args:
        max_states: how many states to visit for all ops together, those that hold most bytes first.
        op_states: how many of them for one op.
    """
    walk = Backwards(graph, budget_bytes)
    left = max_states
    for target in _targets(graph):
        if left <= 0:
            break
        visited, reached = walk.run(target, min(left, op_states))
        if not reached:
            return True
        left -= visited
    return False


def _targets(graph: Graph) -> list[int]:
    """What must be alive at once, just before each op and at the end; most bytes first."""
    ops = graph.program.ops
    last_need = last_needs(graph)
    pinned: list[int] = []
    targets = []
    for t, op in enumerate(ops):
        pinned = [b for b in pinned if last_need[b] > t]
        held = [b for b in pinned if not ops[graph.producer[b]].can_recompute(t + 1)]
        targets.append((-graph.local_bytes[t], t, mask_of((*graph.inputs[t], *held))))
        if not op.recomputable or op.deadline is not None:
            pinned.extend(graph.outputs[t])
    targets.append((-sum(graph.nbytes[b] for b in graph.results), len(ops), mask_of(graph.results)))
    return [mask for _, _, mask in sorted(targets)]


def mask_of(buffers: Iterable[int]) -> int:
    """Buffers as a bit mask."""
    return sum(1 << b for b in set(buffers))


class Backwards:
    """Ways back from a set of buffers that are alive at once, within a budget."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.capacity_bytes = budget_bytes - graph.argument_bytes
        self.reads = [mask_of(i) for i in graph.inputs]
        self.writes = [mask_of(o) for o in graph.outputs]
        # Walks ask for the bytes of the same few buffers all the time; each comes with its bit.
        self.read_bytes = [self._with_bytes(i) for i in graph.inputs]
        self.written_bytes = [self._with_bytes(o) for o in graph.outputs]
        self.saved_bytes = [
            [(1 << i, min(graph.nbytes[o], graph.nbytes[i])) for o, i in shares] for shares in graph.shares
        ]

    def _with_bytes(self, buffers: Iterable[int]) -> list[tuple[int, int]]:
        nbytes = self.graph.nbytes
        return [(1 << b, nbytes[b]) for b in dict.fromkeys(buffers) if nbytes[b]]

    def run(self, target: int, max_states: int) -> tuple[int, bool]:
        """How many states were visited, and whether a way back was found, or may exist."""
        queue = [(self.nbytes(target), target)]
        seen = {target}
        for visited in range(max_states):
            if not queue:
                return visited, False
            held_bytes, held = heapq.heappop(queue)
            if not held:
                return visited, True
            for before_bytes, before in self.before(held, held_bytes):
                if before not in seen:
                    seen.add(before)
                    heapq.heappush(queue, (before_bytes, before))
        return max_states, True

    def nbytes(self, mask: int) -> int:
        """Bytes of a set of buffers."""
        total = 0
        while mask:
            low = mask & -mask
            total += self.graph.nbytes[low.bit_length() - 1]
            mask ^= low
        return total

    def before(self, held: int, held_bytes: int) -> list[tuple[int, int]]:
        """What was alive before the last run that made some of `held`, and its bytes."""
        graph = self.graph
        befores = []
        rest = held
        while rest:
            op = graph.producer[(rest & -rest).bit_length() - 1]
            made = held & self.writes[op]
            rest &= ~made
            before_bytes, during_bytes = held_bytes, held_bytes + graph.workspace_bytes[op]
            for bit, nbytes in self.read_bytes[op]:
                if not held & bit:
                    before_bytes += nbytes
                    during_bytes += nbytes
            for bit, nbytes in self.written_bytes[op]:
                if held & bit:
                    before_bytes -= nbytes
                else:
                    during_bytes += nbytes
            # At most so many are saved by taking places of inputs that are not alive afterwards.
            for bit, nbytes in self.saved_bytes[op]:
                if not held & bit:
                    during_bytes -= nbytes
            if during_bytes <= self.capacity_bytes:
                befores.append((before_bytes, held & ~made | self.reads[op]))
        return befores
