"""What a GPU executable's thunks read and write of its temporaries.

As `passes.pinning.thunks`, for `xla.gpu` (public source, `xla/backends/gpu/runtime`): what is not on a list
here refuses the whole program. What the messages leave open is taken the safe way, which is that a thunk
reads what it writes:

- a kernel's list of written arguments tells outputs from inputs only where its arguments are, in order and
  size, the operands and results of its instruction;
- an output that was filled beforehand, by the last memset or by an earlier thunk of the same instruction, of
  any kind, may be worked on in place: a sum is accumulated, what was copied there is sorted.

What an asynchronous region uses is in use until its `done`, which is taken to read it again. A kernel that
starts before the one ahead of it has ended (`use_pdl`) waits before it reads what that one writes and before
it writes; who writes what is as it was, so that stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from passes.hlo.graph import Instruction, Module
from passes.pinning.mentions import Mentions, ThunkError, all_slices, allow_only, messages_at
from passes.pinning.slices import Access, Branch, Call, Loop, Node, Run

ALIGNMENT = 256
_INFO = {"profile_annotation", "thunk_id"}
_KERNEL = "zeroed_output_buffer_indices tma_metadata use_pdl written"
# Kernels: where their arguments are; then their other fields, after a bar.
_KERNELS = {
    "kernel_thunk": f"args | args_shape kernel_name launch_dimensions cluster_dim shmem_bytes {_KERNEL}",
    "custom_kernel_thunk": f"args.slice | custom_kernel {_KERNEL}",
}
_FILLS = {"memzero_thunk": "w dest_buffer.slice |", "memset32bit_value_thunk": "w dest_buffer | value"}
_COLLECTIVE = "r buffers.source_buffer.slice, w buffers.destination_buffer.slice | collective_config"
# Other kinds of thunk: their rules (see `Mentions.access_by`).
_KINDS = {
    "all_gather_thunk": _COLLECTIVE,
    "all_reduce_thunk": f"{_COLLECTIVE} reduction_kind",
    "all_to_all_thunk": f"{_COLLECTIVE} has_split_dimension",
    "collective_permute_thunk": f"{_COLLECTIVE} source_target_pairs",
    "reduce_scatter_thunk": f"{_COLLECTIVE} reduction_kind",
    "device_to_device_copy_thunk": "r copy_thunk.source_buffer.slice,"
    " w copy_thunk.destination_buffer.slice |",
    "gemm_thunk": "r lhs_buffer, r rhs_buffer, rw output_buffer, w workspace | gemm_config deterministic",
    "cublas_lt_matmul_thunk": "r a.slice, r b.slice, r c.slice, r bias.slice, r a_scale.slice,"
    " r b_scale.slice, r c_scale.slice, r d_scale.slice, r group_sizes.slice, rw aux.slice, w d.slice,"
    " w d_amax.slice, w workspace.slice | gemm_config grouped_gemm_config epilogue algorithm_idx"
    " canonical_hlo autotune_workspace_size",
    "convolution_thunk": "r operand_buffers.slice, w result_buffers.slice, w scratch_buffer"
    " | conv_descriptor",
    "fft_thunk": "r input_buffer, w output_buffer | fft_type fft_length input_shape output_shape",
    "triangular_solve_thunk": "r a_buffer.slice, rw b_buffer.slice, w temp_buffer.slice | options",
    "custom_call_thunk": "r operands.shaped_slice.slice, w results.shaped_slice.slice | target_name opaque"
    " api_version attributes called_computation execution_state use_pdl",
    "replica_id_thunk": "w dest_buffer |",
    "partition_id_thunk": "w dest_buffer |",
}
_NESTED = {
    "sequential_thunk": frozenset({"thunks"}),
    "conditional_thunk": frozenset({"branch_index_buffer", "branch_thunks"}),
    "while_thunk": frozenset(
        {"condition_result_buffer_index", "condition_thunk_sequence", "body_thunk_sequence", "trip_count"}
    ),
}
_START, _DONE, _SLICING = "async_start_thunk", "async_done_thunk", "dynamic_slice_fusion_thunk"
_EMBEDDED = "embedded_thunks"


class GpuThunks(Mentions):
    """The thunks of a GPU executable, and the slices of its temporaries.

    Attributes:
        program: what happens to the slices.

    Raises:
        ThunkError: they hold something that may not be moved.
    """

    def __init__(self, thunks: Sequence[Any], temp_allocation: int, nbytes: int, module: Module) -> None:
        super().__init__(temp_allocation)
        self.instructions = {i.name: (i, c) for c in module.computations.values() for i in c.by_id.values()}
        self.filled: list[Any] = []  # by memsets, and not used since
        self.written: dict[str, list[Any]] = {}  # by thunks of a name
        body = self._sequence(thunks)
        # The slices of embedded thunks are of allocations that exist only within their fusion.
        mentioned = sum(1 for t in thunks for _ in all_slices(t, outside=_EMBEDDED))
        self.program = self.program_of(body, nbytes, ALIGNMENT, mentioned)

    def _sequence(self, thunks: Sequence[Any]) -> tuple[Node, ...]:
        held: dict[int, tuple[Access, ...]] = {}
        nodes = tuple(self._thunk(t, held) for t in thunks)
        if held:
            raise ThunkError(f"{len(held)} asynchronous regions are not ended where they were started")
        return nodes

    def _thunk(self, thunk: Any, held: dict[int, tuple[Access, ...]]) -> Node:
        """What one thunk does; `held` has what the asynchronous regions use that are not done."""
        kind = thunk.WhichOneof("impl")
        allow_only(thunk, {"thunk_info", kind})
        allow_only(thunk.thunk_info, _INFO)
        name = thunk.thunk_info.profile_annotation
        impl: Any = getattr(thunk, kind) if kind else None
        if kind in _KERNELS:
            return self._run(name, self._kernel(name, kind, impl))
        if kind in _KINDS:
            return self._run(name, self.access_by(_KINDS[kind], name, impl))
        if kind in _FILLS:
            accesses = self.access_by(_FILLS[kind], name, impl)
            self.filled += [self.slices[a.slice] for a in accesses]
            return Run(name=name, accesses=accesses)
        if kind == _SLICING:
            return self._run(name, self._slicing(name, impl))
        if kind == _START:
            return self._start(name, impl, held)
        if kind == _DONE:
            return self._done(name, impl, held)
        if kind not in _NESTED:
            raise ThunkError(f"{name} is a {kind}, which is not known")
        allow_only(impl, _NESTED[kind])
        return self._nested(name, kind, impl)

    def _run(self, name: str, accesses: tuple[Access, ...]) -> Run:
        """A thunk that also reads what it writes where that was filled for it."""
        of_name = self.written.setdefault(name, [])
        before = [*self.filled, *of_name]
        used = [self.slices[a.slice] for a in accesses]
        self.filled = [s for s in self.filled if not any(_overlap(s, other) for other in used)]
        of_name += [s for s, a in zip(used, accesses, strict=True) if a.writes]
        return Run(
            name=name,
            accesses=tuple(
                replace(a, reads=a.reads or any(_overlap(s, other) for other in before)) if a.writes else a
                for s, a in zip(used, accesses, strict=True)
            ),
        )

    def _nested(self, name: str, kind: str, impl: Any) -> Node:
        if kind == "sequential_thunk":
            return Call(name=name, body=self._sequence(impl.thunks))
        if kind == "conditional_thunk":
            index = self._only_slice(name, impl.branch_index_buffer)
            branches = tuple(self._sequence(branch.thunks) for branch in impl.branch_thunks)
            return Branch(name=name, index=index, branches=branches)
        return Loop(
            name=name,
            test=self._sequence(impl.condition_thunk_sequence.thunks),
            flag=self._only_slice(name, impl.condition_result_buffer_index),
            body=self._sequence(impl.body_thunk_sequence.thunks),
            test_runs=not impl.HasField("trip_count"),
        )

    def _only_slice(self, name: str, message: Any) -> tuple[Access, ...]:
        """The slice that a condition is read from, with or without a shape around it."""
        return tuple(a for s in all_slices(message) for a in self.access(name, s, "r"))

    def _kernel(self, name: str, kind: str, impl: Any) -> tuple[Access, ...]:
        path, _, others = _KERNELS[kind].partition("|")
        path = path.strip()
        allow_only(impl, {path.split(".")[0], *others.split()})
        arguments = list(messages_at(impl, path.split(".")))
        if len(arguments) != len(impl.written):
            raise ThunkError(
                f"{name} has {len(arguments)} arguments and {len(impl.written)} marks of writing"
            )
        inputs = self._inputs(name, [s.size for s in arguments])
        accesses: list[Access] = []
        for n, (message, written) in enumerate(zip(arguments, impl.written, strict=True)):
            output = inputs is not None and n >= inputs
            accesses += self.access(name, message, "r" if not written else "w" if output else "rw")
        return tuple(accesses)

    def _inputs(self, name: str, sizes: list[int]) -> int | None:
        """How many of a kernel's arguments are operands; None if they are not operands, then results."""
        if name not in self.instructions:
            return None
        instruction, computation = self.instructions[name]
        operands = [n for operand in computation.operands(instruction) for n in _array_sizes(operand)]
        known = operands + _array_sizes(instruction)
        return len(operands) if known == sizes else None

    def _slicing(self, name: str, impl: Any) -> tuple[Access, ...]:
        """A fusion with slices whose places are computed: a result keeps what is around its slice."""
        known = {"parameters", "results", "parameter_buffers", "result_buffers", "slice_allocations"}
        allow_only(impl, known | {_EMBEDDED, "verify_offsets"})
        if len(impl.results) != len(impl.result_buffers):
            raise ThunkError(f"{name} has {len(impl.results)} results in {len(impl.result_buffers)} buffers")
        own = {a.index for a in impl.slice_allocations}
        if not own.issuperset(s.buffer_allocation_index for s in all_slices(getattr(impl, _EMBEDDED))):
            raise ThunkError(f"{name} has embedded thunks that use more than its slices")
        by_slice = [self.access(name, s, "r") for s in impl.parameter_buffers]
        for result, buffer in zip(impl.results, impl.result_buffers, strict=True):
            by_slice.append(self.access(name, buffer, "rw" if result.update_offsets else "w"))
        return tuple(access for accesses in by_slice for access in accesses)

    def _start(self, name: str, impl: Any, held: dict[int, tuple[Access, ...]]) -> Node:
        allow_only(impl, {"async_execution_id", "thunks", "computation_stream_id", "communication_stream_id"})
        first = len(self.slices)
        body = self._sequence(impl.thunks.thunks)
        accessed = range(first, len(self.slices))
        held[impl.async_execution_id] = tuple(Access(slice=n, reads=True, writes=False) for n in accessed)
        return Call(name=name, body=body)

    def _done(self, name: str, impl: Any, held: dict[int, tuple[Access, ...]]) -> Node:
        allow_only(impl, {"async_execution_id"})
        if impl.async_execution_id not in held:
            raise ThunkError(f"{name} ends an asynchronous region that was not started here")
        return Run(name=name, accesses=held.pop(impl.async_execution_id))


def _array_sizes(instruction: Instruction) -> list[int]:
    """Bytes of each array that an instruction gives, without tables of pointers."""
    return [shape.nbytes for _, shape in instruction.shape.leaves() if not shape.is_tuple]


def _overlap(first: Any, second: Any) -> bool:
    """True if two slices of the temporaries share bytes."""
    return bool(first.offset < second.offset + second.size and second.offset < first.offset + first.size)
