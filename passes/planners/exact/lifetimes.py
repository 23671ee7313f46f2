"""The model with lifetimes and addresses: which steps of an axis run, which live ranges result, and where.

After Moccasin (ICML 2023), joined with the problem of MiniMalloc (ASPLOS 2023): a live range is a rectangle
of time x bytes. It begins when its step runs, lasts to the last use that it serves, and has an offset;
`NoOverlap2D` keeps the rectangles apart. Which steps run decides all but the offsets: a buffer is needed
at a moment if a later step reads it before it is recomputed, and then it is there, because it has been
made before. One function per family of constraints; without the last two it is the problem of live bytes.

Positions are those of the axis; bytes are in units of their greatest common divisor, so nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from passes.planners.exact.axis import Axis
from passes.planners.exact.retention import sure_pairs

Literal = cp_model.BoolVarT | int
Value = cp_model.IntVar | int
Linear = cp_model.LinearExpr | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A position that makes a buffer, or reads it."""

    position: int
    is_def: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetimes:
    """The variables of one model.

    Attributes:
        axis: the steps to choose from.
        model: the solver's model.
        capacity: the budget less the arguments, in units.
        unit: bytes to a unit.
        uses: for every buffer where it is used, ascending; none for arguments and empty buffers.
        run: for every position whether its step is taken; 1 for first runs.
        needed: (buffer, k): whether the live range that is there after the buffer's use `k` is read later.
        shared: (position, output, input): the output lies in the place of the input, which dies there.
        stop: (buffer, k): where the live range that use `k` makes ends (half-open).
        offset: (buffer, k): where the live range that use `k` makes lies.
    """

    axis: Axis
    model: cp_model.CpModel
    capacity: int
    unit: int
    uses: list[list[Use]]
    run: list[Literal] = field(default_factory=list)
    needed: dict[tuple[int, int], Literal] = field(default_factory=dict)
    shared: dict[tuple[int, int, int], cp_model.IntVar] = field(default_factory=dict)
    stop: dict[tuple[int, int], Linear] = field(default_factory=dict)
    offset: dict[tuple[int, int], Value] = field(default_factory=dict)

    @classmethod
    def of(cls, axis: Axis, budget_bytes: int) -> Lifetimes:
        """An empty model."""
        graph = axis.graph
        unit = math.gcd(*graph.nbytes, *graph.workspace_bytes) or 1
        return cls(
            axis=axis,
            model=cp_model.CpModel(),
            capacity=(budget_bytes - graph.argument_bytes) // unit,
            unit=unit,
            uses=_uses(axis),
        )

    def size(self, buffer: int) -> int:
        """Units of a buffer."""
        return self.axis.graph.nbytes[buffer] // self.unit

    def work(self, position: int) -> int:
        """Units of scratch memory that a position's op takes."""
        return self.axis.graph.workspace_bytes[self.axis.steps[position]] // self.unit


def build(
    axis: Axis, budget_bytes: int, *, placed: bool, offsets: Mapping[tuple[int, int], int] | None = None
) -> Lifetimes:
    """All families over one axis, minimizing the cost of the recomputes.

    Args:
        placed: whether live ranges get offsets; else only their live bytes are in the budget.
        offsets: (position, buffer): live ranges that must lie there, in bytes from the first argument on.
    """
    made = Lifetimes.of(axis, budget_bytes)
    add_runs(made)
    add_needs(made)
    add_sharing(made)
    add_live_bytes(made)
    if placed:
        add_stops(made)
        add_places(made, offsets or {})
    made.model.minimize(recompute_ns(made))
    return made


def add_runs(made: Lifetimes) -> None:
    """Every op runs first where it does; a recompute is for the model to choose."""
    for position, is_first in enumerate(made.axis.is_first):
        made.run.append(1 if is_first else made.model.new_bool_var(f"run {position}"))


def add_needs(made: Lifetimes) -> None:
    """A live range is needed until its last reader, but not across a step that makes it again."""
    for buffer, uses in enumerate(made.uses):
        need: Literal = int(made.axis.graph.is_output[buffer])
        for k in reversed(range(len(uses))):
            made.needed[buffer, k] = need
            run = made.run[uses[k].position]
            name = f"{buffer} before {uses[k].position}"
            need = (
                _and_not(made.model, need, run, name) if uses[k].is_def else _or(made.model, need, run, name)
            )


