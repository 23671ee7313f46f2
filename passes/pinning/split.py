"""Messages that XLA writes in parts, because one protobuf message holds 2 GiB at most.

The parts are the records of a Riegeli file. The first one, the manifest, says for each of the others whether
it is merged into the message or is one field's contents (public source: `xla/util/split_proto`). A message
that is no such file is read as well, as XLA does; what is written is a file with one part.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from passes.hlo.schema import Schema
from passes.pinning import riegeli

_MOST_BYTES = 2**31 - 1


def read_message(data: bytes, kind: Any, schema: Schema) -> Any:
    """The message of class `kind` in `data`, in parts or whole.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        if not riegeli.is_riegeli(data):
            return kind.FromString(data)
        head, *parts = riegeli.records(data)
        manifest = _manifest(schema).FromString(head)
        message = kind()
        if manifest.result_proto_type != message.DESCRIPTOR.full_name:
            raise ValueError(
                f"{manifest.result_proto_type} where {message.DESCRIPTOR.full_name} was expected"
            )
        for record, part in zip(manifest.records, parts, strict=True):
            if record.HasField("field_override_record"):
                _override(message, record.field_override_record, part)
            else:
                message.MergeFromString(part)
        return message
    except DecodeError as error:
        raise ValueError(f"the executable cannot be read: {error}") from error


def write_message(message: Any, schema: Schema) -> bytes:
    """A file that holds `message` in one part.

    Raises:
        ValueError: it is too large for that.
    """
    size = message.ByteSize()
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes must be written in parts, which is not supported")
    manifest = _manifest(schema)(result_proto_type=message.DESCRIPTOR.full_name)
    manifest.records.add().proto_merge_record.SetInParent()
    parts = (manifest, message)
    return riegeli.write([part.SerializeToString(deterministic=True) for part in parts])


def _manifest(schema: Schema) -> Any:
    return schema.message("xla/util/split_proto/split_proto.proto", "xla.SplitProtoManifest")


def _override(message: Any, record: Any, part: bytes) -> None:
    """Make `part` the contents of the field that `record` names."""
    if len(record.field_path) != 1 or record.field_path[0].WhichOneof("index") is not None:
        raise ValueError("a part belongs to a field of an inner message, which is not supported")
    field = message.DESCRIPTOR.fields_by_number[record.field_path[0].field_number]
    setattr(message, field.name, part.decode() if field.type == field.TYPE_STRING else part)
