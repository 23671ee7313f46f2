"""Replay XLA's buffer assignment: what gets storage of its own, and what is left for the heap.

The order of decisions is XLA's BufferAssigner (public source, `buffer_assignment.cc`): arguments, constants
and tables of pointers get allocations of their own; a temporary that fits into an output's (or a donated
argument's) allocation while that is free goes there; what is left is packed. XLA:TPU decides in the order of
time, the others begin with the largest. What XLA:TPU does after its callback counts: scalars move to a memory
of their own, and the first thing of a computation in which another core does part of the work is that core's
scratch memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.backend import BACKENDS
from passes.hlo import graph
from passes.hlo.dataflow import Dataflow, Position, Value, analyse
from passes.hlo.graph import HOST
from passes.hlo.inplace import Sharing, is_elementwise
from passes.hlo.liverange import Clock, Range, live_ranges
from passes.reach import reached

_TABLES = 5
"""Tables of tuples that an operation of another core has once XLA has split it in two, after its callback."""
# What has a word of context beside operands and results: copies, and slices to and from the host, too.
_STARTS = frozenset({"async-start", "copy-start"})
# Kernels that read scalars where XLA moves them, beside elementwise ones: each was compiled for a v5e.
_SCALAR_READERS = frozenset(
    {"broadcast", "dynamic-slice", "dynamic-update-slice", "fusion", "pad", "reduce", "reshape"}
)


@dataclass(slots=True, eq=False)
class Allocation:
    """One of XLA's allocations outside the heap.

    Attributes:
        values: that it holds, by id.
        busy: a bit for each time at which one of them is there.
        held: a bit for each time at which it is taken by what is no value of the module.
    """

    nbytes: int
    kind: str
    space: int = 0
    lives_out: bool = False
    values: list[int] = field(default_factory=list)
    busy: int = 0
    held: int = 0

    @property
    def is_temp(self) -> bool:
        """True if its bytes count as temporaries of the device."""
        return self.space != HOST and self.kind in ("tuple", "scratch") and not self.lives_out


def offloaded(module: graph.Module) -> list[tuple[graph.Computation, graph.Instruction]]:
    """What starts work of a core of another kind, and where; slices, started ahead in loops, are copies."""
    instructions = ((c, i) for c in module.computations.values() for i in c.by_id.values())
    return [(c, i) for c, i in instructions if i.opcode == "async-start" and not _is_slice(module, i)]


def _is_slice(module: graph.Module, start: graph.Instruction) -> bool:
    """True for the start of a copy of a slice, or into one, between memories of the device or the host's."""
    inner = module.innermost(start)
    return inner.by_id[inner.root].opcode in ("dynamic-slice", "dynamic-update-slice")


def _cores(instruction: graph.Instruction) -> int:
    """How many cores of another kind an operation runs on: a v6e has two to a chip, a v5p four."""
    config = json.loads(instruction.proto.backend_config or b"{}")
    return len(config.get("sparse_core_config", {}).get("core_ids", ()))


def _between(start: int, end: int) -> int:
    """A bit for each time from `start` to `end`, both included."""
    return ((1 << (end - start + 1)) - 1) << start


@dataclass(frozen=True, slots=True)
class _Storage:
    """What an alias class asks of an allocation, a bit for each time.

    Attributes:
        inside: when one of its values is there, but for the ends of their ranges.
        edges: the ends.
        copied: what its values are copies of, by computation and instruction.
    """

    inside: int
    edges: int
    copied: list[tuple[int, int]]


