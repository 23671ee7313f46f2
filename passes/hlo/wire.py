"""Protobuf messages as bytes: read and replace single fields, and leave every other byte as it is."""

from __future__ import annotations

from collections.abc import Iterator

from passes.hlo.schema import varint

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """(number, wire type, where the field starts, where its contents start, where both end) of each field.

    Raises:
        ValueError: the bytes are no message.
    """
    at = 0
    while at < len(data):
        start = at
        try:
            tag, at = varint(data, at)
            kind, inner = tag & 7, at
            if kind == _VARINT:
                _, at = varint(data, at)
            elif kind == _DELIMITED:
                size, inner = varint(data, at)
                at = inner + size
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"wire type {kind} at byte {start}")
        except IndexError as error:
            raise ValueError(f"a field that starts at byte {start} has no end") from error
        if at > len(data):
            raise ValueError(f"a field that starts at byte {start} ends after byte {len(data)}")
        yield tag >> 3, kind, start, inner, at


def contents(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, contents) of each delimited field; others are skipped.

    Raises:
        ValueError: the bytes are no message.
    """
    for number, kind, _, inner, end in fields(data):
        if kind == _DELIMITED:
            yield number, data[inner:end]


def only_field(data: bytes, number: int) -> bytes:
    """The contents of the one delimited field of that number.

    Raises:
        ValueError: there is not exactly one.
    """
    _, inner, end = _place(data, number)
    return data[inner:end]


def replace_field(data: bytes, number: int, contents: bytes) -> bytes:
    """`data` with other contents in the one delimited field of that number."""
    start, _, end = _place(data, number)
    return data[:start] + encode(number << 3 | _DELIMITED) + encode(len(contents)) + contents + data[end:]


def encode(value: int) -> bytes:
    """A number in base 128."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    written.append(value)
    return bytes(written)


def _place(data: bytes, number: int) -> tuple[int, int, int]:
    places = [(at, inner, end) for n, k, at, inner, end in fields(data) if (n, k) == (number, _DELIMITED)]
    if len(places) != 1:
        raise ValueError(f"field {number} occurs {len(places)} times, not once")
    return places[0]
