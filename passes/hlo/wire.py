"""Protobuf messages as bytes: read and replace single fields, and leave every other byte as it is."""

from __future__ import annotations

from collections.abc import Iterator

from passes.hlo.schema import varint

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, where the field starts, where it ends) of each field.

    Raises:
        ValueError: the bytes are no message.
    """
    at = 0
    while at < len(data):
        start = at
        try:
            tag, at = varint(data, at)
            kind = tag & 7
            if kind == _VARINT:
                _, at = varint(data, at)
            elif kind == _DELIMITED:
                size, at = varint(data, at)
                at += size
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"wire type {kind} at byte {start}")
        except IndexError as error:
            raise ValueError(f"a field that starts at byte {start} has no end") from error
        if at > len(data):
            raise ValueError(f"a field that starts at byte {start} ends after byte {len(data)}")
        yield tag >> 3, kind, start, at


def contents(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, contents) of each delimited field; others are skipped.

    Raises:
        ValueError: the bytes are no message.
    """
    for number, kind, start, end in fields(data):
        if kind == _DELIMITED:
            yield number, _contents(data, start, end)


def only_field(data: bytes, number: int) -> bytes:
    """The contents of the one delimited field of that number.

    Raises:
        ValueError: there is not exactly one.
    """
    return _contents(data, *_place(data, number))


def replace_field(data: bytes, number: int, contents: bytes) -> bytes:
    """`data` with other contents in the one delimited field of that number."""
    start, end = _place(data, number)
    return data[:start] + encode(number << 3 | _DELIMITED) + encode(len(contents)) + contents + data[end:]


def encode(value: int) -> bytes:
    """A number in base 128."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    written.append(value)
    return bytes(written)


def _contents(data: bytes, start: int, end: int) -> bytes:
    _, at = varint(data, start)
    size, at = varint(data, at)
    assert at + size == end, "a delimited field ends with its contents"
    return data[at:end]


def _place(data: bytes, number: int) -> tuple[int, int]:
    places = [(start, end) for n, kind, start, end in fields(data) if n == number and kind == _DELIMITED]
    if len(places) != 1:
        raise ValueError(f"field {number} occurs {len(places)} times, not once")
    return places[0]
