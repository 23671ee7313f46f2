"""The address space of a compiled program: where its temporaries lie, when, and at what cost.

XLA says where it put every buffer; the packing that was predicted is compared with that, and what is alive at
once with the room that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from coop_jax import serialized
from coop_jax.errors import UnsupportedError
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.graph import HOST
from passes.hlo.heap import packing_saves, predict_assigned
from passes.hlo.schema import Schema, SchemaError, schema
from passes.hlo.xla_assignment import Assignment, compare, of_message, read_assignment
from passes.jaxpr import compat
from passes.pinning.gpu_executable import read_gpu_assignment
from passes.pinning.mentions import ThunkError
from passes.pinning.pin import read
from passes.pinning.repack import repack


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressed:
    """One temporary: bytes `offset` to `offset + nbytes`, from step `start` to `end` of the schedule.

    Attributes:
        name: the instruction that defines it.
        offset: None if it is not known where XLA put it.
    """

    name: str
    nbytes: int
    offset: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressView:
    """The temporaries of a program on one device.

    Attributes:
        temp_bytes: what XLA's count says they take.
        predicted_temp_bytes: what was predicted from the final schedule.
        live_bytes: largest sum of temporaries alive at once, by XLA's rules of when one is alive.
        packed_bytes: the best packing that was found for the same live ranges.
        buffers: temporaries that XLA assigned; None if it does not tell.
        equal: those of them that lie where they were predicted.
        values: the temporaries.
    """

    temp_bytes: int
    predicted_temp_bytes: int
    live_bytes: int
    packed_bytes: int
    buffers: int | None
    equal: int | None
    values: tuple[Addressed, ...]


def address_view(compiled: Any) -> AddressView:
    """Where the temporaries of a compiled program lie.

    XLA tells where it put them: on a CPU with the program's memory analysis, on a GPU in its executable.
    Where neither can be read offsets are None, and only sizes can be compared.
    """
    module = proto.parse(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    stats = compiled.memory_analysis()
    real = real_assignment(compiled, module)
    return _view(module, serialized.kind_of(compiled), stats.temp_size_in_bytes, real)


def real_assignment(compiled: Any, module: Any) -> Assignment | None:
    """Where XLA put what of a compiled program; None where it does not tell.

    Args:
        module: the program's parsed HloModuleProto.
    """
    data = compiled.memory_analysis().serialized_buffer_assignment_proto
    try:
        described = schema(serialized.proto_library(serialized.kind_of(compiled)))
        return read_assignment(data, module, described) if data else _from_executable(compiled, described)
    except (SchemaError, ValueError, FileNotFoundError, jax.errors.JaxRuntimeError):
        return None


def _from_executable(compiled: Any, described: Schema) -> Assignment | None:
    """The assignment in a GPU's executable, if there is one."""
    assignment, module = read_gpu_assignment(serialized.to_bytes(compiled), described)
    return of_message(assignment, module) if assignment.buffer_allocations else None


def executable_view(compiled: Any) -> AddressView:
    """Where the temporaries of a program lie by its executable alone, pinned or not.

    Times are kernels in the order of the executable, and a temporary is there while its bytes are in use:
    that can be shorter than XLA's rules of when a value is alive.

    Raises:
        UnsupportedError: the program's executable cannot be read.
    """
    platform = serialized.kind_of(compiled)
    try:
        data = serialized.to_bytes(compiled)
        executable = read(data, schema(serialized.proto_library(platform)), platform)
    except (ThunkError, SchemaError, ValueError, FileNotFoundError, jax.errors.JaxRuntimeError) as error:
        raise UnsupportedError(f"the executable cannot be read: {error}") from error
    program, names = executable.thunks.program, executable.thunks.names
    packed = repack(program)
    values = [
        Addressed(name=names[web.slices[0]], nbytes=web.nbytes, offset=web.offset, start=first, end=last)
        for web in packed.webs
        for first, last in web.lives
    ]
    return AddressView(
        temp_bytes=program.nbytes, predicted_temp_bytes=program.nbytes, live_bytes=packed.live_bytes,
        packed_bytes=min(program.nbytes, packed.moved.nbytes), buffers=len(packed.webs),
        equal=len(packed.webs), values=tuple(sorted(values, key=lambda a: (a.start, a.end, a.name))),
    )  # fmt: skip


def _view(module: Any, platform: str, temp_bytes: int, real: Assignment | None) -> AddressView:
    assigner = Assigner(graph.read(module), platform, old_rules=compat.OLD_RULES)
    predicted = predict_assigned(assigner)
    comparison = None if real is None else compare(assigner, real)
    return AddressView(
        temp_bytes=temp_bytes,
        predicted_temp_bytes=predicted.temp_bytes,
        live_bytes=predicted.live_bytes,
        packed_bytes=temp_bytes - packing_saves(assigner),
        buffers=None if comparison is None else comparison.buffers,
        equal=None if comparison is None else comparison.equal,
        values=_values(assigner, real),
    )


def _values(assigner: Assigner, real: Assignment | None) -> tuple[Addressed, ...]:
    flow = assigner.flow
    addressed = []
    for group in assigner.heap:
        for v in flow.classes[group] if assigner.space_of(group) != HOST else ():
            home = flow.values[v].home
            name = flow.instruction(home).name
            at = None if real is None else real.addresses.get((name, home.index))
            offset = at.offset if at is not None and at.is_temp else None
            lives = assigner.ranges[v]
            addressed.append(
                Addressed(
                    name=name, nbytes=flow.values[v].nbytes, offset=offset, start=lives.start, end=lives.end
                )
            )
    return tuple(sorted(addressed, key=lambda a: (a.start, a.end, a.name)))
