"""The forward pass in segments: what crosses their borders is kept, all else comes back when it is asked for.

    forward    seg 1 | seg 2 | seg 3        borders where the least crosses
    backward   seg 3' (seg 3 again first) ...

The forward pass is what runs before the moment of most live bytes. Cuts at peaks take out one value after the
other; where little more than the values between blocks may stay, and whole blocks run twice, this is nearer.
Chen et al. (2016) put borders after so many bytes (`passes.planners.baselines.chen`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.liveness import Graph, IntArray
from passes.planners.schedule import Schedule, absent_closure

# How far from equal parts a border may be, as a share of a part.
_NEAR = 0.45


def forward_end(schedule: Schedule) -> int:
    """The last op of the forward pass; -1 where there is none."""
    return int(np.argmax(schedule.live)) if len(schedule.live) else -1


def in_segments(graph: Graph, end: int, count: int) -> list[int]:
    """The steps with the forward pass up to `end` in about `count` segments of as many bytes."""
    made = np.cumsum([sum(graph.nbytes[b] for b in graph.outputs[op]) for op in range(end + 1)])
    crossing = _crossing_bytes(graph, end)
    part = made[-1] / count if len(made) else 0
    borders = set[int]()
    for k in range(1, count):
        first, stop = np.searchsorted(made, ((k - _NEAR) * part, (k + _NEAR) * part))
        near = crossing[first : min(stop, end)]
        if len(near):
            least = first + np.flatnonzero(near == near.min())
            borders.add(int(least[np.argmin(abs(made[least] - k * part))]))
    return with_recomputes(graph, end, kept_at(graph, end, sorted(borders)))


def kept_at(graph: Graph, end: int, borders: Sequence[int]) -> list[bool]:
    """Which values stay: arguments, what cannot be run again, and what the forward pass reads across a
    border, which lies behind an op."""
    last = _last_forward_reads(graph, end)
    kept = [op < 0 for op in graph.producer]
    for facts in graph.program.ops:
        if not facts.recomputable or facts.deadline is not None or facts.id > end:
            for b in facts.outputs:
                kept[b] = True
    for border in borders:
        for value, op in enumerate(graph.producer):
            kept[value] |= 0 <= op <= border < last[value]
    return kept


def with_recomputes(graph: Graph, end: int, kept: list[bool]) -> list[int]:
    """The schedule with every dropped value recomputed when it is first asked for behind the forward pass."""
    steps = list(range(end + 1))
    present = list(kept)
    for op in range(end + 1, len(graph.cost_ns) + 1):
        is_end = op == len(graph.cost_ns)
        needs = graph.results if is_end else graph.inputs[op]
        dropped = [graph.producer[b] for b in needs if not present[b]]
        for run in [*absent_closure(graph, dropped, present), *([] if is_end else [op])]:
            steps.append(run)
            for b in graph.outputs[run]:
                present[b] = True
    return steps


def _last_forward_reads(graph: Graph, end: int) -> list[int]:
    last = [-1] * len(graph.nbytes)
    for op in range(end + 1):
        for b in graph.inputs[op]:
            last[b] = op
    return last


def _crossing_bytes(graph: Graph, end: int) -> IntArray:
    """What is made by then and read later in the forward pass, behind each of its ops."""
    changes = np.zeros(end + 2, dtype=np.int64)
    for b, last in enumerate(_last_forward_reads(graph, end)):
        op = graph.producer[b]
        if 0 <= op < last:
            changes[op] += graph.nbytes[b]
            changes[last] -= graph.nbytes[b]
    return np.cumsum(changes)
