"""Which array lives where: the values of a module, their positions and uses, and who must share storage.

A value is one array (or one tuple's table of pointers) that some instruction defines. Views (bitcast,
get-tuple-element, elements of tuples, results of calls, loops and branches) only pass values on. A leaf that
a loop or a branch changes is a phi: a value of its own at the parameter and at the result. This follows
XLA's HloDataflowAnalysis and HloAliasAnalysis (public sources, `xla/hlo/analysis`); ids come out in XLA's
order because they break ties when the heap is packed.

Not done: dynamic shapes, several execution threads, computations with more than one caller (the second call
is treated like the first one's).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from passes.hlo.graph import BARRIERS, Computation, Instruction, Module, post_order
from passes.hlo.inplace import in_place_pairs
from passes.union_find import UnionFind

Index = tuple[int, ...]
Tree = dict[Index, int]

_FORWARD = BARRIERS | {"bitcast", "domain", "add-dependency"}
_CALLS = frozenset({"call", "while", "conditional", "async-start", "async-update", "async-done"})


@dataclass(frozen=True, slots=True)
class Position:
    """A place where a value can be seen: the sub-shape `index` of an instruction of a computation."""

    computation: int
    instruction: int
    index: Index


@dataclass(frozen=True, slots=True)
class Use:
    """The sub-shape `index` of operand `operand` of an instruction."""

    computation: int
    instruction: int
    operand: int
    index: Index


@dataclass(slots=True, eq=False)
class Value:
    """One array or table of pointers; `positions[0]` defines it."""

    id: int
    nbytes: int
    is_tuple: bool
    memory_space: int
    positions: list[Position] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    @property
    def home(self) -> Position:
        """The defining position."""
        return self.positions[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataflow:
    """Values by id, the tree of values at every instruction, and the alias class of every value.

    Attributes:
        module: the module.
        values: in id order.
        trees: (computation, instruction) -> index -> value id.
        classes: lists of value ids that must share storage, sorted, each list sorted.
        class_of: value id -> index into `classes`.
        callers: computation id -> (computation id, instruction id) of its caller.
        reachable: ids of the computations whose values get global storage, in the message's order.
        orders: computation id -> XLA's post-order of its instructions.
    """

    module: Module
    values: list[Value]
    trees: dict[tuple[int, int], Tree]
    classes: list[list[int]]
    class_of: list[int]
    callers: dict[int, tuple[int, int]]
    reachable: list[int]
    orders: dict[int, list[int]]

    def instruction(self, position: Position | Use) -> Instruction:
        """The instruction of a position or use."""
        return self.module.computations[position.computation].by_id[position.instruction]


class _Builder:
    """Walks the call tree from the entry; values get provisional numbers, ids come last."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.home: list[Position] = []
        self.phi: list[bool] = []
        self.resolved: dict[int, int] = {}
        self.trees: dict[tuple[int, int], Tree] = {}
        self.callers: dict[int, tuple[int, int]] = {}
        self.orders: dict[int, list[int]] = {}

    def define(self, computation: Computation, instruction: Instruction, index: Index, phi: bool) -> int:
        self.home.append(Position(computation.id, instruction.id, index))
        self.phi.append(phi)
        return len(self.home) - 1

    def resolve(self, value: int) -> int:
        while value in self.resolved:
            value = self.resolved[value]
        return value

    def computation(self, computation: Computation, arguments: list[Tree] | None) -> Tree:
        """Evaluate a computation; returns the tree of its root."""
        order = self.orders[computation.id] = post_order(computation.by_id)
        for i in order:
            instruction = computation.by_id[i]
            tree = self.instruction(computation, instruction, arguments)
            self.trees[computation.id, i] = tree
        return self.trees[computation.id, computation.root]

    def instruction(self, comp: Computation, instr: Instruction, arguments: list[Tree] | None) -> Tree:
        opcode = instr.opcode
        operands = [self.trees[comp.id, o] for o in instr.operands]
        if opcode == "parameter" and arguments is not None:
            return arguments[instr.number]
        if opcode in _FORWARD:
            return operands[0]
        if opcode == "get-tuple-element":
            return {i[1:]: v for i, v in operands[0].items() if i and i[0] == instr.number}
        if opcode == "tuple":
            tree: Tree = {(): self.define(comp, instr, (), False)}
            for n, operand in enumerate(operands):
                tree.update({(n, *i): v for i, v in operand.items()})
            return tree
        if opcode == "copy":
            return {**operands[0], (): self.define(comp, instr, (), False)}
        if opcode in _CALLS:
            return self.call(comp, instr, operands)
        if opcode == "copy-start":
            tree = {i: self.define(comp, instr, i, False) for i in ((), (0,), (2,))}
            return {**tree, (1,): operands[0][()]}
        if opcode == "copy-done":
            return {(): operands[0][0,]}
        return self.define_all(comp, instr)

    def define_all(self, comp: Computation, instr: Instruction, *, phi: bool = False) -> Tree:
        return {i: self.define(comp, instr, i, phi) for i, _ in instr.shape.leaves()}

    def call(self, comp: Computation, instr: Instruction, operands: list[Tree]) -> Tree:
        for called in instr.called:
            self.callers[called] = (comp.id, instr.id)
        callees = [self.module.computations[c] for c in instr.called]
        if instr.opcode == "call":
            return self.computation(callees[0], operands)
        if instr.opcode == "while":
            return self.loop(comp, instr, operands[0])
        if instr.opcode == "conditional":
            return self.branches(comp, instr, operands)
        if instr.opcode == "async-start":
            return self.start(comp, instr, operands)
        if instr.opcode == "async-update":
            return self.update(comp, instr, operands)
        return {i[1:]: v for i, v in operands[0].items() if i and i[0] == 1}

    def update(self, comp: Computation, instr: Instruction, operands: list[Tree]) -> Tree:
        """What was started; XLA:TPU's last passes start some work with nothing, and hand it operands here."""
        begun, *given = operands
        if not given:
            return begun
        started = comp.by_id[instr.operands[0]]
        tree = self.start(comp, replace(instr, called=started.called), given)
        return {**tree, **{index: v for index, v in begun.items() if index in tree and index[:1] == (2,)}}

    def start(self, comp: Computation, instr: Instruction, operands: list[Tree]) -> Tree:
        called = self.module.computations[instr.called[0]]
        root = self.computation(called, operands) if len(operands) == len(called.parameters()) else {}
        tree: Tree = {}
        for index, shape in instr.shape.leaves():
            if shape.is_tuple or not index or index[0] > 1:
                tree[index] = self.define(comp, instr, index, False)
        for n, operand in enumerate(operands):
            tree.update({(0, n, *i): v for i, v in operand.items()})
        tree.update({(1, *i): v for i, v in root.items()})
        return tree

    def branches(self, comp: Computation, instr: Instruction, operands: list[Tree]) -> Tree:
        roots = [
            self.computation(self.module.computations[c], [operands[n + 1]])
            for n, c in enumerate(instr.called)
        ]
        tree: Tree = {}
        for index, _ in instr.shape.leaves():
            sources = {root[index] for root in roots}
            same = len(sources) == 1
            tree[index] = roots[0][index] if same else self.define(comp, instr, index, True)
        return tree

    def loop(self, comp: Computation, instr: Instruction, init: Tree) -> Tree:
        body, condition = loop_parts(self.module, instr)
        inside = self.define_all(body, body.parameters()[0], phi=True)
        root = self.computation(body, [inside])
        changed = [i for i in init if self.resolve(root[i]) not in (inside[i], self.resolve(init[i]))]
        for index in init:
            if index not in changed:
                self.resolved[inside[index]] = init[index]
        parameter = condition.parameters()[0]
        test = {i: self.define(condition, parameter, i, True) if i in changed else v for i, v in init.items()}
        self.computation(condition, [test])
        return {i: self.define(comp, instr, i, True) if i in changed else v for i, v in init.items()}


