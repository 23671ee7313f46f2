"""Replay a scheduled module at its addresses, and say what would be read that is not there.

An abstract machine that knows nothing of plans: memory is ranges of bytes at XLA's own addresses, each of
which holds the result of one run of one instruction. Kernels read all of their operands, then write.
A copy that runs beside the kernels may read and write at any moment from its start to its done, so its source
must be unchanged until then, and nobody may read its target before, or write there. Loops run as often as
their conditions say, with scalars that are really computed, so that what is written to a stack and read from
it is known slice by slice.

Problems are sentences. What is found this way is wrong on any device, whatever the copies' speed.
Not done: memory that an instruction reads beyond its operands; programs over several devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.dataflow import Index, loop_parts
from passes.hlo.graph import HOST, Computation, Instruction, Module
from passes.hlo.heap import host_offsets, temp_offsets
from passes.hlo.xla_assignment import Address, Name
from tests.scalars import Scalars

MOST_ITERATIONS = 256
_VIEWS = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "domain", "add-dependency"})


@dataclass(slots=True, eq=False)
class Content:
    """What one run of an instruction left in memory.

    Attributes:
        name: the instruction.
        place: allocation, first byte, byte after the last.
        number: of a scalar that is known.
        slices: of a stack that began empty, what was written: (first element, elements).
        pending: True until the copy that writes it is done.
        on_host: whose memory it is in.
    """

    name: str
    place: tuple[Any, int, int]
    number: int | None = None
    slices: frozenset[tuple[int, int]] | None = None
    pending: bool = False
    on_host: bool = False


Tree = dict[Index, Content]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay saw.

    Attributes:
        problems: what would go wrong.
        to_host, from_host: number of copies that crossed, slices of stacks included.
        iterations: how often bodies of loops ran.
    """

    problems: tuple[str, ...]
    to_host: int
    from_host: int
    iterations: int


@dataclass(slots=True, eq=False)
class _Flight:
    """An asynchronous operation under way: what it reads, and what it writes."""

    reads: list[Content] = field(default_factory=list)
    writes: list[Content] = field(default_factory=list)


