"""A scheduled HLO module as plain Python objects: what the lift, the heap model and the cost model read.

The view is read-only and keeps no pointer into the message but `Instruction.proto`, through which rare
attributes are read and from which `passes.hlo.emit` clones. Operands and callees are resolved.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any

TUPLE, OPAQUE, TOKEN, BUFFER = 13, 14, 17, 34
# The memory space of a layout: 0 is the device's default one.
HOST = 5
# XLA's two names of one opcode.
BARRIERS = frozenset({"optimization-barrier", "opt-barrier"})
# What has no kernel: views, parameters and constants.
VIEWS = BARRIERS | {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "domain", "add-dependency",
}  # fmt: skip
_BITS = {
    1: 8, 30: 1, 26: 2, 21: 4, 2: 8, 3: 16, 4: 32, 5: 64, 31: 1, 27: 2, 22: 4, 6: 8, 7: 16, 8: 32, 9: 64,
    10: 16, 11: 32, 16: 16, 12: 64, 19: 8, 28: 8, 20: 8, 23: 8, 29: 8, 24: 8, 25: 8, 32: 4, 33: 8, 35: 6,
    36: 6, 15: 64, 18: 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, tuple, token or opaque shape. `nbytes` of a tuple is that of its table of pointers;
    of an array with tiles the padding is in it.

    Attributes:
        element: XLA's PrimitiveType number.
        dims: sizes of the dimensions, empty for scalars and tuples.
        layout: minor to major order.
        parts: shapes of a tuple's elements, None for everything else.
        memory_space: 0 is the device's default memory.
        element_bits: storage bits of one element.
    """

    element: int
    dims: tuple[int, ...]
    layout: tuple[int, ...]
    parts: tuple[Shape, ...] | None
    memory_space: int
    element_bits: int
    nbytes: int = field(compare=False)
    _leaves: tuple[tuple[tuple[int, ...], Shape], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Say once what the shape is made of: there are few shapes, and every pass asks."""
        below = [((i, *index), s) for i, part in enumerate(self.parts or ()) for index, s in part.leaves()]
        object.__setattr__(self, "_leaves", (((), self), *below))

    @property
    def is_tuple(self) -> bool:
        """True for a tuple."""
        return self.parts is not None

    @property
    def count(self) -> int:
        """Number of elements of an array."""
        return prod(self.dims)

    def is_same_memory(self, other: Shape) -> bool:
        """True for arrays of as many elements of one kind in as many bytes, padding included."""
        mine = (self.element, self.count, self.nbytes, self.element_bits, self.memory_space)
        its = (other.element, other.count, other.nbytes, other.element_bits, other.memory_space)
        return mine == its and not self.is_tuple and not other.is_tuple

    def leaves(self) -> tuple[tuple[tuple[int, ...], Shape], ...]:
        """Every sub-shape with its index, this shape first."""
        return self._leaves

    def at(self, index: tuple[int, ...]) -> Shape:
        """The sub-shape at `index`."""
        shape = self
        for i in index:
            assert shape.parts is not None, f"index {index} goes below an array"
            shape = shape.parts[i]
        return shape

    @property
    def total_nbytes(self) -> int:
        """Bytes of all arrays in this shape, without tables of pointers."""
        if self.parts is None:
            return self.nbytes
        return sum(part.total_nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instruction:
    """One instruction. Operands are instruction ids of the same computation."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    control: tuple[int, ...]
    number: int
    proto: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Computation:
    """A computation. `order` is its schedule (by id where it has none); `by_id` is sorted by id; `called` are
    the computations that its instructions call."""

    id: int
    name: str
    by_id: dict[int, Instruction]
    root: int
    order: tuple[int, ...]
    scheduled: bool
    fused: bool
    called: tuple[int, ...]
    proto: Any

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The operands of `instruction`."""
        return [self.by_id[i] for i in instruction.operands]

    def parameters(self) -> list[Instruction]:
        """The parameters in order of their numbers."""
        parameters = [i for i in self.by_id.values() if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: i.number)

    def results(self) -> list[Instruction]:
        """The root, or the elements of the tuple that it is."""
        root = self.by_id[self.root]
        return self.operands(root) if root.opcode == "tuple" else [root]

    def result(self, index: tuple[int, ...]) -> Instruction:
        """The root, or what is at `index` of the tuple that it is."""
        at = self.by_id[self.root]
        for i in index:
            at = self.by_id[at.operands[i]] if at.opcode == "tuple" else at
        return at

    def users(self) -> dict[int, list[Instruction]]:
        """For every instruction its users, each once, in id order."""
        users: dict[int, list[Instruction]] = {i: [] for i in self.by_id}
        for instruction in self.by_id.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    """A module. `computations` is in the message's order: callees before callers."""

    name: str
    computations: dict[int, Computation]
    entry: Computation
    donated: dict[tuple[int, ...], tuple[int, tuple[int, ...]]]
    proto: Any

    def innermost(self, caller: Instruction) -> Computation:
        """What an instruction calls; where the root of that is a fusion, what this calls, and so on."""
        inner = self.computations[caller.called[0]]
        while (root := inner.by_id[inner.root]).opcode == "fusion":
            inner = self.computations[root.called[0]]
        return inner


def _padded_count(dims: tuple[int, ...], layout: Any, tiled: bool) -> int:
    """Elements of an array with what its tiles pad it with; only layouts for TPUs have tiles.

    A tile splits the most minor dimensions into whole tiles, which are dimensions of their own from then on;
    the next tile splits those. `T(8,128)(2,1)`: rows of 128 in groups of 8, these in pairs. Where XLA:TPU
    forgets them, as it does for a product whose result is only looked at in another shape, it counts whole
    tiles of eight rows of 128.
    """
    tiles = [list(tile.dimensions) for tile in layout.tiles]
    if tiled and not tiles:
        tiles = [[8, 128] if len(dims) > 1 else [1024]]
    sizes = [dims[d] for d in reversed(layout.minor_to_major)] or list(dims)
    for sides in tiles:
        sizes = [1] * (len(sides) - len(sizes)) + sizes
        whole = [-(-n // side) for n, side in zip(sizes[-len(sides) :], sides, strict=True)]
        sizes = [*sizes[: -len(sides)], *whole, *sides]
    return prod(sizes)


class _Shapes:
    """Builds each distinct shape once; in a module for a TPU arrays are of tiles."""

    def __init__(self, tiled: bool) -> None:
        self._tiled = tiled
        self._known: dict[bytes, Shape] = {}

    def read(self, proto: Any) -> Shape:
        key = proto.SerializeToString()
        shape = self._known.get(key)
        if shape is None:
            shape = self._known[key] = self._build(proto)
        return shape

    def _build(self, proto: Any) -> Shape:
        element = proto.element_type
        parts: tuple[Shape, ...] | None = None
        dims = tuple(max(d, 0) for d in proto.dimensions)
        layout = proto.layout
        bits = layout.element_size_in_bits or _BITS.get(element, 0)
        if element == TUPLE:
            parts = tuple(self.read(p) for p in proto.tuple_shapes)
            nbytes = 8 * len(parts)
        elif element == TOKEN:
            nbytes = 0
        elif element == OPAQUE:
            nbytes = 8
        elif element == BUFFER:
            parts, nbytes = None, sum(self.read(p).nbytes for p in proto.tuple_shapes)
        else:
            nbytes = -(-_padded_count(dims, layout, self._tiled) * bits // 8)
            if any(proto.is_dynamic_dimension):
                nbytes += 4 * len(dims)
        return Shape(element, dims, tuple(layout.minor_to_major), parts, layout.memory_space, bits, nbytes)


def post_order(by_id: dict[int, Instruction]) -> list[int]:
    """XLA's post-order: from every instruction without users, control predecessors, then operands."""
    used = {o for i in by_id.values() for o in i.operands}
    done: dict[int, bool] = {}
    order: list[int] = []
    for start in by_id:
        if start in used:
            continue
        stack = [start]
        while stack:
            top = stack[-1]
            state = done.get(top)
            if state is None:
                done[top] = False
                instruction = by_id[top]
                stack.extend(o for o in reversed(instruction.operands) if o not in done)
                stack.extend(c for c in instruction.control if c not in done)
                continue
            stack.pop()
            if not state:
                done[top] = True
                order.append(top)
    return order


_LEAVES = frozenset(
    {"get-tuple-element", "tuple", "bitcast", "parameter", "constant", "broadcast", "reshape", "convert",
     "add", "subtract", "multiply", "divide", "copy", "slice", "dynamic-slice", "select", "compare",
     "negate", "transpose", "iota", "exponential", "maximum"}
)  # fmt: skip


def _computation(proto: Any, schedule: dict[int, tuple[int, ...]], shapes: _Shapes) -> Computation:
    fused = proto.is_fusion_computation
    by_id: dict[int, Instruction] = {}
    for i in proto.instructions:
        opcode = i.opcode
        by_id[i.id] = Instruction(
            id=i.id, name=i.name, opcode=opcode, shape=shapes.read(i.shape), operands=tuple(i.operand_ids),
            called=() if opcode in _LEAVES else tuple(i.called_computation_ids),
            control=() if fused else tuple(i.control_predecessor_ids),
            number=i.tuple_index if opcode == "get-tuple-element" else i.parameter_number, proto=i,
        )  # fmt: skip
    by_id = {i: by_id[i] for i in sorted(by_id)}
    order = schedule.get(proto.id)
    return Computation(
        id=proto.id, name=proto.name, by_id=by_id, root=proto.root_id,
        order=tuple(by_id) if order is None else order,
        scheduled=order is not None, fused=fused, proto=proto,
        called=tuple(c for i in by_id.values() for c in i.called),
    )  # fmt: skip


def _has_tiles(module: Any) -> bool:
    """True if the layout of an argument or a result has tiles, as all have in a module for a TPU."""
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    shapes = [*entry.program_shape.parameters, entry.program_shape.result]
    while shapes:
        shape = shapes.pop()
        if shape.layout.tiles:
            return True
        shapes += shape.tuple_shapes
    return False


def read(module: Any, earlier: Module | None = None, written: Collection[int] = ()) -> Module:
    """The view of a parsed message.

    Args:
        module: a parsed HloModuleProto.
        earlier: the view of the module that this one was made from; what did not change is shared with it.
        written: ids of the computations of it that are not as they were.

    Raises:
        ValueError: the module has no schedule for its entry.
    """
    schedule = {s.key: tuple(s.value.instruction_ids) for s in module.schedule.sequences}
    shapes = _Shapes(_has_tiles(module))
    computations: dict[int, Computation] = {}
    for c in module.computations:
        known = earlier.computations.get(c.id) if earlier and c.id not in written else None
        computations[c.id] = known or _computation(c, schedule, shapes)
    entry = computations[module.entry_computation_id]
    if not entry.scheduled:
        raise ValueError(
            f"module {module.name!r} has no schedule: it must come from the POST_SCHEDULER stage"
        )
    donated = {
        tuple(e.output_shape_index): (e.parameter_number, tuple(e.parameter_shape_index))
        for e in module.input_output_alias.entries
    }
    return Module(name=module.name, computations=computations, entry=entry, donated=donated, proto=module)
