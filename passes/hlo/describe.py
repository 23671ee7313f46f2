"""Describe a scheduled module as a `passes.memory_map.MemoryMap`: what lies where, when, and why.

Live ranges, sharing and packing are those of the replayed buffer assignment (`passes.hlo.assign`, `heap`), so
that the largest sum of live bytes is the predicted one. Values that XLA put inside outputs or donated
arguments take no room of their own and are left out. The clock ticks where a kernel runs or a temporary
comes alive; views in between are no steps.

A value counts as kept for the backward pass if its maker stands before differentiation's transpose, and one
that reads it behind. Makers say so themselves: their names carry JAX's transformations ("transpose(jvp(f))").
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from passes.counts import Fixed
from passes.hlo.assign import Assigner
from passes.hlo.graph import HOST, VIEWS, Instruction, Shape
from passes.hlo.heap import HeapPrediction, heap_intervals, predict_assigned, temp_offsets
from passes.hlo.lift import frames
from passes.hlo.origins import Origins
from passes.hlo.xla_assignment import Address, Assignment, Name
from passes.memory_map import ARGUMENT, CONSTANT, KEPT, OUTPUT, RECOMPUTED, WORKING, MemoryMap, Value
from passes.outcome import RECOMPUTE_SCOPE

_ELEMENTS = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16",
    11: "f32", 12: "f64", 15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4",
    26: "s2", 27: "u2", 30: "s1", 31: "u1", 32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip
_LIBRARY = re.compile(r"(?:site-packages|dist-packages|/lib/python3|<frozen )")
_WRAPPED = re.compile(r"[\w.\-]+\((.*)\)")
_PLUMBING = frozenset({"while", "body", "cond", "branch", "closed_call", "checkpoint", "rematted_computation",
                       "shard_map", "eval_jaxpr", RECOMPUTE_SCOPE})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(Fixed):
    """XLA's own counts of a compiled program, on one device.

    Attributes:
        argument_bytes, output_bytes: storage of the program's arguments and results.
        temp_bytes: XLA's heap of temporaries.
        alias_bytes: results that live in donated arguments.
        total_bytes: arguments + outputs - aliased + temporaries + constants; this is what budgets bound.
        host_bytes: the same in the host's memory.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    total_bytes: int
    host_bytes: int = 0

    @property
    def constant_bytes(self) -> int:
        """What is in the total beside these and the temporaries: arrays that are written in the program."""
        return self.total_bytes - self.fixed_bytes - self.temp_bytes


def describe(
    assigner: Assigner, *, counted: Counted | None = None, real: Assignment | None = None
) -> MemoryMap:
    """The memory of a scheduled module.

    Args:
        assigner: the replayed buffer assignment of the module, without barriers.
        counted: XLA's counts; None if they are not known, then the prediction stands in.
        real: XLA's own addresses; None if they are not known, then they are predicted.
    """
    prediction = predict_assigned(assigner)
    totals = counted or _as_counted(prediction, real)
    work = _Describe(assigner, {} if real is None else real.addresses)
    values = (*work.fixed(totals.constant_bytes), *work.temporaries())
    return MemoryMap(
        name=assigner.module.name, platform=assigner.backend.name, steps=work.steps, values=values,
        argument_bytes=totals.argument_bytes, output_bytes=totals.output_bytes,
        alias_bytes=totals.alias_bytes, temp_bytes=totals.temp_bytes, total_bytes=totals.total_bytes,
        counted=counted is not None, exact_addresses=real is not None,
    )  # fmt: skip


def _as_counted(prediction: HeapPrediction, real: Assignment | None) -> Counted:
    temp_bytes = prediction.temp_bytes if real is None else real.temp_bytes
    return Counted(
        argument_bytes=prediction.argument_bytes, output_bytes=prediction.output_bytes,
        alias_bytes=prediction.alias_bytes, temp_bytes=temp_bytes,
        total_bytes=prediction.total_bytes - prediction.temp_bytes + temp_bytes,
    )  # fmt: skip


