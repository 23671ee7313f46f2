"""Keep, recompute or page: the cheapest of the three for every value, on the real schedule.

Several ways lead to sequences of steps, and for each of them the pager says which live ranges go to the host:

alone     recompute alone, so that a plan with pages never costs more than one without.
carried   the link's own share first: what it carries for nothing has no bytes in the program that the cuts
          then bring within the budget. The dearest values are paged, the cheapest recomputed.
plain     no recompute: pages alone, the only way below what recompute can reach.
levels    recompute down to some level between the budget and the peak, pages for the rest.
again     as `carried`, with what the best sequence pages at last, where it does.
around    a search around the best: some recomputes are taken out, and pages or cuts make up for them.

All are compared by the price of their steps, of their copies and of waiting for the link, replayed in both
queues: for the least time, or for the least energy in a limit of time, that is what `Prices` say.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from passes.ir import Program
from passes.link import Link
from passes.liveness import Graph
from passes.planners.candidate import Candidate, WorkLimit
from passes.planners.cut import SCHEDULE_UNITS, Style, descend, lower_to
from passes.planners.neighbourhood import alike, pick
from passes.planners.paging.carried import carried, first_pages, relieved
from passes.planners.paging.pager import Host, Paged, Pager
from passes.planners.schedule import HOLE, Schedule, prune


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorConfig:
    """Where pages are looked for; set by `benchmarks.paging`.

    Attributes:
        shares: of the link's rate, at which what it carries costs nothing.
        tilts: of the cuts that a plan is repaired with.
        levels: of the bytes over the budget, what recompute leaves to pages.
        made_ratio: of the work, for making sequences; what is left is for their neighbourhoods.
        rounds: of plans around what the best sequence pages.
        patience: after how many neighbours in vain the search ends.
        step_units: work of a look, for each step.
        page_units: work of a look, for each page.
    """

    shares: tuple[float, ...] = (1.0, 1.15, 0.85, 1.3, 0.7, 2.0, 0.5)
    tilts: tuple[float, ...] = (0.1, -0.1)
    levels: tuple[float, ...] = (3 / 6, 4 / 6, 2 / 6, 5 / 6, 1 / 6)
    made_ratio: float = 0.5
    rounds: int = 4
    patience: int = 60
    step_units: int = 7
    page_units: int = 60


CONFIG = DirectorConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A sequence with its pages.

    Attributes:
        candidate: the sequence.
        paged: its pages.
        page_offsets: where each page's live range comes back, if it is placed.
        end_bytes: the end of the highest live range then.
        price: of its steps, copies and waiting, by the director's prices.
    """

    candidate: Candidate
    paged: Paged
    page_offsets: tuple[int, ...] = ()
    end_bytes: int = 0
    price: int = 0

    @property
    def total_ns(self) -> int:
        """Time of all steps, and of waiting."""
        return self.candidate.cost_ns + self.paged.waiting_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What is weighed against each other, in the unit of the objective.

    Attributes:
        op: of a run of every op.
        byte: of a byte over the link.
        waiting: of a nanosecond in which the program waits for the link.
        limit_ns: no plan may take more time.
    """

    op: list[int]
    byte: float = 0.0
    waiting: int = 0
    limit_ns: float = math.inf

    @classmethod
    def of_energy(cls, program: Program, link: Link, limit_ns: float) -> Prices:
        """Picojoules; waiting costs time only: idle power is not in the model."""
        op_pj = [op.energy_pj for op in program.ops]
        return cls(op=op_pj, byte=link.picojoules_per_byte, limit_ns=limit_ns)


class Director:
    """One program, its budgets, and the best sequence with pages so far.

    Attributes:
        best: None until something keeps the budgets.
    """

    def __init__(
        self, graph: Graph, budget_bytes: int, host: Host, work: WorkLimit, prices: Prices | None = None
    ) -> None:
        self.graph, self.budget_bytes, self.host, self.work = graph, budget_bytes, host, work
        self.prices = prices or Prices(op=graph.cost_ns, waiting=1)
        self.start = Candidate.of(Schedule(graph, range(len(graph.cost_ns))))
        self.pager = Pager(graph, self.start.steps, host)
        self.best: Mixed | None = None

    def direct(self, alone: Candidate, floor: int) -> Mixed | None:
        """The cheapest sequence with pages that is found; None if none keeps the budgets.

        Args:
            alone: recompute alone for the same budget.
            floor: a price; nothing cheaper is looked for.
        """
        self.offer(alone)
        for _ in self._ways():
            if self.best is not None and (self.rank(self.best)[:2] <= (False, floor) or not self.work.left):
                break
        return self.best

    def offer(self, candidate: Candidate, preferred: Collection[int] = ()) -> Mixed | None:
        """Page a sequence, and keep it if it is the best."""
        paged = Pager(self.graph, candidate.steps, self.host).within(self.budget_bytes, preferred)
        self.work.done += SCHEDULE_UNITS + CONFIG.step_units * len(candidate.steps)
        if paged is None:
            return None
        self.work.done += CONFIG.page_units * len(paged.pages)
        mixed = self._mixed(candidate, paged)
        if self.best is None or self.rank(mixed) < self.rank(self.best):
            self.best = mixed
        return mixed

    def rank(self, mixed: Mixed) -> tuple[bool, int, int, int]:
        """The cheaper the better; then fewer pages, on a link that others may use."""
        late = mixed.total_ns > self.prices.limit_ns
        price = mixed.total_ns if late else mixed.price
        return late, price, len(mixed.paged.pages), mixed.paged.host_peak_bytes

    def _mixed(self, candidate: Candidate, paged: Paged) -> Mixed:
        """A sequence and its pages with their price; the cuts may have weighed another cost than time."""
        prices, steps = self.prices, candidate.steps
        price = sum([prices.op[op] for op in steps]) + prices.waiting * paged.waiting_ns
        price += round(prices.byte * paged.moved_bytes)
        cost_ns = sum([self.graph.cost_ns[op] for op in steps])
        return Mixed(candidate=replace(candidate, cost_ns=cost_ns), paged=paged, price=price)

    def _ways(self) -> Iterator[None]:
        yield from self._carried(CONFIG.shares[:1])
        self.offer(self.start)
        yield
        for _ in itertools.zip_longest(self._carried(CONFIG.shares[1:]), self._levels()):
            if self.work.done > CONFIG.made_ratio * self.work.limit:
                break
            yield
        yield from self._around_pages()
        yield from self._around()

    def _carried(self, shares: Sequence[float]) -> Iterator[None]:
        """What the link carries for nothing is free, for several shares of its rate."""
        seen: set[bytes] = set()
        for share in shares:
            rows = carried(self.pager, share)
            self.work.done += CONFIG.step_units * len(self.start.steps)
            if len(rows) and rows.tobytes() not in seen:
                seen.add(rows.tobytes())
                pages = self.pager.timed(rows, self.start.peak_bytes).pages
                graph = relieved(self.pager.schedule, pages)
                preferred = frozenset(page.buffer for page in pages)
                yield from self._lowered(graph, self.start, self.budget_bytes, preferred)

    def _levels(self) -> Iterator[None]:
        """Recompute alone down to levels, pages from there."""
        over_bytes = self.start.peak_bytes - self.budget_bytes
        for level in CONFIG.levels:
            level_bytes = self.budget_bytes + int(over_bytes * level)
            yield from self._lowered(self.graph, self.start, level_bytes, frozenset())

    def _around_pages(self) -> Iterator[None]:
        """Plan around what the best sequence pages, until that does not help any more."""
        for _ in range(CONFIG.rounds):
            before = self.best
            if before is None or not before.paged.pages:
                break
            graph, preferred = self._relieved(before)
            yield from self._lowered(graph, self.start, self.budget_bytes, preferred)
            if self.best is before:
                break

    def _lowered(
        self, graph: Graph, start: Candidate, level_bytes: int, preferred: Collection[int]
    ) -> Iterator[None]:
        graph = replace(graph, cost_ns=self.prices.op)
        begin = Candidate.of(Schedule(graph, start.steps))
        for tilt_ratio in CONFIG.tilts:
            lowered = begin
            if begin.peak_bytes > level_bytes:
                part = WorkLimit(self.work.limit)
                lowered = descend(graph, begin, level_bytes, part, Style(tilt_ratio=tilt_ratio))
                self.work.done += part.done
            self.offer(lowered, preferred)
            yield
            if lowered is begin:
                break

    def _relieved(self, mixed: Mixed) -> tuple[Graph, frozenset[int]]:
        """The graph in which what a sequence pages has no bytes, and the buffers that it pages."""
        pages = first_pages(Schedule(self.graph, mixed.candidate.steps), mixed.paged.pages)
        return relieved(self.pager.schedule, pages), frozenset(page.buffer for page in pages)

    def _around(self) -> Iterator[None]:
        """Large-neighbourhood search: take recomputes out, let pages or cuts make up for them."""
        random_number = random.Random(0)
        kinds = alike(self.graph)
        current, stale = self.best, 0
        while current is not None and stale < CONFIG.patience:
            schedule = Schedule(self.graph, current.candidate.steps)
            recomputes = schedule.recompute_positions()
            if not recomputes:
                break
            for position in pick(schedule, recomputes, kinds, random_number):
                if schedule.steps[position] != HOLE:
                    schedule.try_delete(position, 1 << 62)
            prune(schedule)
            mixed = self._repaired(schedule, current, random_number)
            better = mixed is not None and self.rank(mixed) < self.rank(current)
            stale = 0 if better else stale + 1
            if mixed is not None and self.rank(mixed)[:2] <= self.rank(current)[:2]:
                current = mixed
            yield

    def _repaired(self, schedule: Schedule, current: Mixed, random_number: random.Random) -> Mixed | None:
        """A sequence that lacks some recomputes, with pages in their place, or cut again around the pages."""
        steps = schedule.compact()
        if random_number.random() < 0.5:
            return self.offer(Candidate.of(schedule), [page.buffer for page in current.paged.pages])
        graph, preferred = self._relieved(current)
        style = Style(
            reserve_ratio=random_number.choice((0.0, 0.0, 0.02)),
            tilt_ratio=random_number.choice((0.0, 0.1, -0.1)),
        )
        lowered = lower_to(replace(graph, cost_ns=self.prices.op), steps, self.budget_bytes, self.work, style)
        return self.offer(lowered, preferred)
