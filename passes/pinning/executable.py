"""A serialized CPU executable in parts: the two of them that hold places of temporaries can be changed.

    container = size, metadata, ExecutableAndOptions { executable }
    executable = CompilationResult { module, buffer assignment, thunks, object code, ... }

Everything but the buffer assignment and the thunks stays as it is, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from passes.hlo import proto, wire
from passes.hlo.schema import Schema, varint
from passes.hlo.xla_assignment import is_temp
from passes.pinning.mentions import ThunkError
from passes.pinning.thunks import Thunks

_EXECUTABLE, _MODULE_WITH_CONFIG, _MODULE, _ASSIGNMENT, _THUNKS = 1, 1, 1, 2, 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Executable:
    """A parsed executable. `assignment` and the slices of `thunks` may be changed.

    Attributes:
        data: the container.
        assignment: its BufferAssignmentProto.
        sequence: its ThunkSequenceProto.
        thunks: what is in that.
        temp: place of the one allocation of temporaries.
    """

    data: bytes
    assignment: Any
    sequence: Any
    thunks: Thunks
    temp: int

    @property
    def allocation(self) -> Any:
        """The allocation of temporaries."""
        return self.assignment.buffer_allocations[self.temp]

    @property
    def temp_bytes(self) -> int:
        """Size of the allocation of temporaries."""
        return int(self.allocation.size)

    @property
    def assigned(self) -> list[Any]:
        """The places of buffers in the allocation of temporaries."""
        return list(self.allocation.assigned)

    def resize(self, nbytes: int) -> None:
        """Set the size of the allocation of temporaries."""
        self.allocation.size = nbytes

    def module(self) -> Any:
        """The HloModuleProto that was compiled."""
        inner = wire.only_field(_inner(self.data), _MODULE_WITH_CONFIG)
        return proto.parse(wire.only_field(inner, _MODULE))

    def copy(self) -> Executable:
        """The same with messages of its own."""
        assignment, sequence = proto.copy(self.assignment), proto.copy(self.sequence)
        thunks = Thunks(sequence, self.allocation.index, self.allocation.size)
        return replace(self, assignment=assignment, sequence=sequence, thunks=thunks)

    def contents(self) -> list[bytes]:
        """All that it holds, to be compared with another's."""
        return [self.serialize()]

    def serialize(self) -> bytes:
        """The container with what the messages say now."""
        inner = _inner(self.data)
        for number, message in ((_ASSIGNMENT, self.assignment), (_THUNKS, self.sequence)):
            inner = wire.replace_field(inner, number, message.SerializeToString(deterministic=True))
        body = body_start(self.data)
        return self.data[:body] + wire.replace_field(self.data[body:], _EXECUTABLE, inner)


def read_executable(data: bytes, schema: Schema) -> Executable:
    """Read what `LoadedExecutable.serialize()` gave.

    Raises:
        ThunkError: it holds something that may not be moved.
        ValueError: it is no such container.
    """
    inner = _inner(data)
    assignment_class = schema.message("xla/service/hlo.proto", "xla.BufferAssignmentProto")
    sequence_class = schema.message("xla/backends/cpu/runtime/thunk.proto", "xla.cpu.ThunkSequenceProto")
    try:
        assignment = assignment_class.FromString(wire.only_field(inner, _ASSIGNMENT))
        sequence = sequence_class.FromString(wire.only_field(inner, _THUNKS))
    except DecodeError as error:
        raise ValueError(f"the executable cannot be read: {error}") from error
    temp = only_temp(assignment.buffer_allocations)
    allocation = assignment.buffer_allocations[temp]
    thunks = Thunks(sequence, allocation.index, allocation.size)
    return Executable(data=data, assignment=assignment, sequence=sequence, thunks=thunks, temp=temp)


def only_temp(allocations: Sequence[Any]) -> int:
    """Which of `allocations` holds the temporaries.

    Raises:
        ThunkError: there is not exactly one that does.
    """
    temps = [n for n, a in enumerate(allocations) if is_temp(a) and a.size]
    if len(temps) != 1:
        count = f"{len(temps)} allocations of temporaries; one can be pinned" if temps else "no temporaries"
        raise ThunkError(f"the program has {count}")
    return temps[0]


def _inner(data: bytes) -> bytes:
    return wire.only_field(data[body_start(data) :], _EXECUTABLE)


def body_start(data: bytes) -> int:
    """Where the message after the metadata starts."""
    try:
        size, at = varint(data, 0)
    except IndexError as error:
        raise ValueError("the executable is empty") from error
    return at + size