class _Describe:
    """Values of one module, on a clock of kernels."""

    def __init__(self, assigner: Assigner, addresses: Mapping[Name, Address]) -> None:
        self.a = assigner
        self.flow = assigner.flow
        self.addresses = addresses
        self.module = assigner.module
        self.lives = _lives(assigner)
        self.origins = Origins(assigner)
        self.ticks, self.steps = self._clock()
        self.predicted = temp_offsets(assigner)

    def _clock(self) -> tuple[list[int], tuple[str, ...]]:
        """Times of the flattened schedule that are steps, and the instructions there."""
        begin = {start for _, _, start, _ in self.lives}
        steps = []
        for (computation, i), time in self.a.ticks.time.items():
            instruction = self.module.computations[computation].by_id[i]
            if time in begin or instruction.opcode not in VIEWS:
                steps.append((time, instruction.name))
        steps.sort()
        return [time for time, _ in steps], tuple(name for _, name in steps)

    def step(self, time: int) -> int:
        """The first step that is not before a time."""
        return bisect_left(self.ticks, time)

    def temporaries(self) -> list[Value]:
        """What lies in the heap, and the tables of pointers beside it."""
        values = []
        for v, nbytes, start, stop in self.lives:
            instruction = self.flow.instruction(self.flow.values[v].home)
            kind = self._kind(v, instruction)
            value = self._value(v, instruction, kind, nbytes)
            last = self.step(stop) - 1
            values.append(
                replace(
                    value, start=self.step(start), stop=last + 1, offset=self._offset(v),
                    last_use=self.steps[last] if 0 <= last < len(self.steps) else "",
                )
            )  # fmt: skip
        beside = [a for a in self.a.allocations if a.is_temp]
        values += [
            replace(self._value(a.values[0], None, WORKING, a.nbytes), offset=self._offset(a.values[0]))
            for a in beside
            if a.values
        ]
        cores = [a.nbytes for a in beside if not a.values]
        values += [self._throughout("other cores", "memory of other cores", n, WORKING) for n in cores]
        return _with_evicted(values)

    def fixed(self, constant_bytes: int) -> list[Value]:
        """Arguments, outputs and constants, each in its own allocation."""
        values = []
        outputs = {id(self.a.home[g]): v for v, g in self._results() if g in self.a.home}
        for allocation in self.a.allocations:
            if allocation.space == HOST or not allocation.values:
                continue
            v = outputs.get(id(allocation), allocation.values[0])
            if allocation.kind in ("argument", "donated"):
                first = self.flow.instruction(self.flow.values[allocation.values[0]].home)
                values.append(self._value(allocation.values[0], first, ARGUMENT, allocation.nbytes))
            elif allocation.kind == "output" or (allocation.kind == "tuple" and allocation.lives_out):
                values.append(self._value(v, None, OUTPUT, allocation.nbytes))
        if constant_bytes:
            values.append(self._throughout("constants", "constant", constant_bytes, CONSTANT))
        return values

    def _throughout(self, name: str, op: str, nbytes: int, kind: str) -> Value:
        """What is there for the whole run, and is no value of the program."""
        stop = max(1, len(self.steps))
        return Value(name=name, op=op, shape="", nbytes=nbytes, start=0, stop=stop, kind=kind)

    def _results(self) -> list[tuple[int, int]]:
        entry = self.module.entry
        tree = self.flow.trees[entry.id, entry.root]
        return [(tree[index], self.flow.class_of[tree[index]]) for index in sorted(tree)]

    def _value(self, v: int, instruction: Instruction | None, kind: str, nbytes: int) -> Value:
        """A value that is there for the whole run; others get their times afterwards."""
        home = self.flow.values[v].home
        made = instruction or self.flow.instruction(home)
        is_argument = kind == ARGUMENT
        origin = made if is_argument else self.origins.of(v)
        path = _name_path(origin)
        return Value(
            name=path if is_argument and path else made.name,
            op="argument" if is_argument else _op(origin),
            shape=shape_text(made.shape.at(home.index)), nbytes=nbytes, start=0,
            stop=max(1, len(self.steps)), kind=kind,
            source="" if is_argument else user_line(self.module.proto, origin),
            scope="" if is_argument else scope_of_name(path) or functions(self.module.proto, origin),
        )  # fmt: skip

    def _offset(self, v: int) -> int | None:
        home = self.flow.values[v].home
        if not self.addresses:
            return self.predicted.get(v)
        at = self.addresses.get((self.flow.instruction(home).name, home.index))
        return at.offset if at is not None and at.is_temp else None

    def _kind(self, v: int, instruction: Instruction) -> str:
        if _is_recompute(instruction):
            return RECOMPUTED
        members = self.flow.classes[self.flow.class_of[v]]
        return KEPT if any(map(self._is_kept, members)) else WORKING

    def _is_kept(self, v: int) -> bool:
        value = self.flow.values[v]
        maker = self.flow.instruction(value.home)
        if _is_later(maker) or not _name_path(maker):
            return False
        return any(_is_later(self.flow.instruction(use)) for use in value.uses)


