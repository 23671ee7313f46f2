"""XLA's own protobuf schema, as the installed version has it.

No package ships XLA's message classes, but every `FileDescriptorProto` is embedded in the shared libraries
that were built with it. They are found by their own file name, which is the first field of a descriptor,
and read up to the first byte that cannot belong to one. So readers of XLA's messages need no field numbers,
and a version that changed a message is read by its own description.
"""

from __future__ import annotations

import functools
import mmap
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

_NAME_FIRST = re.compile(rb"\n([\x08-\x7f])((?:[\w\-]+/)*[\w\-]+\.proto)[\x12\x1a\x22]")
_LAST_FIELD = 14
_DELIMITED, _VARINT = 2, 0


class SchemaError(Exception):
    """The library does not hold the description of a message."""


@functools.lru_cache(maxsize=8)
def schema(library: str) -> Schema:
    """The messages whose descriptions are embedded in a shared library; read once per process."""
    return Schema(library)


class Schema:
    """Message classes of one shared library.

    Raises:
        SchemaError: the library cannot be read.
    """

    def __init__(self, library: str) -> None:
        self.library = library
        try:
            with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._files = dict(_descriptors(data))
        except (OSError, ValueError) as error:
            raise SchemaError(f"{library} cannot be read: {error}") from error
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()

    def message(self, file: str, name: str) -> Any:
        """The class of the message `name`, such as "xla.HloProto", that `file` describes.

        Raises:
            SchemaError: the library does not describe it.
        """
        self._add(file)
        try:
            return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
        except KeyError as error:
            raise SchemaError(f"{file} in {self.library} has no message {name}") from error

    def _add(self, file: str) -> None:
        if file in self._added:
            return
        self._added.add(file)
        if file not in self._files:
            raise SchemaError(f"{self.library} does not describe {file}")
        for needed in self._files[file].dependency:
            self._add(needed)
        self._pool.Add(self._files[file])


def _descriptors(data: mmap.mmap) -> list[tuple[str, Any]]:
    descriptors = []
    for match in _NAME_FIRST.finditer(data):
        if match[1][0] != len(match[2]):
            continue
        end = _end(data, match.end() - 1)
        try:
            message = descriptor_pb2.FileDescriptorProto.FromString(data[match.start() : end])
        except DecodeError:
            continue
        descriptors.append((message.name, message))
    return descriptors


def _end(data: mmap.mmap, at: int) -> int:
    """Where a descriptor whose name ends at `at` ends: before the first field that is none of its own."""
    try:
        while True:
            tag, value_at = varint(data, at)
            if not 1 < tag >> 3 <= _LAST_FIELD:
                return at
            if tag & 7 == _DELIMITED:
                size, value_at = varint(data, value_at)
                if value_at + size > len(data):
                    return at
                value_at += size
            elif tag & 7 == _VARINT:
                _, value_at = varint(data, value_at)
            else:
                return at
            at = value_at
    except IndexError:
        return at


def varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The base-128 number at `at`, and where the next byte is.

    Raises:
        IndexError: the data end before the number does.
    """
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
