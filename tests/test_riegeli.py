"""The container of GPU executables: hashes, compression, blocks, and messages in parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_jax import serialized
from passes.hlo.schema import schema
from passes.pinning import riegeli, snappy
from passes.pinning.highway import hash64
from passes.pinning.split import read_message, write_message

KEY = (0x0706050403020100, 0x0F0E0D0C0B0A0908, 0x1716151413121110, 0x1F1E1D1C1B1A1918)
# Of the bytes 0, 1, 2, ... under that key, as the authors of the hash published them.
HASHES = {0: 0x907A56DE22C26E53, 1: 0x7EAB43AAC7CDDD78, 2: 0xB8D0569AB0B53D62, 3: 0x5C6BEFAB8A463D80}
# The first 64 bytes of every file, from the format's description.
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000"
)


@pytest.mark.parametrize("size", HASHES)
def test_published_hashes(size: int) -> None:
    assert hash64(bytes(range(size)), KEY) == HASHES[size]


def test_the_signature_is_the_published_one() -> None:
    file = riegeli.write([b"one", b""])
    assert file.startswith(SIGNATURE)
    assert riegeli.is_riegeli(file)
    assert not riegeli.is_riegeli(b"\n\x03one")
    assert riegeli.records(file) == [b"one", b""]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 80_000), max_size=2), edge=st.integers(65_400, 65_560))
def test_records_survive_the_file(sizes: list[int], edge: int) -> None:
    """Whatever block headers fall into, and at the block's very end."""
    found = [bytes([n + 1]) * size for n, size in enumerate([*sizes, edge])]
    assert riegeli.records(riegeli.write(found)) == found


def test_damaged_files_are_refused() -> None:
    file = riegeli.write([b"record" * 20])
    with pytest.raises(ValueError, match="within a chunk"):
        riegeli.records(file[:-1])
    kind = bytearray(file)
    kind[64 + 24] = ord("t")
    with pytest.raises(ValueError, match="a chunk of kind 't'"):
        riegeli.records(bytes(kind))
    compression = bytearray(file)
    compression[64 + 40] = ord("z")
    with pytest.raises(ValueError, match="compression 'z'"):
        riegeli.records(bytes(compression))


@pytest.mark.parametrize(
    ("block", "contents"),
    [
        (b"\x00", b""),
        (b"\x03\x08abc", b"abc"),
        (b"\x46\xf0\x45" + bytes(70), bytes(70)),  # a literal whose length has a byte of its own
        (b"\x09\x08abc\x09\x03", b"abcabcabc"),  # 6 bytes from 3 back, short form
        (b"\x07\x08abc\x0e\x02\x00", b"abcbcbc"),  # 4 bytes from 2 back, the pattern repeats
        (b"\x05\x08abc\x07\x03\x00\x00\x00", b"abcab"),  # 2 bytes from 3 back, long form
    ],
)
def test_snappy_elements(block: bytes, contents: bytes) -> None:
    assert snappy.decompress(block) == contents


@pytest.mark.parametrize("block", [b"", b"\x05\x08abc", b"\x03\x08ab", b"\x04\x00a\x09\x05", b"\x03\xf4"])
def test_damaged_snappy_is_refused(block: bytes) -> None:
    with pytest.raises(ValueError, match="snappy"):
        snappy.decompress(block)


def test_messages_in_parts_and_whole() -> None:
    library = schema(serialized.proto_library("cpu"))
    kind = library.message("xla/service/hlo.proto", "xla.HloModuleProto")
    message = kind(name="module", entry_computation_id=7)
    file = write_message(message, library)
    assert read_message(file, kind, library) == message
    assert read_message(message.SerializeToString(), kind, library) == message
    manifest = library.message("xla/util/split_proto/split_proto.proto", "xla.SplitProtoManifest")
    head = manifest(result_proto_type="xla.HloModuleProto")
    head.records.add().field_override_record.field_path.add().field_number = 1
    head.records.add().proto_merge_record.SetInParent()
    rest = kind(entry_computation_id=7).SerializeToString()
    parts = riegeli.write([head.SerializeToString(), b"module", rest])
    assert read_message(parts, kind, library) == message
    other = library.message("xla/service/hlo.proto", "xla.HloProto")
    with pytest.raises(ValueError, match=r"HloModuleProto where xla\.HloProto was"):
        read_message(file, other, library)
