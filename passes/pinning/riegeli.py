"""Riegeli/records, the container that XLA writes large executables in.

A file is a row of chunks, which hold records; every 64 KiB a block header interrupts whatever is there
(public: google/riegeli, doc/riegeli_records_file_format.md). What is read is simple chunks, stored or
compressed by snappy (XLA writes no others here), without checking hashes: the bytes come from the same
process. What is written is one simple chunk, stored, with its hashes.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.hlo.schema import varint
from passes.hlo.wire import encode
from passes.pinning import snappy
from passes.pinning.highway import hash64

_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
_KEY = (0x2F696C6567656952, 0x0A7364726F636572) * 2  # "Riegeli/records\n", twice
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_USABLE = _BLOCK - _BLOCK_HEADER
_SIMPLE, _SIGNATURE_KIND, _WITHOUT_RECORDS = ord("r"), ord("s"), frozenset(b"smp")
_STORED, _SNAPPY = 0, ord("s")


def is_riegeli(data: bytes) -> bool:
    """True if `data` starts as such a file does."""
    return data.startswith(_SIGNATURE)


def records(data: bytes) -> list[bytes]:
    """The records of a file.

    Raises:
        ValueError: the file is damaged, or holds chunks of another kind.
    """
    return [record for chunk in _chunks(data) for record in chunk]


def write(records: list[bytes]) -> bytes:
    """A file of these records."""
    sizes = b"".join(encode(len(record)) for record in records)
    values = b"".join(records)
    contents = bytes([_STORED]) + encode(len(sizes)) + sizes + values
    file = bytearray()
    _append(file, _chunk(_SIGNATURE_KIND, b"", count=0, decoded=0))
    _append(file, _chunk(_SIMPLE, contents, count=len(records), decoded=len(values)))
    return bytes(file)


def _chunk(kind: int, contents: bytes, *, count: int, decoded: int) -> bytes:
    """A chunk with its header, without what interrupts it."""
    numbers = (len(contents), hash64(contents, _KEY), kind | count << 8, decoded)
    return _hashed(b"".join(n.to_bytes(8, "little") for n in numbers)) + contents


def _append(file: bytearray, chunk: bytes) -> None:
    """Append a chunk, which is at least as many bytes as it has records, so that it needs no padding."""
    begin = len(file)
    blocks = (len(chunk) + (begin + _USABLE - 1) % _BLOCK) // _USABLE
    end = begin + len(chunk) + blocks * _BLOCK_HEADER
    written = 0
    while len(file) < end:
        if len(file) % _BLOCK == 0:
            distances = (len(file) - begin, end - len(file))
            file += _hashed(b"".join(n.to_bytes(8, "little") for n in distances))
        step = min(len(chunk) - written, _BLOCK - len(file) % _BLOCK)
        file += chunk[written : written + step]
        written += step


def _hashed(data: bytes) -> bytes:
    """A header that starts with the hash of the rest."""
    return hash64(data, _KEY).to_bytes(8, "little") + data


def _chunks(data: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at < len(data):
        header, end = _read(data, at, _CHUNK_HEADER)
        size, count, decoded = (
            int.from_bytes(header[a:b], "little") for a, b in ((8, 16), (25, 32), (32, 40))
        )
        kind = header[24]
        contents, end = _read(data, end, size)
        if kind == _SIMPLE:
            yield _simple(contents, count, decoded)
        elif kind not in _WITHOUT_RECORDS:
            raise ValueError(f"a chunk of kind {chr(kind)!r}, which is not known")
        at = max(end, _chunk_boundary(at + count))


def _read(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """`size` bytes from `at` on without the block headers in between, and where they end."""
    contents = bytearray()
    while len(contents) < size:
        if at % _BLOCK == 0:
            at += _BLOCK_HEADER
        step = min(size - len(contents), _BLOCK - at % _BLOCK)
        if at + step > len(data):
            raise ValueError(f"the file ends at byte {len(data)}, within a chunk")
        contents += data[at : at + step]
        at += step
    return bytes(contents), at


def _chunk_boundary(at: int) -> int:
    """The first place from `at` on where a chunk may end: not within or right after a block header."""
    remaining = -at % _BLOCK
    return at + max(0, remaining - (_USABLE - 1))


def _simple(contents: bytes, count: int, decoded: int) -> list[bytes]:
    """The records of a simple chunk: their sizes, then their bytes, each compressed by itself."""
    try:
        compression = contents[0]
        size, at = varint(contents, 1)
        sizes = _decompressed(contents[at : at + size], compression)
        values = _decompressed(contents[at + size :], compression)
        records, place, start = [], 0, 0
        for _ in range(count):
            nbytes, place = varint(sizes, place)
            records.append(values[start : start + nbytes])
            start += nbytes
    except IndexError as error:
        raise ValueError("a chunk ends within a number") from error
    if start != len(values) or start != decoded:
        raise ValueError(f"a chunk of {decoded} bytes holds {len(values)}, its records {start}")
    return records


def _decompressed(data: bytes, compression: int) -> bytes:
    if compression == _STORED:
        return data
    if compression != _SNAPPY:
        raise ValueError(f"compression {chr(compression)!r}, which is not known")
    size, at = varint(data, 0)
    contents = snappy.decompress(data[at:])
    if len(contents) != size:
        raise ValueError(f"a block of {size} bytes holds {len(contents)}")
    return contents