class Assigner:
    """Replays XLA's buffer assignment; afterwards `heap` holds the values left for the packer.

    Attributes:
        backend: whose rules are replayed.
        flow, ticks, ranges: what is alive when.
        home: alias class -> allocation outside the heap, for those that got one.
        heap: alias classes that the packer places.
        old_rules: True for jaxlib before 0.12: XLA's total counts the scalars of reducers, and
            asynchronous values live from their own instruction on.
    """

    def __init__(self, module: graph.Module, platform: str, *, old_rules: bool = False) -> None:
        self.module = module
        self.backend = BACKENDS[platform]
        self.old_rules = old_rules
        self.flow: Dataflow = analyse(module)
        self.ticks = Clock(self.flow)
        self.ranges: list[Range] = live_ranges(self.flow, self.ticks, old_rules=old_rules)
        if self.backend.table_bytes is not None:
            for value in self.flow.values:
                is_table = value.is_tuple and value.nbytes  # that of no elements takes nothing
                value.nbytes = self.backend.table_bytes if is_table else value.nbytes
        self.sharing = Sharing(module, self.backend)
        self.allocations: list[Allocation] = []
        self.home: dict[int, Allocation] = {}
        self.heap: list[int] = []
        self._reusable: list[Allocation] = []
        self._outputs = {
            self.flow.class_of[v] for v in self.flow.trees[module.entry.id, module.entry.root].values()
        }
        self._donated = set(module.donated.values())
        self._offloaded = offloaded(module) if self.backend.scratch_bytes else []
        if self.backend.context_space:
            for value in self.flow.values:
                value.memory_space = self._apart(value) or value.memory_space
        self._scratch: list[Allocation] = []
        self._sizes = [max(self.flow.values[v].nbytes for v in g) for g in self.flow.classes]
        self._spaces = [self._space(g) for g in self.flow.classes]
        added = self._with_scratch()
        held = added[0].held if added else 0
        for group in self._sorted():
            while added and self._begin(group) >= (held & -held).bit_length() - 1:
                self._add(added.pop(0))
            self._assign(group)
        for allocation in added:
            self._add(allocation)

    def on(self, module: graph.Module) -> Assigner:
        """The same rules, replayed on another module."""
        return Assigner(module, self.backend.name, old_rules=self.old_rules)

    @property
    def apart(self) -> frozenset[int]:
        """Memory spaces that are not the device's main memory."""
        backend = self.backend
        return frozenset({HOST, backend.context_space, backend.scalar_space, backend.small_space} - {0})

    def _apart(self, value: Value) -> int:
        """The memory space that XLA moves a value to; 0 for none."""
        instruction = self.flow.instruction(value.home)
        if value.home.index == (2,) and instruction.opcode in _STARTS:
            return self.backend.context_space
        return self.backend.scalar_space if self._is_lone_scalar(value, instruction) else 0

    def _is_lone_scalar(self, value: Value, instruction: graph.Instruction) -> bool:
        """True for a single number that is computed by itself, and read by kernels alone."""
        shape = instruction.shape
        if shape.is_tuple or shape.count != 1 or not is_elementwise(instruction):
            return False
        group = self.flow.class_of[value.id]
        if instruction.opcode == "constant" or group in self._outputs or len(self.flow.classes[group]) > 1:
            return False
        readers = [self.flow.instruction(use) for use in value.uses]  # none of a loop's condition
        return bool(readers) and all(r.opcode in _SCALAR_READERS or is_elementwise(r) for r in readers)

    def _is_offloaded(self, value: Value) -> bool:
        home = self.module.computations[value.home.computation], self.flow.instruction(value.home)
        return home in self._offloaded

    def _called(self, computation: int) -> list[int]:
        return [c for i in self.module.computations[computation].by_id.values() for c in i.called]

    def _with_scratch(self) -> list[Allocation]:
        """The memory in which cores of another kind work, and the tables that each such operation gets.

        There is as much as the operation asks for that most cores run. It is held from the first of what a
        computation runs after its parameters, where XLA starts the operation, until that is done. Before and
        afterwards values are there.
        """
        if not self._offloaded:
            return []
        scratch = Allocation(0, "scratch")
        called = reached([c for _, i in self._offloaded for c in i.called], self._called)
        tables = sum(v.is_tuple and self._is_offloaded(v) for v in self.flow.values)
        for computation, instruction in self._offloaded:
            if computation.id not in called and computation.id in self.ticks.span:
                given = [self.ticks.time[computation.id, p.id] for p in computation.parameters()]
                begin = max(given, default=self.ticks.span[computation.id][0])
                started = self.flow.trees[computation.id, instruction.id][()]
                scratch.held |= _between(begin, self.ranges[started].end)
                scratch.nbytes = max(scratch.nbytes, _cores(instruction) * self.backend.scratch_bytes)
                tables -= _TABLES
        return [scratch, *(Allocation(self.backend.table_bytes or 0, "tuple") for _ in range(-tables))]

    @property
    def scratch_bytes(self) -> int:
        """What the other cores' scratch memory takes; 0 if there is none."""
        return sum(allocation.nbytes for allocation in self._scratch)

    @property
    def scratch_held(self) -> int:
        """A bit for each time at which another core has its scratch memory; 0 if there is none."""
        return sum(allocation.held for allocation in self._scratch)

    def space_of(self, group: int) -> int:
        """The memory space of an alias class: 0 is the device's default one, `HOST` is the host's."""
        return self._spaces[group]

    def _space(self, members: Sequence[int]) -> int:
        return next((s for v in members if (s := self.flow.values[v].memory_space)), 0)

    def _sorted(self) -> list[int]:
        """Alias classes in the order in which XLA assigns them: the largest first, or each when it begins."""
        groups = range(len(self.flow.classes))
        if self.backend.heap == "in time order":
            return sorted(groups, key=self._begin)
        place = self._positions()

        def key(group: int) -> tuple[int, bool, int, int]:
            homes = [self.flow.values[v].home for v in self.flow.classes[group]]
            first = min(place[home.computation, home.instruction] for home in homes)
            return -self._sizes[group], group not in self._outputs, first, group

        return sorted(groups, key=key)

    def _begin(self, group: int) -> int:
        """When the first value of an alias class begins; what a program is given, and its constants, are
        there before all others."""
        begins = []
        for v in self.flow.classes[group]:
            home = self.flow.values[v].home
            is_given = self.flow.instruction(home).opcode in ("parameter", "constant")
            is_there = is_given and home.computation == self.module.entry.id
            begins.append(-1 if is_there else self.ranges[v].start)
        return min(begins)

    def _positions(self) -> dict[tuple[int, int], int]:
        """XLA's post-order over the whole module, callers before callees."""
        place: dict[tuple[int, int], int] = {}
        for c in reversed(self._call_order()):
            for i in self.flow.orders[c]:
                place[c, i] = len(place)
        return place

    def _call_order(self) -> list[int]:
        """Computations with global storage, callees before callers, in the order of the calls."""
        known, order = set(self.flow.reachable), dict[int, None]()
        stack: list[tuple[int, bool]] = [(self.module.entry.id, False)]
        while stack:
            c, done = stack.pop()
            if done:
                order[c] = None
            elif c not in order:
                calls = [
                    n for i in self.module.computations[c].by_id.values() for n in i.called if n in known
                ]
                stack.append((c, True))
                stack += [(n, False) for n in reversed(calls)]
        return list(order)

    def _add(self, allocation: Allocation) -> None:
        self.allocations.append(allocation)
        self._scratch += [allocation] if allocation.kind == "scratch" else []

    def _assign(self, group: int) -> None:
        members = [self.flow.values[v] for v in self.flow.classes[group]]
        if self._special(group, members):
            return
        lives_out = group in self._outputs
        asked = self._storage(members)
        for allocation in self._candidates(members):
            if not allocation.busy & asked.inside and self._fits(allocation, group, asked, lives_out):
                self._put(allocation, group)
                return
        if not lives_out:
            self.heap.append(group)
            return
        self._put(self._new(group, "output"), group)
        self._reusable.append(self.home[group])

    def _storage(self, members: list[Value]) -> _Storage:
        inside = edges = 0
        copied: list[tuple[int, int]] = []
        for value in members:
            live, instruction = self.ranges[value.id], self.flow.instruction(value.home)
            edges |= 1 << live.start | 1 << live.end
            if live.end > live.start + 1:
                inside |= _between(live.start + 1, live.end - 1)
            if instruction.opcode == "copy":
                copied.append((value.home.computation, instruction.operands[0]))
        return _Storage(inside, edges, copied)

    def _special(self, group: int, members: list[Value]) -> bool:
        entry = self.module.entry.id
        for value in members:
            instruction = self.flow.instruction(value.home)
            if instruction.opcode == "constant":
                self._put(self._new(group, "constant"), group)
                return True
            if instruction.opcode == "parameter" and value.home.computation == entry:
                donated = (instruction.number, value.home.index) in self._donated
                self._put(self._new(group, "donated" if donated else "argument"), group)
                if donated:
                    self._reusable.append(self.home[group])
                return True
        if any(value.is_tuple for value in members):
            self._put(self._new(group, "tuple"), group)
            return True
        return False

    def _new(self, group: int, kind: str) -> Allocation:
        allocation = Allocation(self._sizes[group], kind, self.space_of(group))
        self.allocations.append(allocation)
        return allocation

    def _put(self, allocation: Allocation, group: int) -> None:
        self.home[group] = allocation
        allocation.lives_out |= group in self._outputs
        for v in self.flow.classes[group]:
            allocation.values.append(v)
            live = self.ranges[v]
            allocation.busy |= _between(live.start, live.end)

    def _candidates(self, members: list[Value]) -> list[Allocation]:
        """Allocations in XLA's order of trial: of operands, then the newest first, or scratch memory."""
        candidates: list[Allocation] = []
        for value in members:
            if value.home.index or value.is_tuple:
                continue
            for operand in self.flow.instruction(value.home).operands:
                top = self.flow.trees[value.home.computation, operand][()]
                allocation = self.home.get(self.flow.class_of[top])
                if allocation is not None and allocation.kind in ("output", "donated"):
                    candidates.append(allocation)
        return candidates + (self._reusable[::-1] if self.backend.reuses_results else self._scratch)

    def _fits(self, allocation: Allocation, group: int, asked: _Storage, lives_out: bool) -> bool:
        """True if an allocation that is free inside of a group's ranges is where XLA puts the group."""
        if self._sizes[group] > allocation.nbytes or allocation.space != self._spaces[group]:
            return False
        if lives_out and (allocation.nbytes != self._sizes[group] or allocation.held):
            return False
        if allocation.held & (asked.inside | asked.edges):
            return False
        if asked.copied and any(self._copies(allocation, source) for source in asked.copied):
            return False
        if not allocation.busy & asked.edges:
            return True
        return not any(self._meets(v, allocation) for v in self.flow.classes[group])

    def _copies(self, allocation: Allocation, source: tuple[int, int]) -> bool:
        """True if what is copied is in the allocation: XLA keeps those apart."""
        positions = (p for w in allocation.values for p in self.flow.values[w].positions)
        return any((p.computation, p.instruction) == source for p in positions)

    def _meets(self, v: int, allocation: Allocation) -> bool:
        """True if a value cannot share storage with one that is in an allocation."""
        ranges, first = self.ranges, self.ranges[v]
        for w in allocation.values:
            second = ranges[w]
            if first.start > second.end or second.start > first.end:
                continue
            if first.end == second.start:
                shares = self.takes_over(self.flow.values[w].home, first.last)
            else:
                shares = second.end == first.start and self.takes_over(self.flow.values[v].home, second.last)
            if not shares:
                return True
        return False

    def written_over(self, v: int) -> int | None:
        """The value that ends where another one is made, in whose storage that is packed; None if there is
        none."""
        home = self.flow.values[v].home
        instruction = self.flow.instruction(home)
        if not self._is_alone(v):
            return None
        for operand in instruction.operands:
            w = self.flow.trees[home.computation, operand].get(())
            if w is None or not self._is_alone(w) or self.ranges[w].end != self.ranges[v].start:
                continue
            if self.takes_over(home, self.flow.values[w].home):
                return w
        return None

    def _is_alone(self, v: int) -> bool:
        return len(self.flow.classes[self.flow.class_of[v]]) == 1

    def takes_over(self, home: Position, operand: Position) -> bool:
        """True if what an instruction makes at `home` may take the storage of what it reads at `operand`."""
        instruction = self.flow.instruction(home)
        if instruction.opcode == "copy" or operand.computation != home.computation:
            return False
        if operand.instruction not in instruction.operands:
            return False
        computation = self.module.computations[home.computation]
        return self.sharing.may_share(
            computation, computation.by_id[operand.instruction], operand.index, instruction, home.index
        )
