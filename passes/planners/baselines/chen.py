"""Chen et al. (2016): checkpoints every so many bytes of the forward pass, the rest recomputed by segments.

The forward pass is what runs before the moment of most live bytes. Walking through it, a segment ends once
its values have `segment_bytes` (their Algorithm 3); what is alive for the forward pass where a segment
ends is a checkpoint. Everything else is dropped after its last forward use, and comes back when the
backward pass first asks for it. sqrt(n) is the segment size at which checkpoints and one segment balance;
a few sizes around it are tried, and the cheapest that fits is taken.
"""

from __future__ import annotations

import math

from passes.liveness import Graph
from passes.planners.schedule import Schedule
from passes.planners.segments import forward_end, kept_at, with_recomputes

# Numbers of segments besides the square root of the length.
SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def candidates(graph: Graph) -> list[list[int]]:
    """Sequences of steps for several segment sizes, sqrt(n)'s first."""
    end = forward_end(Schedule(graph, range(len(graph.cost_ns))))
    forward_bytes = sum(graph.nbytes[b] for op in range(end + 1) for b in graph.outputs[op])
    counts = [max(1, math.isqrt(end + 1)), *SEGMENTS]
    sizes = dict.fromkeys(max(1, forward_bytes // count) for count in counts)
    kept = (kept_at(graph, end, _borders(graph, end, nbytes)) for nbytes in sizes)
    return [with_recomputes(graph, end, stays) for stays in kept]


def _borders(graph: Graph, end: int, segment_bytes: int) -> list[int]:
    """The ops after which a segment has its bytes."""
    borders, held_bytes = [], 0
    for op in range(end + 1):
        held_bytes += sum(graph.nbytes[b] for b in graph.outputs[op])
        if held_bytes >= segment_bytes:
            held_bytes = 0
            borders.append(op)
    return borders
