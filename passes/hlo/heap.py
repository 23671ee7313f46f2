"""Predict the bytes that XLA will allocate for a scheduled module.

`passes.hlo.assign` says what is left for the heap; here XLA's heap simulator is replayed on it (public
source, `heap_simulator.cc`), `passes.offsets.xla_heap` packs it, and the allocations are put in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.graph import HOST
from passes.hlo.inplace import is_elementwise
from passes.hlo.liverange import Range
from passes.offsets.tight import live_bound, pack_tight
from passes.offsets.xla_heap import PACKERS, HeapLayout, Interval

_Local = tuple[graph.Computation, graph.Instruction]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapPrediction:
    """What a module will allocate, in bytes.

    Attributes:
        temp_bytes: the heap and the tables of pointers inside the program.
        argument_bytes, output_bytes, alias_bytes: as XLA counts them; `alias` is in both of the others.
        constant_bytes: constants that get storage, and scalars of reducers where XLA counts them.
        total_bytes: arguments + outputs - aliased + constants + temps.
        live_bytes: largest sum of temporaries alive at once, without fragmentation.
        host_bytes: arguments, results and temporaries in the host's memory, aliased ones counted once.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    constant_bytes: int
    total_bytes: int
    live_bytes: int
    host_bytes: int = 0


class _Events:
    """Replays XLA's heap simulator: allocations, frees and operand reuse on one clock of events."""

    def __init__(self, assigner: Assigner, space: int) -> None:
        self.a = assigner
        self.flow = assigner.flow
        self.ranges = [Range(r.start, r.end, r.last) for r in assigner.ranges]
        groups = [g for g in assigner.heap if assigner.space_of(g) == space]
        self.todo = {v for g in groups for v in self.flow.classes[g]}
        self.sizes = {v: max(self.flow.values[w].nbytes for w in self.flow.classes[g])
                      for g in groups for v in self.flow.classes[g]}  # fmt: skip
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.leader: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.alive: dict[int, int] = {}
        self.now = 0
        self.live = 0
        self.peak = 0

    def run(self) -> list[Interval]:
        defined: dict[int, list[int]] = {}
        freed: dict[int, list[int]] = {}
        for v in sorted(self.todo, key=lambda v: (self.ranges[v].start, self.ranges[v].end, v)):
            defined.setdefault(self.ranges[v].start, []).append(v)
            freed.setdefault(self.ranges[v].end, []).append(v)
        for time in sorted({*defined, *freed}):
            for v in defined.get(time, ()):
                self._define(v, time, freed)
            for v in freed.get(time, ()):
                self._free(v)
        return [
            Interval(
                key=v, nbytes=self.sizes[v], start=self.start[v], end=self.end[v], group=self.leader[v],
                leads=self.leader[v] == v,
            )
            for v in sorted(self.start)
        ]  # fmt: skip

    def _define(self, v: int, time: int, freed: dict[int, list[int]]) -> None:
        group = self.flow.class_of[v]
        if group in self.first:
            self.leader[v] = self.leader[self.first[group]]
        else:
            operand = self._dying(v, time, freed.get(time, []))
            if operand is None:
                self.leader[v] = self.first[group] = v
            else:
                self._free(operand)
                freed[time].remove(operand)
                self.leader[v] = self.leader[operand]
                self.ranges[operand].end = self.ranges[v].end
        self.start[v] = self.now
        self.now += 1
        self._count(v, 1)

    def _free(self, v: int) -> None:
        self.end[v] = self.now
        self.now += 1
        self._count(v, -1)

    def _count(self, v: int, change: int) -> None:
        """Live bytes; values of one storage count once."""
        storage = self.leader[v]
        before = self.alive.get(storage, 0)
        self.alive[storage] = before + change
        if before == 0 or before + change == 0:
            self.live += change * self.sizes[v]
            self.peak = max(self.peak, self.live)

    def _dying(self, v: int, time: int, freed: list[int]) -> int | None:
        """The operand whose place `v` takes, if XLA lets it."""
        value = self.flow.values[v]
        if len(self.flow.classes[self.flow.class_of[v]]) > 1:
            return None
        home = value.home
        instruction = self.flow.instruction(home)
        if instruction.opcode == "copy":
            return None
        computation = self.a.module.computations[home.computation]
        for operand in instruction.operands:
            w = self.flow.trees[home.computation, operand][()]
            if w not in freed or self.ranges[w].end != time or w not in self.todo:
                continue
            if len(self.flow.classes[self.flow.class_of[w]]) > 1:
                continue
            source = self.flow.values[w].home
            if source.computation != home.computation or source.instruction not in instruction.operands:
                continue
            if self.a.sharing.may_share(
                computation, computation.by_id[source.instruction], source.index, instruction, home.index
            ):
                return w
        return None


