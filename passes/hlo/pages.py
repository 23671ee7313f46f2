"""Copies between the device's memory and the host's, as instructions of a scheduled module.

A copy is a pair, `copy-start` and `copy-done`. The start's result is a tuple of the target, the source and a
word of context; the host's side has memory space 5 in its layout. XLA runs such pairs on streams of their
own, one for each direction, and keeps source and target alive from the start to the done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from passes.hlo import graph
from passes.hlo.dataflow import Dataflow
from passes.hlo.graph import BARRIERS, HOST, Instruction
from passes.ir import Page

CopyStyle = Literal["asynchronous", "plain"]
_U32 = 8
_TUPLES = BARRIERS | {"tuple"}
_NO_READERS = _TUPLES | {"get-tuple-element"}
_NO_ARRAYS = (graph.TUPLE, graph.OPAQUE, graph.TOKEN, graph.BUFFER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What happens at which step of a plan: pages by each of their places, in their order."""

    run: dict[int, list[Page]]
    out_done: dict[int, list[Page]]
    in_start: dict[int, list[Page]]
    in_done: dict[int, list[Page]]

    @classmethod
    def of(cls, pages: Sequence[Page]) -> Moments:
        """Sort pages by their places.

        Raises:
            ValueError: a page that comes back before it has left, or of an argument.
        """
        tables: tuple[dict[int, list[Page]], ...] = ({}, {}, {}, {})
        for page in pages:
            if page.run is None or not page.run < page.out_done <= page.in_start <= page.in_done:
                raise ValueError(f"{page} does not leave, arrive and come back in this order")
            for table, at in zip(tables, (page.run, page.out_done, page.in_start, page.in_done), strict=True):
                table.setdefault(at, []).append(page)
        run, out_done, in_start, in_done = tables
        return cls(run=run, out_done=out_done, in_start=in_start, in_done=in_done)


def copy_start(source: Any, shape: Any, *, to_host: bool) -> Any:
    """The instruction that starts a copy; id and name are still to be given.

    Args:
        source: the instruction that holds the array.
        shape: of the array on the device.
        to_host: the direction.
    """
    made = type(source)(opcode="copy-start", operand_ids=[source.id])
    there, here = made.shape.tuple_shapes.add(), made.shape.tuple_shapes.add()
    for part in (there, here):
        part.CopyFrom(shape)
    (there if to_host else here).layout.memory_space = HOST
    made.shape.tuple_shapes.add(element_type=_U32).layout.SetInParent()
    made.shape.element_type = graph.TUPLE
    return made


def copy_done(start: Any) -> Any:
    """The instruction that waits for a copy; id and name are still to be given."""
    made = type(start)(opcode="copy-done", operand_ids=[start.id])
    made.shape.CopyFrom(start.shape.tuple_shapes[0])
    return made


def copy_plain(source: Any, shape: Any, *, to_host: bool) -> Any:
    """A copy on the device in the place of one of either direction."""
    del to_host
    made = type(source)(opcode="copy", operand_ids=[source.id])
    made.shape.CopyFrom(shape)
    return made


def held_at(flow: Dataflow, instruction: Instruction) -> int | None:
    """The array that an instruction of the entry makes, or takes out of a tuple that an op made."""
    if instruction.shape.is_tuple:
        return None
    entry = flow.module.entry
    at = instruction
    while at.opcode == "get-tuple-element":
        at = entry.by_id[at.operands[0]]
    if at is not instruction and (at.opcode in _TUPLES or at.opcode == "bitcast"):
        return None
    if instruction.opcode in ("bitcast", "parameter", "constant"):
        return None
    return flow.trees[entry.id, instruction.id][()]


def pageable_values(flow: Dataflow) -> frozenset[int]:
    """Values of the entry that can be sent to the host: arrays that are there when their op has run, and are
    read one by one, not as parts of tuples that an op made."""
    entry = flow.module.entry
    pageable: set[int] = set()
    for instruction in entry.by_id.values():
        v = held_at(flow, instruction)
        if v is not None and _is_array(flow, v):
            pageable.add(v)
    return frozenset(pageable - _handed_on_whole(flow))


def _is_array(flow: Dataflow, v: int) -> bool:
    value = flow.values[v]
    home = flow.instruction(value.home)
    shape = home.shape.at(value.home.index)
    at, starts = value.home.computation, home.opcode.endswith("-start")
    while at != flow.module.entry.id:
        at, caller = flow.callers[at]
        starts |= flow.module.computations[at].by_id[caller].opcode.endswith("-start")
    return not starts and value.memory_space == 0 and shape.element not in _NO_ARRAYS and bool(value.nbytes)


def _handed_on_whole(flow: Dataflow) -> set[int]:
    """Values in tuples that an op made and something else than a view reads."""
    entry = flow.module.entry
    whole: set[int] = set()

    def visit(operand: Instruction) -> None:
        if not operand.shape.is_tuple:
            return
        if operand.opcode in _TUPLES:
            for inner in entry.operands(operand):
                visit(inner)
        else:
            whole.update(flow.trees[entry.id, operand.id].values())

    for instruction in entry.by_id.values():
        if instruction.opcode not in _NO_READERS:
            for operand in entry.operands(instruction):
                visit(operand)
    visit(entry.by_id[entry.root])
    return whole


def holders(lifted: Any, values: Iterable[int]) -> dict[int, list[int]]:
    """For values of a lifted module the instructions that hold them, in the order of the schedule."""
    flow: Dataflow = lifted.assigner.flow
    by_value: dict[int, list[int]] = {v: [] for v in sorted(values)}
    if by_value:
        for i in flow.module.entry.order:
            v = held_at(flow, flow.module.entry.by_id[i])
            if v in by_value:
                by_value[v].append(i)
    return by_value
