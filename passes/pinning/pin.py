"""Rewrite a serialized executable so that its temporaries lie at other offsets.

The offsets of slices change in the thunks, and in the buffer assignment the offsets and the size of the one
allocation of temporaries. The result is then read anew, from its bytes, and handed back only if it is proved
to compute what the original does, and to differ from it in nothing else.

What XLA assigned but no thunk uses (tables of pointers) loses its storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes.backend import CPU, CUDA
from passes.hlo import graph
from passes.hlo.dataflow import Dataflow, Position, Use, analyse
from passes.hlo.schema import Schema, SchemaError
from passes.pinning.executable import Executable, read_executable
from passes.pinning.gpu_executable import GpuExecutable, read_gpu_executable
from passes.pinning.mentions import ThunkError
from passes.pinning.moves import MoveError, check_moves
from passes.pinning.repack import repack
from passes.pinning.slices import Moved

AnyExecutable = Executable | GpuExecutable
_READERS: dict[str, Callable[[bytes, Schema], AnyExecutable]] = {
    CPU.name: read_executable,
    CUDA.name: read_gpu_executable,
}
READABLE = tuple(_READERS)


class PinError(Exception):
    """An executable is left as it is; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A rewritten executable.

    Attributes:
        data: its bytes; the very object that came in if nothing would be gained.
        temp_bytes_before, temp_bytes: size of the allocation of temporaries.
        live_bytes: no packing is smaller.
        buffers: groups of slices that move together.
        moved: those of them whose offset changed.
    """

    data: bytes
    temp_bytes_before: int
    temp_bytes: int
    live_bytes: int
    buffers: int
    moved: int


def read(data: bytes, schema: Schema, platform: str) -> AnyExecutable:
    """Read an executable that was serialized on `platform`, one of `READABLE`.

    Raises:
        ThunkError: it holds something that may not be moved.
        SchemaError, ValueError: it cannot be read.
    """
    return _READERS[platform](data, schema)


def pin(data: bytes, schema: Schema, platform: str = CPU.name) -> Pinned:
    """Pack the temporaries of a serialized executable as tightly as can be found.

    Args:
        data: what the executable's `serialize()` gave.
        schema: of the library that wrote it.
        platform: one of `READABLE`.

    Raises:
        PinError: the executable cannot be rewritten, or the result is not proved to be right.
    """
    try:
        executable = read(data, schema, platform)
        packed = repack(executable.thunks.program)
        before, target = executable.temp_bytes, packed.moved
        rewritten, size = rewrite(executable, target) if target.nbytes < before else (data, before)
        if size < before:
            prove(data, rewritten, schema, platform)
        else:
            rewritten, size = data, before
    except (ThunkError, SchemaError, MoveError, ValueError) as error:
        raise PinError(str(error)) from error
    slices = executable.thunks.program.slices
    moved = sum(target.offsets[w.slices[0]] != slices[w.slices[0]].offset for w in packed.webs)
    changed = rewritten is not data
    return Pinned(
        data=rewritten, temp_bytes_before=before, temp_bytes=size,
        live_bytes=packed.live_bytes, buffers=len(packed.webs), moved=moved if changed else 0,
    )  # fmt: skip


def rewrite(executable: AnyExecutable, target: Moved) -> tuple[bytes, int]:
    """The executable with every slice where `target` says, and the bytes it needs for temporaries then.

    Proves nothing: see `prove`.
    """
    new = executable.copy()
    places = _new_places(executable, target)
    size = target.nbytes
    for assigned in new.assigned:
        assigned.offset = places.get(assigned.logical_buffer_id, 0)
        size = max(size, assigned.offset + assigned.size)
    for message, offset in zip(new.thunks.slices, target.offsets, strict=True):
        message.offset = offset
    new.resize(size)
    return new.serialize(), size


def prove(before: bytes, after: bytes, schema: Schema, platform: str = CPU.name) -> None:
    """Prove that one serialized executable is another with its temporaries moved, and computes the same.

    Raises:
        MoveError: it is not proved.
        ThunkError, ValueError: one of them cannot be read.
    """
    old, new = read(before, schema, platform), read(after, schema, platform)
    moved = Moved(nbytes=new.temp_bytes, offsets=tuple(s.offset for s in new.thunks.slices))
    check_moves(old.thunks.program, moved)
    for assigned in new.assigned:
        if assigned.offset < 0 or assigned.offset + assigned.size > moved.nbytes:
            raise MoveError(f"{assigned.size} bytes are assigned at {assigned.offset} of {moved.nbytes}")
    if len(new.assigned) != len(old.assigned):
        raise MoveError("the rewritten executable assigns other buffers")
    # With the old places put back nothing may differ.
    new.resize(old.temp_bytes)
    for theirs, ours in zip(new.assigned, old.assigned, strict=True):
        theirs.offset = ours.offset
    for theirs, ours in zip(new.thunks.slices, old.thunks.slices, strict=True):
        theirs.offset = ours.offset
    if new.contents() != old.contents():
        raise MoveError("the rewritten executable differs in more than the places of temporaries")


def _new_places(executable: AnyExecutable, target: Moved) -> dict[int, int]:
    """The new offset of every logical buffer that a thunk uses.

    The buffers of one alias class share their storage, so they go where the first slice goes that has their
    old place and is in the thunk of an instruction that defines, passes on or uses one of them.
    """
    thunks = executable.thunks
    slices: dict[tuple[str, int, int], int] = {}
    for s, name, offset in zip(thunks.program.slices, thunks.names, target.offsets, strict=True):
        slices.setdefault((name, s.offset, s.nbytes), offset)
    flow = analyse(graph.read(executable.module()))
    value_at = {(v.home.instruction, v.home.index): v.id for v in flow.values}
    defined = {b.id: b.defined_at for b in executable.assignment.logical_buffers}
    places: dict[int, int] = {}
    for assigned in executable.assigned:
        at = defined[assigned.logical_buffer_id]
        value = value_at.get((at.instruction_id, tuple(at.shape_index)))
        names = [] if value is None else _names(flow, value)
        keys = [(name, assigned.offset, assigned.size) for name in names]
        known = next((slices[key] for key in keys if key in slices), None)
        if known is not None:
            places[assigned.logical_buffer_id] = known
    return places


def _names(flow: Dataflow, value: int) -> list[str]:
    """The instructions that define, pass on or use a value, then those of what shares its storage."""
    members = dict.fromkeys([value, *flow.classes[flow.class_of[value]]])
    places: list[Position | Use] = []
    for v in members:
        places += [*flow.values[v].positions, *flow.values[v].uses]
    return list(dict.fromkeys(flow.instruction(p).name for p in places))
