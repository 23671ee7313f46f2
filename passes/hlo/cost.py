"""Roofline cost of the kernels of a scheduled module.

A kernel moves the bytes it really reads and writes: a fusion that only slices an operand reads the slice,
an update in place writes the update, as a scatter does (rows of an embedding's gradient took 2 us on an
H100, the whole would take 500). Dots and convolutions, alone, in fusions or as library calls, add
2 * M * N * K flops at the width of their operands; elementwise work and reductions add a flop for an element,
transcendental functions `EXPENSIVE_FLOPS`; XLA:GPU's kernels of elementwise work write so many elements in a
second at most. Loops count their body times the trip count where the module says
it, and an assumed one where it does not. Copies to and from the host run beside the kernels, in two queues at
the rates of the device's link: what counts is how long the program waits for them. Other copies that are
started go into a TPU's memory on the chip, beside the kernels, too: their bytes are counted where they are
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any
from weakref import WeakKeyDictionary

from passes.cost import (
    ASSUMED_ITERATIONS,
    EXPENSIVE_FLOPS,
    DeviceModel,
    is_unaligned,
    kernel_ns,
    kernel_pj,
)
from passes.hlo import graph
from passes.hlo.graph import HOST, VIEWS, Computation, Instruction, Module
from passes.hlo.scalar_work import TRANSCENDENTAL, scalar_ns

_FREE = VIEWS | {
    "async-done", "async-update", "copy-start", "copy-done", "partition-id", "replica-id", "after-all",
}  # fmt: skip
# They move values, or are counted as matrix flops.
_NO_ARITHMETIC = _FREE | {
    "bitcast-convert", "broadcast", "concatenate", "convolution", "copy", "custom-call", "dot",
    "dynamic-slice", "dynamic-update-slice", "fusion", "gather", "iota", "pad", "reshape", "reverse",
    "scaled-dot", "slice", "transpose",
}  # fmt: skip
_PRODUCTS = ("gemm", "matmul")
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
# What a TPU's compiler writes for a stack that a loop will fill, and for what it knows of values.
_NO_KERNELS = frozenset({"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"})


def instruction_ns(
    module: Module, computation: Computation, instruction: Instruction, device: DeviceModel
) -> int:
    """Estimated time of one run of an instruction, called computations included."""
    opcode = instruction.opcode
    if opcode in _FREE or instruction.proto.custom_call_target in _NO_KERNELS:
        return 0
    if host_transfer(module, instruction) is not None:
        return 0
    if opcode in ("call", "async-start"):
        return sum(computation_ns(module, module.computations[c], device) for c in instruction.called)
    if opcode == "conditional":
        return max(computation_ns(module, module.computations[c], device) for c in instruction.called)
    if opcode == "while":
        return sum(_loop_times_ns(module, instruction, device))
    work, nbytes = _work(module, computation, instruction)
    return kernel_ns(
        device, nbytes=nbytes, matrix_flops=work.matrix_flops, unaligned_flops=work.unaligned_flops,
        bits=work.bits, vector_flops=work.vector_flops,
        scalar_ns=scalar_ns(module, computation, instruction, device),
        elements=work.elements if instruction.proto.fusion_kind == "kLoop" else 0,
    )  # fmt: skip


def _work(module: Module, computation: Computation, instruction: Instruction) -> tuple[_Work, int]:
    """What a kernel does, and the bytes that it moves."""
    if instruction.opcode == "fusion":
        work = _fused_work(module, module.computations[instruction.called[0]])
        return work, work.written_bytes + work.read_bytes(instruction.operands)
    work = _own_work(module, computation, instruction)
    return work, work.written_bytes + sum(work.used_bytes)


def instruction_pj(
    module: Module, computation: Computation, instruction: Instruction, device: DeviceModel
) -> int:
    """Estimated energy of one run of an instruction in picojoules, called computations included.

    Of its bytes and products; of copies to and from the host only those in called computations, since plans
    count the others. 0 where the device's is unknown.
    """
    opcode = instruction.opcode
    if not device.watts or opcode in _FREE or instruction.proto.custom_call_target in _NO_KERNELS:
        return 0
    if host_transfer(module, instruction) is not None:
        return 0
    if opcode in ("call", "async-start", "conditional", "while"):
        inner = [computation_pj(module, module.computations[c], device) for c in instruction.called]
        iterations = trip_count(module, instruction) if opcode == "while" else 1
        return iterations * (max(inner) if opcode == "conditional" else sum(inner))
    work, nbytes = _work(module, computation, instruction)
    return kernel_pj(device, nbytes=nbytes, matrix_flops=work.matrix_flops, bits=work.bits)


def computation_pj(module: Module, computation: Computation, device: DeviceModel) -> int:
    """Estimated energy of one run of a computation in picojoules, copies to and from the host included."""
    if not device.watts:
        return 0
    total = 0
    for i in computation.order:
        instruction = computation.by_id[i]
        total += instruction_pj(module, computation, instruction, device)
        copied = host_transfer(module, instruction)
        if copied is not None and device.host_link is not None:
            total += round(device.host_link.picojoules_per_byte * copied[1])
    return total


def computation_ns(module: Module, computation: Computation, device: DeviceModel) -> int:
    """Estimated time of one run of a computation, waiting for the host included."""
    kernels_ns, waiting_ns = computation_times_ns(module, computation, device)
    return kernels_ns + waiting_ns


def computation_times_ns(module: Module, computation: Computation, device: DeviceModel) -> tuple[int, int]:
    """Estimated time of the kernels of one run of a computation, and of waiting for copies beside them."""
    clock = waiting = 0
    free = {True: 0, False: 0}
    arrival: dict[int, int] = {}
    for i in computation.order:
        instruction = computation.by_id[i]
        copied = host_transfer(module, instruction)
        if copied is not None and device.host_link is not None:
            to_host, nbytes = copied
            link = device.host_link
            takes_ns = link.to_host_ns(nbytes) if to_host else link.from_host_ns(nbytes)
            arrival[i] = free[to_host] = max(free[to_host], clock) + takes_ns
        elif instruction.opcode in ("copy-done", "async-done") and instruction.operands[0] in arrival:
            late = max(0, arrival[instruction.operands[0]] - clock)
            clock, waiting = clock + late, waiting + late
        elif instruction.opcode == "while":
            takes_ns, late = _loop_times_ns(module, instruction, device)
            clock, waiting = clock + takes_ns + late, waiting + late
        else:
            clock += instruction_ns(module, computation, instruction, device)
    return clock - waiting, waiting


def _loop_times_ns(module: Module, loop: Instruction, device: DeviceModel) -> tuple[int, int]:
    """Estimated time of the kernels of all iterations of a loop, and of waiting for copies beside them."""
    inner = [computation_times_ns(module, module.computations[c], device) for c in loop.called]
    iterations = trip_count(module, loop)
    return iterations * sum(kernels for kernels, _ in inner), iterations * sum(late for _, late in inner)


def host_transfer(module: Module, instruction: Instruction) -> tuple[bool, int] | None:
    """The direction of a copy between the device's memory and the host's, True to the host, and its bytes.

    Returns:
        None for everything else than the start of such a copy: of an array, of a slice that is written into
        one on the host, or of a slice that is read there.
    """
    if is_host_copy(instruction):
        there = instruction.shape.at((0,))
        return there.memory_space == HOST, there.nbytes
    if instruction.opcode != "async-start":
        return None
    inner = module.innermost(instruction)
    root = inner.by_id[inner.root]
    if root.opcode == "dynamic-update-slice" and root.shape.memory_space == HOST:
        return True, inner.by_id[root.operands[1]].shape.nbytes
    if root.opcode == "dynamic-slice" and inner.by_id[root.operands[0]].shape.memory_space == HOST:
        return False, root.shape.nbytes
    return None


def is_host_copy(instruction: Instruction) -> bool:
    """True for the start of a copy between the device's memory and the host's."""
    if instruction.opcode != "copy-start" or instruction.shape.parts is None:
        return False
    spaces = [part.memory_space for part in instruction.shape.parts[:2]]
    return (spaces[0] == HOST) != (spaces[1] == HOST)


def trip_count(module: Module, loop: Instruction) -> int:
    """How often a while runs: from its backend config or its condition `i < constant`; else as assumed."""
    config = loop.proto.backend_config
    marker = b'"known_trip_count":{"n":"'
    at = config.find(marker)
    if at >= 0:
        digits = config[at + len(marker) :].split(b'"')[0]
        if digits.isdigit():
            return int(digits)
    for c in loop.called:
        condition = module.computations[c]
        if condition.by_id[condition.root].shape.is_tuple:
            continue
        limits = [_integer(i) for i in condition.by_id.values() if i.opcode == "constant"]
        counts = [n for n in limits if n is not None and n > 0]
        reads = sum(i.opcode == "get-tuple-element" for i in condition.by_id.values())
        if len(counts) == 1 == reads:
            return counts[0]
    return ASSUMED_ITERATIONS


def _integer(constant: Instruction) -> int | None:
    literal = constant.proto.literal
    for values in (literal.s32s, literal.s64s, literal.u32s, literal.u64s):
        if len(values) == 1:
            return int(values[0])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a kernel does.

    Attributes:
        written_bytes: of its results.
        elements: of the largest result of a fused computation.
        used_bytes: of each parameter of a fused computation, or each distinct operand.
        matrix_flops, unaligned_flops, bits, vector_flops: as `passes.cost.kernel_ns` has them.
    """

    written_bytes: int
    elements: int = 0
    used_bytes: tuple[int, ...]
    matrix_flops: int
    unaligned_flops: int
    bits: int
    vector_flops: int

    def read_bytes(self, operands: tuple[int, ...]) -> int:
        """Bytes read of every distinct operand."""
        total: dict[int, int] = {}
        for operand, nbytes in zip(operands, self.used_bytes, strict=True):
            total[operand] = max(total.get(operand, 0), nbytes)
        return sum(total.values())