def add_sharing(made: Lifetimes) -> None:
    """An output lies in the place of an input only where the op runs and the input dies."""
    graph = made.axis.graph
    for buffer, uses in enumerate(made.uses):
        for k, use in enumerate(uses):
            op = made.axis.steps[use.position]
            for out, inp in [] if use.is_def else sure_pairs(graph, op):
                if inp == buffer and graph.nbytes[out]:
                    literal = made.model.new_bool_var(f"{out} in the place of {inp} at {use.position}")
                    made.model.add_implication(literal, made.run[use.position])
                    made.model.add_implication(literal, _not(made.needed[buffer, k]))
                    made.shared[use.position, out, inp] = literal


def add_live_bytes(made: Lifetimes) -> None:
    """At every position what is there, what it makes and its scratch memory are within the budget."""
    graph, axis = made.axis.graph, made.axis
    there: dict[int, Literal] = {}
    used = _used(made)
    for position, op in enumerate(axis.steps):
        run = made.run[position]
        terms: list[tuple[int, Literal]] = [(made.size(b), need) for b, need in there.items()]
        terms += [(made.size(b), run) for b in graph.outputs[op]]
        terms.append((made.work(position), run))
        for out, inp in sure_pairs(graph, op):
            if (position, out, inp) in made.shared:
                shared = made.shared[position, out, inp]
                terms.append((-min(made.size(out), made.size(inp)), shared))
        if sum(units for units, _ in terms if units > 0) > made.capacity:
            made.model.add(sum(units * literal for units, literal in terms) <= made.capacity)
        for buffer, k in used[position]:
            there[buffer] = made.needed[buffer, k]


def add_stops(made: Lifetimes) -> None:
    """A live range ends behind its last reader, or where an output takes its place."""
    graph = made.axis.graph
    for buffer, uses in enumerate(made.uses):
        stop: Linear = len(made.axis.steps) if graph.is_output[buffer] else 0
        for k in reversed(range(len(uses))):
            position, need = uses[k].position, made.needed[buffer, k]
            if uses[k].is_def:
                made.stop[buffer, k] = _latest(made, position + 1, stop, need)
            else:
                stop = _latest(made, position + 1 - _gives_way(made, position, buffer), stop, need)


def add_places(made: Lifetimes, offsets: Mapping[tuple[int, int], int]) -> None:
    """No two rectangles overlap; an output that shares lies where the live range lies that dies."""
    boxes = _Boxes(made)
    for buffer, uses in enumerate(made.uses):
        for k, use in enumerate(uses):
            if use.is_def:
                at = _offset(made, made.size(buffer), offsets.get((use.position, buffer)))
                made.offset[buffer, k] = at
                start = use.position + _waits(made, use.position, buffer)
                boxes.add(use.position, start, made.stop[buffer, k], at, made.size(buffer))
    for position in range(len(made.axis.steps)):
        if size := made.work(position):
            boxes.add(position, position, position + 1, _offset(made, size, None), size)
    made.model.add_no_overlap_2d(boxes.across, boxes.along)
    _join_places(made)


class _Boxes:
    """Rectangles of one model, each there if its position runs."""

    def __init__(self, made: Lifetimes) -> None:
        self.made = made
        self.across: list[cp_model.IntervalVar] = []
        self.along: list[cp_model.IntervalVar] = []

    def add(self, position: int, start: Linear, stop: Linear, offset: Value, size: int) -> None:
        """One more, from `start` until before `stop`, `size` units from `offset` on."""
        model, run = self.made.model, self.made.run[position]
        plain = isinstance(start, int)
        length = stop - start if plain else model.new_int_var(0, len(self.made.axis.steps), "length")
        self.across.append(model.new_optional_interval_var(start, length, stop, run, f"time {position}"))
        self.along.append(model.new_optional_fixed_size_interval_var(offset, size, run, f"bytes {position}"))


def recompute_ns(made: Lifetimes) -> Linear:
    """Cost of the recomputes."""
    axis = made.axis
    recomputes = [p for p, is_first in enumerate(axis.is_first) if not is_first]
    return sum(axis.graph.cost_ns[axis.steps[p]] * made.run[p] for p in recomputes)