def loop_parts(module: Module, instruction: Instruction) -> tuple[Computation, Computation]:
    """Body and condition of a while."""
    first, second = (module.computations[c] for c in instruction.called)
    is_test = not second.by_id[second.root].shape.is_tuple and first.by_id[first.root].shape.is_tuple
    return (first, second) if is_test else (second, first)


def analyse(module: Module) -> Dataflow:
    """The values of a module and their alias classes."""
    builder = _Builder(module)
    builder.computation(module.entry, None)
    orders = builder.orders
    reachable = [c for c in module.computations if c in orders]
    number, values = _number(builder, reachable)
    trees: dict[tuple[int, int], Tree] = {}
    for c in reachable:
        for i in orders[c]:
            tree = builder.trees[c, i]
            trees[c, i] = {index: number[builder.resolve(v)] for index, v in tree.items()}
    flow = Dataflow(
        module=module, values=values, trees=trees, classes=[], class_of=[0] * len(values),
        callers=builder.callers, reachable=reachable, orders=orders,
    )  # fmt: skip
    for c in reachable:
        _positions(flow, c, orders[c])
    _classes(flow)
    return flow


def _number(builder: _Builder, reachable: list[int]) -> tuple[dict[int, int], list[Value]]:
    rank = {(c, i): n for c in reachable for n, i in enumerate(builder.orders[c])}
    place = {c: n for n, c in enumerate(reachable)}

    def key(v: int) -> tuple[bool, int, int, Index]:
        home = builder.home[v]
        at = home.computation
        return builder.phi[v], place[at], rank[at, home.instruction], home.index

    live = [v for v in range(len(builder.home)) if v not in builder.resolved]
    number: dict[int, int] = {}
    values: list[Value] = []
    for n, v in enumerate(sorted(live, key=key)):
        home = builder.home[v]
        shape = builder.module.computations[home.computation].by_id[home.instruction].shape.at(home.index)
        number[v] = n
        value = Value(n, shape.nbytes, shape.is_tuple, shape.memory_space)
        value.positions.append(home)
        values.append(value)
    return number, values


