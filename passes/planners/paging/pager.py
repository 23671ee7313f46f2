"""Pages for a given sequence of steps: which live ranges wait on the host, and from when to when.

A live range that nothing uses for a while can be away in that gap. Gaps are chosen where the program is over
the budget, the longest first, since their live ranges have most time on the link; what turns out to be
needless stays. Then the steps are gone through with a clock: a live range's bytes are free as soon as it has
arrived on the host, or earlier at the price of waiting where the budget asks for them; it starts to come
back, in the order of next uses, in time for its use by twice over, once its bytes fit from there to the use.

Invariant: whatever gaps are chosen that bring the program within the budget, their pages keep it; only the
waiting differs. It knows nothing of recomputes: a sequence that has some is one more sequence with gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir import BufferId, Page
from passes.link import Link
from passes.liveness import BoolArray, Graph, IntArray
from passes.planners.paging.queues import replay
from passes.planners.schedule import Schedule

LEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What pages may use.

    Attributes:
        link: what carries them.
        nbytes: what they may take on the host at once.
        forced: buffers whose longest gap is paged whatever it costs.
    """

    link: Link
    nbytes: int
    forced: frozenset[BufferId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Pages of a sequence.

    Attributes:
        pages: in the order in which they come back.
        peak_bytes: live bytes with them.
        waiting_ns: how long kernels stand still.
        host_peak_bytes: the most bytes on the host at once.
        moved_bytes: bytes that the link carries, both ways together.
    """

    pages: tuple[Page, ...]
    peak_bytes: int
    waiting_ns: int
    host_peak_bytes: int
    moved_bytes: int


class Gaps:
    """The gaps between uses of a sequence's live ranges; one row each.

    Attributes:
        buffer, nbytes: what would be away.
        run: position of the run that made it.
        after: position of the last use before the gap.
        use: position of the next use, the number of steps for what is needed at the end.
        back: from this position on the bytes are there again at the latest.
        time_ns: kernels' time between both uses.
    """

    __slots__ = ("after", "back", "buffer", "nbytes", "run", "time_ns", "use")

    def __init__(self, schedule: Schedule, clock_ns: IntArray) -> None:
        order, n_steps = schedule.order, len(schedule.steps)
        runs = np.maximum.accumulate(np.where(order.is_def, np.arange(len(order.position)), 0))
        nbytes = schedule.graph.arrays.nbytes[order.buffer]
        back = np.minimum(order.following, n_steps - 1)
        can = schedule.graph.arrays.pageable[order.buffer]
        rows = np.flatnonzero(~order.dies & (back - order.position > 1) & can)
        self.buffer: IntArray = order.buffer[rows]
        self.nbytes: IntArray = nbytes[rows]
        self.run: IntArray = order.position[runs[rows]]
        self.after: IntArray = order.position[rows]
        self.use: IntArray = order.following[rows]
        self.back: IntArray = back[rows]
        self.time_ns: IntArray = clock_ns[self.back] - clock_ns[self.after + 1]


class Pager:
    """Pages for one sequence of steps; gaps, profile and clock are made once."""

    def __init__(self, graph: Graph, steps: Sequence[int], host: Host) -> None:
        self.graph, self.host = graph, host
        self.schedule = Schedule(graph, steps)
        self.cost_ns = [graph.cost_ns[op] for op in steps]
        self.clock_ns: IntArray = np.concatenate(([0], np.cumsum(self.cost_ns, dtype=np.int64)))
        self.gaps = Gaps(self.schedule, self.clock_ns)

    def least_bytes(self) -> int:
        """The peak if every live range were away in all of its gaps."""
        away = self._away(np.arange(len(self.gaps.buffer)))
        return int((self.schedule.live - away).max(initial=self.graph.argument_bytes))

    def within(self, budget_bytes: int, preferred: Collection[int] = ()) -> Paged | None:
        """Pages with which the sequence keeps the budgets; None if none are found.

        Args:
            preferred: buffers whose gaps are taken first.
        """
        chosen = self._chosen(budget_bytes, preferred)
        return None if chosen is None else self.timed(chosen, budget_bytes)

    def _away(self, rows: IntArray) -> IntArray:
        """Bytes that are away at every position if these gaps are paged, transfers taking no time."""
        gaps = self.gaps
        change = np.zeros(len(self.schedule.steps) + 1, dtype=np.int64)
        np.add.at(change, gaps.after[rows] + 1, gaps.nbytes[rows])
        np.subtract.at(change, gaps.back[rows], gaps.nbytes[rows])
        away: IntArray = np.cumsum(change[:-1])
        return away

    def forced(self) -> list[int]:
        """The longest gap of each buffer that must be paged."""
        gaps = self.gaps
        best: dict[int, int] = {}
        for row in np.flatnonzero(np.isin(gaps.buffer, sorted(self.host.forced))).tolist():
            known = best.get(int(gaps.buffer[row]))
            if known is None or gaps.time_ns[row] > gaps.time_ns[known]:
                best[int(gaps.buffer[row])] = row
        return sorted(best.values())

    def forced_bytes(self) -> int:
        """The most that the buffers that must be paged take on the host at once."""
        room = _HostSlack(self.gaps, int(self.gaps.nbytes.sum()), len(self.schedule.steps))
        for row in self.forced():
            room.take(row)
        return room.most_bytes

    def _chosen(self, budget_bytes: int, preferred: Collection[int]) -> IntArray | None:
        """Rows of gaps whose paging brings the profile within the budget, the host's too."""
        gaps = self.gaps
        first = np.isin(gaps.buffer, sorted(preferred))
        rank = np.lexsort((-gaps.time_ns, ~first)).argsort()
        forced = self.forced()
        chosen: BoolArray = np.zeros(len(gaps.buffer), dtype=np.bool_)
        chosen[forced] = True
        low: IntArray = self.schedule.live - self._away(np.asarray(forced, dtype=np.int64))
        slack = _HostSlack(gaps, self.host.nbytes, len(self.schedule.steps))
        if not all(slack.take(row) for row in forced):
            return None
        while len(low) and low.max() > budget_bytes:
            position = int(low.argmax())
            excess = int(low[position]) - budget_bytes
            rows = np.flatnonzero(~chosen & (gaps.after < position) & (gaps.back > position))
            for row in rows[np.argsort(rank[rows])].tolist():
                if excess <= 0:
                    break
                if slack.take(row):
                    chosen[row] = True
                    low[gaps.after[row] + 1 : gaps.back[row]] -= gaps.nbytes[row]
                    excess -= int(gaps.nbytes[row])
            if excess > 0:
                return None
        chosen[forced] = False
        rows = np.flatnonzero(chosen)
        for row in rows[np.argsort(-rank[rows])].tolist():
            inside = low[gaps.after[row] + 1 : gaps.back[row]]
            if inside.max() + gaps.nbytes[row] <= budget_bytes:
                inside += gaps.nbytes[row]
                chosen[row] = False
        chosen[forced] = True
        needed: IntArray = np.flatnonzero(chosen)
        return needed

    def timed(self, rows: IntArray, budget_bytes: int) -> Paged:
        """When the chosen gaps' live ranges leave and come back."""
        gaps = self.gaps
        rows = rows[np.lexsort((gaps.after[rows], gaps.use[rows]))]
        return _Replay(self, rows, budget_bytes).run()


class _HostSlack:
    """Bytes on the host in every moment; a live range is there from its run until its last page is back."""

    def __init__(self, gaps: Gaps, limit_bytes: int, n_steps: int) -> None:
        self._gaps, self._limit_bytes = gaps, limit_bytes
        self._used: IntArray = np.zeros(n_steps + 2, dtype=np.int64)
        self._until: dict[tuple[int, int], int] = {}

    @property
    def most_bytes(self) -> int:
        """The most that is there at once."""
        return int(self._used.max())

    def take(self, row: int) -> bool:
        """Page a gap if the host has room for it."""
        gaps = self._gaps
        key = (int(gaps.run[row]), int(gaps.buffer[row]))
        begin, end = max(key[0], self._until.get(key, 0)), int(gaps.use[row])
        if end > begin:
            span = self._used[begin + 1 : end + 1]
            if span.max(initial=0) + gaps.nbytes[row] > self._limit_bytes:
                return False
            span += gaps.nbytes[row]
            self._until[key] = end
        return True


class _Replay:
    """Goes through the steps with a clock and both queues, and settles every page's moments."""

    def __init__(self, pager: Pager, rows: IntArray, budget_bytes: int) -> None:
        gaps = pager.gaps
        self.pager, self.budget_bytes = pager, budget_bytes
        self.nbytes: list[int] = gaps.nbytes[rows].tolist()
        self.buffer: list[int] = gaps.buffer[rows].tolist()
        self.made: list[int] = gaps.run[rows].tolist()
        self.after: list[int] = gaps.after[rows].tolist()
        self.use: list[int] = gaps.use[rows].tolist()
        self.back: list[int] = gaps.back[rows].tolist()
        link = pager.host.link
        self.out_ns = [link.to_host_ns(n) for n in self.nbytes]
        self.in_ns = [link.from_host_ns(n) for n in self.nbytes]
        self.taken: IntArray = pager.schedule.live - pager._away(rows)
        self.first = self._firsts()
        self.leaving: IntArray = self._leaving()
        self.not_before = self._not_before()
        self.out_done = [-1] * len(rows)
        self.in_start = [-1] * len(rows)
        self.arrival = [0] * len(rows)
        self.returned = [0] * len(rows)
        self.on_way: list[tuple[int, int]] = []
        self.on_way_bytes = 0

    def _firsts(self) -> list[bool]:
        """Whether a page is the first of its live range, which is the one that goes over the link."""
        earliest: dict[tuple[int, int], int] = {}
        for made, buffer, after in zip(self.made, self.buffer, self.after, strict=True):
            earliest[made, buffer] = min(after, earliest.get((made, buffer), after))
        keys = zip(self.made, self.buffer, self.after, strict=True)
        return [earliest[made, buffer] == after for made, buffer, after in keys]

    def _leaving(self) -> IntArray:
        """Bytes that are on their way to the host at every position, if the program never waited."""
        clock_ns = self.pager.clock_ns
        change = np.zeros(len(clock_ns), dtype=np.int64)
        free = 0
        for k in sorted(range(len(self.made)), key=lambda k: (self.made[k], self.buffer[k])):
            if self.first[k]:
                free = max(free, int(clock_ns[self.made[k] + 1])) + self.out_ns[k]
                end = min(int(np.searchsorted(clock_ns, free)), self.back[k])
                if end > self.after[k] + 1:
                    change[self.after[k] + 1] += self.nbytes[k]
                    change[end] -= self.nbytes[k]
        leaving: IntArray = np.cumsum(change[:-1])
        return leaving

    def _not_before(self) -> list[int]:
        """For every page the step that is early enough to come back in time by `LEAD` times over."""
        clock_ns = self.pager.clock_ns
        steps = [0] * len(self.use)
        free = int(clock_ns[-1])
        for k in reversed(range(len(self.use))):
            free = min(free, int(clock_ns[self.use[k]])) - LEAD * self.in_ns[k]
            steps[k] = max(0, int(np.searchsorted(clock_ns, free, side="right")) - 1)
        return steps

    def run(self) -> Paged:
        """The pages, in the order in which they come back."""
        made, after, due = _by_step(self.made), _by_step(self.after), _by_step(self.use)
        clock = out_free = in_free = head = 0
        cost_ns = self.pager.cost_ns
        for step in range(len(cost_ns) + 1):
            clock = self._arrive(step, clock)
            while head < len(self.use) and self._starts(head, step):
                if self.out_done[head] < 0:
                    clock = max(clock, self.arrival[head])
                    self._leave(head, step)
                in_free = max(in_free, clock) + self.in_ns[head]
                self.in_start[head], self.returned[head] = step, in_free
                self.taken[step : self.back[head]] += self.nbytes[head]
                head += 1
            clock = max([clock, *(self.returned[k] for k in due.get(step, ()))])
            if step == len(cost_ns):
                break
            clock += cost_ns[step]
            for k in sorted(made.get(step, ()), key=lambda k: self.buffer[k]):
                if self.first[k]:
                    out_free = max(out_free, clock) + self.out_ns[k]
                    self.arrival[k] = out_free
            for k in after.get(step, ()):
                heapq.heappush(self.on_way, (self.arrival[k], k))
                self.on_way_bytes += self.nbytes[k]
        pages = self._pages()
        replayed = replay(cost_ns, self.pager.graph.nbytes, pages, self.pager.host.link)
        return Paged(
            pages=pages,
            peak_bytes=self._peak_bytes(),
            waiting_ns=replayed.waiting_ns,
            host_peak_bytes=replayed.host_peak_bytes,
            moved_bytes=replayed.moved_bytes,
        )

    def _arrive(self, step: int, clock: int) -> int:
        """Free what has arrived, and wait for more where the budget asks for it; returns the clock."""
        if step >= len(self.taken):
            return clock
        while self.on_way:
            arrival, k = self.on_way[0]
            if arrival > clock and int(self.taken[step]) + self.on_way_bytes <= self.budget_bytes:
                break
            clock = max(clock, arrival)
            self._leave(k, step)
        return clock

    def _leave(self, page: int, step: int) -> None:
        if self.on_way[0][1] == page:
            heapq.heappop(self.on_way)
        else:
            self.on_way.remove((self.arrival[page], page))
            heapq.heapify(self.on_way)
        self.on_way_bytes -= self.nbytes[page]
        self.out_done[page] = step

    def _starts(self, page: int, step: int) -> bool:
        """Whether a page comes back from `step` on: it must, or it is time and its bytes fit."""
        if self.after[page] >= step:
            return False
        if step >= self.back[page]:
            return True
        if self.out_done[page] < 0 or step < self.not_before[page]:
            return False
        if int(self.taken[step]) + self.on_way_bytes + self.nbytes[page] > self.budget_bytes:
            return False
        span = slice(step, self.back[page])
        held = self.taken[span] + self.leaving[span]
        return int(held.max()) + self.nbytes[page] <= self.budget_bytes

    def _peak_bytes(self) -> int:
        live = self.pager.schedule.live.copy()
        for k, nbytes in enumerate(self.nbytes):
            live[self.out_done[k] : self.in_start[k]] -= nbytes
        return int(live.max(initial=self.pager.graph.argument_bytes))

    def _pages(self) -> tuple[Page, ...]:
        return tuple(
            Page(
                buffer=BufferId(self.buffer[k]),
                run=self.made[k],
                out_done=self.out_done[k],
                in_start=self.in_start[k],
                in_done=self.use[k],
            )
            for k in range(len(self.use))
        )


def _by_step(positions: Sequence[int]) -> dict[int, list[int]]:
    by_step: dict[int, list[int]] = {}
    for k, position in enumerate(positions):
        by_step.setdefault(position, []).append(k)
    return by_step
