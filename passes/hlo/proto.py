"""Read and write HloModuleProto without jaxlib's help.

jaxlib ships no `hlo_pb2`, so the messages this package reads are described here at run time, field by
field, with the numbers of XLA's public `xla/service/hlo.proto` and `xla/xla_data.proto`. Protobuf keeps
every field that is not described, so `serialize(parse(data))` loses nothing.

The table is deliberately minimal: a field is listed only if a module of this package reads or writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

_KIND = descriptor_pb2.FieldDescriptorProto

# One line a field: name, number, type; "*" marks a repeated field. Messages have a capital, types of
# protobuf's own have none. Enumerations are read as int32.
_MESSAGES: dict[str, str] = {
    "Tile": "dimensions 1 int64*",
    "Layout": "minor_to_major 1 int64*, tiles 6 Tile*, element_size_in_bits 7 int64, memory_space 8 int64",
    "Shape": "element_type 2 int32, dimensions 3 int64*, tuple_shapes 4 Shape*, layout 5 Layout,"
    " is_dynamic_dimension 6 bool*",
    "Metadata": "op_type 1 string, op_name 2 string, source_file 3 string, source_line 4 int32,"
    " stack_frame_id 15 int32",
    "Literal": "preds 2 bool*, s32s 4 int32*, s64s 5 int64*, u32s 6 uint32*, u64s 7 uint64*",
    "Payload": "value 1 bytes, id 2 int64",
    "WindowDimension": "size 1 int64, stride 2 int64, padding_low 3 int64, padding_high 4 int64,"
    " window_dilation 5 int64, base_dilation 6 int64",
    "Window": "dimensions 1 WindowDimension*",
    "ConvolutionDimensions": "kernel_input_feature_dimension 3 int64,"
    " kernel_output_feature_dimension 4 int64, kernel_spatial_dimensions 6 int64*,"
    " output_batch_dimension 9 int64, output_feature_dimension 10 int64, output_spatial_dimensions 12 int64*,"
    " input_batch_dimension 7 int64, input_feature_dimension 8 int64, input_spatial_dimensions 11 int64*",
    "DotDimensions": "lhs_contracting_dimensions 1 int64*, rhs_contracting_dimensions 2 int64*,"
    " lhs_batch_dimensions 3 int64*, rhs_batch_dimensions 4 int64*",
    "OutputOperandAliasing": "output_shape_index 1 int64*, operand_index 2 int64,"
    " operand_shape_index 3 int64*",
    "Instruction": "name 1 string, opcode 2 string, shape 3 Shape, metadata 7 Metadata, literal 8 Literal,"
    " parameter_number 9 int64, fusion_kind 11 string, tuple_index 13 int64, dimensions 14 int64*,"
    " window 15 Window, convolution_dimension_numbers 16 ConvolutionDimensions,"
    " fft_type 31 int32, fft_length 32 int64*,"
    " custom_call_target 28 string, dot_dimension_numbers 30 DotDimensions, id 35 int64,"
    " operand_ids 36 int64*, control_predecessor_ids 37 int64*, called_computation_ids 38 int64*,"
    " backend_config 43 bytes, is_host_transfer 47 bool, feature_group_count 50 int64,"
    " comparison_direction 63 string, custom_call_has_side_effect 65 bool,"
    " frontend_attributes 68 FrontendAttributes,"
    " output_operand_aliasing 74 OutputOperandAliasing*, backend_config_payload 99 Payload",
    "ProgramShape": "parameters 1 Shape*, result 2 Shape, parameter_names 3 string*",
    "Computation": "name 1 string, instructions 2 Instruction*, program_shape 4 ProgramShape, id 5 int64,"
    " root_id 6 int64, is_fusion_computation 7 bool, execution_thread 8 string",
    "Sequence": "instruction_ids 1 int64*",
    "SequencesEntry": "key 1 int64, value 2 Sequence",
    "Schedule": "sequences 1 SequencesEntry*",
    "AliasEntry": "output_shape_index 1 int64*, parameter_number 2 int64, parameter_shape_index 3 int64*,"
    " kind 4 int32",
    "InputOutputAlias": "entries 1 AliasEntry*",
    "FileLocation": "file_name_id 1 int32, function_name_id 2 int32, line 3 int32",
    "StackFrame": "file_location_id 1 int32, parent_frame_id 2 int32",
    "StackFrameIndex": "file_names 1 string*, function_names 2 string*, file_locations 3 FileLocation*,"
    " stack_frames 4 StackFrame*",
    "MapEntry": "key 1 string, value 2 string",
    "FrontendAttributes": "map 1 MapEntry*",
    "Module": "name 1 string, entry_computation_name 2 string, computations 3 Computation*, id 5 int64,"
    " entry_computation_id 6 int64, schedule 7 Schedule, input_output_alias 8 InputOutputAlias,"
    " stack_frame_index 17 StackFrameIndex, frontend_attributes 19 FrontendAttributes,"
    " payloads 22 bytes*",
}
_PACKAGE = "coop_hlo"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="coop_hlo.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(","):
            field_name, number, kind = text.split()
            repeated = kind.endswith("*")
            kind = kind.rstrip("*")
            field = message.field.add(name=field_name, number=int(number))
            field.label = _KIND.LABEL_REPEATED if repeated else _KIND.LABEL_OPTIONAL
            if kind.islower():
                field.type = _KIND.Type.Value(f"TYPE_{kind.upper()}")
            else:
                field.type = _KIND.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    return file


def _module_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Module"))


_MODULE = _module_class()


def parse(data: bytes) -> Any:
    """Read a serialized HloModuleProto.

    Raises:
        ValueError: `data` is not a serialized message.
    """
    try:
        return _MODULE.FromString(data)
    except Exception as error:
        raise ValueError(f"expected a serialized HloModuleProto, found {len(data)} other bytes") from error


def serialize(module: Any) -> bytes:
    """The bytes of a module, fields this package does not know included."""
    data: bytes = module.SerializeToString()
    return data


def copy(message: Any) -> Any:
    """A deep copy of a message."""
    result = type(message)()
    result.CopyFrom(message)
    return result


def put(field: Any, messages: Iterable[Any]) -> None:
    """Let a repeated field hold copies of these messages, which may be among those that it holds."""
    copies = list(map(copy, messages))
    del field[:]
    field.extend(copies)
