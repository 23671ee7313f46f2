"""What the addresses of a compiled program cost: what is alive at once, and the room that it takes.

XLA says where it put every buffer; the packing that was predicted is compared with that. `coop.inspect` lists
the buffers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled

from coop_jax import aot, serialized
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.heap import packing_saves, predict_assigned
from passes.hlo.schema import Schema, SchemaError, schema
from passes.hlo.xla_assignment import Assignment, compare, of_message, read_assignment
from passes.jaxpr import compat
from passes.pinning.gpu_executable import read_gpu_assignment


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
    """

    temp_bytes: int
    predicted_temp_bytes: int
    live_bytes: int
    packed_bytes: int
    buffers: int | None
    equal: int | None


def address_view(compiled: Compiled) -> AddressView:
    """How the temporaries of a compiled program are packed.

    XLA tells where it put them: on a CPU with the program's memory analysis, on a GPU in its executable.
    Where neither can be read only sizes can be compared.
    """
    module = proto.parse(aot.final_module(compiled))
    stats: Any = compiled.memory_analysis()
    real = real_assignment(compiled, module)
    assigner = Assigner(graph.read(module), serialized.kind_of(compiled), old_rules=compat.OLD_RULES)
    predicted = predict_assigned(assigner)
    buffers, equal = (None, None) if real is None else compare(assigner, real)
    return AddressView(
        temp_bytes=stats.temp_size_in_bytes,
        predicted_temp_bytes=predicted.temp_bytes,
        live_bytes=predicted.live_bytes,
        packed_bytes=stats.temp_size_in_bytes - packing_saves(assigner),
        buffers=buffers,
        equal=equal,
    )


def real_assignment(compiled: Compiled, module: Any) -> Assignment | None:
    """Where XLA put what of a compiled program; None where it does not tell.

    Args:
        module: the program's parsed HloModuleProto.
    """
    stats: Any = compiled.memory_analysis()
    data = stats.serialized_buffer_assignment_proto
    try:
        described = schema(serialized.proto_library(serialized.kind_of(compiled)))
        return read_assignment(data, module, described) if data else _from_executable(compiled, described)
    except (SchemaError, ValueError, FileNotFoundError, jax.errors.JaxRuntimeError):
        return None


def _from_executable(compiled: Compiled, described: Schema) -> Assignment | None:
    """The assignment in a GPU's executable, if there is one."""
    assignment, module = read_gpu_assignment(serialized.to_bytes(compiled), described)
    return of_message(assignment, module) if assignment.buffer_allocations else None
