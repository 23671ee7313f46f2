"""The one definition of peak: what is alive at every step of a plan.

At a run step (1) outputs come alive and the op's workspace with them; an output that may take the place
of an input which dies at this step adds only the difference in size, never less than nothing, and each
place is taken at most once, in the order of `may_share`; (2) the peak is sampled; (3) what had its last
use dies. An output that nobody uses dies right after its step, unless it is a program output whose
latest run it is: that one lives to the end. Arguments live throughout. A live range that is on the host (a
page) is not alive from before step `out_done` until before step `in_start`. On the example of `passes.ir`,
the steps 0 1 2 3 1 4 5 are sampled at 4, 8, 12, 9, 9, 10 and 6 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir import OpId, Page, Program
from passes.liveness import Graph, IntArray, LiveRanges, live_ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What a sequence of steps needs.

    Attributes:
        live_bytes: sampled live bytes at every step, shape (steps,).
        peak_bytes: their maximum (the arguments' bytes if there is no step).
        peak_step: the first step at which it is reached, 0 if there is no step.
        cost_ns: cost of all steps; waiting for the link is not in it (`passes.planners.paging.queues`).
        overhead_ratio: cost of the recomputes over the cost of running every op once.
        ranges: of all but the arguments; what came back has one of its own.
    """

    live_bytes: IntArray
    peak_bytes: int
    peak_step: int
    cost_ns: int
    overhead_ratio: float
    ranges: LiveRanges


def simulate(program: Program, steps: Sequence[OpId] | None = None, pages: Sequence[Page] = ()) -> Timeline:
    """Live bytes at every step of `steps`, the program's own order if not given; O(size of the program, the
    steps and the pages).

    Raises:
        ValueError: a step reads a buffer that no earlier step has made, or that is on the host; a page
            that is out of order, or that nothing needs.
    """
    return simulate_graph(Graph.of(program), program.order if steps is None else steps, pages)


def simulate_graph(graph: Graph, steps: Sequence[int], pages: Sequence[Page] = ()) -> Timeline:
    """`simulate` for callers that keep the `Graph` of a program."""
    ranges = live_ranges(graph, steps, pages)
    live = profile(graph, steps, ranges)
    peak_step = int(np.argmax(live)) if len(steps) else 0
    cost_ns = sum(graph.cost_ns[op] for op in steps)
    base_ns = sum(graph.cost_ns)
    return Timeline(
        live_bytes=live,
        peak_bytes=int(live[peak_step]) if len(steps) else graph.argument_bytes,
        peak_step=peak_step,
        cost_ns=cost_ns,
        overhead_ratio=(cost_ns - base_ns) / base_ns if base_ns else 0.0,
        ranges=ranges,
    )


def profile(graph: Graph, steps: Sequence[int], ranges: LiveRanges) -> IntArray:
    """Live bytes at every step, shape (steps,)."""
    change = np.zeros(len(steps) + 1, dtype=np.int64)
    if ranges.buffer:
        nbytes = np.asarray(graph.nbytes, dtype=np.int64)[ranges.buffer]
        np.add.at(change, ranges.start, nbytes)
        np.subtract.at(change, ranges.stop, nbytes)
    live: IntArray = np.cumsum(change)[: len(steps)] + graph.argument_bytes
    live += np.asarray(graph.workspace_bytes, dtype=np.int64)[list(steps)] if len(steps) else 0
    for new, old in enumerate(ranges.place):
        if old >= 0:
            shared = min(graph.nbytes[ranges.buffer[new]], graph.nbytes[ranges.buffer[old]])
            live[ranges.start[new]] -= shared
    return live
