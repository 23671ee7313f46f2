"""Replay XLA's buffer assignment: what gets storage of its own, and what is left for the heap.

The order of decisions is XLA's BufferAssigner (public source, `buffer_assignment.cc`): arguments, constants
and tables of pointers get allocations of their own; a temporary that fits into an output's (or a donated
argument's) allocation while that is free goes there; what is left is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.backend import BACKENDS
from passes.hlo import graph
from passes.hlo.dataflow import Dataflow, Value, analyse
from passes.hlo.graph import HOST
from passes.hlo.inplace import Sharing
from passes.hlo.liverange import Clock, Range, live_ranges


@dataclass(slots=True, eq=False)
class Allocation:
    """One of XLA's allocations outside the heap."""

    nbytes: int
    kind: str
    space: int = 0
    lives_out: bool = False
    values: list[int] = field(default_factory=list)
    busy: int = 0

    @property
    def is_temp(self) -> bool:
        """True if its bytes count as temporaries of the device."""
        return self.space != HOST and self.kind == "tuple" and not self.lives_out


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
                value.nbytes = self.backend.table_bytes if value.is_tuple else value.nbytes
        if self.backend.context_space:
            for value in self.flow.values:
                if value.home.index == (2,) and self.flow.instruction(value.home).opcode == "copy-start":
                    value.memory_space = self.backend.context_space
        self.sharing = Sharing(module, self.backend)
        self.allocations: list[Allocation] = []
        self.home: dict[int, Allocation] = {}
        self.heap: list[int] = []
        self._reusable: list[Allocation] = []
        self._outputs = {
            self.flow.class_of[v] for v in self.flow.trees[module.entry.id, module.entry.root].values()
        }
        self._sizes = [max(self.flow.values[v].nbytes for v in g) for g in self.flow.classes]
        self._spaces = [self._space(g) for g in self.flow.classes]
        for group in self._sorted():
            self._assign(group)

    @property
    def apart(self) -> frozenset[int]:
        """Memory spaces that are not the device's main memory."""
        return frozenset({HOST, self.backend.context_space} - {0})

    def space_of(self, group: int) -> int:
        """The memory space of an alias class: 0 is the device's default one, `HOST` is the host's."""
        return self._spaces[group]

    def _space(self, members: Sequence[int]) -> int:
        return next((s for v in members if (s := self.flow.values[v].memory_space)), 0)

    def _sorted(self) -> list[int]:
        place = self._positions()

        def key(group: int) -> tuple[int, bool, int, int]:
            homes = [self.flow.values[v].home for v in self.flow.classes[group]]
            first = min(place[home.computation, home.instruction] for home in homes)
            return -self._sizes[group], group not in self._outputs, first, group

        return sorted(range(len(self.flow.classes)), key=key)

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
        allocation = Allocation(self._sizes[group], kind, self.space_of(group))
        self.allocations.append(allocation)
        return allocation

    def _put(self, allocation: Allocation, group: int) -> None:
        self.home[group] = allocation
        allocation.lives_out |= group in self._outputs
        for v in self.flow.classes[group]:
            allocation.values.append(v)
            live = self.ranges[v]
            allocation.busy |= ((1 << (live.end - live.start + 1)) - 1) << live.start

    def _candidates(self, members: list[Value]) -> list[Allocation]:
        """Allocations in XLA's order of trial: those of operands, then the newest first."""
        if not self.backend.reuses_results:
            return []
        candidates: list[Allocation] = []
        for value in members:
            if value.home.index or value.is_tuple:
                continue
            for operand in self.flow.instruction(value.home).operands:
                top = self.flow.trees[value.home.computation, operand][()]
                allocation = self.home.get(self.flow.class_of[top])
                if allocation is not None and allocation.kind in ("output", "donated"):
                    candidates.append(allocation)
        return candidates + self._reusable[::-1]

    def _fits(self, allocation: Allocation, group: int, lives_out: bool) -> bool:
        if self._sizes[group] > allocation.nbytes or allocation.space != self._spaces[group]:
            return False
        if lives_out and allocation.nbytes != self._sizes[group]:
            return False
        edges = False
        for v in self.flow.classes[group]:
            live = self.ranges[v]
            span = allocation.busy >> live.start
            width = live.end - live.start
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
