"""What a CPU executable's thunks read and write of its temporaries.

A thunk is one kernel launch, copy, library call, loop or branch of a compiled program; its message names
every byte range that it uses as a slice (allocation, offset, size). Only what this file knows is
accepted: a kind of thunk, a field, or a slice that no rule here accounts for refuses the whole program.
The roles follow `buffer_uses` of XLA's thunks (public source, `xla/backends/cpu/runtime`).
"""

from __future__ import annotations

from typing import Any

from passes.pinning.mentions import Mentions, ThunkError, all_slices, allow_only
from passes.pinning.slices import Branch, Call, Loop, Node, Run

ALIGNMENT = 64
# Kind of thunk: its rule (see `Mentions.access_by`).
_KINDS = {
    "kernel_thunk": "r arguments_buffers.slice, w results_buffers.slice"
    " | kernel_name num_workgroups invariant_arguments min_alignment",
    "ynn_fusion_thunk": "r arguments_shapes.slice, w results_shapes.slice | options instruction_id",
    "dot_thunk": "r lhs_buffer_shape.slice, r rhs_buffer_shape.slice, w out_buffer_shape.slice"
    " | dot_dimensions",
    "convolution_thunk": "r input_buffer_shape.slice, r kernel_buffer_shape.slice,"
    " w output_buffer_shape.slice | dimension_numbers window feature_group_count options",
    "copy_thunk": "r src_buffer_shape.slice, w dst_buffer_shape.slice |",
    "fft_thunk": "r input_buffer_shape.slice, w output_buffer_shape.slice"
    " | is_multi_thread_eigen fft_type fft_length",
    "sort_thunk": "rw inputs_shapes.slice | dimension is_stable direction comparator_name",
    "top_k_thunk": "r values_buffer, w output_buffer, w indices_buffer | batch_size input_size k",
    "custom_call_thunk": "r op_buffers.arguments_shapes.slice, w op_buffers.results_shapes.slice"
    " | api_version target_name backend_config",
    "collective_thunk": "r op_buffers.source_shapes_buffer_slices.slice,"
    " w op_buffers.destination_shapes_buffer_slices.slice"
    " | op_params op_resources all_gather_thunk all_reduce_thunk all_to_all_thunk reduce_scatter_thunk"
    " collective_permute_thunk",
    "partition_id_thunk": "w logical_id_buffer |",
    "replica_id_thunk": "w logical_id_buffer |",
    "rng_seed_thunk": "w dest_buffer |",
    "rng_get_and_update_state_thunk": "rw state_buffer | delta",
    "xnn_fusion_thunk": "r xnn_dot_thunk.lhs_buffer_shape.slice, r xnn_dot_thunk.rhs_buffer_shape.slice,"
    " w xnn_dot_thunk.out_buffer_shape.slice, r xnn_convolution_thunk.input_buffer_shape.slice,"
    " r xnn_convolution_thunk.kernel_buffer_shape.slice, w xnn_convolution_thunk.output_buffer_shape.slice,"
    " r xnn_fusion_thunk.arguments_shapes.slice, w xnn_fusion_thunk.results_shapes.slice | options",
}
_NESTED = {
    "call_thunk": frozenset({"called_sequence"}),
    "conditional_thunk": frozenset({"branch_sequences", "branch_index_buffer"}),
    "while_thunk": frozenset({"cond_sequence", "body_sequence", "trip_count", "cond_buffer"}),
}


class Thunks(Mentions):
    """The thunks of a CPU executable, and the slices of its temporaries.

    Attributes:
        program: what happens to the slices.

    Raises:
        ThunkError: see there.
    """

    def __init__(self, sequence: Any, temp_allocation: int, nbytes: int) -> None:
        super().__init__(temp_allocation)
        body = self._sequence(sequence)
        mentioned = sum(1 for _ in all_slices(sequence))
        self.program = self.program_of(body, nbytes, ALIGNMENT, mentioned)

    def _sequence(self, sequence: Any) -> tuple[Node, ...]:
        allow_only(sequence, {"thunks", "thunk_resources"})
        return tuple(self._thunk(t) for t in sequence.thunks)

    def _thunk(self, thunk: Any) -> Node:
        kind = thunk.WhichOneof("impl")
        name = thunk.info.op_name
        allow_only(thunk, {"kind", "info", kind})
        impl: Any = getattr(thunk, kind) if kind else None
        if kind in _KINDS:
            return Run(name=name, accesses=self.access_by(_KINDS[kind], name, impl))
        if kind not in _NESTED:
            raise ThunkError(f"{name} is a thunk of kind {thunk.kind!r}, which is not known")
        allow_only(impl, _NESTED[kind])
        if kind == "call_thunk":
            return Call(name=name, body=self._sequence(impl.called_sequence))
        if kind == "conditional_thunk":
            index = self.access(name, impl.branch_index_buffer, "r")
            return Branch(name=name, index=index, branches=tuple(map(self._sequence, impl.branch_sequences)))
        return Loop(
            name=name,
            test=self._sequence(impl.cond_sequence),
            flag=self.access(name, impl.cond_buffer, "r"),
            body=self._sequence(impl.body_sequence),
            test_runs=not impl.trip_count.contains_value,
        )