class _Machine:
    def __init__(self, module: Module, addresses: Mapping[Name, Address]) -> None:
        self.module = module
        self.addresses = addresses
        self.memory: dict[Any, list[Content]] = {}
        self.problems: dict[str, None] = {}
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.flight: _Flight | None = None
        self.crossed = {True: 0, False: 0}
        self.iterations = 0

    def write(self, content: Content) -> None:
        """Put a content in its place; what it covers is there no more."""
        allocation, start, end = content.place
        there = self.memory.setdefault(allocation, [])
        there[:] = [c for c in there if c.place[2] <= start or c.place[1] >= end]
        if start < end:
            there.append(content)
        if self.flight is not None:
            content.pending = True
            self.flight.writes.append(content)

    def holds(self, content: Content) -> bool:
        """True if a content is still in its place."""
        allocation, start, end = content.place
        return start == end or any(c is content for c in self.memory.get(allocation, ()))

    def say(self, problem: str) -> None:
        """Note a problem once."""
        self.problems[problem] = None

    def read(self, content: Content, reader: str) -> None:
        """An instruction reads a content."""
        mine = self.flight is not None and content in self.flight.writes
        if content.pending and not mine:
            self.say(f"{reader} reads {content.name} before its copy is done")
        elif not self.holds(content):
            self.say(f"{reader} reads {content.name}, where something else was written")
        if self.flight is not None and not mine:
            self.flight.reads.append(content)

    def content(self, instruction: Instruction, index: Index) -> Content:
        """A new content for a part of an instruction's result."""
        shape = instruction.shape.at(index)
        at = self.addresses.get((instruction.name, index))
        start = 0 if at is None else at.offset
        allocation = object() if at is None else at.allocation
        made = Content(instruction.name, (allocation, start, start + shape.nbytes))
        made.on_host = shape.memory_space == HOST
        return made

    def run(self, computation: Computation, arguments: list[Tree]) -> Tree:
        """Run a computation; returns its root's parts."""
        env: dict[int, Tree] = {}
        for i in computation.order:
            instruction = computation.by_id[i]
            if instruction.opcode == "parameter":
                env[i] = arguments[instruction.number]
            else:
                operands = [env[o] for o in instruction.operands]
                env[i] = self.step(computation, instruction, operands)
        return env[computation.root]

    def step(self, computation: Computation, instruction: Instruction, operands: list[Tree]) -> Tree:
        opcode = instruction.opcode
        if opcode == "tuple":
            return {(n, *i): c for n, tree in enumerate(operands) for i, c in tree.items()}
        if opcode == "get-tuple-element":
            return {i[1:]: c for i, c in operands[0].items() if i and i[0] == instruction.number}
        if opcode in _VIEWS:
            return operands[0]
        if opcode == "copy-start":
            return self.start_copy(computation, instruction, operands[0])
        if opcode == "async-start":
            return self.start(computation, instruction, operands)
        if opcode in ("copy-done", "async-done", "async-update"):
            return self.go_on(computation, instruction, operands[0])
        if opcode == "while":
            return self.loop(instruction, operands[0])
        if opcode == "conditional":
            return self.branches(instruction, operands)
        if opcode == "call":
            return self.run(self.module.computations[instruction.called[0]], operands)
        return self.kernel(computation, instruction, operands)

    def kernel(self, computation: Computation, instruction: Instruction, operands: list[Tree]) -> Tree:
        """An instruction that reads all and then writes all."""
        scalars = Scalars(self.module, computation, [t[()].number if () in t else None for t in operands])
        for n, tree in enumerate(operands):
            for content in tree.values():
                self.read(content, instruction.name)
            if () in tree:
                self.read_slices(instruction, n, tree[()], scalars)
        made: Tree = {}
        for index, shape in instruction.shape.leaves():
            if shape.is_tuple or shape.element in (graph.TOKEN, graph.OPAQUE):
                continue
            made[index] = self.content(instruction, index)
            made[index].number = scalars.result(instruction, index)
            made[index].slices = self.slices_after(instruction, index, operands, scalars)
        for content in made.values():
            self.write(content)
        return made

    def read_slices(self, reader: Instruction, n: int, stack: Content, scalars: Scalars) -> None:
        """Slices that are read of a stack must have been written."""
        for part in scalars.slices_read(reader, n):
            if stack.on_host:
                self.crossed[False] += 1
            if stack.slices is not None and part not in stack.slices:
                self.say(f"{reader.name} reads {part[1]} elements at {part[0]} of a stack, not written yet")

    def slices_after(
        self, instruction: Instruction, index: Index, operands: list[Tree], scalars: Scalars
    ) -> frozenset[tuple[int, int]] | None:
        """What is written of a stack after an instruction; None for what is no stack that began empty."""
        if instruction.proto.custom_call_target == "AllocateBuffer":
            return frozenset()
        update = scalars.slice_written(instruction, index)
        if update is not None:
            number, written = update
            base = operands[number].get(())
            if base is not None:
                self.crossed[True] += base.on_host
                return None if base.slices is None else base.slices | {written}
        if instruction.opcode == "copy":
            return operands[0][()].slices
        return None

    def start_copy(self, computation: Computation, instruction: Instruction, source: Tree) -> Tree:
        flight = self.flights[computation.id, instruction.id] = _Flight()
        outer, self.flight = self.flight, flight
        self.read(source[()], instruction.name)
        target = self.content(instruction, (0,))
        target.number, target.slices = source[()].number, source[()].slices
        self.write(target)
        self.flight = outer
        if target.on_host != source[()].on_host:
            self.crossed[target.on_host] += 1
        return {(0,): target, (1,): source[()]}

    def start(self, computation: Computation, instruction: Instruction, operands: list[Tree]) -> Tree:
        flight = self.flights[computation.id, instruction.id] = _Flight()
        outer, self.flight = self.flight, flight
        root = self.run(self.module.computations[instruction.called[0]], operands)
        self.flight = outer
        tree = {(0, n, *i): c for n, t in enumerate(operands) for i, c in t.items()}
        return {**tree, **{(1, *i): c for i, c in root.items()}}

    def go_on(self, computation: Computation, instruction: Instruction, operand: Tree) -> Tree:
        """An update of an asynchronous operation, or its end."""
        if instruction.opcode == "async-update":
            return operand
        start = computation.by_id[instruction.operands[0]]
        while start.opcode == "async-update":
            start = computation.by_id[start.operands[0]]
        flight = self.flights.pop((computation.id, start.id))
        for content in flight.reads:
            if not self.holds(content) and not self.covered(content, flight.writes):
                self.say(f"{content.name} is overwritten before {instruction.name}, which waits for its copy")
        for content in flight.writes:
            if not self.holds(content) and not self.covered(content, flight.writes):
                self.say(f"what {instruction.name} waits for is overwritten on its way: {content.name}")
            content.pending = False
        at = 0 if instruction.opcode == "copy-done" else 1
        return {i[1:]: c for i, c in operand.items() if i and i[0] == at}

    def covered(self, content: Content, writes: list[Content]) -> bool:
        """True if the operation itself wrote over a content, as an update in place does."""
        return any(
            w is not content and w.place[0] == content.place[0] and w.place[1] == content.place[1]
            for w in writes
        )

    def loop(self, instruction: Instruction, carried: Tree) -> Tree:
        body, condition = loop_parts(self.module, instruction)
        for iteration in range(MOST_ITERATIONS):
            goes_on = self.run(condition, [carried])[()].number
            if goes_on == 0 or (goes_on is None and iteration > 1):
                break
            self.iterations += 1
            after = self.run(body, [carried])
            for index, content in after.items():
                if content.place[0:2] != carried[index].place[0:2]:
                    self.say(f"{instruction.name} leaves {content.name} in another place than it found it in")
            carried = after
        return carried

    def branches(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        """Every branch from the same memory; what follows sees the first one's."""
        before = {a: list(there) for a, there in self.memory.items()}
        results = []
        for n, called in enumerate(instruction.called):
            self.memory = {a: list(there) for a, there in before.items()}
            tree = self.run(self.module.computations[called], [operands[n + 1]])
            results.append((tree, self.memory))
        tree, self.memory = results[0]
        return tree


def replay(module: Module, addresses: Mapping[Name, Address]) -> Replay:
    """Run a scheduled module's entry in the abstract.

    Args:
        module: as XLA runs it.
        addresses: where XLA put what instructions define, by their names; what is missing is taken to have a
            place of its own.
    """
    machine = _Machine(module, addresses)
    arguments: list[Tree] = []
    for parameter in module.entry.parameters():
        tree = {i: machine.content(parameter, i) for i, s in parameter.shape.leaves() if not s.is_tuple}
        for content in tree.values():
            machine.write(content)
        arguments.append(tree)
    for content in machine.run(module.entry, arguments).values():
        machine.read(content, "the caller")
    for _, start in machine.flights:
        machine.say(f"nothing waits for {module.entry.by_id[start].name}")
    return Replay(
        problems=tuple(machine.problems), to_host=machine.crossed[True], from_host=machine.crossed[False],
        iterations=machine.iterations,
    )  # fmt: skip


def predicted_addresses(assigner: Assigner) -> dict[Name, Address]:
    """Where XLA is expected to put everything: temporaries, what waits on the host, and the rest."""
    flow = assigner.flow
    found: dict[Name, Address] = {}

    def put(v: int, allocation: int, offset: int) -> None:
        value = flow.values[v]
        found[flow.instruction(value.home).name, value.home.index] = Address(
            allocation=allocation, offset=offset, nbytes=value.nbytes, is_temp=not allocation
        )

    for n, allocation in enumerate(assigner.allocations):
        for v in allocation.values:
            put(v, n + 2, 0)
    for n, offsets in enumerate((temp_offsets(assigner), host_offsets(assigner))):
        for v, offset in offsets.items():
            put(v, n, offset)
    return found
