"""Chen et al. (2016): checkpoints every so many bytes of the forward pass, the rest recomputed by segments.

The forward pass is what runs before the moment of most live bytes. Walking through it, a segment ends once
its values have `segment_bytes` (their Algorithm 3); what is alive for the forward pass where a segment
ends is a checkpoint. Everything else is dropped after its last forward use, and comes back when the
backward pass first asks for it. sqrt(n) is the segment size at which checkpoints and one segment balance;
a few sizes around it are tried, and the cheapest that fits is taken.
"""

from __future__ import annotations

import math

import numpy as np

from passes.liveness import Graph
from passes.planners.schedule import Schedule, absent_closure

# Numbers of segments besides the square root of the length.
SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def candidates(graph: Graph) -> list[list[int]]:
    """Sequences of steps for several segment sizes, sqrt(n)'s first."""
    schedule = Schedule(graph, range(len(graph.cost_ns)))
    peak = int(np.argmax(schedule.live)) if len(schedule.live) else -1
    forward_bytes = sum(graph.nbytes[b] for op in range(peak + 1) for b in graph.outputs[op])
    counts = [max(1, math.isqrt(peak + 1)), *SEGMENTS]
    sizes = dict.fromkeys(max(1, forward_bytes // count) for count in counts)
    return [_steps(graph, peak, _kept(graph, peak, nbytes)) for nbytes in sizes]


def _kept(graph: Graph, peak: int, segment_bytes: int) -> list[bool]:
    """Which values of the forward pass are checkpoints."""
    last = [-1] * len(graph.nbytes)
    for op in range(peak + 1):
        for b in graph.inputs[op]:
            last[b] = op
    kept = [p < 0 for p in graph.producer]
    for facts in graph.program.ops:
        if not facts.recomputable or facts.deadline is not None or facts.id > peak:
            for b in facts.outputs:
                kept[b] = True
    held_bytes = 0
    for op in range(peak + 1):
        held_bytes += sum(graph.nbytes[b] for b in graph.outputs[op])
        if held_bytes >= segment_bytes:
            held_bytes = 0
            for b, producer in enumerate(graph.producer):
                if 0 <= producer <= op < last[b]:
                    kept[b] = True
    return kept


def _steps(graph: Graph, peak: int, kept: list[bool]) -> list[int]:
    """The schedule with every dropped value recomputed when it is first asked for after the turn."""
    steps = list(range(peak + 1))
    present = list(kept)
    for op in range(peak + 1, len(graph.cost_ns) + 1):
        is_end = op == len(graph.cost_ns)
        needs = graph.results if is_end else graph.inputs[op]
        dropped = [graph.producer[b] for b in needs if not present[b]]
        for run in [*absent_closure(graph, dropped, present), *([] if is_end else [op])]:
            steps.append(run)
            for b in graph.outputs[run]:
                present[b] = True
    return steps
