"""From an answer of the 0-1 program to a sequence of steps, and to where it breaks the budget.

Re-runs come as late as their block lets them: just before the first op that reads what they make, at the
latest before the block's last op. In a slot they stand in schedule order. Whatever comes out is a valid
sequence; only its bytes are open.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from passes.liveness import Graph
from passes.planners.exact.frame import Frame
from passes.planners.schedule import Schedule


def steps_of(
    frame: Frame, rerun: Collection[tuple[int, int]], kept: Collection[tuple[int, int]]
) -> list[int]:
    """A sequence that re-runs ops and keeps buffers as a model's answer says.

    Args:
        rerun: (block, op).
        kept: (block, buffer): there when the block begins.
    """
    graph = frame.graph
    steps: list[int] = []
    present = [p < 0 for p in graph.producer]
    for block in range(frame.n_blocks):
        for b, producer in enumerate(graph.producer):
            if producer >= 0 and graph.nbytes[b] and frame.block(producer) < block:
                present[b] = (block, b) in kept
        wanted = [op for op in range(frame.slots(block)[0]) if (block, op) in rerun]
        slots = frame.slots(block)
        for slot in slots:
            needs = list(graph.inputs[slot]) if slot < len(graph.cost_ns) else _final(graph)
            roots = [graph.producer[b] for b in needs if not present[b]]
            if slot == slots[-1]:
                roots += [op for op in wanted if any((block + 1, b) in kept for b in graph.outputs[op])]
            for op in _closure(graph, roots, present):
                steps.append(op)
                _make(graph, op, present)
            if slot < len(graph.cost_ns):
                steps.append(slot)
                _make(graph, slot, present)
    return steps


def breaks(frame: Frame, steps: list[int], budget_bytes: int) -> tuple[list[int], list[int]]:
    """Where a sequence breaks the budget that its frame could not see.

    Returns:
        New cuts, and slots to order; the highest point of every stretch over the budget, and for a
        re-run the cuts around its slot first.
    """
    schedule = Schedule(frame.graph, steps)
    over = np.flatnonzero(schedule.live > budget_bytes)
    cuts: list[int] = []
    ordered: list[int] = []
    for stretch in np.split(over, np.flatnonzero(np.diff(over) > 1) + 1):
        if len(stretch):
            top = int(stretch[np.argmax(schedule.live[stretch])])
            slot = schedule.slots[top]
            around = [slot] if schedule.steps[top] == slot else [slot - 1, slot]
            fresh = [t for t in around if 0 <= t < len(frame.graph.cost_ns) and t not in frame.cuts]
            cuts += fresh
            if not fresh and slot not in frame.ordered:
                ordered.append(slot)
    return sorted(set(cuts)), sorted(set(ordered))


def hint_of(frame: Frame, steps: list[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The point of a frame that a sequence is: (block, op) re-run, (block, buffer) kept."""
    schedule = Schedule(frame.graph, steps)
    rerun = {
        (frame.block(slot), op)
        for slot, op in zip(schedule.slots, schedule.steps, strict=True)
        if op < slot and frame.block(op) < frame.block(slot)
    }
    starts = [0] * (frame.n_blocks + 1)
    for position, slot in reversed(list(enumerate(schedule.slots))):
        starts[frame.block(slot)] = position
    starts[frame.n_blocks] = len(steps)
    for block in reversed(range(1, frame.n_blocks)):
        if not starts[block]:
            starts[block] = starts[block + 1]
    kept = set()
    for b, runs in enumerate(schedule.starts):
        for copy, start in enumerate(runs):
            stop = schedule.last_position(b, copy)
            if frame.graph.is_output[b] and copy == len(runs) - 1:
                stop = len(steps)
            kept |= {(k, b) for k in range(1, frame.n_blocks) if start < starts[k] <= stop}
    return rerun, kept


def _final(graph: Graph) -> list[int]:
    return [b for b in graph.program.outputs if graph.producer[b] >= 0]


def _make(graph: Graph, op: int, present: list[bool]) -> None:
    for b in graph.outputs[op]:
        present[b] = True


def _closure(graph: Graph, roots: list[int], present: list[bool]) -> list[int]:
    """The ops to run for the roots' outputs that are absent, in schedule order."""
    ops = {op for op in roots if not all(present[b] for b in graph.outputs[op])}
    stack = sorted(ops)
    while stack:
        for b in graph.inputs[stack.pop()]:
            producer = graph.producer[b]
            if not present[b] and producer not in ops:
                ops.add(producer)
                stack.append(producer)
    return sorted(ops)