# A module is looked at several times, and each of its plans; what is fused stays as it is.
_WORK: WeakKeyDictionary[Computation, _Work] = WeakKeyDictionary()


def _own_work(module: Module, computation: Computation, instruction: Instruction) -> _Work:
    """Of an instruction that is a kernel of its own."""
    flops, bits = _flops(module, computation, instruction)
    return _Work(
        written_bytes=_written(computation, instruction),
        used_bytes=tuple(_read(computation, instruction)),
        matrix_flops=flops,
        unaligned_flops=_unaligned_flops(module, computation, instruction),
        bits=bits,
        vector_flops=_vector_flops(module, computation, instruction),
    )


def _fused_work(module: Module, fused: Computation) -> _Work:
    if fused not in _WORK:
        users = fused.users()
        inside = list(fused.by_id.values())
        flops = [_flops(module, fused, i) for i in inside]
        results = _results(module, fused)
        _WORK[fused] = _Work(
            written_bytes=sum(nbytes for nbytes, _ in results),
            elements=max((elements for _, elements in results), default=0),
            used_bytes=tuple(_used_bytes(module, fused, users, p) for p in fused.parameters()),
            matrix_flops=sum(f for f, _ in flops),
            unaligned_flops=sum(_unaligned_flops(module, fused, i) for i in inside),
            bits=max((b for f, b in flops if f), default=32),
            vector_flops=sum(_vector_flops(module, fused, i) for i in inside),
        )
    return _WORK[fused]


