"""Prove that a program with moved temporaries computes what it did, or say where it would not.

The original program and the moved one are run together, kernel by kernel, on all control paths at once. The
state says of the original's bytes where the moved program holds the same content:

    KEPT at some distance | LOST (the moved program overwrote its copy) | never written (absent)

A kernel may read what is KEPT at just the distance that its slice was moved by, and what the original
never wrote. Then its inputs are equal, so what it writes is equal, and its outputs are KEPT at their
distance. Where paths meet, bytes that are not KEPT alike on all of them are LOST; a path on which the
original reads bytes that nobody wrote promises nothing. So every read of every path gets the bytes of the
write that it had before.

Besides, nothing about a kernel that its compiler could have relied on may change: which of its slices overlap
and how, alignment, and that they lie inside the allocation.

This file knows the data only, and shares nothing with what chose the places (`passes.pinning.webs`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations, pairwise

from passes.pinning.slices import Access, Branch, Call, Loop, Moved, Node, Run, Slice, SliceProgram

Range = tuple[int, int, int | None]
LOST = None


class MoveError(Exception):
    """The moved program is not proved to be the original one."""


def check_moves(program: SliceProgram, moved: Moved) -> None:
    """Prove that `program` with its slices at `moved.offsets` computes what it did.

    Raises:
        MoveError: where it would not.
    """
    if len(moved.offsets) != len(program.slices):
        raise MoveError(f"{len(moved.offsets)} offsets for {len(program.slices)} slices")
    for n, (old, offset) in enumerate(zip(program.slices, moved.offsets, strict=True)):
        if offset < 0 or offset + old.nbytes > moved.nbytes:
            raise MoveError(f"slice {n} ends at {offset + old.nbytes} of {moved.nbytes} bytes")
        if (offset - old.offset) % program.alignment:
            raise MoveError(
                f"slice {n} moved by {offset - old.offset} bytes, alignment is {program.alignment}"
            )
    checker = _Checker(program, moved)
    checker.block(program.body, _State())


class _State:
    """Disjoint ranges of the original's bytes in order of address: (start, end, distance or LOST)."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: list[Range] | None = None) -> None:
        self.ranges: list[Range] = ranges or []

    def meeting(self, start: int, end: int) -> list[Range]:
        """The ranges that meet [start, end)."""
        first, last = self._span(start, end)
        return self.ranges[first:last]

    def put(self, start: int, end: int, distance: int | None) -> None:
        """Say `distance` of [start, end)."""
        first, last = self._span(start, end)
        new: list[Range] = [(start, end, distance)]
        if first < last:
            low, _, before = self.ranges[first]
            _, high, after = self.ranges[last - 1]
            if low < start:
                new.insert(0, (low, start, before))
            if high > end:
                new.append((end, high, after))
        self.ranges[first:last] = new

    def overwrite(self, start: int, end: int) -> None:
        """The moved program writes [start, end): what it kept there is LOST."""
        for low, high, distance in list(self.ranges):
            if distance is not None and low + distance < end and start < high + distance:
                self.put(max(low, start - distance), min(high, end - distance), LOST)

    def _span(self, start: int, end: int) -> tuple[int, int]:
        first = bisect_left(self.ranges, (start,))
        if first and self.ranges[first - 1][1] > start:
            first -= 1
        return first, bisect_left(self.ranges, (end,), first)


def _join(states: Sequence[_State]) -> _State:
    """What holds whichever of `states` it was."""
    joined = _State(_merged(states[0].ranges))
    for other in states[1:]:
        edges = sorted({at for s in (joined, other) for r in s.ranges for at in r[:2]})
        common: list[Range] = []
        for start, end in pairwise(edges):
            here = [r[2] for s in (joined, other) for r in s.meeting(start, end)]
            if here:
                common.append((start, end, here[0] if len(set(here)) == 1 else LOST))
        joined = _State(_merged(common))
    return joined


def _merged(ranges: list[Range]) -> list[Range]:
    """Neighbours that say the same as one."""
    merged: list[Range] = []
    for start, end, distance in ranges:
        if merged and merged[-1][1] == start and merged[-1][2] == distance:
            merged[-1] = (merged[-1][0], end, distance)
        else:
            merged.append((start, end, distance))
    return merged


class _Checker:
    def __init__(self, program: SliceProgram, moved: Moved) -> None:
        self.program = program
        self.moved = moved

    def block(self, nodes: Sequence[Node], state: _State) -> _State:
        """Run `nodes` from `state`, which is used up; the state after them."""
        for node in nodes:
            if isinstance(node, Run):
                self.run(node.name, node.accesses, state)
            elif isinstance(node, Call):
                state = self.block(node.body, state)
            elif isinstance(node, Branch):
                self.run(node.name, node.index, state)
                state = _join([self.block(b, _State(list(state.ranges))) for b in node.branches] or [state])
            else:
                state = self.loop(node, state)
        return state

    def loop(self, node: Loop, entry: _State) -> _State:
        """What holds at the flag in every iteration is found by assuming all and giving up what fails."""
        head = self.test(node, entry)
        while True:
            next_head = self.test(node, self.block(node.body, _State(list(head.ranges))))
            joined = _join([head, next_head])
            if joined.ranges == _merged(head.ranges):
                return joined
            head = joined

    def test(self, node: Loop, state: _State) -> _State:
        before = _State(list(state.ranges))
        state = self.block(node.test, state)
        self.run(node.name, node.flag, state)
        return state if node.test_runs else _join([before, state])

    def run(self, name: str, accesses: Sequence[Access], state: _State) -> None:
        """One kernel: check its reads in `state`, then write."""
        self.same_overlaps(name, accesses)
        places = [(self.program.slices[a.slice], self.moved.offsets[a.slice], a) for a in accesses]
        for old, offset, access in places:
            if access.reads:
                self.read(name, old, offset - old.offset, state)
        for old, offset, access in places:
            if access.writes and old.nbytes:
                state.overwrite(offset, offset + old.nbytes)
        for old, offset, access in places:
            if access.writes and old.nbytes:
                state.put(old.offset, old.end, offset - old.offset)

    def read(self, name: str, old: Slice, distance: int, state: _State) -> None:
        """Everything in `old` that was ever written must be kept at `distance`."""
        for start, end, distance_there in state.meeting(old.offset, old.end) if old.nbytes else ():
            if distance_there != distance:
                where = "is lost" if distance_there is LOST else f"is {distance_there} bytes away"
                raise MoveError(
                    f"{name} reads bytes {max(start, old.offset)} to {min(end, old.end)} from {distance} "
                    f"bytes away, but what was written there {where}"
                )

    def same_overlaps(self, name: str, accesses: Sequence[Access]) -> None:
        """Slices of one kernel, one of them written, overlap as they did."""
        for first, second in combinations(accesses, 2):
            if not (first.writes or second.writes):
                continue
            a, b = self.program.slices[first.slice], self.program.slices[second.slice]
            x, y = self.moved.offsets[first.slice], self.moved.offsets[second.slice]
            overlapped = a.offset < b.end and b.offset < a.end
            overlaps = x < y + b.nbytes and y < x + a.nbytes
            if overlapped != overlaps or (overlaps and x - y != a.offset - b.offset):
                raise MoveError(f"two slices of {name} overlap differently than before")
