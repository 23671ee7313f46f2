"""Slices of one allocation that an executable's messages mention, each with what is done to it.

Messages of CPU and GPU thunks name byte ranges by the same message, a slice (allocation, offset, size).
`Mentions` collects those of the temporaries, in order, and counts all others, so that a slice that nobody
accounted for is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from passes.pinning.slices import Access, Node, Slice, SliceProgram

_SLICE = "BufferAllocationSliceProto"


class ThunkError(Exception):
    """An executable holds something that is not on the list of what may be moved."""


class Mentions:
    """The slices of an executable's temporaries.

    Attributes:
        slices: the messages of the slices, in order; changing their offsets changes the executable.
        names: of the thunk that each of them is in.
    """

    def __init__(self, temp_allocation: int) -> None:
        self.temp = temp_allocation
        self.slices: list[Any] = []
        self.names: list[str] = []
        self.claimed = 0

    def access(self, name: str, message: Any, how: str) -> tuple[Access, ...]:
        """The access to one slice, for reading (r), writing (w) or both; none if it is no temporary."""
        self.claimed += 1
        if message.buffer_allocation_index != self.temp:
            return ()
        self.slices.append(message)
        self.names.append(name)
        return (Access(slice=len(self.slices) - 1, reads="r" in how, writes="w" in how),)

    def access_by(self, rule: str, name: str, message: Any) -> tuple[Access, ...]:
        """The accesses of a thunk that uses its slices always alike.

        Args:
            rule: what happens to its slices and where they are, such as "r input.slice, w output.slice";
                then its other fields, after a bar.
            name: of the thunk.
            message: what kind of thunk it is.

        Raises:
            ThunkError: it has other fields.
        """
        accessed, _, others = rule.partition("|")
        paths = [part.split() for part in accessed.split(",")]
        allow_only(message, {path.split(".")[0] for _, path in paths} | set(others.split()))
        by_slice = [
            self.access(name, s, how) for how, path in paths for s in messages_at(message, path.split("."))
        ]
        return tuple(access for accesses in by_slice for access in accesses)

    def program_of(self, body: tuple[Node, ...], nbytes: int, alignment: int, mentioned: int) -> SliceProgram:
        """What `body` does to the slices.

        Raises:
            ThunkError: of `mentioned` slices some were never used.
        """
        if mentioned != self.claimed:
            raise ThunkError(f"{mentioned - self.claimed} of {mentioned} slices belong to no known field")
        return SliceProgram(
            nbytes=nbytes, alignment=alignment, body=body,
            slices=tuple(Slice(s.offset, s.size) for s in self.slices),
        )  # fmt: skip


def messages_at(message: Any, path: list[str]) -> Iterator[Any]:
    """The messages at the end of a path of field names; repeated fields are followed into each element.

    A field that this version of XLA does not have holds nothing.
    """
    if not path:
        yield message
        return
    field = message.DESCRIPTOR.fields_by_name.get(path[0])
    if field is None:
        return
    if field.is_repeated:
        for element in getattr(message, path[0]):
            yield from messages_at(element, path[1:])
    elif message.HasField(path[0]):
        yield from messages_at(getattr(message, path[0]), path[1:])


def allow_only(message: Any, known: set[str] | frozenset[str]) -> None:
    """Refuse a message with a field that the caller does not know."""
    for field, _ in message.ListFields():
        if field.name not in known:
            raise ThunkError(f"field {field.name} of {message.DESCRIPTOR.name} is not known")


def all_slices(message: Any, *, outside: str = "") -> Iterator[Any]:
    """All slices anywhere in a message but in fields named `outside`."""
    if message.DESCRIPTOR.name == _SLICE:
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.name == outside:
            continue
        if field.message_type.GetOptions().map_entry:
            value = [v for v in value.values() if hasattr(v, "DESCRIPTOR")]
        for inner in value if field.is_repeated else (value,):
            yield from all_slices(inner, outside=outside)
