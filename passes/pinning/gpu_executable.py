"""A serialized GPU executable: its temporaries and what its thunks do with them.

    container = size, metadata, ExecutableAndOptions { GpuExecutable, options }

Both messages may be in parts (`passes.pinning.split`). XLA lays out memory by
`buffer_allocations` and the thunks' slices; the buffer assignment beside them is there to explain it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from passes.hlo import graph, proto
from passes.hlo.schema import Schema
from passes.pinning.executable import body_start, only_temp
from passes.pinning.gpu_thunks import GpuThunks
from passes.pinning.mentions import ThunkError
from passes.pinning.riegeli import is_riegeli
from passes.pinning.split import read_message, write_message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuExecutable:
    """A parsed executable. The sizes and places of temporaries may be changed.

    Attributes:
        schema: of the library that wrote it.
        metadata: the bytes before the messages.
        options: its ExecutableAndOptionsProto, without the executable.
        message: its GpuExecutableProto.
        temp: index of the allocation of temporaries.
        thunks: what is done to them.
    """

    schema: Schema
    metadata: bytes
    options: Any
    message: Any
    temp: int
    thunks: GpuThunks

    @property
    def assignment(self) -> Any:
        """Its BufferAssignmentProto, which may be empty."""
        return self.message.buffer_assignment

    @property
    def temp_bytes(self) -> int:
        """Size of the allocation of temporaries."""
        return int(self._allocations()[0].size)

    @property
    def assigned(self) -> list[Any]:
        """The places of buffers in the allocation of temporaries."""
        return [a for allocation in self._allocations() for a in allocation.assigned]

    def aliases(self) -> dict[int, int]:
        """The parameter whose storage a result takes, by result.

        Raises:
            ThunkError: other storage is shared.
        """
        allocations = self.message.buffer_allocations.values
        parameters = {a.index: a.parameter_number for a in allocations if a.is_entry_computation_parameter}
        aliases, storage = {}, []
        for entry in self.message.output_info_map:
            index, info = tuple(entry.shape_index.indexes), entry.output_info
            if not index and len(self.message.output_info_map) > 1:
                continue  # the table of pointers to the results
            storage.append(info.allocation_index)
            aliased = info.alias_config.parameter_number if info.HasField("alias_config") else None
            if parameters.get(info.allocation_index) != aliased:
                raise ThunkError(f"result {index} is not in the storage that its alias names")
            if aliased is not None:
                aliases[index[0] if index else 0] = aliased
        if len(set(storage)) != len(storage):
            raise ThunkError("two results of the program share storage")
        return aliases

    def resize(self, nbytes: int) -> None:
        """Set the size of the allocation of temporaries."""
        for allocation in self._allocations():
            allocation.size = nbytes

    def module(self) -> Any:
        """The HloModuleProto that was compiled."""
        return _module(self.message)

    def copy(self) -> GpuExecutable:
        """The same with messages of its own."""
        message = proto.copy(self.message)
        return replace(self, message=message, thunks=_thunks(message, self.temp, self.temp_bytes))

    def contents(self) -> list[bytes]:
        """All that it holds, to be compared with another's: cheaper than the container, which has hashes."""
        parts = (self.options, self.message)
        return [self.metadata, *(part.SerializeToString(deterministic=True) for part in parts)]

    def serialize(self) -> bytes:
        """The container with what the messages say now."""
        options = proto.copy(self.options)
        options.serialized_executable = write_message(self.message, self.schema)
        return self.metadata + write_message(options, self.schema)

    def _allocations(self) -> list[Any]:
        """The allocation of temporaries, everywhere that it is described."""
        described = (*self.message.buffer_allocations.values, *self.assignment.buffer_allocations)
        return [a for a in described if a.index == self.temp]


def read_gpu_executable(data: bytes, schema: Schema) -> GpuExecutable:
    """Read what a GPU's executable is serialized to.

    Raises:
        ThunkError: it holds something that may not be moved.
        SchemaError: this version of XLA has no such messages.
        ValueError: it is no such container.
    """
    start, options, message = _read(data, schema)
    if not {"thunks", "buffer_allocations"} <= set(message.DESCRIPTOR.fields_by_name):
        raise ThunkError("this version of XLA writes GPU executables in a form that is not known")
    options.ClearField("serialized_executable")
    allocations = message.buffer_allocations.values
    temp = allocations[only_temp(allocations)]
    thunks = _thunks(message, temp.index, temp.size)
    return GpuExecutable(
        schema=schema, metadata=data[:start], options=options, message=message, temp=temp.index, thunks=thunks
    )


def read_gpu_assignment(data: bytes, schema: Schema) -> tuple[Any, Any]:
    """The BufferAssignmentProto of a serialized executable, which may be empty, and its HloModuleProto.

    Raises:
        SchemaError, ValueError: it cannot be read.
    """
    _, _, message = _read(data, schema)
    return message.buffer_assignment, _module(message)


def _read(data: bytes, schema: Schema) -> tuple[int, Any, Any]:
    """Where the messages start, and both of them."""
    start = 0 if is_riegeli(data) else body_start(data)
    outer = schema.message("xla/pjrt/proto/compile_options.proto", "xla.ExecutableAndOptionsProto")
    inner = schema.message("xla/service/gpu/gpu_executable.proto", "xla.gpu.GpuExecutableProto")
    options = read_message(data[start:], outer, schema)
    return start, options, read_message(options.serialized_executable, inner, schema)


def _module(message: Any) -> Any:
    return proto.parse(message.hlo_module_with_config.hlo_module.SerializeToString())


def _thunks(message: Any, temp: int, nbytes: int) -> GpuThunks:
    return GpuThunks(message.thunks, temp, nbytes, graph.read(_module(message)))
