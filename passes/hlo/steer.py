"""Steer XLA's packing where it packs in time order: memory that is held while a value is placed.

A TPU's heap gives every value the smallest hole when it comes alive. A statistic of 512 B that lives long
takes what an activation left, and the next activation does not fit. So a tighter packing is looked for, and
where best fit would not follow it, the other holes are filled for that one moment: buffers that nothing
reads or writes (`AllocateBuffer`, XLA's own) are made before the kernel, and a second such call, which has
them for operands, ends their lives after it. No kernel changes.

Where another core's scratch memory is free again, buffers of its size and smaller ones go there, and fill no
hole. So one buffer has that memory until the end.

Which holes there are is predicted. So where XLA moves other values after it called back, buffers may fail to
fill what they were made for: XLA's count decides, as always.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.emit import Cloner
from passes.hlo.heap import Moment, moments
from passes.offsets.tight import pack_tight
from passes.offsets.xla_heap import Holes, Interval, pack_in_time

_F32, _TUPLE = 11, 13
_FIRST = 2
"""How many ids are made free for the buffer that has another core's memory, and the call that ends it."""
_LANES = 128
_ROW_BYTES = 4 * _LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A buffer that fills free memory; where it `opens`, it ends before the kernel and leaves room to it."""

    start: int
    nbytes: int
    opens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Goal:
    """Where values should be: those without places anywhere in a zone below all others, in slots.

    Attributes:
        nbytes: of every group.
        zone_bytes: as many slots as are alive at once.
        places: of the groups that have one.
        rooms: how large the holes are that these find there.
    """

    nbytes: dict[int, int]
    zone_bytes: int
    places: dict[int, int]
    rooms: dict[int, int]

    def allows(self, group: int, start: int) -> bool:
        """True if a group may be there."""
        return start == self.places.get(group, start if start < self.zone_bytes else None)


class _Follower:
    """Replays a heap in time order and makes it follow a packing.

    Attributes:
        steered: tick -> the buffers that are needed there, in the order in which they are made.
    """

    def __init__(self, alignment: int, goal: _Goal) -> None:
        self.heap = Holes(alignment)
        self.goal = goal
        self.places: dict[int, int] = {}
        self.steered: dict[int, list[_Piece]] = {}
        self.pending: list[_Piece] = []

    def follow(self, moment: Moment) -> bool:
        """Go through one tick; False if nothing makes the heap follow."""
        _end(self.heap, self.pending)
        self.pending = []
        if moment.defined and not self._place(moment):
            return False
        for group in moment.freed:
            if self.goal.nbytes[group]:
                self.heap.give(self.places[group])
        return True

    def _place(self, moment: Moment) -> bool:
        pieces: list[_Piece] = []
        found = self._after(moment, pieces)
        if found is None:
            pieces = self._pieces(moment)
            found = self._after(moment, pieces)
            if found is None and pieces:
                # What is free at the end is no hole: a small result would be put into a larger one.
                top = self.heap.aligned(max(p.start + p.nbytes for p in pieces))
                pieces = [*pieces, _Piece(start=top, nbytes=_ROW_BYTES)]
                found = self._after(moment, pieces)
            for piece in sorted(pieces, key=lambda p: -p.nbytes):
                fewer = [p for p in pieces if p is not piece]
                without = self._after(moment, fewer)
                if without is not None:
                    pieces, found = fewer, without
        if found is None:
            return False
        self.heap, places = found
        self.places.update(places)
        self.pending = [p for p in pieces if not p.opens]
        if pieces:
            self.steered[moment.tick] = pieces
        return True

    def _after(self, moment: Moment, pieces: Sequence[_Piece]) -> tuple[Holes, dict[int, int]] | None:
        """The heap when the results are placed, and where; None if they, or buffers, go elsewhere."""
        heap = self.heap.copy()
        if any(heap.take(p.nbytes) != p.start for p in pieces):
            return None
        _end(heap, [p for p in pieces if p.opens])
        places = {g: heap.take(n) for g in moment.defined if (n := self.goal.nbytes[g])}
        return (heap, places) if all(self.goal.allows(*place) for place in places.items()) else None

    def _pieces(self, moment: Moment) -> list[_Piece]:
        """All that is free but for the places of the results, as best fit fills it: small holes first."""
        heap, goal = self.heap, self.goal
        defined = [g for g in moment.defined if goal.nbytes[g]]
        wanted = {goal.places[g]: goal.rooms[g] for g in defined if g in goal.places}
        wanted |= dict.fromkeys(self._slots(len(defined) - len(wanted)), heap.alignment)
        ranges = sorted(heap.holes, key=lambda hole: (hole[1] - hole[0], hole[0]))
        ranges.append((heap.tail, max([heap.tail, *(at + room for at, room in wanted.items())])))
        return [piece for start, stop in ranges for piece in _cut(start, stop, wanted)]

    def _slots(self, count: int) -> list[int]:
        """The lowest free slots of the zone, whole ones."""
        heap = self.heap
        ranges = [*heap.holes, (heap.tail, self.goal.zone_bytes)]
        free = [at for start, stop in ranges for at in _whole(start, stop, heap.alignment)[:count]]
        return sorted(free)[:count]


def _whole(start: int, stop: int, nbytes: int) -> range:
    """Where pieces of as many bytes start from `start` to `stop`."""
    return range(start, stop - nbytes + 1, nbytes)


def _cut(start: int, stop: int, wanted: dict[int, int]) -> Iterator[_Piece]:
    """What is free from `start` to `stop`, in pieces: wanted places, and what is between them."""
    for at, room in sorted(wanted.items()):
        if start <= at < stop:
            yield from _piece(start, at)
            yield from _piece(at, min(at + room, stop), opens=True)
            start = at + room
    yield from _piece(start, stop)


def _piece(start: int, stop: int, *, opens: bool = False) -> Iterator[_Piece]:
    """A buffer there, of whole rows; none where there is no room for one."""
    nbytes = (stop - start) // _ROW_BYTES * _ROW_BYTES
    if nbytes > 0:
        yield _Piece(start=start, nbytes=nbytes, opens=opens)


def _end(heap: Holes, pieces: Sequence[_Piece]) -> None:
    """Buffers die: the call that ends them returns nothing."""
    for piece in pieces:
        heap.give(piece.start)


def steered(assigner: Assigner) -> Any | None:
    """The module with its temporaries packed tighter; None if no way is found.

    Args:
        assigner: of a module of a platform whose heap is packed in time order.

    Returns:
        A message of its own: the same instructions in the same order, and the buffers between them.
    """
    assigner = _without_scratch(assigner)
    intervals, ticks = moments(assigner)
    alignment = assigner.backend.alignment
    together = _together(ticks)
    for small_bytes, apart in itertools.product((0, alignment), ({}, together)):
        follower = _Follower(alignment, _goal(intervals, alignment, apart, small_bytes))
        if all(follower.follow(moment) for moment in ticks):
            return _written(assigner, follower.steered)
    return None


def _without_scratch(assigner: Assigner) -> Assigner:
    """The module with a buffer in the memory that another core is done with, where others would else go.

    It has the lowest ids: of values of one size XLA places those first.
    """
    module, entry = assigner.module, assigner.module.entry
    time = assigner.ticks.time
    after = [i for i in entry.order if time[entry.id, i] >= assigner.scratch_held.bit_length()]
    if not assigner.scratch_held or len(after) < 2:
        return assigner
    made = proto.copy(module.proto)
    _renumber(made, entry.id)
    writer = _Writer(made)
    writer.between(entry.id, after[0] + _FIRST, after[-1] + _FIRST, assigner.scratch_bytes)
    writer.finish()
    return Assigner(graph.read(writer.module), assigner.backend.name, old_rules=assigner.old_rules)


def _renumber(module: Any, computation: int) -> None:
    """Make the lowest ids of a computation free."""
    scope = next(c for c in module.computations if c.id == computation)
    sequence = next(s.value for s in module.schedule.sequences if s.key == computation)
    for instruction in scope.instructions:
        instruction.id += _FIRST
        for ids in (instruction.operand_ids, instruction.control_predecessor_ids):
            ids[:] = [i + _FIRST for i in ids]
    scope.root_id += _FIRST
    sequence.instruction_ids[:] = [i + _FIRST for i in sequence.instruction_ids]


def _together(ticks: Sequence[Moment]) -> dict[int, tuple[int, ...]]:
    """Each result of a kernel that has several, and all of them as they are placed."""
    return {group: moment.defined for moment in ticks if moment.defined[1:] for group in moment.defined}


def _goal(
    intervals: Sequence[Interval], alignment: int, apart: dict[int, tuple[int, ...]], small_bytes: int
) -> _Goal:
    """A tight packing of all that is not small, above a zone for what is.

    A zone costs its slots where the others are at their peak. But of three small results the third would
    take what the second leaves of a larger hole.

    Args:
        apart: results that need holes of their own, and all that are placed with each.
        small_bytes: no more than that is small.
    """
    nbytes: dict[int, int] = {}
    for i in intervals:
        nbytes[i.group] = max(nbytes.get(i.group, 0), i.nbytes)
    small = [i for i in intervals if nbytes[i.group] <= small_bytes]
    zone_bytes = -(-pack_in_time(small, alignment).size // alignment) * alignment
    large = [i for i in intervals if nbytes[i.group] > small_bytes]
    rooms = _rooms(large, alignment, apart)
    packed = pack_tight(list(_spread(large, rooms, apart, alignment)), alignment)
    places = {g: zone_bytes + at for g, at in packed.offsets.items()}
    return _Goal(nbytes=nbytes, zone_bytes=zone_bytes, places=places, rooms=rooms)


def _rooms(large: Sequence[Interval], slot_bytes: int, apart: dict[int, tuple[int, ...]]) -> dict[int, int]:
    """How large a hole each value finds, in whole slots.

    Of several results each takes the smallest that holds it, the lowest of equal ones. So that this is its
    own, it is larger than the holes of those that are placed before it wherever it would hold one of them.
    """
    nbytes = {i.group: i.nbytes for i in large if i.leads}
    rooms: dict[int, int] = {}
    for group in (i.group for i in sorted(large, key=lambda i: i.start) if i.leads):
        room = -(-nbytes[group] // slot_bytes) * slot_bytes
        before = [g for g in apart.get(group, ()) if g in rooms]
        while any(nbytes[g] <= room <= rooms[g] for g in before):
            room += slot_bytes
        rooms[group] = room
    return rooms


def _spread(
    large: Sequence[Interval], rooms: dict[int, int], apart: dict[int, tuple[int, ...]], slot_bytes: int
) -> Iterator[Interval]:
    """Intervals that have their rooms, and a slot between, while what they are to be apart from is placed."""
    first = {i.group: i.start for i in large if i.leads}
    for i in large:
        placed = [first[g] for g in apart.get(i.group, ()) if g in first]
        if not i.leads or not placed:
            yield i
            continue
        end = placed[-1]
        yield replace(i, nbytes=rooms[i.group] + slot_bytes, start=placed[0], end=end)
        if end < i.end:
            yield replace(i, start=end + 1, leads=False)


def _written(assigner: Assigner, steered_ticks: dict[int, list[_Piece]]) -> Any | None:
    """The module with the buffers of each tick around the instruction that runs then."""
    module = proto.copy(assigner.module.proto)
    at = {time: place for place, time in assigner.ticks.time.items()}
    if not all(tick in at for tick in steered_ticks):
        return None
    writer = _Writer(module)
    for tick, pieces in steered_ticks.items():
        writer.around(*at[tick], pieces)
    writer.finish()
    return module


class _Writer:
    """Puts buffers around instructions."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.cloner = Cloner(module)
        self.computations = {c.id: c for c in module.computations}
        self.sequences = {s.key: s.value for s in module.schedule.sequences}
        self.before: dict[int, dict[int, list[Any]]] = {}
        self.after: dict[int, dict[int, list[Any]]] = {}

    def around(self, computation: int, instruction: int, pieces: Sequence[_Piece]) -> None:
        """Fill memory while an instruction's results are placed."""
        scope = self.computations[computation]
        made = [self._buffer(scope, piece.nbytes) for piece in pieces]
        before = list(made)
        opening = [b.id for b, piece in zip(made, pieces, strict=True) if piece.opens]
        closing = [b.id for b, piece in zip(made, pieces, strict=True) if not piece.opens]
        before += [self._call(scope, opening)] if opening else []
        self.before.setdefault(computation, {})[instruction] = before
        self.after.setdefault(computation, {})[instruction] = [self._call(scope, closing)] if closing else []

    def between(self, computation: int, first: int, last: int, nbytes: int) -> None:
        """Fill memory from an instruction on, until another one."""
        scope = self.computations[computation]
        lowest = min(i.id for i in scope.instructions)
        made = self._buffer(scope, nbytes)
        made.id = lowest - _FIRST
        ended = self._call(scope, [made.id])
        ended.id = made.id + 1
        self.before.setdefault(computation, {}).update({first: [made], last: [ended]})
        self.after.setdefault(computation, {})

    def finish(self) -> None:
        """Write the schedules, and the instructions in their order."""
        for key, before in self.before.items():
            scope, sequence = self.computations[key], self.sequences[key]
            protos = {i.id: type(i).FromString(i.SerializeToString()) for i in scope.instructions}
            order = [
                made
                for i in sequence.instruction_ids
                for made in (*before.get(i, ()), protos[i], *self.after[key].get(i, ()))
            ]
            sequence.instruction_ids[:] = [i.id for i in order]
            del scope.instructions[:]
            scope.instructions.extend(order)

    def _buffer(self, scope: Any, nbytes: int) -> Any:
        """A scalar in a tile of so many bytes: XLA moves no scalar to the chip's memory."""
        made = self._made(scope)
        made.shape.element_type = _F32
        made.shape.dimensions.extend((1, 1))
        made.shape.is_dynamic_dimension.extend((False, False))
        made.shape.layout.minor_to_major.extend((1, 0))
        made.shape.layout.tiles.add().dimensions.extend((nbytes // _ROW_BYTES, _LANES))
        return made

    def _call(self, scope: Any, operands: Sequence[int]) -> Any:
        made = self._made(scope)
        made.shape.element_type = _TUPLE
        made.operand_ids.extend(operands)
        made.custom_call_has_side_effect = True
        return made

    def _made(self, scope: Any) -> Any:
        made = type(scope.instructions[0])()
        made.opcode, made.custom_call_target = "custom-call", "AllocateBuffer"
        made.id, made.name = self.cloner.instruction_id(scope), self.cloner.name("reserved", "coop")
        return made
