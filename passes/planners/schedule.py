"""A sequence of steps with its exact byte profile, from which recomputes can be taken out one by one.

Every step uses buffers: it reads some and defines others. All uses, defs among them, lie in one
order, by buffer and then by position, so that a live range of a buffer is a run and the uses behind it, and
its neighbours say all about it. Positions never move: a step that is taken out leaves a hole (`HOLE`). A
hole's bytes are those that pass through it, never more than at the step before it, so the maximum over the
profile stays exact. Invariant: `live` equals `passes.simulate`'s live bytes at every position that is not a
hole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from passes.liveness import BoolArray, Graph, IntArray
from passes.reach import reached

HOLE = -1
# Positions this close to the peak are all but equal (`benchmarks.planners`).
NEARLY_RATIO = 0.002
SHORT = 1 << 16
DELETE_ROUNDS = 3


class Order:
    """The uses of a sequence of steps, by buffer and then by position. Knows nothing of holes.

    Attributes:
        stride: `buffer * stride + position` is the key of a use; more than the number of steps.
        first: for every position the place of its first use in `place`; as in `Arrays.first`.
        place: for every use, step by step, where it is in this order.
        buffer: buffer of every use.
        position: position of every use.
        is_def: whether it begins a live range; else it reads one.
        following: position of the buffer's next use; the number of steps where there is none.
        dies: whether the live range that it makes or uses is not alive after it.
    """

    __slots__ = (
        "_dying",
        "_keys",
        "buffer",
        "dies",
        "first",
        "following",
        "is_def",
        "place",
        "position",
        "stride",
    )

    def __init__(self, graph: Graph, steps: IntArray) -> None:
        arrays = graph.arrays
        first = arrays.first[steps]
        counts = arrays.first[steps + 1] - first
        self.first: IntArray = np.zeros(len(steps) + 1, dtype=np.int64)
        np.cumsum(counts, out=self.first[1:])
        total = int(self.first[-1])
        rows = np.repeat(first - self.first[:-1], counts) + np.arange(total)
        buffer = arrays.buffer[rows]
        small = len(graph.nbytes) < SHORT
        order = np.argsort(buffer.astype(np.uint16) if small else buffer, kind="stable")
        self.stride = len(steps) + 1
        self.place: IntArray = np.empty(total, dtype=np.int64)
        self.place[order] = np.arange(total)
        self.buffer = buffer[order]
        self.position: IntArray = np.repeat(np.arange(len(steps)), counts)[order]
        self.is_def: BoolArray = arrays.is_def[rows][order]
        last = np.ones(total, dtype=np.bool_)
        last[:-1] = self.buffer[1:] != self.buffer[:-1]
        self.following: IntArray = np.full(total, len(steps), dtype=np.int64)
        self.following[:-1][~last[:-1]] = self.position[1:][~last[:-1]]
        self.dies = last & ~arrays.is_output[self.buffer]
        self.dies[:-1] |= self.is_def[1:] & ~last[:-1]
        self._keys: list[int] | None = None
        self._dying: list[bool] = []

    def alive_at(self, buffer: int, position: int) -> bool:
        """True if the live range made last before `position` is alive just before it and still at it."""
        if self._keys is None:
            self._keys = (self.buffer * self.stride + self.position).tolist()
            self._dying = self.dies.tolist()
        k = bisect_left(self._keys, buffer * self.stride + position) - 1
        return not self._dying[k]

    def dying_at(self, position: int) -> list[int]:
        """Buffers that `position` uses and that are not alive after it."""
        places = self.place[self.first[position] : self.first[position + 1]]
        dying: list[int] = self.buffer[places[self.dies[places]]].tolist()
        return dying

    def across(self, position: int) -> tuple[list[int], list[int]]:
        """Buffers alive at `position` and after it, ascending, and where each is used next.

        That is the number of steps for those that are only needed at the end.
        """
        is_across = (self.position <= position) & (self.following > position) & ~self.dies
        return self.buffer[is_across].tolist(), self.following[is_across].tolist()

    def next_runs(self, position: int, n_buffers: int) -> list[int]:
        """For every buffer where it is made next after `position`; `stride` for never."""
        later = np.flatnonzero(self.is_def & (self.position > position))[::-1]
        next_run = np.full(n_buffers, self.stride, dtype=np.int64)
        next_run[self.buffer[later]] = self.position[later]
        result: list[int] = next_run.tolist()
        return result


class _Links:
    """The order as linked lists: for every use its neighbours of the same buffer, -1 for none."""

    __slots__ = ("before", "behind", "first", "is_def", "place", "position")

    def __init__(self, order: Order) -> None:
        total = len(order.buffer)
        index = np.arange(total)
        same = order.buffer[1:] == order.buffer[:-1]
        before, behind = np.full(total, -1), np.full(total, -1)
        before[1:][same] = index[:-1][same]
        behind[:-1][same] = index[1:][same]
        self.before: list[int] = before.tolist()
        self.behind: list[int] = behind.tolist()
        self.position: list[int] = order.position.tolist()
        self.is_def: list[bool] = order.is_def.tolist()
        self.place: list[int] = order.place.tolist()
        self.first: list[int] = order.first.tolist()

    def of(self, position: int) -> list[int]:
        """The uses of a position, reads first."""
        return self.place[self.first[position] : self.first[position + 1]]

    def ends(self, use: int) -> bool:
        """True if the live range that it makes or uses is not used again."""
        after = self.behind[use]
        return after < 0 or self.is_def[after]


class Schedule:
    """A sequence of steps, of which recomputes can be taken out. Internal to the planners.

    Attributes:
        graph: the program.
        steps: op ids, `HOLE` where a recompute was taken out.
        live: bytes at every position.
        order: the uses of the steps as they were given.
        slots: for every position the first op that has not run before it.
        cost_ns: cost of all steps.
    """

    __slots__ = ("_links", "cost_ns", "graph", "live", "order", "slots", "steps")

    def __init__(self, graph: Graph, steps: Sequence[int]) -> None:
        self.graph = graph
        self.steps = list(steps)
        array = np.asarray(self.steps, dtype=np.int64)
        cost_ns = graph.cost_ns
        self.cost_ns = sum([cost_ns[op] for op in self.steps])
        reached = np.zeros(len(array), dtype=np.int64)
        reached[1:] = np.maximum.accumulate(array[:-1] + 1)
        self.slots: list[int] = reached.tolist()
        self.order = Order(graph, array)
        self.live: IntArray = self._profile(array)
        if graph.slack_bytes is not None:
            self.live += graph.slack_bytes[reached]
        self._links: _Links | None = None

    def _profile(self, steps: IntArray) -> IntArray:
        """Live bytes at every position."""
        arrays, order = self.graph.arrays, self.order
        change = np.zeros(len(steps) + 1, dtype=np.int64)
        nbytes = arrays.nbytes[order.buffer]
        np.add.at(change, order.position[order.is_def], nbytes[order.is_def])
        np.subtract.at(change, order.position[order.dies] + 1, nbytes[order.dies])
        live: IntArray = np.cumsum(change[:-1]) + arrays.workspace_bytes[steps]
        live += self.graph.argument_bytes
        shares = arrays.shares[steps]
        one = np.flatnonzero(shares == 1)
        dies = order.dies[order.place[order.first[one] + arrays.share_row[steps[one]]]]
        live[one] -= arrays.share_bytes[steps[one]] * dies
        for position in np.flatnonzero(shares > 1).tolist():
            live[position] -= self._saved_bytes(self.steps[position], order.dying_at(position))
        return live

    def _saved_bytes(self, op: int, dying: Sequence[int]) -> int:
        """Bytes that an op saves by taking the places of inputs in `dying`."""
        nbytes = self.graph.nbytes
        total_bytes = 0
        taken: list[int] = []
        for out, inp in self.graph.shares[op]:
            if inp in dying and inp not in taken and out not in taken:
                total_bytes += min(nbytes[out], nbytes[inp])
                taken += (inp, out)
        return total_bytes

    @property
    def links(self) -> _Links:
        """The uses as linked lists, without those of holes."""
        if self._links is None:
            self._links = _Links(self.order)
        return self._links

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
        """Bytes of the live ranges that are alive just before `position` and still at it."""
        graph, op = self.graph, self.steps[position]
        made_bytes = sum([graph.nbytes[b] for b in graph.outputs[op]]) + graph.workspace_bytes[op]
        shared_bytes = self._saved_bytes(op, self.order.dying_at(position)) if graph.shares[op] else 0
        return int(self.live[position]) - made_bytes + shared_bytes

    def compact(self) -> list[int]:
        """The steps without holes."""
        return [op for op in self.steps if op != HOLE]

    def recompute_positions(self) -> list[int]:
        """Positions of all recomputes, ascending."""
        return [p for p, (op, slot) in enumerate(zip(self.steps, self.slots, strict=True)) if -1 < op < slot]

    def is_useless(self, position: int) -> bool:
        """True if nothing reads what the recompute at `position` makes."""
        links = self.links
        return not any(links.is_def[use] and not self._dies(use) for use in links.of(position))

    def _dies(self, use: int) -> bool:
        """True if the live range that it makes or uses is not alive after it."""
        behind = self.links.behind[use]
        if behind >= 0:
            return self.links.is_def[behind]
        return not self.graph.is_output[int(self.order.buffer[use])]

    def _shared_bytes(self, position: int) -> int:
        """Bytes that the op at `position` saves by taking dying inputs' places."""
        op = self.steps[position]
        if op == HOLE or not self.graph.shares[op]:
            return 0
        inputs = zip(self.graph.inputs[op], self.links.of(position), strict=False)
        return self._saved_bytes(op, [b for b, use in inputs if self._dies(use)])

    def try_delete(self, position: int, limit_bytes: int) -> bool:
        """Take out the recompute at `position` if the peak then stays within `limit_bytes` where it grows."""
        changes, sharers = self._changes(position)
        live = self.live
        if not sharers:
            for lo, hi, delta in changes:
                if delta > 0 and lo < hi and live[lo:hi].max() + delta > limit_bytes:
                    return False
        before = [self._shared_bytes(p) for p in sharers]
        self._unlink(position)
        for p, old in zip(sharers, before, strict=True):
            changes.append((p, p + 1, old - (self._shared_bytes(p) if p != position else 0)))
        for lo, hi, delta in changes:
            live[lo:hi] += delta
        if all(delta <= 0 or lo >= hi or live[lo:hi].max() <= limit_bytes for lo, hi, delta in changes):
            self.cost_ns -= self.graph.cost_ns[self.steps[position]]
            self.steps[position] = HOLE
            return True
        for lo, hi, delta in changes:
            live[lo:hi] -= delta
        self._relink(position)
        return False

    def _changes(self, position: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """What taking out the recompute at `position` changes.

        Returns:
            Half-open ranges with the bytes that they gain, and positions whose sharing may change.
        """
        graph, links = self.graph, self.links
        op = self.steps[position]
        changes = []
        used = [position]
        uses = links.of(position)
        n_inputs = len(graph.inputs[op])
        for b, use in zip(graph.outputs[op], uses[n_inputs:], strict=True):
            before = links.position[links.before[use]]
            used.append(before)
            if links.ends(use) and (links.behind[use] >= 0 or not graph.is_output[b]):
                changes.append((position, position + 1, -graph.nbytes[b]))
            else:
                changes.append((before + 1, position, graph.nbytes[b]))
        for b, use in zip(graph.inputs[op], uses, strict=False):
            before = links.before[use]
            if not links.is_def[before]:
                used.append(links.position[before])
            if links.ends(use) and (links.behind[use] >= 0 or not graph.is_output[b]):
                changes.append((links.position[before] + 1, position + 1, -graph.nbytes[b]))
        if graph.workspace_bytes[op]:
            changes.append((position, position + 1, -graph.workspace_bytes[op]))
        shares = graph.shares
        return changes, sorted({p for p in used if self.steps[p] != HOLE and shares[self.steps[p]]})

    def _unlink(self, position: int) -> None:
        links = self.links
        for use in links.of(position):
            before, behind = links.before[use], links.behind[use]
            links.behind[before] = behind
            if behind >= 0:
                links.before[behind] = before

    def _relink(self, position: int) -> None:
        """Undo `_unlink`."""
        links = self.links
        for use in reversed(links.of(position)):
            before, behind = links.before[use], links.behind[use]
            links.behind[before] = use
            if behind >= 0:
                links.before[behind] = use

    def useless_recomputes(self) -> list[int]:
        """Positions of recomputes whose outputs nothing reads, last first; of the steps as given."""
        useful = np.zeros(len(self.steps), dtype=np.bool_)
        useful[self.order.position[self.order.is_def & ~self.order.dies]] = True
        recomputed = np.asarray(self.steps, dtype=np.int64) < np.asarray(self.slots, dtype=np.int64)
        useless: list[int] = np.flatnonzero(recomputed & ~useful)[::-1].tolist()
        return useless


def prune(schedule: Schedule) -> None:
    """Take out recomputes that nothing reads; it never costs bytes."""
    if schedule._links is None and not schedule.useless_recomputes():
        return
    for position in reversed(schedule.recompute_positions()):
        if schedule.is_useless(position):
            schedule.try_delete(position, schedule.peak_bytes)


def reverse_delete(schedule: Schedule, limit_bytes: int) -> int:
    """Take out recomputes, costliest first, while the peak stays in the limit; returns how often it tried."""
    prune(schedule)
    cost_ns = schedule.graph.cost_ns
    tried = 0
    for _ in range(DELETE_ROUNDS):
        order = sorted(schedule.recompute_positions(), key=lambda p: (-cost_ns[schedule.steps[p]], p))
        tried += len(order)
        deleted = [schedule.try_delete(p, limit_bytes) for p in order]
        if not any(deleted):
            break
        prune(schedule)
    return tried


def slots_of(steps: Sequence[int]) -> list[int]:
    """For every position the first op that has not run before it."""
    slots: list[int] = []
    slot = 0
    for op in steps:
        slots.append(slot)
        slot += op == slot
    return slots


def absent_closure(graph: Graph, roots: list[int], present: list[bool]) -> list[int]:
    """The ops to run for the roots' outputs that are absent, in schedule order."""

    def missing(op: int) -> list[int]:
        return [graph.producer[b] for b in graph.inputs[op] if not present[b]]

    ops = [op for op in roots if not all(present[b] for b in graph.outputs[op])]
    return sorted(reached(ops, missing))
