"""When each value is alive: XLA's flattened schedule and its inclusive live ranges.

Called computations are laid out before their caller (a while: condition, then body), so one clock runs
through the module. Follows XLA's HloLiveRange (public source, `xla/hlo/utils/hlo_live_range.cc`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from passes.hlo.dataflow import Dataflow, Position, Value, loop_parts
from passes.hlo.graph import Computation, Module


@dataclass(slots=True)
class Range:
    """Alive from `start` to `end`, both included. `last` is the position that reaches furthest."""

    start: int
    end: int
    last: Position


class Clock:
    """The flattened schedule of a module.

    Attributes:
        time: (computation, instruction) -> time.
        span: computation -> (first time, time after the last).
        end: time after the last instruction of all.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.time: dict[tuple[int, int], int] = {}
        self.span: dict[int, tuple[int, int]] = {}
        self.end = 0
        self._run(flow.module, flow.module.entry)

    def _run(self, module: Module, computation: Computation) -> None:
        if computation.id in self.span:
            return
        start = self.end
        for i in computation.order:
            instruction = computation.by_id[i]
            called = [module.computations[c] for c in instruction.called]
            if instruction.opcode == "while":
                called = list(reversed(loop_parts(module, instruction)))
            elif instruction.opcode not in ("call", "conditional", "async-start"):
                called = []
            for inner in called:
                self._run(module, inner)
            self.time[computation.id, i] = self.end
            self.end += 1
        self.span[computation.id] = (start, self.end)


def live_ranges(flow: Dataflow, ticks: Clock, *, old_rules: bool = False) -> list[Range]:
    """The live range of every value, in id order; ranges of one alias class follow each other.

    Args:
        flow, ticks: of the module.
        old_rules: see `passes.hlo.assign.Assigner`.
    """
    entry = flow.module.entry
    donated = set(flow.module.donated.values())
    done = _async_ends(flow, ticks)
    ranges = []
    for value in flow.values:
        home = value.home
        live = _range(flow, ticks, value, done.get(home.computation, -1))
        if home.computation in done and not old_rules:
            # What runs asynchronously is there from the instruction that starts it.
            live.start = max(live.start, ticks.time[flow.callers[home.computation]])
        instruction = flow.instruction(home)
        is_argument = home.computation == entry.id and instruction.opcode == "parameter"
        if is_argument and (instruction.number, home.index) not in donated:
            live.end = ticks.end
        ranges.append(live)
    for group in flow.classes:
        if len(group) > 1:
            _normalize(ranges, group)
    return ranges


def _range(flow: Dataflow, ticks: Clock, value: Value, async_end: int) -> Range:
    home = value.home
    computation = flow.module.computations[home.computation]
    span = ticks.span[home.computation]
    at = ticks.time[home.computation, home.instruction]
    is_parameter = flow.instruction(home).opcode == "parameter"
    start = span[0] if is_parameter else at
    end, last = max(span[1] if home.instruction == computation.root else at, async_end), home
    for position in value.positions[1:]:
        where = flow.module.computations[position.computation]
        time = ticks.time[position.computation, position.instruction]
        if position.instruction == where.root:
            time = ticks.span[position.computation][1]
        if time > end:
            end, last = time, position
    used, operand = _last_use(flow, ticks, value)
    return Range(start, used, operand) if used > end and operand else Range(start, max(end, used), last)


def _last_use(flow: Dataflow, ticks: Clock, value: Value) -> tuple[int, Position | None]:
    """When the value is used last, and where that use finds it."""
    last: tuple[int, Position | None] = (-1, None)
    for use in value.uses:
        instruction = flow.instruction(use)
        if instruction.opcode == "call":
            continue
        time = ticks.time[use.computation, use.instruction]
        if instruction.opcode == "while":
            body, _ = loop_parts(flow.module, instruction)
            time = ticks.time[body.id, body.parameters()[0].id]
        if time > last[0]:
            operand = instruction.operands[use.operand]
            last = (time, Position(use.computation, operand, use.index))
    return last


def _async_ends(flow: Dataflow, ticks: Clock) -> dict[int, int]:
    """Computations run asynchronously, with the time of their async-done."""
    ends: dict[int, int] = {}
    for called, (computation, caller) in flow.callers.items():
        where = flow.module.computations[computation]
        if where.by_id[caller].opcode != "async-start":
            continue
        users = where.users()
        at = where.by_id[caller]
        while at.opcode != "async-done":
            following = [u for u in users[at.id] if u.opcode in ("async-update", "async-done")]
            if not following:
                break
            at = following[0]
        ends[called] = ticks.time[computation, at.id]
    return ends


def _normalize(ranges: list[Range], group: list[int]) -> None:
    """Let the ranges of one storage follow each other without overlap, as XLA does."""
    order = sorted(group, key=lambda v: (ranges[v].start, ranges[v].end, v))
    for v, following in pairwise(order):
        first, second = ranges[v], ranges[following]
        second.end = max(first.end, second.end)
        first.end = min(first.end, second.start)