def _concatenate(sizes: list[tuple[int, bool]], alignment: int) -> tuple[int, dict[int, int]]:
    """Size of the temporaries put after each other in the order XLA's partition leaves them, and where
    each of them starts, by its place in `sizes`."""
    items = list(range(len(sizes)))
    first, last = 0, len(items)
    while True:
        while first != last and not sizes[items[first]][1]:
            first += 1
        if first == last:
            break
        last -= 1
        while first != last and sizes[items[last]][1]:
            last -= 1
        if first == last:
            break
        items[first], items[last] = items[last], items[first]
        first += 1
    total = 0
    starts: dict[int, int] = {}
    for item in items:
        nbytes, is_temp = sizes[item]
        if is_temp:
            starts[item] = -(-total // alignment) * alignment
            total = starts[item] + nbytes
    return total, starts


def _local_values(module: graph.Module, reachable: list[int]) -> list[_Local]:
    """What reducers and the like define: never temporaries, but they take part in the order."""
    known = set(reachable)
    return [
        (c, i)
        for c in module.computations.values()
        if c.id not in known and not c.fused
        for i in c.by_id.values()
        if i.opcode not in ("bitcast", "get-tuple-element")
    ]


def layout(assigner: Assigner, space: int = 0) -> tuple[HeapLayout, int]:
    """Where a memory space's values sit, and the largest sum of their bytes alive at once."""
    events = _Events(assigner, space)
    intervals = events.run()
    backend = assigner.backend
    if space == HOST:
        return PACKERS["largest first"](intervals, backend.host_alignment), events.peak
    return PACKERS[backend.heap](intervals, backend.alignment), events.peak


def heap_intervals(assigner: Assigner, space: int = 0) -> list[Interval]:
    """The intervals that XLA packs in a memory space, on its clock of events."""
    return _Events(assigner, space).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One tick of the schedule: what comes alive, then what dies, as indices of groups."""

    tick: int
    defined: tuple[int, ...]
    freed: tuple[int, ...]


def moments(assigner: Assigner) -> tuple[list[Interval], list[Moment]]:
    """The intervals of the default memory space, and the ticks at which their groups begin and end."""
    events = _Events(assigner, 0)
    intervals = events.run()
    last: dict[int, Interval] = {}
    for i in intervals:
        if i.group not in last or last[i.group].end < i.end:
            last[i.group] = i
    defined: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for i in sorted(intervals, key=lambda i: i.start):
        if i.leads:
            defined.setdefault(events.ranges[i.key].start, []).append(i.group)
    for group, i in last.items():
        freed.setdefault(events.ranges[i.key].end, []).append(group)
    ticks = sorted({*defined, *freed})
    return intervals, [
        Moment(tick=t, defined=tuple(defined.get(t, ())), freed=tuple(freed.get(t, ()))) for t in ticks
    ]


def predict_assigned(assigner: Assigner) -> HeapPrediction:
    """What XLA will allocate, from a replayed buffer assignment."""
    row = _row(assigner)
    tables = sum(a.nbytes for a in assigner.allocations if a.is_temp)
    kinds = {"argument": 0, "donated": 0, "constant": 0, "output": 0}
    kinds["constant"] += sum(i.shape.nbytes for c, i in row.local if _is_counted(assigner, c, i))
    for a in assigner.allocations:
        if a.space == HOST:
            continue
        if a.kind == "tuple" and a.lives_out:
            kinds["output"] += a.nbytes
        elif a.kind in kinds:
            kinds[a.kind] += a.nbytes
    argument = kinds["argument"] + kinds["donated"]
    fixed = argument + kinds["output"] + kinds["constant"]
    return HeapPrediction(
        temp_bytes=row.nbytes, argument_bytes=argument, output_bytes=kinds["output"] + kinds["donated"],
        alias_bytes=kinds["donated"], constant_bytes=kinds["constant"], total_bytes=fixed + row.nbytes,
        live_bytes=sum(row.peaks) + tables, host_bytes=_host_bytes(assigner),
    )  # fmt: skip


def _is_counted(assigner: Assigner, computation: graph.Computation, instruction: graph.Instruction) -> bool:
    """True if XLA's total counts what a reducer or the like defines; none in the memory of scalars."""
    if instruction.opcode == "constant" or not assigner.old_rules:
        return instruction.opcode == "constant"
    is_inside = instruction.id != computation.root and is_elementwise(instruction)
    return not (is_inside and assigner.backend.scalar_space)


def _host_bytes(assigner: Assigner) -> int:
    """What a module keeps in the host's memory."""
    fixed = sum(a.nbytes for a in assigner.allocations if a.space == HOST)
    has_temps = any(assigner.space_of(g) == HOST for g in assigner.heap)
    size = layout(assigner, HOST)[0].size if has_temps else 0
    multiple = assigner.backend.host_multiple
    return fixed + -(-size // multiple) * multiple


def packing_saves(assigner: Assigner) -> int:
    """By how much the best packing that is found makes the heap of the default memory space smaller."""
    alignment = assigner.backend.alignment
    intervals = heap_intervals(assigner)
    size = PACKERS[assigner.backend.heap](intervals, alignment).size
    if size <= live_bound(intervals, alignment):
        return 0
    return size - pack_tight(intervals, alignment).size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """The temporaries of a program behind each other.

    Attributes:
        nbytes: all of them.
        tables: index of an allocation of the assigner -> where it starts.
        heaps: memory space, where its heap starts, and the heap.
        peaks: largest sum of bytes alive at once in each heap.
        local: what reducers and the like define, and where.
    """

    nbytes: int
    tables: dict[int, int]
    heaps: list[tuple[int, int, HeapLayout]]
    peaks: list[int]
    local: list[_Local]


def _row(assigner: Assigner) -> _Row:
    order = [(a.nbytes, a.is_temp) for a in assigner.allocations]
    spaces = sorted({assigner.space_of(g) for g in assigner.heap} - assigner.apart)
    layouts = [layout(assigner, space) for space in spaces]
    first = len(order)
    order += [(heap.size, True) for heap, _ in layouts]
    local = _local_values(assigner.module, assigner.flow.reachable)
    order += [(i.shape.nbytes, False) for _, i in local]
    nbytes, starts = _concatenate(order, assigner.backend.alignment)
    heaps = [
        (space, starts[first + n], heap)
        for n, (space, (heap, _)) in enumerate(zip(spaces, layouts, strict=True))
    ]
    tables = {n: at for n, at in starts.items() if n < first}
    return _Row(nbytes=nbytes, tables=tables, heaps=heaps, peaks=[p for _, p in layouts], local=local)


def temp_offsets(assigner: Assigner) -> dict[int, int]:
    """Where XLA will put every temporary, by value id, in bytes from the start of the temporaries."""
    row = _row(assigner)
    offsets: dict[int, int] = {}
    for n, at in row.tables.items():
        offsets.update(dict.fromkeys(assigner.allocations[n].values, at))
    for space, at, heap in row.heaps:
        offsets.update(_offsets(assigner, space, at, heap))
    return offsets


def host_offsets(assigner: Assigner) -> dict[int, int]:
    """Where XLA will put what waits in the host's memory, by value id, from the start of its heap there."""
    if not any(assigner.space_of(g) == HOST for g in assigner.heap):
        return {}
    return _offsets(assigner, HOST, 0, layout(assigner, HOST)[0])


def _offsets(assigner: Assigner, space: int, at: int, heap: HeapLayout) -> dict[int, int]:
    groups = [g for g in assigner.heap if assigner.space_of(g) == space]
    leaders = {i.key: i.group for i in heap_intervals(assigner, space)}
    return {v: at + heap.offsets[leaders[v]] for g in groups for v in assigner.flow.classes[g]}
