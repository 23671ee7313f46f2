"""From an answer of the 0-1 program to a sequence of steps, and to where it breaks the budget.

Recomputes come as late as their block lets them: just before the first op that reads what they make, at the
latest before the block's last op. In a slot they stand in schedule order. Whatever comes out is a valid
sequence; only its bytes are open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import numpy as np

from passes.liveness import live_ranges
from passes.planners.exact.frame import Frame
from passes.planners.schedule import absent_closure, slots_of
from passes.simulate import simulate_graph


def steps_of(
    frame: Frame, recompute: Collection[tuple[int, int]], kept: Collection[tuple[int, int]]
) -> list[int]:
    """A sequence that recomputes ops and keeps buffers as a model's answer says.

    Args:
        recompute: (block, op).
        kept: (block, buffer): there when the block begins.
    """
    graph = frame.graph
    steps: list[int] = []
    present = [p < 0 for p in graph.producer]
    for block in range(frame.n_blocks):
        for b, producer in enumerate(graph.producer):
            if producer >= 0 and graph.nbytes[b] and frame.block(producer) < block:
                present[b] = (block, b) in kept
        wanted = [op for op in range(frame.slots(block)[0]) if (block, op) in recompute]
        slots = frame.slots(block)
        for slot in slots:
            needs = graph.inputs[slot] if slot < len(graph.cost_ns) else graph.results
            roots = [graph.producer[b] for b in needs if not present[b]]
            if slot == slots[-1]:
                roots += [op for op in wanted if any((block + 1, b) in kept for b in graph.outputs[op])]
            for op in [*absent_closure(graph, roots, present), *range(slot, len(graph.cost_ns))[:1]]:
                steps.append(op)
                for b in graph.outputs[op]:
                    present[b] = True
    return steps


def breaks(frame: Frame, steps: list[int], budget_bytes: int) -> tuple[list[int], list[int]]:
    """Where a sequence breaks the budget that its frame could not see.

    Returns:
        New breakpoints, and slots to order; the highest point of every stretch over the budget, and for a
        recompute the breakpoints around its slot first.
    """
    live = simulate_graph(frame.graph, steps).live_bytes
    slots = slots_of(steps)
    over = np.flatnonzero(live > budget_bytes)
    breakpoints: list[int] = []
    ordered: list[int] = []
    for stretch in np.split(over, np.flatnonzero(np.diff(over) > 1) + 1):
        if len(stretch):
            top = int(stretch[np.argmax(live[stretch])])
            slot = slots[top]
            around = [slot] if steps[top] == slot else [slot - 1, slot]
            fresh = [t for t in around if 0 <= t < len(frame.graph.cost_ns) and t not in frame.breakpoints]
            breakpoints += fresh
            if not fresh and slot not in frame.ordered:
                ordered.append(slot)
    return sorted(set(breakpoints)), sorted(set(ordered))


def hint_of(frame: Frame, steps: list[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The point of a frame that a sequence is: (block, op) recompute, (block, buffer) kept."""
    blocks = [frame.block(slot) for slot in slots_of(steps)]
    recompute = {(k, op) for k, op in zip(blocks, steps, strict=True) if frame.block(op) < k}
    begins = [bisect_left(blocks, k) for k in range(frame.n_blocks)]
    ranges = live_ranges(frame.graph, steps)
    last = {b: live_range for live_range, b in enumerate(ranges.buffer)}
    kept = set()
    for live_range, b in enumerate(ranges.buffer):
        to_end = frame.graph.is_output[b] and last[b] == live_range
        stop = len(steps) + 1 if to_end else ranges.stop[live_range]
        kept |= {(k, b) for k in range(1, frame.n_blocks) if ranges.start[live_range] < begins[k] < stop}
    return recompute, kept
