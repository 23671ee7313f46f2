"""The last resort under a tight budget: what an op reads is recomputed, from nothing, before the op runs.

Backwards, as in `passes.planners.proof`: of the buffers that are alive at once, one was made last, beside
its own inputs; so on, until nothing is left. Read forwards that is a sequence of runs within the budget. Two
orders find it: the state of the latest made buffers first dives to the beginning, but may not get away from
where bytes are tightest; the state of fewest bytes first gets away and then loses itself. So dives start
where few bytes are alive.

Only slots that break the budget are recomputed; more of them where what was dropped and recomputed breaks it
elsewhere. Needs ops that may all be recomputed, and a program for whose size the work suffices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.cut import DELETE_UNITS
from passes.planners.proof import Backwards, mask_of
from passes.planners.schedule import Schedule, absent_closure, reverse_delete

WIDTHS = (1, 100, 400)
STARTS = 3
DIVE_STATES = 600
STATE_UNITS = 100
LEAST_STATES_PER_OP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """What a search saw: for every state the one after it and the ops that lead there; and where it ended."""

    after: dict[int, tuple[int, tuple[int, ...]]]
    visited: list[int]
    end: int | None

    def ops(self, state: int, last: int) -> list[int]:
        """The ops that lead from a state to `last`, the root."""
        found: list[int] = []
        while state != last:
            state, ops = self.after[state]
            found += ops
        return found


def rebuild(graph: Graph, found: Candidate, budget_bytes: int, work: WorkLimit) -> Candidate:
    """A sequence within the budget, or `found` where none is found.

    Args:
        found: a sequence over the budget, low in bytes; its slots within the budget are kept.
    """
    free = all(op.recomputable and op.deadline is None for op in graph.program.ops)
    if not free or LEAST_STATES_PER_OP * STATE_UNITS * len(graph.cost_ns) > work.limit:
        return found
    ways = _Ways(graph, budget_bytes, work)
    blocks = _blocks(found.steps)
    anew: set[int] = set()
    schedule = Schedule(graph, found.steps)
    while schedule.peak_bytes > budget_bytes and work.left:
        over = {schedule.slots[p] for p in np.flatnonzero(schedule.live > budget_bytes).tolist()}
        if over <= anew:
            return found
        anew |= over
        steps = _assembled(graph, blocks, anew, ways)
        if steps is None:
            return found
        schedule = Schedule(graph, steps)
        work.done += len(steps)
    if schedule.peak_bytes > budget_bytes:
        return found
    work.done += DELETE_UNITS * reverse_delete(schedule, budget_bytes)
    return Candidate.of(schedule)


def _blocks(steps: Sequence[int]) -> list[list[int]]:
    """The steps by slot; the last block is what runs after the last op."""
    blocks: list[list[int]] = [[]]
    for op in steps:
        blocks[-1].append(op)
        if op == len(blocks) - 1:
            blocks.append([])
    return blocks


def _assembled(graph: Graph, blocks: list[list[int]], anew: set[int], ways: _Ways) -> list[int] | None:
    """The blocks one after the other; in the slots of `anew` everything is dropped, and what is read made.

    What a later block misses then is recomputed just before it.
    """
    steps: list[int] = []
    present = [producer < 0 for producer in graph.producer]
    for slot, block in enumerate(blocks):
        last = slot == len(graph.cost_ns)
        reads = [b for b in graph.program.outputs if graph.producer[b] >= 0] if last else graph.inputs[slot]
        if slot in anew:
            way = ways.to(mask_of(reads))
            if way is None:
                return None
            steps += way
            present = [producer < 0 for producer in graph.producer]
            for b in reads:
                present[b] = True
            block = [] if last else [slot]
        for op in block:
            _run(graph, op, present, steps)
        if last:
            for op in absent_closure(graph, [graph.producer[b] for b in reads if not present[b]], present):
                _run(graph, op, present, steps)
    return steps


def _run(graph: Graph, op: int, present: list[bool], steps: list[int]) -> None:
    """Run an op after what its inputs lack."""
    missing = [graph.producer[b] for b in graph.inputs[op] if not present[b]]
    for other in [*absent_closure(graph, missing, present), op]:
        steps.append(other)
        for b in graph.outputs[other]:
            present[b] = True


class _Ways(Backwards):
    """Ways from nothing to a set of buffers that is alive at once."""

    def __init__(self, graph: Graph, budget_bytes: int, work: WorkLimit) -> None:
        super().__init__(graph, budget_bytes)
        self.work = work
        self._known: dict[int, list[int] | None] = {}

    def to(self, target: int) -> list[int] | None:
        """Ops that end with `target` alive, from nothing on and within the budget; None if not found."""
        if target not in self._known:
            self._known[target] = self._found(target)
        return self._known[target]

    def _found(self, target: int) -> list[int] | None:
        root, last_ops = self._reduced(target)
        for width in WIDTHS:
            spread = self._search(root, width, self.nbytes)
            for start in sorted(spread.visited, key=lambda state: (self.nbytes(state), state))[:STARTS]:
                dive = self._search(start, DIVE_STATES, self._latest)
                if dive.end is not None:
                    return [*dive.ops(dive.end, start), *spread.ops(start, root), *last_ops]
                if not self.work.left:
                    return None
        return None

    def _search(self, root: int, max_states: int, key: Callable[[int], int]) -> _Tree:
        """States before `root`, the one of smallest key first, until nothing is alive."""
        queue = [(key(root), root)]
        tree = _Tree(after={root: (root, ())}, visited=[], end=None)
        while queue and len(tree.visited) < max_states:
            state = heapq.heappop(queue)[1]
            self.work.done += STATE_UNITS
            tree.visited.append(state)
            if not state:
                return _Tree(after=tree.after, visited=tree.visited, end=state)
            for _, before, op in self.before(state, self.nbytes(state)):
                reduced, ops = self._reduced(before)
                if reduced not in tree.after:
                    tree.after[reduced] = (state, (*ops, op))
                    heapq.heappush(queue, (key(reduced), reduced))
        return tree

    def _latest(self, state: int) -> int:
        """The last op that made some of a state, then its bytes."""
        op = self.graph.producer[state.bit_length() - 1] if state else -1
        return op * (self.room_bytes + 1) + self.nbytes(state)

    def _reduced(self, state: int) -> tuple[int, tuple[int, ...]]:
        """A state without what can be made of the rest of it, and the ops that then make it."""
        ops: list[int] = []
        rest = state
        while rest:
            op = self.graph.producer[rest.bit_length() - 1]
            writes = self.writes[op]
            rest &= ~writes
            if not (self.reads[op] | writes) & ~state and not self.graph.workspace_bytes[op]:
                state &= ~writes
                ops.append(op)
        return state, tuple(reversed(ops))