def add_hint(made: Lifetimes, positions: Collection[int], offsets: Mapping[tuple[int, int], int]) -> None:
    """A known plan as the place to start from.

    Args:
        positions: which steps of the axis it takes.
        offsets: (position, buffer): where the live ranges lie, in bytes; empty if they are not placed.
    """
    taken = set(positions)
    axis = made.axis
    for position, run in enumerate(made.run):
        if not isinstance(run, int):
            made.model.add_hint(run, position in taken)
    for (buffer, k), place in made.offset.items():
        offset = offsets.get((made.uses[buffer][k].position, buffer))
        if offset is not None and not isinstance(place, int):
            made.model.add_hint(place, (offset - axis.graph.argument_bytes) // made.unit)


def _join_places(made: Lifetimes) -> None:
    """Offsets of outputs that share are those of the input's live range that is there."""
    given: dict[tuple[int, int], list[tuple[int, cp_model.IntVar]]] = {}
    for (position, out, inp), literal in made.shared.items():
        given.setdefault((inp, position), []).append((out, literal))
    index = {(b, t.position): k for b, uses in enumerate(made.uses) for k, t in enumerate(uses)}
    for buffer in sorted({inp for inp, _ in given}):
        there: Value = 0
        for k, use in enumerate(made.uses[buffer]):
            if use.is_def:
                there = _chosen(made, made.run[use.position], made.offset[buffer, k], there)
            for out, literal in given.get((buffer, use.position), ()):
                at = made.offset[out, index[out, use.position]]
                made.model.add(at == there).only_enforce_if(literal)


def _uses(axis: Axis) -> list[list[Use]]:
    graph = axis.graph
    uses: list[list[Use]] = [[] for _ in graph.nbytes]
    for position, op in enumerate(axis.steps):
        for is_def, buffers in ((False, graph.inputs[op]), (True, graph.outputs[op])):
            for b in buffers:
                if graph.nbytes[b]:
                    uses[b].append(Use(position=position, is_def=is_def))
    return uses


def _used(made: Lifetimes) -> list[list[tuple[int, int]]]:
    """For every position (buffer, k): which uses of which buffers lie there."""
    by_position: list[list[tuple[int, int]]] = [[] for _ in made.axis.steps]
    for buffer, uses in enumerate(made.uses):
        for k, use in enumerate(uses):
            by_position[use.position].append((buffer, k))
    return by_position


def _gives_way(made: Lifetimes, position: int, inp: int) -> Linear:
    """1 if an input ends as its op begins, because an output no smaller takes its place."""
    return _shared(made, position, lambda o, i: i == inp and made.size(i) <= made.size(o))


def _waits(made: Lifetimes, position: int, out: int) -> Linear:
    """1 if an output begins when its op ends, because it takes the place of a larger input."""
    return _shared(made, position, lambda o, i: o == out and made.size(i) > made.size(o))


def _shared(made: Lifetimes, position: int, chosen: Callable[[int, int], bool]) -> Linear:
    """1 if the output of the chosen pair takes the place of its input."""
    pairs = sure_pairs(made.axis.graph, made.axis.steps[position])
    return next((made.shared.get((position, o, i), 0) for o, i in pairs if chosen(o, i)), 0)


def _offset(made: Lifetimes, size: int, fixed_bytes: int | None) -> Value:
    if fixed_bytes is not None:
        return (fixed_bytes - made.axis.graph.argument_bytes) // made.unit
    return made.model.new_int_var(0, max(0, made.capacity - size), "offset")


def _or(model: cp_model.CpModel, one: Literal, other: Literal, name: str) -> Literal:
    """Whether one of two is true."""
    for known, unknown in ((one, other), (other, one)):
        if isinstance(known, int):
            return 1 if known else unknown
    literal = model.new_bool_var(name)
    model.add_bool_or([one, other]).only_enforce_if(literal)
    model.add_implication(one, literal)
    model.add_implication(other, literal)
    return literal


def _and_not(model: cp_model.CpModel, one: Literal, other: Literal, name: str) -> Literal:
    """Whether the first is true and the second is not."""
    if isinstance(one, int) or isinstance(other, int):
        return _not(other) if isinstance(one, int) and one else 0
    literal = model.new_bool_var(name)
    model.add_implication(literal, one)
    model.add_implication(literal, ~other)
    model.add_bool_or([literal, ~one, other])
    return literal


def _not(literal: Literal) -> Literal:
    return 1 - literal if isinstance(literal, int) else ~literal


def _latest(made: Lifetimes, least: Linear, later: Linear, need: Literal) -> Linear:
    """Not before `least`, and not before `later` if that is needed."""
    if isinstance(need, int):
        return later if need else least
    stop = made.model.new_int_var(0, len(made.axis.steps), "stop")
    made.model.add(stop >= least)
    made.model.add(stop >= later).only_enforce_if(need)
    return stop


def _chosen(made: Lifetimes, run: Literal, new: Value, old: Value) -> Value:
    """The offset of the live range that is there: a new one if the step runs."""
    if isinstance(run, int):
        return new
    there = made.model.new_int_var(0, made.capacity, "there")
    made.model.add(there == new).only_enforce_if(run)
    made.model.add(there == old).only_enforce_if(~run)
    return there
