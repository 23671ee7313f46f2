"""What follows from placing one item: for several candidates of a node at once, in numpy.

The rules are in the head of `passes.offsets.solver`. Arrays have a row for each candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.liveness import BoolArray, IntArray
from passes.offsets.sweep import NONE_LEFT, Sections


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Left:
    """What is left to place.

    Attributes:
        items: ascending.
        low: of every item the lowest offset that it can have, `NONE_LEFT` for those that are not left.
        stand: of every item the height of what is placed below it.
        watch: of every item one that it can stand on, the last that was looked for.
        total: bytes left in every section.
        rank: the place of every item among those of equal offsets.
        least, last_rank: offset and rank of what was placed last, (0, -1) for nothing.
    """

    items: IntArray
    low: IntArray
    stand: IntArray
    watch: IntArray
    total: IntArray
    rank: IntArray
    least: int
    last_rank: int

    def key(self) -> bytes:
        """What a search depends on besides `least` and `last_rank`."""
        of_items = (self.low[self.items], self.stand[self.items], self.rank[self.items])
        return b"".join(array.tobytes() for array in (self.items, *of_items))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """Which rules are used; each only leaves out what cannot be, or need not be looked at.

    Attributes:
        canonical: what was passed over, or cannot stand on what is placed, stands on something that is left.
        dominance: no item is placed so high that another one would fit below it.
        heads: in every section what is left fits above any height which it cannot go below.
        not_first: an item above whose lowest offset its section does not fit has another one below it.
        parts: what shares no section is solved apart.
        memory: what is left is searched once.
    """

    canonical: bool = True
    dominance: bool = True
    heads: bool = True
    not_first: bool = True
    parts: bool = True
    memory: bool = True


ALL = RuleSet()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """The rules of one problem.

    Attributes:
        on: which of them are used.
        failures: how often what is left did not fit in a section; counted up in place.
    """

    sections: Sections
    capacity_bytes: int
    failures: IntArray
    on: RuleSet = ALL

    def candidates(self, left: Left) -> IntArray:
        """The items that can be placed next, the lowest first."""
        items = left.items
        low, stand, ranks = left.low[items], left.stand[items], left.rank[items]
        first, last = self.sections.first[items[0]], self.sections.last[items].max()
        highest = self.capacity_bytes - int(left.total[first : last + 1].max())
        below = int((stand + self.sections.size[items]).min()) if self.on.dominance else NONE_LEFT
        later = (low > left.least) | (ranks > left.last_rank)
        chosen = np.flatnonzero(later & (low == stand) & (low < below) & (low <= highest))
        return items[chosen[np.lexsort((ranks[chosen], low[chosen]))]]

    def leaves_slack(self, left: Left, chosen: IntArray) -> IntArray:
        """The candidates in whose own sections what is left would fit above the lowest of it."""
        sections = self.sections
        if not self.on.heads:
            return chosen
        rows = [sections.rows[k] for k in chosen.tolist()]
        which = np.repeat(np.arange(len(chosen)), [len(row) for row in rows])
        row, item = np.concatenate(rows), chosen[which]
        crowd = sections.crowd[row]
        low = np.maximum(left.low[crowd], left.low[item][:, None] + sections.lift[item[:, None], crowd])
        low[crowd == item[:, None]] = NONE_LEFT
        held = left.total[row] - sections.held[item, row]
        over = (low.min(axis=1) + held > self.capacity_bytes) & (held > 0)
        np.add.at(self.failures, row[over], 1)
        fits = np.ones(len(chosen), dtype=np.bool_)
        fits[which[over]] = False
        return chosen[fits]

    def after(self, left: Left, chosen: IntArray) -> list[Left]:
        """For each item placed next at its lowest offset what is then left, but not where it cannot fit."""
        low_bytes = left.low[chosen]
        top = self.sections.lift[chosen] + low_bytes[:, None]
        low = np.maximum(np.maximum(left.low, top), low_bytes[:, None])
        low[np.arange(len(chosen)), chosen] = NONE_LEFT
        batch = _Batch(
            rules=self,
            least=low_bytes[:, None],
            low=low,
            stand=np.maximum(left.stand, top),
            watch=np.repeat(left.watch[None], len(chosen), axis=0),
            total=left.total - self.sections.held[chosen],
            earlier=left.rank < left.rank[chosen][:, None],
        )
        return [
            Left(
                items=left.items[left.items != chosen[k]],
                low=low[k],
                stand=batch.stand[k],
                watch=batch.watch[k],
                total=batch.total[k],
                rank=left.rank,
                least=int(low_bytes[k]),
                last_rank=int(left.rank[chosen[k]]),
            )
            for k in batch.inferred(left.low).tolist()
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """Candidates of one node, each placed; `low` and `watch` are changed in place.

    `earlier` marks the items that come before the candidate at equal offsets; the others are as in `Left`.
    """

    rules: Rules
    least: IntArray
    low: IntArray
    stand: IntArray
    watch: IntArray
    total: IntArray
    earlier: BoolArray

    def inferred(self, before: IntArray) -> IntArray:
        """Raise lowest offsets as far as the rules tell; the candidates that still may fit."""
        dead = np.zeros(len(self.low), dtype=np.bool_)
        changed = self.low != before
        while changed.any():
            start = self.low.copy()
            self._fill_sections(changed, dead)
            if self.rules.on.canonical:
                self._stand_on_others(dead)
            changed = (self.low != start) & ~dead[:, None]
        return np.flatnonzero(~dead)

    def _fill_sections(self, changed: BoolArray, dead: BoolArray) -> None:
        """Heads, and what cannot be first, in all sections where something changed."""
        sections, capacity_bytes = self.rules.sections, self.rules.capacity_bytes
        which, row = np.nonzero(changed.astype(np.float32) @ sections.alive)
        at = which[:, None] * self.low.shape[1] + sections.crowd[row]
        low = self.low.ravel()
        reach = low[at]
        late = (reach > (capacity_bytes - self.total[which, row])[:, None]) & (reach < NONE_LEFT)
        # Where nothing is late all fits above the highest of them.
        full = np.flatnonzero(late.any(axis=1))
        if not len(full):
            return
        at, late, reach, which, row = at[full], late[full], reach[full], which[full], row[full]
        held = np.where(reach < NONE_LEFT, sections.load[row], 0)
        first_end = np.where(late, NONE_LEFT, reach + held).min(axis=1)
        order = reach.argsort(axis=1) + held.shape[1] * np.arange(len(full))[:, None]
        held = held.ravel()[order]
        ends = reach.ravel()[order] + held[:, ::-1].cumsum(axis=1)[:, ::-1]
        over = first_end >= NONE_LEFT
        if self.rules.on.heads:
            over |= ((ends > capacity_bytes) & (held > 0)).any(axis=1)
        np.add.at(self.rules.failures, row[over], 1)
        dead[which[over]] = True
        if self.rules.on.not_first:
            np.maximum.at(low, at[late], np.repeat(first_end, late.sum(axis=1)))

    def _stand_on_others(self, dead: BoolArray) -> None:
        """What was passed over or cannot stand on what is placed stands on something that is left."""
        low, width = self.low.ravel(), self.low.shape[1]
        passed = (self.low > self.stand) | ((self.low == self.least) & self.earlier)
        which, item = np.nonzero(passed & (self.low < NONE_LEFT) & ~dead[:, None])
        watched = self.watch[which, item]
        lift = self.rules.sections.lift[watched, item]
        moved = np.flatnonzero(low[which * width + watched] + lift > low[which * width + item])
        if not len(moved):
            return
        which, item = which[moved], item[moved]
        near = self.rules.sections.near[item]
        ends = low[which[:, None] * width + near] + self.rules.sections.rise[item]
        lowest = ends.min(axis=1)
        self.watch[which, item] = near[np.arange(len(near)), ends.argmin(axis=1)]
        dead[which[lowest >= NONE_LEFT]] = True
        low[which * width + item] = np.maximum(low[which * width + item], lowest)
