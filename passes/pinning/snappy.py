"""Snappy's block format, read only.

A block is the size of its contents in base 128, then elements: bytes as they are, or copies of what came
before. The low two bits of an element's first byte say which (public: google/snappy, format_description.txt).
"""

from __future__ import annotations

from passes.hlo.schema import varint

_LITERAL, _COPY_1, _COPY_2 = 0, 1, 2
_SHORT_LITERAL = 60


def decompress(data: bytes) -> bytes:
    """The contents of a block.

    Raises:
        ValueError: the block is damaged.
    """
    try:
        size, at = varint(data, 0)
        contents = bytearray()
        while at < len(data):
            element = _literal if data[at] & 3 == _LITERAL else _copy
            at = element(data, at, contents)
    except IndexError as error:
        raise ValueError("a snappy block ends within an element") from error
    if len(contents) != size:
        raise ValueError(f"a snappy block of {size} bytes holds {len(contents)}")
    return bytes(contents)


def _literal(data: bytes, at: int, contents: bytearray) -> int:
    """Append the literal at `at`; where the next element starts."""
    count, at = data[at] >> 2, at + 1
    if count >= _SHORT_LITERAL:
        width = count - _SHORT_LITERAL + 1
        count, at = int.from_bytes(data[at : at + width], "little"), at + width
    end = at + count + 1
    if end > len(data):
        raise IndexError(end)
    contents += data[at:end]
    return end


def _copy(data: bytes, at: int, contents: bytearray) -> int:
    """Append the copy at `at`; where the next element starts."""
    tag = data[at]
    if tag & 3 == _COPY_1:
        count, distance, at = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at + 1], at + 2
    else:
        width = 2 if tag & 3 == _COPY_2 else 4
        count, distance = (tag >> 2) + 1, int.from_bytes(data[at + 1 : at + 1 + width], "little")
        at += 1 + width
    start = len(contents) - distance
    if not 0 <= start < len(contents):
        raise ValueError(f"a snappy copy from {distance} bytes back at byte {len(contents)}")
    if count <= distance:
        contents += contents[start : start + count]
    else:
        # The copy reads what it has just written: a pattern of `distance` bytes, repeated.
        pattern = bytes(contents[start:])
        contents += (pattern * (count // distance + 1))[:count]
    return at