def _results(module: Module, fused: Computation) -> list[tuple[int, int]]:
    """Bytes and elements that a fusion writes of each result."""
    found = []
    for at in fused.results():
        while at.opcode in ("bitcast", "reshape"):
            at = fused.by_id[at.operands[0]]
        if at.opcode == "fusion":
            inner = _fused_work(module, module.computations[at.called[0]])
            found.append((inner.written_bytes, inner.elements))
        elif at.opcode != "parameter":
            found.append((_written(fused, at), _elements(fused, at)))
    return found


def _elements(computation: Computation, instruction: Instruction) -> int:
    """That are written of the largest part of a result."""
    made = [leaf.count for _, leaf in instruction.shape.leaves() if not leaf.is_tuple]
    if instruction.opcode in _UPDATES:
        made = [computation.by_id[o].shape.count for o in _parts(instruction)]
    return max(made, default=0)


def _unaligned_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Matrix flops of a kernel in products of matrices, rows of one of which are no whole words."""
    if instruction.opcode == "fusion":
        return _fused_work(module, module.computations[instruction.called[0]]).unaligned_flops
    target = instruction.proto.custom_call_target
    if instruction.opcode != "dot" and not any(name in target for name in _PRODUCTS):
        return 0
    operands = [computation.by_id[o].shape for o in instruction.operands[:2]]
    results = [leaf for _, leaf in instruction.shape.leaves() if not leaf.is_tuple]
    shapes = [s for s in (*operands, *results[:1]) if s.layout]
    unaligned = any(is_unaligned(s.dims[s.layout[0]], s.element_bits) for s in shapes)
    return _flops(module, computation, instruction)[0] if unaligned else 0


def _written(computation: Computation, instruction: Instruction) -> int:
    made_bytes = instruction.shape.total_nbytes
    if instruction.opcode not in _UPDATES:
        return made_bytes
    return min(made_bytes, sum(computation.by_id[o].shape.nbytes for o in _parts(instruction)))


def _parts(update: Instruction) -> tuple[int, ...]:
    """What an update in place writes: of a scatter as many last operands as it has results."""
    at = update.operands
    return at[1:2] if update.opcode == "dynamic-update-slice" else at[len(at) // 2 + 1 :]


def _read(computation: Computation, instruction: Instruction) -> list[int]:
    """Bytes read of every distinct operand."""
    if instruction.opcode in ("dynamic-slice", "gather", "slice"):
        rest = [computation.by_id[o].shape.nbytes for o in instruction.operands[1:]]
        return [instruction.shape.nbytes, *rest]
    if instruction.opcode in _UPDATES:
        read = instruction.operands[len(_parts(instruction)) :]
        return [computation.by_id[o].shape.nbytes for o in dict.fromkeys(read)]
    return [computation.by_id[o].shape.total_nbytes for o in dict.fromkeys(instruction.operands)]


def _used_bytes(
    module: Module, fused: Computation, users: dict[int, list[Instruction]], at: Instruction
) -> int:
    """Bytes of a fusion's parameter that its users look at, those in fusions inside of it included."""
    seen = 0
    for user in users[at.id]:
        if user.opcode in ("bitcast", "reshape") and user.id != fused.root:
            seen += _used_bytes(module, fused, users, user)
        elif user.opcode == "fusion":
            inner = _fused_work(module, module.computations[user.called[0]]).used_bytes
            seen += sum(n for operand, n in zip(user.operands, inner, strict=True) if operand == at.id)
        elif user.opcode in ("slice", "dynamic-slice", "gather") and user.operands[0] == at.id:
            seen += user.shape.nbytes
        elif user.opcode != "tuple" and not (user.opcode in _UPDATES and user.operands[0] == at.id):
            return at.shape.total_nbytes
    return min(seen, at.shape.total_nbytes)


