"""XLA's real buffer assignment, read from its own message, and a comparison with the predicted one.

A value is named by the instruction that defines it and the index of the sub-shape: numbers of instructions
change while XLA compiles, names do not. Offsets count from the
start of the allocation that holds the value; what XLA calls the preallocated temporaries is one allocation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.hlo.assign import Assigner
from passes.hlo.dataflow import Index
from passes.hlo.heap import temp_offsets
from passes.hlo.schema import Schema

Name = tuple[str, Index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where XLA put one value.

    Attributes:
        allocation: index of the allocation.
        offset, nbytes: inside of it.
        is_temp: the allocation holds the program's temporaries.
    """

    allocation: int
    offset: int
    nbytes: int
    is_temp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What XLA assigned.

    Attributes:
        addresses: of every value.
        temp_bytes: all allocations of temporaries.
    """

    addresses: dict[Name, Address]
    temp_bytes: int


def read_assignment(data: bytes, module: Any, schema: Schema) -> Assignment:
    """Read a serialized BufferAssignmentProto.

    Args:
        data: the message.
        module: the parsed HloModuleProto that it was made for.
        schema: of the library that wrote it.
    """
    message = schema.message("xla/service/hlo.proto", "xla.BufferAssignmentProto")
    return of_message(message.FromString(data), module)


def of_message(assignment: Any, module: Any) -> Assignment:
    """The addresses in a parsed BufferAssignmentProto."""
    known = {i.id: i.name for c in module.computations for i in c.instructions}
    names = {
        b.id: (known[b.defined_at.instruction_id], tuple(b.defined_at.shape_index))
        for b in assignment.logical_buffers
    }
    temps = {a.index: a.size for a in assignment.buffer_allocations if is_temp(a)}
    addresses = {
        names[v.logical_buffer_id]: Address(
            allocation=a.index, offset=v.offset, nbytes=v.size, is_temp=a.index in temps
        )
        for a in assignment.buffer_allocations
        for v in a.assigned
    }
    return Assignment(addresses=addresses, temp_bytes=sum(temps.values()))


def is_temp(allocation: Any) -> bool:
    """True for a BufferAllocationProto whose memory lives during a call only (XLA's own definition)."""
    return not (
        allocation.is_entry_computation_parameter
        or allocation.is_constant
        or allocation.is_thread_local
        or allocation.maybe_live_out
    )


def compare(assigner: Assigner, real: Assignment) -> tuple[int, int]:
    """How many temporaries XLA assigned, and how many of them lie where a module's replay puts them."""
    flow = assigner.flow

    def name_of(value: int) -> Name:
        home = flow.values[value].home
        return flow.instruction(home).name, home.index

    predicted = {name_of(v): at for v, at in temp_offsets(assigner).items()}
    apart = {
        name_of(v)
        for group in assigner.heap
        if assigner.space_of(group) in assigner.apart
        for v in flow.classes[group]
    }
    temps = {name: a.offset for name, a in real.addresses.items() if a.is_temp and name not in apart}
    return len(temps), sum(predicted.get(name) == at for name, at in temps.items())