def _positions(flow: Dataflow, computation: int, order: list[int]) -> None:
    by_id = flow.module.computations[computation].by_id
    for i in order:
        instruction = by_id[i]
        for index, v in flow.trees[computation, i].items():
            value = flow.values[v]
            home = value.positions[0]
            if home.instruction != i or home.index != index or home.computation != computation:
                value.positions.append(Position(computation, i, index))
        if instruction.opcode in ("tuple", "domain"):
            continue
        top_only = instruction.opcode in ("get-tuple-element", "copy")
        for n, operand in enumerate(instruction.operands):
            tree = flow.trees[computation, operand]
            if top_only or len(tree) == 1:
                flow.values[tree[()]].uses.append(Use(computation, i, n, ()))
            else:
                for index, v in tree.items():
                    flow.values[v].uses.append(Use(computation, i, n, index))


def _classes(flow: Dataflow) -> None:
    union = UnionFind(len(flow.values))
    module = flow.module
    entry = module.entry
    root = flow.trees[entry.id, entry.root]
    parameters = {p.number: p.id for p in entry.parameters()}
    for output, (number, index) in module.donated.items():
        if output in root:
            union.join((root[output], flow.trees[entry.id, parameters[number]][index]))
    for c in flow.reachable:
        for instruction in module.computations[c].by_id.values():
            _merge_instruction(flow, union, c, instruction)
    groups: dict[int, list[int]] = {}
    for v in range(len(flow.values)):
        groups.setdefault(union.find(v), []).append(v)
    flow.classes.extend(groups.values())
    for n, group in enumerate(flow.classes):
        for v in group:
            flow.class_of[v] = n


def _merge_instruction(flow: Dataflow, union: UnionFind, computation: int, instruction: Instruction) -> None:
    module = flow.module
    tree = flow.trees[computation, instruction.id]
    if instruction.opcode == "while":
        body, condition = loop_parts(module, instruction)
        others = [flow.trees[computation, instruction.operands[0]], flow.trees[body.id, body.root]]
        others += [flow.trees[c.id, c.parameters()[0].id] for c in (body, condition)]
    elif instruction.opcode == "conditional":
        others = [flow.trees[c, module.computations[c].root] for c in instruction.called]
    else:
        for operand, source, target in in_place_pairs(module, instruction):
            union.join((tree[target], flow.trees[computation, instruction.operands[operand]][source]))
        return
    for other in others:
        for index, v in tree.items():
            union.join((v, other[index]))
