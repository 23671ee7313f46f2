"""A sequence of steps with its exact byte profile, from which re-runs can be taken out one by one.

Positions never move: a step that is taken out leaves a hole (`HOLE`). A hole's bytes are those that pass
through it, never more than at the step before it, so the maximum over the profile stays exact.
Invariant: `live` equals `passes.simulate`'s live bytes at every position that is not a hole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from passes.liveness import Graph, IntArray

HOLE = -1
NEARLY_RATIO = 0.002


class Schedule:
    """A mutable sequence of steps. Internal to the planners.

    Attributes:
        graph: the program.
        steps: op ids, `HOLE` where a re-run was taken out.
        live: bytes at every position.
        starts: for every buffer the positions of the runs that make it.
        uses: for every buffer and each of its runs the positions of the uses that this copy serves.
        slots: for every position the first op that has not run before it.
        cost_ns: cost of all steps.
    """

    __slots__ = ("cost_ns", "graph", "live", "slots", "starts", "steps", "uses")

    def __init__(self, graph: Graph, steps: Sequence[int]) -> None:
        self.graph = graph
        self.steps = list(steps)
        self.starts: list[list[int]] = [[] for _ in graph.nbytes]
        self.uses: list[list[list[int]]] = [[] for _ in graph.nbytes]
        self.slots: list[int] = []
        self.cost_ns = sum([graph.cost_ns[op] for op in self.steps])
        slot = 0
        for position, op in enumerate(self.steps):
            self.slots.append(slot)
            slot += op == slot
            for b in graph.inputs[op]:
                self.uses[b][-1].append(position)
            for b in graph.outputs[op]:
                self.starts[b].append(position)
                self.uses[b].append([])
        self.live: IntArray = self._profile()

    def _profile(self) -> IntArray:
        """Live bytes at every position."""
        graph = self.graph
        count = len(self.steps)
        change = [0] * (count + 1)
        for b, nbytes in enumerate(graph.nbytes):
            if nbytes and self.starts[b]:
                for start, uses in zip(self.starts[b], self.uses[b], strict=True):
                    change[start] += nbytes
                    change[(uses[-1] if uses else start) + 1] -= nbytes
                if graph.is_output[b]:
                    uses = self.uses[b][-1]
                    change[(uses[-1] if uses else self.starts[b][-1]) + 1] += nbytes
        live: IntArray = np.cumsum(np.asarray(change[:count], dtype=np.int64))
        live += graph.argument_bytes
        for position, op in enumerate(self.steps):
            if graph.workspace_bytes[op]:
                live[position] += graph.workspace_bytes[op]
            if graph.shares[op]:
                live[position] -= self.shared_bytes(position)
        return live

    @property
    def peak_bytes(self) -> int:
        """The largest live bytes."""
        return int(self.live.max()) if len(self.live) else self.graph.argument_bytes

    @property
    def tops(self) -> tuple[int, int]:
        """The largest live bytes and at how many positions they are reached: what a cut should lower."""
        peak_bytes = self.peak_bytes
        return peak_bytes, int((self.live == peak_bytes).sum())

    @property
    def peak_position(self) -> int:
        """The first position of the largest live bytes."""
        return int(self.live.argmax())

    def tightest_position(self, level_bytes: int) -> int:
        """Where to cut: of the highest positions, all but equal, the one whose op needs most for itself.

        It leaves the least room for a choice; what another one of them lets go of may be needed there.
        """
        peak_bytes = self.peak_bytes
        least_bytes = max(level_bytes + 1, peak_bytes - int(NEARLY_RATIO * peak_bytes))
        high = np.flatnonzero(self.live >= least_bytes)
        if not len(high):
            return self.peak_position
        local_bytes = self.graph.local_bytes
        return max((int(p) for p in high), key=lambda p: (local_bytes[self.steps[p]], -p))

    def crossing_bytes(self, position: int) -> int:
        """Bytes of the copies that are alive just before `position` and still at it."""
        op = self.steps[position]
        made_bytes = sum([self.graph.nbytes[b] for b in self.graph.outputs[op]])
        made_bytes += self.graph.workspace_bytes[op]
        return int(self.live[position]) - made_bytes + self.shared_bytes(position)

    def compact(self) -> list[int]:
        """The steps without holes."""
        return [op for op in self.steps if op != HOLE]

    def rerun_positions(self) -> list[int]:
        """Positions of all re-runs, ascending."""
        return [p for p, op in enumerate(self.steps) if op != HOLE and op < self.slots[p]]

    def copy_at(self, buffer: int, position: int) -> int:
        """Index of the copy that a use at `position` reads; it was made before `position`."""
        return bisect_left(self.starts[buffer], position) - 1

    def last_position(self, buffer: int, copy: int) -> int:
        """The last position at which a copy is alive."""
        if self.graph.is_output[buffer] and copy == len(self.starts[buffer]) - 1:
            return len(self.steps) - 1
        uses = self.uses[buffer][copy]
        return uses[-1] if uses else self.starts[buffer][copy]

    def next_need(self, buffer: int, copy: int, position: int) -> int | None:
        """The first use of a copy after `position`; `len(steps)` for the end; None if there is none."""
        uses = self.uses[buffer][copy]
        k = bisect_right(uses, position)
        if k < len(uses):
            return uses[k]
        if self.graph.is_output[buffer] and copy == len(self.starts[buffer]) - 1:
            return len(self.steps)
        return None

    def is_useless(self, position: int) -> bool:
        """True if nothing reads what the re-run at `position` makes."""
        for b in self.graph.outputs[self.steps[position]]:
            copy = bisect_left(self.starts[b], position)
            if self.uses[b][copy] or (self.graph.is_output[b] and copy == len(self.starts[b]) - 1):
                return False
        return True

    def shared_bytes(self, position: int) -> int:
        """Bytes that the op at `position` saves by taking dying inputs' places."""
        op = self.steps[position]
        if op == HOLE or not self.graph.shares[op]:
            return 0
        total_bytes = 0
        taken: list[int] = []
        for out, inp in self.graph.shares[op]:
            if inp in taken or out in taken:
                continue
            copy = self.copy_at(inp, position)
            if self.last_position(inp, copy) == position and not self._to_end(inp, copy):
                total_bytes += min(self.graph.nbytes[out], self.graph.nbytes[inp])
                taken += (inp, out)
        return total_bytes

    def try_delete(self, position: int, limit_bytes: int) -> bool:
        """Take out the re-run at `position` if the peak then stays within `limit_bytes` where it grows."""
        sharers = self._sharers(position)
        before = [self.shared_bytes(p) for p in sharers]
        grown = self._grown(position)
        if not sharers and not self._grown_fits(grown, limit_bytes):
            return False
        changes = self._delete(position, grown)
        for p, old in zip(sharers, before, strict=True):
            changes.append((p, p + 1, old - self.shared_bytes(p)))
        for lo, hi, delta in changes:
            self.live[lo:hi] += delta
        if all(delta <= 0 or lo >= hi or self.live[lo:hi].max() <= limit_bytes for lo, hi, delta in changes):
            self.cost_ns -= self.graph.cost_ns[self.steps[position]]
            self.steps[position] = HOLE
            return True
        for lo, hi, delta in changes:
            self.live[lo:hi] -= delta
        self._restore(position)
        return False

    def _grown_fits(self, grown: list[tuple[int, int, int]], limit_bytes: int) -> bool:
        """A quick no for the common case; exact where one buffer grows, optimistic where several do."""
        return all(self.live[lo:hi].max() + delta <= limit_bytes for lo, hi, delta in grown if lo < hi)

    def _grown(self, position: int) -> list[tuple[int, int, int]]:
        """Half-open ranges over which earlier copies live longer if the re-run goes, with their bytes."""
        op = self.steps[position]
        changes = []
        for b in self.graph.outputs[op]:
            copy = bisect_left(self.starts[b], position)
            nbytes = self.graph.nbytes[b]
            last = self.last_position(b, copy)
            if last == position and not self.uses[b][copy] and not self._to_end(b, copy):
                changes.append((position, position + 1, -nbytes))
            else:
                changes.append((self.last_position(b, copy - 1) + 1, position, nbytes))
        return changes

    def _to_end(self, buffer: int, copy: int) -> bool:
        return self.graph.is_output[buffer] and copy == len(self.starts[buffer]) - 1

    def _sharers(self, position: int) -> list[int]:
        """Positions whose sharing may change if the re-run goes."""
        op = self.steps[position]
        touched = [position]
        for b in self.graph.outputs[op]:
            copy = bisect_left(self.starts[b], position)
            touched.append(self.last_position(b, copy - 1))
        for b in self.graph.inputs[op]:
            uses = self.uses[b][self.copy_at(b, position)]
            k = bisect_left(uses, position)
            if k:
                touched.append(uses[k - 1])
        return sorted({p for p in touched if self.steps[p] != HOLE and self.graph.shares[self.steps[p]]})

    def _delete(self, position: int, grown: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Re-wire the uses; returns the byte changes of all ranges."""
        graph, op = self.graph, self.steps[position]
        changes = list(grown)
        for b in graph.outputs[op]:
            copy = bisect_left(self.starts[b], position)
            self.uses[b][copy - 1] += self.uses[b][copy]
            del self.uses[b][copy]
            del self.starts[b][copy]
        for b in graph.inputs[op]:
            copy = self.copy_at(b, position)
            uses = self.uses[b][copy]
            before = self.last_position(b, copy)
            del uses[bisect_left(uses, position)]
            after = self.last_position(b, copy)
            if after < before:
                changes.append((after + 1, before + 1, -graph.nbytes[b]))
        if graph.workspace_bytes[op]:
            changes.append((position, position + 1, -graph.workspace_bytes[op]))
        return changes

    def _restore(self, position: int) -> None:
        """Undo `_delete`'s re-wiring."""
        op = self.steps[position]
        for b in self.graph.inputs[op]:
            uses = self.uses[b][self.copy_at(b, position)]
            uses.insert(bisect_left(uses, position), position)
        for b in self.graph.outputs[op]:
            copy = bisect_left(self.starts[b], position)
            uses = self.uses[b][copy - 1]
            k = bisect_left(uses, position)
            self.starts[b].insert(copy, position)
            self.uses[b].insert(copy, uses[k:])
            del uses[k:]


def prune(schedule: Schedule) -> None:
    """Take out re-runs that nothing reads; it never costs bytes."""
    for position in reversed(schedule.rerun_positions()):
        if schedule.is_useless(position):
            schedule.try_delete(position, schedule.peak_bytes)


def reverse_delete(schedule: Schedule, limit_bytes: int, rounds: int = 3) -> None:
    """Take out re-runs, costliest first, while the peak stays within `limit_bytes`."""
    prune(schedule)
    cost_ns = schedule.graph.cost_ns
    for _ in range(rounds):
        order = sorted(schedule.rerun_positions(), key=lambda p: (-cost_ns[schedule.steps[p]], p))
        deleted = [schedule.try_delete(p, limit_bytes) for p in order]
        if not any(deleted):
            return
        prune(schedule)