def _vector_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Elementwise flops of a kernel; a reduction works on the elements of its operands."""
    if instruction.opcode == "fusion":
        return _fused_work(module, module.computations[instruction.called[0]]).vector_flops
    if instruction.opcode in _NO_ARITHMETIC:
        return 0
    shapes = [instruction.shape, *(computation.by_id[o].shape for o in instruction.operands)]
    elements = max((leaf.count for shape in shapes for _, leaf in shape.leaves()), default=0)
    return elements * (EXPENSIVE_FLOPS if instruction.opcode in TRANSCENDENTAL else 1)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
    """Matrix flops of a kernel and the width of their operands in bits."""
    if instruction.opcode == "fusion":
        work = _fused_work(module, module.computations[instruction.called[0]])
        return work.matrix_flops, work.bits
    if instruction.opcode == "custom-call":
        return _library_flops(computation, instruction)
    if instruction.opcode in ("dot", "scaled-dot"):
        left = computation.by_id[instruction.operands[0]].shape
        contracted = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
        depth = prod(left.dims[d] for d in contracted)
        return 2 * instruction.shape.count * depth, left.element_bits
    if instruction.opcode == "convolution":
        taken, kernel = (computation.by_id[o].shape for o in instruction.operands[:2])
        return _convolution(instruction, instruction.shape, kernel, taken)
    return 0, 32


def _convolution(
    instruction: Instruction, output: graph.Shape, kernel: graph.Shape, taken: graph.Shape | None = None
) -> tuple[int, int]:
    """2 * output elements * kernel window * input features of a group; `taken` is the input, where known."""
    numbers = instruction.proto.convolution_dimension_numbers
    window = 1
    for n, d in enumerate(numbers.kernel_spatial_dimensions):
        if taken is None or not _is_batch(instruction.proto, n, output, taken):
            window *= kernel.dims[d]
    features = kernel.dims[numbers.kernel_input_feature_dimension] if kernel.dims else 1
    return 2 * output.count * window * features, kernel.element_bits


def _is_batch(convolution: Any, n: int, output: graph.Shape, taken: graph.Shape) -> bool:
    """True for a spatial dimension that is one of batches, as a TPU's compiler writes the dots of attention.

    Its window is as long as its output and laid out so that each output meets one input: by a dilation and a
    stride that differ by one, or by padding an input of one.
    """
    numbers, window = convolution.convolution_dimension_numbers, convolution.window.dimensions[n]
    n_out = output.dims[numbers.output_spatial_dimensions[n]]
    n_in = taken.dims[numbers.input_spatial_dimensions[n]]
    if not 1 < window.size == n_out:
        return False
    spread = (n_in - 1) * window.base_dilation
    first = range(-window.padding_low, n_out * window.stride - window.padding_low, max(1, window.stride))
    step, dilation = max(1, window.window_dilation), max(1, window.base_dilation)
    meetings = sum(_meetings(start, window.size, step, spread, dilation) for start in first)
    return bool(meetings == n_out)


def _meetings(start: int, count: int, step: int, spread: int, dilation: int) -> int:
    """How many of `count` places, from `start` by `step`, are multiples of `dilation` from 0 to `spread`."""
    common = gcd(step, dilation)
    if start % common:
        return 0
    low, high = max(0, -(start // step)), min(count - 1, (spread - start) // step)
    period = dilation // common
    solution = -(start // common) * pow(step // common, -1, period)
    return len(range(low + (solution - low) % period, high + 1, period))


def _library_flops(computation: Computation, instruction: Instruction) -> tuple[int, int]:
    target = instruction.proto.custom_call_target
    shapes = [computation.by_id[o].shape for o in instruction.operands]
    leaves = [shape for _, shape in instruction.shape.leaves() if not shape.is_tuple]
    if not shapes or not leaves:
        return 0, 32
    if "conv" in target and "__cudnn" in target and len(shapes) > 1:
        if "BackwardFilter" in target:
            return _convolution(instruction, shapes[1], leaves[0])
        if "BackwardInput" in target:
            return _convolution(instruction, shapes[0], shapes[1])
        return _convolution(instruction, leaves[0], shapes[1])
    if any(name in target for name in _PRODUCTS) or "dot" in target.lower():
        left, right, out = shapes[0], shapes[min(1, len(shapes) - 1)], leaves[0]
        # M * K, K * N and M * N (times the batch B) give (B * M * N * K)^2 = left * right * out * B.
        batch = prod(out.dims[:-2])
        return 2 * round((left.count * right.count * out.count / max(batch, 1)) ** 0.5), left.element_bits
    return 0, 32
