"""Which slices of a program must move together, and when each such group is in use.

A web is what compilers call the defs and uses that reach each other: every write with all reads that may get
its bytes, and the other writes that those may get. Webs are found from the executable alone: bytes that are
read later are alive (backwards, to a fixpoint over loops), and every live byte carries the writes that
it may come from (forwards). Slices that overlap within one kernel belong to one web, too, so that no
in-place pair is split. Two webs may share addresses if they are never in use at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from passes.pinning.slices import Access, Branch, Call, Loop, Node, Run, SliceProgram
from passes.union_find import UnionFind

_NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Web:
    """Slices that move together.

    Attributes:
        slices: indices into the program's slices.
        offset, nbytes: the bytes from the first to the last of them.
        lives: (first, last) kernel of every stretch in which it is in use, both included.
    """

    slices: tuple[int, ...]
    offset: int
    nbytes: int
    lives: tuple[tuple[int, int], ...]


class _Points:
    """The program as a graph of kernels in a row; `following[t]` may run after `t`."""

    def __init__(self, program: SliceProgram) -> None:
        self.accesses: list[tuple[Access, ...]] = []
        self.following: list[list[int]] = []
        self.block(program.body, [])

    def point(self, accesses: tuple[Access, ...], before: Sequence[int]) -> list[int]:
        now = len(self.accesses)
        self.accesses.append(accesses)
        self.following.append([])
        for t in before:
            self.following[t].append(now)
        return [now]

    def block(self, nodes: Sequence[Node], before: list[int]) -> list[int]:
        """Append `nodes` after any of the points `before`; the points after which they are over."""
        for node in nodes:
            if isinstance(node, Run):
                before = self.point(node.accesses, before)
            elif isinstance(node, Call):
                before = self.block(node.body, before)
            elif isinstance(node, Branch):
                at = self.point(node.index, before)
                before = list(dict.fromkeys(e for b in node.branches for e in self.block(b, at))) or at
            else:
                before = self.loop(node, before)
        return before

    def loop(self, node: Loop, before: list[int]) -> list[int]:
        # An empty point where the test starts gives the way back a place to go to.
        start = self.point((), before)
        tested = self.block(node.test, start)
        flag = self.point(node.flag, tested)
        head = flag if node.test_runs else self.point((), list(dict.fromkeys([*start, *flag])))
        for t in self.block(node.body, head):
            self.following[t].append(start[0])
        return head


def find_webs(program: SliceProgram) -> tuple[Web, ...]:
    """The webs of a program, each once, in the order of their first slices. Unused slices have none."""
    return _Webs(program).found()


class _Webs:
    def __init__(self, program: SliceProgram) -> None:
        self.program = program
        self.points = _Points(program)
        edges = sorted({at for s in program.slices for at in (s.offset, s.end)})
        place = {at: n for n, at in enumerate(edges)}
        self.span = [slice(place[s.offset], place[s.end]) for s in program.slices]
        self.n_segments = max(0, len(edges) - 1)
        self.groups = UnionFind(len(program.slices))
        self.in_use: dict[int, list[int]] = {}

    def found(self) -> tuple[Web, ...]:
        self.carry(self.liveness())
        members: dict[int, list[int]] = {}
        used = {a.slice for accesses in self.points.accesses for a in accesses}
        for n in sorted(used):
            if self.program.slices[n].nbytes:
                members.setdefault(self.groups.find(n), []).append(n)
        times: dict[int, set[int]] = {}
        for t, owners in self.in_use.items():
            for n in owners:
                times.setdefault(self.groups.find(n), set()).add(t)
        return tuple(self.web(group, sorted(times[root])) for root, group in members.items())

    def web(self, group: list[int], times: list[int]) -> Web:
        slices = [self.program.slices[n] for n in group]
        offset = min(s.offset for s in slices)
        lives: list[tuple[int, int]] = []
        for t in times:
            if lives and lives[-1][1] == t - 1:
                lives[-1] = (lives[-1][0], t)
            else:
                lives.append((t, t))
        nbytes = max(s.end for s in slices) - offset
        return Web(slices=tuple(group), offset=offset, nbytes=nbytes, lives=tuple(lives))

    def liveness(self) -> list[np.ndarray]:
        """For every point, as bits, the segments that are read at or after it before they are written."""
        empty = np.packbits(np.zeros(self.n_segments, bool))
        before = [empty] * len(self.points.accesses)
        changed = True
        while changed:
            changed = False
            for t in reversed(range(len(before))):
                alive = empty
                for u in self.points.following[t]:
                    alive = alive | before[u]
                now = self.bits(alive)
                for access in self.points.accesses[t]:
                    if access.writes:
                        now[self.span[access.slice]] = False
                for access in self.points.accesses[t]:
                    if access.reads:
                        now[self.span[access.slice]] = True
                packed = np.packbits(now)
                if not np.array_equal(packed, before[t]):
                    before[t] = packed
                    changed = True
        return before

    def bits(self, packed: np.ndarray) -> np.ndarray:
        """Packed bits as one boolean for every segment."""
        return np.unpackbits(packed, count=self.n_segments).astype(bool)

    def carry(self, alive: list[np.ndarray]) -> None:
        """Let every live segment carry a slice that it may come from, and unite what meets.

        What arrives is kept only where control flow meets; in between it is handed on.
        """
        before: list[list[int]] = [[] for _ in alive]
        for t, following in enumerate(self.points.following):
            for u in following:
                before[u].append(t)
        kept = {t: np.full(self.n_segments, _NOBODY) for t in range(len(alive)) if before[t] != [t - 1]}
        changed = True
        while changed:
            changed = False
            handed = np.full(self.n_segments, _NOBODY)
            for t in range(len(alive)):
                arriving = kept[t].copy() if t in kept else handed
                self.note(t, arriving)
                leaving = self.through(t, arriving)
                for u in self.points.following[t]:
                    flowing = np.where(self.bits(alive[u]), leaving, _NOBODY)
                    if u in kept:
                        changed = self.meet(kept[u], flowing) or changed
                    else:
                        handed = flowing

    def through(self, t: int, state: np.ndarray) -> np.ndarray:
        """What leaves a kernel that gets `state`."""
        accesses = [a for a in self.points.accesses[t] if self.program.slices[a.slice].nbytes]
        for access in accesses:
            if access.reads:
                span = self.span[access.slice]
                owners = np.unique(state[span])
                self.groups.join([access.slice, *(int(n) for n in owners if n != _NOBODY)])
                state[span] = access.slice
        for first, second in combinations(accesses, 2):
            a, b = self.program.slices[first.slice], self.program.slices[second.slice]
            if (first.writes or second.writes) and a.offset < b.end and b.offset < a.end:
                self.groups.join([first.slice, second.slice])
        for access in accesses:
            if access.writes:
                state[self.span[access.slice]] = access.slice
        return state

    def note(self, t: int, arriving: np.ndarray) -> None:
        """What is in use at a point: all that arrives alive, and all that it uses."""
        owners = {int(n) for n in np.unique(arriving) if n != _NOBODY}
        owners |= {a.slice for a in self.points.accesses[t] if self.program.slices[a.slice].nbytes}
        self.in_use[t] = sorted(owners)

    def meet(self, state: np.ndarray, other: np.ndarray) -> bool:
        """Let `other` flow into `state`; True if that says anything new."""
        fresh = (state == _NOBODY) & (other != _NOBODY)
        both = (state != _NOBODY) & (other != _NOBODY) & (state != other)
        changed = bool(fresh.any())
        state[fresh] = other[fresh]
        for pair in np.unique(np.stack([state[both], other[both]]), axis=1).T if both.any() else ():
            changed = self.groups.join([int(n) for n in pair]) or changed
        return changed