def _lives(assigner: Assigner) -> list[tuple[int, int, int, int]]:
    """(value, room, first time, time after the last) of all in the heap; no storage is counted twice."""
    spaces = {assigner.space_of(g) for g in assigner.heap} - assigner.apart
    lives = []
    for space in sorted(spaces):
        storages: dict[int, list[tuple[int, int, int, int]]] = {}
        for interval in heap_intervals(assigner, space):
            at = assigner.ranges[interval.key]
            storages.setdefault(interval.group, []).append((at.start, at.end, interval.key, interval.nbytes))
        for members in storages.values():
            members.sort()
            following = [start for start, *_ in members[1:]] + [None]
            for (start, end, v, nbytes), after in zip(members, following, strict=True):
                stop = end + 1 if after is None else min(end + 1, after)
                lives.append((v, nbytes, start, stop))
    return sorted(lives, key=lambda life: (life[2], life[0]))


def _with_evicted(values: list[Value]) -> list[Value]:
    """Values made before a recompute of the same op, line, scope and shape, and gone before it."""
    latest: dict[tuple[str, str, str, str], int] = {}
    for value in values:
        if value.kind == RECOMPUTED:
            key = (value.op, value.source, value.scope, value.shape)
            latest[key] = max(latest.get(key, 0), value.start)

    def is_evicted(value: Value) -> bool:
        recomputed_at = latest.get((value.op, value.source, value.scope, value.shape), -1)
        return value.kind == WORKING and value.stop <= recomputed_at

    return [replace(value, evicted=True) if is_evicted(value) else value for value in values]


def _is_later(instruction: Instruction) -> bool:
    """True for what differentiation's transpose wrote, and what runs again."""
    return "transpose(" in _name_path(instruction) or _is_recompute(instruction)


def _is_recompute(instruction: Instruction) -> bool:
    """True for what runs again: by a plan of either stage, by `jax.checkpoint`, or by XLA's own pass."""
    path = _name_path(instruction)
    return RECOMPUTE_SCOPE in path or "rematted_computation" in path or ".remat" in instruction.name


def _name_path(instruction: Instruction) -> str:
    """What JAX calls an instruction, such as "jit(f)/jvp(layer)/dot_general"."""
    return str(instruction.proto.metadata.op_name)


def _op(instruction: Instruction) -> str:
    path = _name_path(instruction).partition(";")[0]
    return path.rpartition("/")[2] if "/" in path else instruction.opcode


def scope_of_name(path: str) -> str:
    """The named scopes in a name: "jit(f)/transpose(jvp(block_0))/attn/mul" is in "block_0/attn"."""
    scopes = []
    for part in _parts(path.partition(";")[0])[:-1]:
        if part.startswith(("jit(", "pjit(")):
            continue
        while (match := _WRAPPED.fullmatch(part)) is not None:
            part = match[1]
        scopes += [inner for inner in part.split("/") if inner and inner not in _PLUMBING]
    return "/".join(scopes)


def _parts(path: str) -> list[str]:
    """`path` at its slashes outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(path):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            parts.append(path[start:i])
            start = i + 1
    return [*parts, path[start:]]


def user_line(module: Any, instruction: Instruction) -> str:
    """The innermost line outside of installed packages that an instruction comes from; "" if unknown."""
    metadata = instruction.proto.metadata
    if metadata.source_file:
        return f"{metadata.source_file}:{metadata.source_line}"
    places = list(frames(module, metadata.stack_frame_id))
    users = [place for place, _ in places if not _LIBRARY.search(place)]
    return users[0] if users else places[0][0] if places else ""


def functions(module: Any, instruction: Instruction) -> str:
    """The user's function that an instruction comes from, and its caller, such as "block > attention"."""
    places = frames(module, instruction.proto.metadata.stack_frame_id)
    names = [name for place, name in places if not _LIBRARY.search(place) and not name.startswith("<")]
    return " > ".join(reversed(names[:2]))


def shape_text(shape: Shape) -> str:
    """A shape in XLA's words, such as "f32[8,128]"."""
    if shape.parts is not None:
        parts = [shape_text(part) for part in shape.parts[:4]] + (["..."] if len(shape.parts) > 4 else [])
        return f"({', '.join(parts)})"
    return f"{_ELEMENTS.get(shape.element, 'opaque')}[{','.join(map(str, shape.dims))}]"
