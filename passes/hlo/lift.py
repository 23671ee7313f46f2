"""Lift a scheduled computation to the IR: its kernels in schedule order, its arrays as buffers.

It is the entry of a module, or the body of one of its loops. Views are not buffers. Storage that exists for
the whole run has zero bytes: arguments, results, constants, temporaries that XLA keeps inside results, and of
a body all that it shares with the world outside, such as what it carries. Called computations are one op each
with their inner peak as workspace. An op that overwrites storage runs once; an op that reads storage which is
overwritten later gets that op as its deadline, so that no recompute reads what is no longer there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from passes.cost import DeviceModel
from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.cost import instruction_ns, instruction_pj
from passes.hlo.dataflow import Value
from passes.hlo.graph import VIEWS, Computation, Instruction
from passes.hlo.heap import HeapPrediction, predict_assigned
from passes.hlo.pages import pageable_values
from passes.hlo.purity import Purity
from passes.ir import Buffer, BufferId, Op, OpId, Program


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiftedModule:
    """A module and the program it was lifted to.

    Attributes:
        module: the view of the message.
        scope: the computation that was lifted.
        platform: see `passes.backend`.
        program: its ops in schedule order.
        prediction: what XLA allocates for the module as it is.
        instructions: op id -> instruction id in the scope.
        values: buffer id -> value id.
        assigner: the replayed buffer assignment of the module.
        overwriters: op id -> the later ops that overwrite some of what it reads; the first is its deadline.
    """

    module: graph.Module
    scope: Computation
    platform: str
    program: Program
    prediction: HeapPrediction
    instructions: tuple[int, ...]
    values: tuple[int, ...]
    assigner: Assigner
    overwriters: tuple[tuple[OpId, ...], ...]

    def buffers_of(self, values: Collection[int]) -> frozenset[BufferId]:
        """The buffers of values that can be sent to the host."""
        pairs = zip(self.program.buffers, self.values, strict=True)
        return frozenset(b.id for b, v in pairs if v in values and b.pageable and b.nbytes)


def source_of(module: Any, instruction: Instruction) -> str:
    """Where an instruction comes from, such as "model.py:41 (jit(f)/dot_general)"; "" if unknown."""
    metadata = instruction.proto.metadata
    place = f"{metadata.source_file}:{metadata.source_line}" if metadata.source_file else ""
    if not place:
        place = next((place for place, _ in frames(module, metadata.stack_frame_id)), "")
    if metadata.op_name:
        return f"{place} ({metadata.op_name})" if place else metadata.op_name
    return place


def frames(module: Any, frame_id: int) -> Iterator[tuple[str, str]]:
    """(file and line, function) of the frames of a stack, the innermost first."""
    index = module.stack_frame_index
    while 0 < frame_id <= len(index.stack_frames):
        frame = index.stack_frames[frame_id - 1]
        at = index.file_locations[frame.file_location_id - 1]
        name = index.function_names[at.function_name_id - 1] if at.function_name_id else ""
        yield f"{index.file_names[at.file_name_id - 1]}:{at.line}", name.rpartition(".")[2]
        frame_id = frame.parent_frame_id


class _Lift:
    def __init__(
        self, module: graph.Module, scope: Computation, device: DeviceModel, assigner: Assigner
    ) -> None:
        self.module = module
        self.device = device
        self.assigner = assigner
        self.flow = self.assigner.flow
        self.scope = scope
        self.purity = Purity(module)
        is_entry = scope is module.entry
        self.pageable = pageable_values(self.flow) if is_entry else frozenset[int]()
        self.heap = {g for g in self.assigner.heap if self.assigner.space_of(g) not in self.assigner.apart}
        if not is_entry:
            self.heap -= {self.flow.class_of[v.id] for v in self.flow.values if self._caller(v) is None}
        self.buffer: dict[int, BufferId] = {}
        self.buffers: list[Buffer] = []
        self.values: list[int] = []
        self.ops = [i for i in self.scope.order if self.scope.by_id[i].opcode not in VIEWS]
        self.op_of = {i: OpId(n) for n, i in enumerate(self.ops)}
        self.producer = self._producers()
        self.outside = {self.flow.class_of[v] for v in self.producer}
        self.nested = self._nested()
        self.writers = self._writers()

    def _producers(self) -> dict[int, int]:
        """Value -> op that first makes it visible in the scope; -1 for arguments and constants."""
        producer: dict[int, int] = {}
        for i in self.scope.order:
            for v in self.flow.trees[self.scope.id, i].values():
                producer.setdefault(v, self.op_of.get(i, OpId(-1)))
        return producer

    def _nested(self) -> dict[int, list[int]]:
        """Op -> values that computations it calls define."""
        nested: dict[int, list[int]] = {}
        for value in self.flow.values:
            caller = self._caller(value)
            if caller is not None and caller >= 0:
                nested.setdefault(self.op_of[caller], []).append(value.id)
        return nested

    def _caller(self, value: Value) -> int | None:
        """The instruction of the scope that calls what makes a value; -1 if it is made in the scope itself,
        None if outside of it."""
        at, caller = value.home.computation, -1
        while at != self.scope.id:
            if at not in self.flow.callers:
                return None
            at, caller = self.flow.callers[at]
        return caller

    def _writers(self) -> dict[int, list[int]]:
        """Alias class -> ops that write its storage, in order."""
        writers: dict[int, set[int]] = {}
        for v, op in self.producer.items():
            if op >= 0:
                writers.setdefault(self.flow.class_of[v], set()).add(op)
        for op, values in self.nested.items():
            for v in values:
                writers.setdefault(self.flow.class_of[v], set()).add(op)
        return {group: sorted(ops) for group, ops in writers.items()}

    def nbytes(self, v: int) -> int:
        """Bytes of a value that the heap must find; zero for storage that is there anyway."""
        if self.flow.class_of[v] in self.heap:
            return self.flow.values[v].nbytes
        return 0

    def buffer_of(self, v: int) -> BufferId:
        buffer = self.buffer.get(v)
        if buffer is None:
            buffer = self.buffer[v] = BufferId(len(self.buffers))
            name = self.flow.instruction(self.flow.values[v].home).name
            self.buffers.append(
                Buffer(id=buffer, nbytes=self.nbytes(v), name=name, pageable=v in self.pageable)
            )
            self.values.append(v)
        return buffer

    def arrays(self, instruction: int) -> list[int]:
        """Values of arrays at an instruction, each once, in index order."""
        tree = self.flow.trees[self.scope.id, instruction]
        values = dict.fromkeys(tree[i] for i in sorted(tree))
        return [v for v in values if not self.flow.values[v].is_tuple]

    def op(self, n: int) -> Op:
        instruction = self.scope.by_id[self.ops[n]]
        made = [v for v in self.arrays(instruction.id) if self.producer[v] == n]
        read = list(dict.fromkeys(v for o in instruction.operands for v in self.arrays(o)))
        read = [v for v in read if v not in made]
        if instruction.opcode in ("async-update", "async-done", "copy-done"):
            read += [v for v in self._held(instruction) if v not in read and v not in made]
        return Op(
            id=OpId(n),
            inputs=tuple(self.buffer_of(v) for v in read),
            outputs=tuple(self.buffer_of(v) for v in made),
            cost_ns=instruction_ns(self.module, self.scope, instruction, self.device),
            energy_pj=instruction_pj(self.module, self.scope, instruction, self.device),
            recomputable=self._recomputable(n, instruction, made, read),
            deadline=self._deadline(read),
            may_share=self._may_share(instruction, made, read),
            workspace_bytes=self._workspace(n, made),
            name=instruction.name,
            source=source_of(self.module.proto, instruction),
        )

    def _held(self, done: Instruction) -> list[int]:
        """What an asynchronous operation reads until it is done."""
        start = self.scope.by_id[done.operands[0]]
        while start.opcode == "async-update":
            start = self.scope.by_id[start.operands[0]]
        return [v for o in start.operands for v in self.arrays(o)]

    def _recomputable(self, n: int, instruction: Instruction, made: list[int], read: list[int]) -> bool:
        if not made or not self.purity.instruction(instruction):
            return False
        if len(made) > 1 and not can_drop_outputs(instruction) and any(self._is_fixed(v) for v in made):
            return False
        mine = set(made) | set(self.nested.get(n, ()))
        used = set(read)
        for v in sorted(mine):
            group = self.flow.class_of[v]
            if any(w in used for w in self.flow.classes[group]):
                return False
            if any(op < n for op in self.writers.get(group, ())):
                return False
        return True

    def _is_fixed(self, v: int) -> bool:
        return self.flow.values[v].nbytes > 0 and self.nbytes(v) == 0

    def _deadline(self, read: list[int]) -> int | None:
        """The first op that overwrites something of what is read."""
        return min(self._overwriters(read), default=None)

    def _overwriters(self, read: list[int]) -> set[int]:
        """The ops that overwrite something of what is read."""
        writers = ((v, op) for v in read for op in self.writers.get(self.flow.class_of[v], ()))
        return {op for v, op in writers if op > self.producer[v]}

    def overwriters(self, op: Op) -> tuple[OpId, ...]:
        """The ops behind one that overwrite something of what it reads."""
        found = self._overwriters([self.values[b] for b in op.inputs])
        return tuple(OpId(n) for n in sorted(found) if n > op.id)

    def _may_share(
        self, instruction: Instruction, made: list[int], read: list[int]
    ) -> tuple[tuple[BufferId, BufferId], ...]:
        pairs: list[tuple[BufferId, BufferId]] = []
        for v in made:
            group = self.flow.class_of[v]
            for w in read:
                same_class = self.flow.class_of[w] == group
                if same_class or (self.nbytes(v) and self.nbytes(w) and self._takes_over(v, w)):
                    pairs.append((self.buffer_of(v), self.buffer_of(w)))
        return tuple(pairs)

    def _takes_over(self, v: int, w: int) -> bool:
        if any(len(self.flow.classes[self.flow.class_of[u]]) > 1 for u in (v, w)):
            return False
        target, source = self.flow.values[v].home, self.flow.values[w].home
        is_here = target.computation == self.scope.id and not source.index
        return is_here and self.assigner.takes_over(target, source)

    def _workspace(self, n: int, made: Sequence[int]) -> int:
        """The largest sum of what called computations keep alive beside this op's inputs and outputs; the
        results of a branch take their room when it makes them, and what is written over has gone before."""
        is_cond = self.scope.by_id[self.ops[n]].opcode == "conditional"
        results = {self.flow.class_of[v] for v in made} if is_cond else set[int]()
        inside = [v for v in self.nested.get(n, ()) if self._is_inside(v, results)]
        written_over = {self.assigner.written_over(v) for v in inside}
        events: list[tuple[int, int, int]] = []
        for v in inside:
            held = self.assigner.ranges[v]
            nbytes = self.flow.values[v].nbytes
            events += [(held.start, 1, nbytes), (held.end, 0 if v in written_over else 2, -nbytes)]
        most_bytes = max(accumulate((change for _, _, change in sorted(events)), initial=0))
        return max(0, most_bytes - sum(map(self.nbytes, made))) if is_cond else most_bytes

    def _is_inside(self, v: int, results: set[int]) -> bool:
        group = self.flow.class_of[v]
        return group in self.heap and (group not in self.outside or group in results)


def can_drop_outputs(instruction: Instruction) -> bool:
    """True if outputs of a clone that nobody uses can be removed."""
    return instruction.opcode == "fusion" and instruction.proto.fusion_kind in ("kLoop", "kInput")


def lift(
    module: graph.Module, device: DeviceModel, platform: str, *, scope: Computation | None = None,
    assigner: Assigner | None = None, prediction: HeapPrediction | None = None,
) -> LiftedModule:  # fmt: skip
    """Lift a computation of a scheduled module.

    Args:
        module: see `passes.hlo.graph.read`.
        scope: a loop's body; None for the entry.
        device: cost model.
        platform: see `passes.backend`.
        assigner, prediction: of this module, where they are known already.
    """
    assigner = assigner or Assigner(module, platform)
    work = _Lift(module, scope or module.entry, device, assigner)
    for i in work.scope.order:
        if work.scope.by_id[i].opcode in ("parameter", "constant"):
            for v in work.arrays(i):
                work.buffer_of(v)
    ops = tuple(work.op(n) for n in range(len(work.ops)))
    outputs = tuple(work.buffer_of(v) for v in work.arrays(work.scope.root))
    program = Program.build(name=module.name, ops=ops, buffers=tuple(work.buffers), outputs=outputs)
    return LiftedModule(
        module=module, scope=work.scope, platform=platform, program=program,
        prediction=prediction or predict_assigned(assigner),
        instructions=tuple(work.ops), values=tuple(work.values), assigner=assigner,
        overwriters=tuple(map(work.overwriters, ops)),
    )  # fmt: skip
