"""Predict the bytes that XLA will allocate for a scheduled module.

The order of decisions is XLA's BufferAssigner (public source, `buffer_assignment.cc`): arguments, constants
and tables of pointers get allocations of their own; a temporary that fits into an output's (or a donated
argument's) allocation while that is free goes there; what is left is packed by `passes.offsets.xla_heap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.hlo import graph
from passes.hlo.dataflow import Dataflow, Value, analyse
from passes.hlo.inplace import Sharing
from passes.hlo.liverange import Clock, Range, clock, live_ranges
from passes.offsets.xla_heap import HeapLayout, Interval, pack

ALIGNMENT = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapPrediction:
    """What a module will allocate, in bytes.

    Attributes:
        temp_bytes: the heap and the tables of pointers inside the program.
        argument_bytes, output_bytes, alias_bytes: as XLA counts them; `alias` is in both of the others.
        constant_bytes: constants that get storage.
        total_bytes: arguments + outputs - aliased + constants + temps.
        live_bytes: largest sum of temporaries alive at once, without fragmentation.
        exact: False where the module has something that is only bounded.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    constant_bytes: int
    total_bytes: int
    live_bytes: int
    exact: bool = True


@dataclass(slots=True, eq=False)
class Allocation:
    """One of XLA's allocations outside the heap."""

    nbytes: int
    kind: str
    lives_out: bool = False
    values: list[int] | None = None
    busy: int = 0

    @property
    def is_temp(self) -> bool:
        """True if its bytes count as temporaries."""
        return self.kind == "tuple" and not self.lives_out


class Assigner:
    """Replays XLA's buffer assignment; afterwards `heap` holds the values left for the packer.

    Attributes:
        flow, ticks, ranges: what is alive when.
        home: alias class -> allocation outside the heap, for those that got one.
        heap: alias classes that the packer places.
    """

    def __init__(self, module: graph.Module, platform: str) -> None:
        self.module = module
        self.platform = platform
        self.flow: Dataflow = analyse(module)
        self.ticks: Clock = clock(self.flow)
        self.ranges: list[Range] = live_ranges(self.flow, self.ticks)
        self.sharing = Sharing(module, platform)
        self.allocations: list[Allocation] = []
        self.home: dict[int, Allocation] = {}
        self.heap: list[int] = []
        self._reusable: list[Allocation] = []
        self._outputs = {
            self.flow.class_of[v] for v in self.flow.trees[module.entry.id, module.entry.root].values()
        }
        self._sizes = [max(self.flow.values[v].nbytes for v in g) for g in self.flow.classes]
        for group in self._sorted():
            self._assign(group)

    def _sorted(self) -> list[int]:
        callers_first = self._positions()
        def key(group: int) -> tuple[int, bool, int, int]:
            members = self.flow.classes[group]
            first = min(callers_first[h.computation, h.instruction] for h in (self.flow.values[v].home for v in members))
            return -self._sizes[group], group not in self._outputs, first, group
        return sorted(range(len(self.flow.classes)), key=key)

    def _positions(self) -> dict[tuple[int, int], int]:
        """XLA's post-order over the whole module, callers before callees."""
        place: dict[tuple[int, int], int] = {}
        for c in reversed(self.flow.reachable):
            for i in self.flow.orders[c]:
                place[c, i] = len(place)
        return place

    def _assign(self, group: int) -> None:
        members = [self.flow.values[v] for v in self.flow.classes[group]]
        if self._special(group, members):
            return
        lives_out = group in self._outputs
        for allocation in self._candidates(members):
            if self._fits(allocation, group, lives_out):
                self._put(allocation, group)
                return
        if not lives_out:
            self.heap.append(group)
            return
        self._put(self._new(group, "output"), group)
        self._reusable.append(self.home[group])

    def _special(self, group: int, members: list[Value]) -> bool:
        entry = self.module.entry.id
        for value in members:
            instruction = self.flow.instruction(value.home)
            if instruction.opcode == "constant":
                self._put(self._new(group, "constant"), group)
                return True
            if instruction.opcode == "parameter" and value.home.computation == entry:
                donated = (instruction.number, value.home.index) in set(self.module.donated.values())
                self._put(self._new(group, "donated" if donated else "argument"), group)
                if donated:
                    self._reusable.append(self.home[group])
                return True
        if any(value.is_tuple for value in members):
            self._put(self._new(group, "tuple"), group)
            return True
        return False

    def _new(self, group: int, kind: str) -> Allocation:
        allocation = Allocation(self._sizes[group], kind, values=[])
        self.allocations.append(allocation)
        return allocation

    def _put(self, allocation: Allocation, group: int) -> None:
        assert allocation.values is not None, "allocations hold values"
        self.home[group] = allocation
        allocation.lives_out |= group in self._outputs
        for v in self.flow.classes[group]:
            allocation.values.append(v)
            found = self.ranges[v]
            allocation.busy |= ((1 << (found.end - found.start + 1)) - 1) << found.start

    def _candidates(self, members: list[Value]) -> list[Allocation]:
        """Allocations in XLA's order of trial: those of operands, then the newest first."""
        found: list[Allocation] = []
        for value in members:
            if value.home.index or value.is_tuple:
                continue
            for operand in self.flow.instruction(value.home).operands:
                top = self.flow.trees[value.home.computation, operand][()]
                allocation = self.home.get(self.flow.class_of[top])
                if allocation is not None and allocation.kind in ("output", "donated"):
                    found.append(allocation)
        return found + self._reusable[::-1]

    def _fits(self, allocation: Allocation, group: int, lives_out: bool) -> bool:
        if self._sizes[group] > allocation.nbytes:
            return False
        if lives_out and allocation.nbytes != self._sizes[group]:
            return False
        assert allocation.values is not None, "allocations hold values"
        edges = False
        for v in self.flow.classes[group]:
            found = self.ranges[v]
            span = allocation.busy >> found.start
            width = found.end - found.start
            if width > 1 and span >> 1 & ((1 << (width - 1)) - 1):
                return False
            edges = edges or bool(span & 1) or bool(span >> width & 1)
        if any(self._copies(allocation, v) for v in self.flow.classes[group]):
            return False
        if not edges:
            return True
        return not any(self._meet(v, w) for v in self.flow.classes[group] for w in allocation.values)

    def _copies(self, allocation: Allocation, v: int) -> bool:
        """True if `v` is a copy of something in the allocation: XLA keeps those apart."""
        assert allocation.values is not None, "allocations hold values"
        home = self.flow.values[v].home
        instruction = self.flow.instruction(home)
        if instruction.opcode != "copy":
            return False
        source = (home.computation, instruction.operands[0])
        return any(
            (p.computation, p.instruction) == source
            for w in allocation.values
            for p in self.flow.values[w].positions
        )

    def _meet(self, v: int, w: int) -> bool:
        """True if two values cannot share storage."""
        first, second = self.ranges[v], self.ranges[w]
        if first.start > second.end or second.start > first.end:
            return False
        if first.end == second.start:
            return not self._takes_over(w, first)
        if second.end == first.start:
            return not self._takes_over(v, second)
        return True

    def _takes_over(self, user: int, operand: Range) -> bool:
        """True if the value `user` may start where the value with range `operand` ends."""
        home = self.flow.values[user].home
        instruction = self.flow.instruction(home)
        last = operand.last
        if instruction.opcode == "copy" or last.computation != home.computation:
            return False
        if last.instruction not in instruction.operands:
            return False
        computation = self.module.computations[home.computation]
        return self.sharing.may_share(
            computation, computation.by_id[last.instruction], last.index, instruction, home.index
        )


