"""An exact packer: depth-first search over items in the order of their offsets, section by section.

After MiniMalloc (ASPLOS 2023), with more inference; `passes.offsets.infer.RuleSet` switches each rule off.
Time is cut into sections in which the same items are
alive. Items are placed from low to high offsets, each at the lowest offset that what is placed leaves it:

canonical   offsets never fall from one placement to the next, ties in the order of `rank`; every item
            stands on the ground or on another one. An item that is passed over, or that can no longer stand
            on what is placed, will stand on one that is left: that raises the lowest offset it can have.
dominance   no item is placed so high that another one that is left would fit below it.
heads       in every section the items that are left fit above any height which they cannot go below.
not first   an item above whose lowest offset a section's items do not fit has one below it that is not such.
parts       sections that no item that is left joins any more are solved one by one, the tightest first.
memory      what is left, and how high it must lie, is searched once.

A search that ends without a placement is a proof. Parts that are apart from the start are searched one
after another. For each some orders of `rank` take turns, each with a growing limit of tries; three of them
have learned from the rounds before in which sections the search fails (as dom/wdeg, Boussemart et al. 2004).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passes.liveness import IntArray
from passes.offsets.infer import ALL, Left, Rules, RuleSet
from passes.offsets.packing import Item
from passes.offsets.sweep import NONE_LEFT, Sections

# Keys of `Sweep._keys`, and whether parts that come apart during the search are ordered anew.
ORDERS = (
    (("total", "time", "space"), False),
    (("failures", "time", "space"), False),
    (("total", "space", "time"), True),
    (("burden", "time", "space"), False),
    (("total", "time", "space"), True),
    (("failures", "space", "time"), False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverConfig:
    """How long each order is tried, and what is learned; set by the rows A to K of `benchmarks.pack`.

    Attributes:
        most_items: what `search` takes: tables grow with their square.
        first_tries: of every order in the first round.
        more: how many times as many each round has.
        fading: what a round's failures still count after each later round.
        first_look: how many candidates of a node are judged together at first.
        most_remembered: how many states that failed are remembered.
    """

    most_items: int = 400
    first_tries: int = 300
    more: int = 5
    fading: float = 0.9
    first_look: int = 8
    most_remembered: int = 20_000


SOLVER = SolverConfig()
ROUND_TRIES = len(ORDERS) * SOLVER.first_tries


class LimitError(Exception):
    """The limit of tries is reached, or somebody else has the answer."""


def search(items: Sequence[Item], capacity: int, max_tries: int) -> list[int] | None:
    """Offsets within a capacity; None if there are none, or too many items, or the tries do not suffice."""
    if len(items) > SOLVER.most_items:
        return None
    try:
        return Sweep(items, capacity).solve(max_tries)
    except LimitError:
        return None


class Sweep:
    """One problem in sections.

    Attributes:
        tries: placements tried so far, without those that fail at first sight.
    """

    def __init__(
        self,
        items: Sequence[Item],
        capacity_bytes: int,
        stop: Callable[[], bool] = lambda: False,
        on: RuleSet = ALL,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.stop = stop
        self.tries = 0
        self._sections = Sections.of(items)
        n_sections = self._sections.held.shape[1]
        failures = np.zeros(n_sections, dtype=np.int64)
        self._rules = Rules(sections=self._sections, capacity_bytes=capacity_bytes, failures=failures, on=on)
        self._weights = np.zeros(n_sections)
        self._limit = 0
        self._order, self._reorders = ORDERS[0]
        self._offsets = [0] * len(items)
        self._failed: dict[bytes, tuple[int, int]] = {}
        self._found: dict[bytes, list[int]] = {}

    def solve(self, max_tries: int, first_round: int = 0) -> list[int] | None:
        """Offsets of all items; None if it is proved that there are none.

        Args:
            max_tries: of all calls together.
            first_round: the round of the orders to begin with.

        Raises:
            LimitError: neither is known after `max_tries` placements, or `stop` says so.
        """
        sections = self._sections
        total = sections.held.sum(axis=0)
        if total.max(initial=0) > self.capacity_bytes:
            return None
        ground = np.zeros_like(sections.size)
        start = Left(
            items=np.flatnonzero(sections.size > 0),
            low=np.where(sections.size > 0, 0, NONE_LEFT),
            stand=ground,
            watch=np.full_like(ground, len(ground) - 1),
            total=total,
            rank=ground,
            least=0,
            last_rank=-1,
        )
        if not all(self._solve_part(part, max_tries, first_round) for part in self._parts(start)):
            return None
        return list(self._offsets)

    def _solve_part(self, part: Left, max_tries: int, first_round: int) -> bool:
        """Whether a part that was apart from the start can be placed; `_offsets` then says how."""
        for n_rounds in itertools.count(first_round):
            for self._order, self._reorders in ORDERS:
                self._limit = min(max_tries, self.tries + SOLVER.first_tries * SOLVER.more**n_rounds)
                self._failed.clear()
                self._found.clear()
                try:
                    return self._placed(dataclasses.replace(part, rank=self._ranked(part)))
                except LimitError:
                    if self.stop() or self.tries >= max_tries:
                        raise
                self._learn()
        raise AssertionError("rounds do not end")

    def _learn(self) -> None:
        """Weigh the sections by the failures of a round, and of those before."""
        failures = self._rules.failures
        self._weights = SOLVER.fading * self._weights + failures / max(1, int(failures.sum()))
        failures[:] = 0

    def _keys(self, left: Left) -> dict[str, IntArray | npt.NDArray[np.float64]]:
        """What can make an item hard to place: the larger the harder."""
        sections, items = self._sections, left.items
        held = sections.held[items]
        return {
            "total": np.where(held > 0, left.total, 0).max(axis=1),
            "failures": np.where(held > 0, self._weights, 0).max(axis=1),
            "burden": held @ self._weights,
            "time": sections.time[items],
            "space": sections.time[items] * sections.size[items],
        }

    def _ranked(self, left: Left) -> IntArray:
        """The rank of every item that is left in the round's order."""
        keys = self._keys(left)
        rank = np.full_like(left.rank, len(left.rank))
        rank[left.items[np.lexsort([-keys[key] for key in reversed(self._order)])]] = np.arange(
            len(left.items)
        )
        return rank

    def _placed(self, start: Left) -> bool:
        """Whether all can be placed; the stack of searches is kept here, as it may be deep."""
        stack = [self._search(start)]
        answer: bool | None = None
        while True:
            try:
                stack.append(self._search(stack[-1].send(answer)))
                answer = None
            except StopIteration as done:
                answer = bool(done.value)
                stack.pop()
                if not stack:
                    return answer

    def _search(self, part: Left) -> Generator[Left, bool | None, bool]:
        """Place one of the items, and then the others, part by part where sections have come apart.

        Yields what is to be searched next, and is sent whether that can be placed.
        """
        chosen = self._rules.candidates(part)
        if len(part.items) == 1 and len(chosen):
            self._place(part, int(chosen[0]))
            return True
        for rest in self._rests(part, chosen):
            parts = self._parts(rest)
            for one in parts:
                if not (yield from self._solved(one, among=len(parts) > 1)):
                    break
            else:
                (item,) = np.setdiff1d(part.items, rest.items, assume_unique=True).tolist()
                self._place(part, item)
                return True
        return False

    def _place(self, left: Left, item: int) -> None:
        self._offsets[int(self._sections.index[item])] = int(left.low[item])

    def _rests(self, left: Left, chosen: IntArray) -> Iterator[Left]:
        """What is left after each of the candidates: one by one at first, later several at a time."""
        count = 1
        for look in (chosen[: SOLVER.first_look], chosen[SOLVER.first_look :]):
            if not len(look):
                break
            chosen = self._rules.leaves_slack(left, look)
            while len(chosen):
                now, chosen = chosen[:count], chosen[count:]
                self.tries += len(now)
                if self.tries > self._limit or self.stop():
                    raise LimitError
                yield from self._rules.after(left, now)
                count = min(2 * count, SOLVER.first_look)

    def _solved(self, part: Left, *, among: bool) -> Generator[Left, bool | None, bool]:
        """Whether a part can be placed, searched once; offsets are kept if it is one `among` others."""
        key = part.key()
        index = self._sections.index[part.items].tolist()
        if self._rules.on.memory and key in self._found:
            for i, offset in zip(index, self._found[key], strict=True):
                self._offsets[i] = offset
            return True
        at = (part.least, part.last_rank)
        failed = self._failed.get(key)
        if self._rules.on.memory and failed is not None and failed <= at:
            return False
        if not (yield part):
            if len(self._failed) < SOLVER.most_remembered:
                self._failed[key] = at
            return False
        if among:
            self._found[key] = [self._offsets[i] for i in index]
        return True

    def _parts(self, left: Left) -> list[Left]:
        """Groups of items that share no section, the one with the least slack first."""
        items = left.items
        reach = np.maximum.accumulate(self._sections.last[items])
        breaks = np.flatnonzero(self._sections.first[items[1:]] > reach[:-1]) + 1
        if not len(breaks) or not self._rules.on.parts:
            return [left] if len(items) else []
        parts = [self._part(left, some) for some in np.split(items, breaks)]
        return sorted(parts, key=lambda part: (self._slack(part), len(part.items)))

    def _part(self, left: Left, items: IntArray) -> Left:
        """Some of what is left, without the others."""
        low = np.full_like(left.low, NONE_LEFT)
        low[items] = left.low[items]
        part = dataclasses.replace(left, items=items, low=low, last_rank=-1)
        return dataclasses.replace(part, rank=self._ranked(part)) if self._reorders else part

    def _slack(self, left: Left) -> int:
        """Bytes to spare in the fullest section."""
        first, last = self._sections.first[left.items[0]], self._sections.last[left.items].max()
        floor = left.low[self._sections.crowd[first : last + 1]].min(axis=1)
        spare = self.capacity_bytes - left.total[first : last + 1] - floor
        return int(spare[floor < NONE_LEFT].min())
