"""Which live range serves which use, and when every live range is alive.

Everything that reasons about memory over a sequence of steps starts here: the simulator, the placement
and the planners. The validator does not, on purpose. Invariant: intervals are half-open in steps.
Arguments never die, so they have no live ranges here; their bytes are `Graph.argument_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from passes.ir import BufferId, Op, OpId, Page, Program
from passes.returned import check_served, pages_by_range

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """A graph's numbers as arrays, for work on whole sequences; rows are what ops use, arguments apart.

    Attributes:
        nbytes: size of every buffer.
        is_output: whether a buffer must survive the last op.
        pageable: whether a buffer may be sent to the host.
        workspace_bytes: scratch memory of every op.
        first: index of every op's first row, and the number of all rows at the end; shape (ops + 1,).
        buffer: the buffer of every row; an op's inputs come before its outputs.
        is_def: whether the row is an output.
        shares: number of `may_share` pairs of every op.
        share_row: for ops with exactly one pair the place of its input among the op's rows, else 0.
        share_bytes: what that pair can save.
    """

    nbytes: IntArray
    is_output: BoolArray
    pageable: BoolArray
    workspace_bytes: IntArray
    first: IntArray
    buffer: IntArray
    is_def: BoolArray
    shares: IntArray
    share_row: IntArray
    share_bytes: IntArray

    @classmethod
    def of(
        cls,
        program: Program,
        inputs: list[tuple[int, ...]],
        outputs: list[tuple[int, ...]],
        shares: list[tuple[tuple[int, int], ...]],
    ) -> Arrays:
        """Lay out the rows; O(size of the program)."""
        nbytes = np.asarray([b.nbytes for b in program.buffers], dtype=np.int64)
        is_output = np.zeros(len(nbytes), dtype=np.bool_)
        is_output[list(program.outputs)] = True
        rows = [(*i, *o) for i, o in zip(inputs, outputs, strict=True)]
        first = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        is_def = np.zeros(int(first[-1]), dtype=np.bool_)
        share_row, share_bytes = np.zeros((2, len(rows)), dtype=np.int64)
        for op, row in enumerate(rows):
            is_def[first[op] + len(inputs[op]) : first[op + 1]] = True
            if len(shares[op]) == 1:
                ((out, inp),) = shares[op]
                share_row[op] = row.index(inp)
                share_bytes[op] = min(nbytes[out], nbytes[inp])
        return cls(
            nbytes=nbytes,
            is_output=is_output,
            pageable=np.asarray([b.pageable and b.nbytes > 0 for b in program.buffers], dtype=np.bool_),
            workspace_bytes=np.asarray([op.workspace_bytes for op in program.ops], dtype=np.int64),
            first=first,
            buffer=np.asarray([b for row in rows for b in row], dtype=np.int64),
            is_def=is_def,
            shares=np.asarray([len(pairs) for pairs in shares], dtype=np.int64),
            share_row=share_row,
            share_bytes=share_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A program as plain lists for inner loops; build it once with `Graph.of`.

    Attributes:
        program: where it comes from.
        nbytes: size of every buffer.
        producer: op that writes every buffer, -1 for arguments.
        inputs: distinct inputs of every op without arguments.
        outputs: distinct outputs of every op.
        shares: `may_share` of every op without arguments.
        cost_ns: cost of every op.
        workspace_bytes: scratch memory of every op.
        local_bytes: what every op holds while it runs: inputs, outputs and scratch, less what it may
            save by sharing.
        is_output: whether a buffer must survive the last op.
        results: the buffers that must, without arguments.
        argument_bytes: bytes of all arguments, alive throughout.
        arrays: the same as arrays.
        slack_bytes: bytes that planners leave free in every slot and at the end, shape (ops + 1,).
    """

    program: Program
    nbytes: list[int]
    producer: list[int]
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    shares: list[tuple[tuple[int, int], ...]]
    cost_ns: list[int]
    workspace_bytes: list[int]
    local_bytes: list[int]
    is_output: list[bool]
    results: list[int]
    argument_bytes: int
    arrays: Arrays
    slack_bytes: IntArray | None = None

    def readers(self) -> list[list[int]]:
        """For every buffer the ops that read it, ascending."""
        readers: list[list[int]] = [[] for _ in self.nbytes]
        for op, inputs in enumerate(self.inputs):
            for b in inputs:
                readers[b].append(op)
        return readers

    @classmethod
    def of(cls, program: Program) -> Graph:
        """Read a program into lists; O(size of the program)."""
        producer = [-1 if p is None else int(p) for p in program.producer]
        is_output = [False] * len(producer)
        for b in program.outputs:
            is_output[b] = True
        nbytes = [b.nbytes for b in program.buffers]
        inputs: list[tuple[int, ...]] = [
            tuple(dict.fromkeys(b for b in op.inputs if producer[b] >= 0)) for op in program.ops
        ]
        outputs: list[tuple[int, ...]] = [tuple(dict.fromkeys(op.outputs)) for op in program.ops]
        shares = [_shares(op, producer) for op in program.ops]
        return cls(
            program=program,
            nbytes=nbytes,
            producer=producer,
            inputs=inputs,
            outputs=outputs,
            shares=shares,
            cost_ns=[op.cost_ns for op in program.ops],
            workspace_bytes=[op.workspace_bytes for op in program.ops],
            local_bytes=[_local_bytes(op, nbytes, producer) for op in program.ops],
            is_output=is_output,
            results=[b for b in program.outputs if producer[b] >= 0],
            argument_bytes=sum(program.buffers[b].nbytes for b in program.arguments),
            arrays=Arrays.of(program, inputs, outputs, shares),
        )