class _Events:
    """Replays XLA's heap simulator: allocations, frees and operand reuse on one clock of events."""

    def __init__(self, assigner: Assigner) -> None:
        self.a = assigner
        self.flow = assigner.flow
        self.ranges = [Range(r.start, r.end, r.last) for r in assigner.ranges]
        self.todo = {v for g in assigner.heap for v in self.flow.classes[g]}
        self.sizes = {v: max(self.flow.values[w].nbytes for w in self.flow.classes[g])
                      for g in assigner.heap for v in self.flow.classes[g]}  # fmt: skip
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


def _concatenate(sizes: list[tuple[int, bool]], alignment: int) -> int:
    """Size of the temporaries put after each other in the order XLA's partition leaves them."""
    items = list(sizes)
    first, last = 0, len(items)
    while True:
        while first != last and not items[first][1]:
            first += 1
        if first == last:
            break
        last -= 1
        while first != last and items[last][1]:
            last -= 1
        if first == last:
            break
        items[first], items[last] = items[last], items[first]
        first += 1
    total = 0
    for nbytes, is_temp in items:
        if is_temp:
            total = -(-total // alignment) * alignment + nbytes
    return total


def _local_values(module: graph.Module, reachable: list[int]) -> list[graph.Instruction]:
    """What reducers and the like define: never temporaries, but they take part in the order."""
    known = set(reachable)
    return [
        i
        for c in module.computations.values()
        if c.id not in known and not c.fused
        for i in c.by_id.values()
        if i.opcode not in ("bitcast", "get-tuple-element")
    ]


def layout(assigner: Assigner) -> tuple[HeapLayout, int]:
    """Where the heap's values sit, and the largest sum of their bytes alive at once."""
    events = _Events(assigner)
    intervals = events.run()
    return pack(intervals, ALIGNMENT[assigner.platform]), events.peak


def predict_assigned(assigner: Assigner) -> HeapPrediction:
    """What XLA will allocate, from a replayed buffer assignment."""
    module, platform = assigner.module, assigner.platform
    heap, live = layout(assigner)
    order = [(a.nbytes, a.is_temp) for a in assigner.allocations]
    if heap.offsets:
        order.append((heap.size, True))
    local = _local_values(module, assigner.flow.reachable)
    order += [(i.shape.nbytes, False) for i in local]
    temp = _concatenate(order, ALIGNMENT[platform])
    tables = sum(a.nbytes for a in assigner.allocations if a.is_temp)
    kinds = {"argument": 0, "donated": 0, "constant": 0, "output": 0}
    kinds["constant"] += sum(i.shape.nbytes for i in local if i.opcode == "constant")
    for a in assigner.allocations:
        if a.kind == "tuple" and a.lives_out:
            kinds["output"] += a.nbytes
        elif a.kind in kinds:
            kinds[a.kind] += a.nbytes
    argument = kinds["argument"] + kinds["donated"]
    fixed = argument + kinds["output"] + kinds["constant"]
    return HeapPrediction(
        temp_bytes=temp, argument_bytes=argument, output_bytes=kinds["output"] + kinds["donated"],
        alias_bytes=kinds["donated"], constant_bytes=kinds["constant"], total_bytes=fixed + temp,
        live_bytes=live + tables,
    )  # fmt: skip


def predict(module: Any, platform: str) -> HeapPrediction:
    """What XLA will allocate for a scheduled module.

    Args:
        module: a parsed HloModuleProto with a schedule.
        platform: "cpu" or "cuda".
    """
    return predict_assigned(Assigner(graph.read(module), platform))