def _shares(op: Op, producer: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((o, i) for o, i in op.may_share if producer[i] >= 0)


def _local_bytes(op: Op, nbytes: list[int], producer: list[int]) -> int:
    """Distinct inputs, outputs and scratch of an op, every place being taken once."""
    total = op.workspace_bytes + sum(
        [nbytes[b] for b in dict.fromkeys((*op.inputs, *op.outputs)) if producer[b] >= 0]
    )
    taken: list[int] = []
    for out, inp in _shares(op, producer):
        if out not in taken and inp not in taken:
            total -= min(nbytes[out], nbytes[inp])
            taken += (out, inp)
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRanges:
    """The live ranges of a sequence of steps in the order in which they begin, then returned ones.

    Attributes:
        buffer: whose each is.
        start: step that makes it, or before which its bytes are taken when it comes back from the host.
        stop: first step at which it is no longer alive (half-open).
        place: index of the dying live range whose place it takes, -1 if it takes none.
        page: for returned live ranges, which are last, the place of their page in the plan's pages.
    """

    buffer: list[int]
    start: list[int]
    stop: list[int]
    place: list[int]
    page: list[int] = field(default_factory=list)


def live_ranges(graph: Graph, steps: Sequence[int], pages: Sequence[Page] = ()) -> LiveRanges:
    """Lifetimes of all live ranges, and which of them take the place of a dying input.

    What leaves for the host gives its place to nobody.

    Raises:
        ValueError: a step reads a buffer that no earlier step has made, or a page is of no use or away
            when it is read.
    """
    latest = [-1] * len(graph.nbytes)
    buffer: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    reads: list[list[int]] = []
    for position, op in enumerate(steps):
        read = [latest[b] for b in graph.inputs[op]]
        for live_range in read:
            if live_range < 0:
                raise ValueError(f"step {position} runs op {op} before all its inputs have been made")
            stop[live_range] = position + 1
        reads.append(read)
        for b in graph.outputs[op]:
            latest[b] = len(buffer)
            buffer.append(b)
            start.append(position)
            stop.append(position + 1)
    for b in graph.results:
        if latest[b] < 0:
            raise ValueError(f"no step makes the program's output {b}")
        stop[latest[b]] = len(steps)
    ranges = LiveRanges(buffer=buffer, start=start, stop=stop, place=[-1] * len(buffer))
    final = {latest[b] for b in graph.results}
    if pages:
        final |= _send_away(graph, pages, reads, ranges, final)
    _take_places(graph, steps, reads, ranges, frozenset(final))
    return ranges


def _send_away(
    graph: Graph, pages: Sequence[Page], reads: list[list[int]], ranges: LiveRanges, final: set[int]
) -> set[int]:
    """Cut lifetimes where live ranges are on the host; returns the parts whose places nobody may take."""
    made = {(ranges.start[c], ranges.buffer[c]): c for c in range(len(ranges.buffer))}
    uses: dict[int, list[int]] = {}
    for position, read in enumerate(reads):
        for live_range in read:
            uses.setdefault(live_range, []).append(position)
    index = {id(page): k for k, page in enumerate(pages)}
    keep: set[int] = set()
    for key, own in pages_by_range(pages).items():
        if not graph.program.buffers[key[1]].pageable:
            raise ValueError(f"buffer {key[1]} cannot be sent to the host: {own[0]}")
        if key not in made:
            raise ValueError(f"step {key[0]} does not make buffer {key[1]}, which a page sends to the host")
        live_range = part = made[key]
        for page in own:
            check_served(page, uses.get(live_range, ()), len(reads) if live_range in final else None)
            keep.add(part)
            new = len(ranges.buffer)
            ranges.buffer.append(ranges.buffer[live_range])
            ranges.start.append(page.in_start)
            ranges.stop.append(ranges.stop[part])
            ranges.stop[part] = page.out_done
            ranges.place.append(-1)
            ranges.page.append(index[id(page)])
            for position in uses.get(live_range, ()):
                if position >= page.in_done:
                    reads[position] = [new if c == part else c for c in reads[position]]
            part = new
        if live_range in final:
            keep.add(part)
    return keep


def _take_places(
    graph: Graph, steps: Sequence[int], reads: list[list[int]], ranges: LiveRanges, final: frozenset[int]
) -> None:
    """Pair outputs with inputs that die at the same step, in the order of `may_share`.

    Args:
        final: live ranges that outlive the last step; no output of that step may take their place.
    """
    made = 0
    for position, op in enumerate(steps):
        if graph.shares[op]:
            serving = dict(zip(graph.inputs[op], reads[position], strict=True))
            index = {b: made + k for k, b in enumerate(graph.outputs[op])}
            taken: list[int] = []
            for out, inp in graph.shares[op]:
                old, new = serving[inp], index[out]
                dies = ranges.stop[old] == position + 1 and old not in final
                if dies and old not in taken and ranges.place[new] < 0:
                    ranges.place[new] = old
                    taken.append(old)
        made += len(graph.outputs[op])


def last_readers(program: Program) -> dict[BufferId, OpId]:
    """For every buffer that an op reads the last one that does."""
    return {b: op.id for op in program.ops for b in op.inputs}


def live_steps(program: Program, steps: Sequence[int]) -> list[bool]:
    """For every step whether it must run: something reads what it makes, or it has an effect."""
    needed = set(program.outputs)
    live = []
    for step in reversed(steps):
        op = program.ops[step]
        live.append(not op.recomputable or not needed.isdisjoint(op.outputs))
        if live[-1]:
            needed.difference_update(op.outputs)
            needed.update(op.inputs)
    return live[::-1]
