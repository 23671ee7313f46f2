"""What the link carries for nothing: values that get to the host before the peak and back before their use.

At the peak of the schedule without recomputes every live range that is kept across it could be away. To the
host all have the same deadline, the peak, and are released when they are made; back, they are released after
the peak and have their uses as deadlines. One queue each way: a set is in time if, for every moment, what is
released after it fits between it and the peak, and what is due before it fits between the peak and it.
Taken greedily, the dearest to recompute first for their bytes.

The recompute planners are then asked for a program in which these values have no bytes, and the bytes that
they still take on the way are reserved, slot by slot: they spend the budget on what is left.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from passes.ir import Page
from passes.liveness import Graph, IntArray
from passes.planners.bounds import last_needs
from passes.planners.paging.pager import Pager
from passes.planners.schedule import Schedule
from passes.returned import pages_by_range

ALIKE = math.log(1.2)


def carried(pager: Pager, share: float) -> IntArray:
    """Rows of the gaps across the peak whose live ranges are in time both ways.

    Args:
        pager: of the schedule without recomputes.
        share: how much of the link's rate to count on; more than 1 where the program will take longer.
    """
    gaps, clock_ns = pager.gaps, pager.clock_ns
    peak = pager.schedule.peak_position
    rows = np.flatnonzero((gaps.after < peak) & (gaps.back > peak))
    release_ns = clock_ns[gaps.run[rows] + 1]
    due_ns = clock_ns[gaps.use[rows]]
    out_slack_ns = share * (clock_ns[peak] - release_ns)
    in_slack_ns = share * (due_ns - clock_ns[peak + 1])
    link = pager.host.link
    chosen = pager.forced()
    held_bytes = int(gaps.nbytes[chosen].sum())
    for k in np.lexsort((-gaps.time_ns[rows], -_prices(pager, rows))).tolist():
        nbytes = int(gaps.nbytes[rows[k]])
        before, behind = release_ns <= release_ns[k], due_ns >= due_ns[k]
        out_ns, in_ns = link.to_host_ns(nbytes), link.from_host_ns(nbytes)
        in_time = out_slack_ns[before].min() >= out_ns and in_slack_ns[behind].min() >= in_ns
        if in_time and held_bytes + nbytes <= pager.host.nbytes:
            out_slack_ns[before] -= out_ns
            in_slack_ns[behind] -= in_ns
            held_bytes += nbytes
            chosen.append(int(rows[k]))
    return np.asarray(sorted(set(chosen)), dtype=np.int64)


def _prices(pager: Pager, rows: IntArray) -> IntArray:
    """For every gap what its value's op costs a byte, in steps of a fifth."""
    graph, gaps = pager.graph, pager.gaps
    prices = []
    for b in gaps.buffer[rows].tolist():
        op = graph.producer[b]
        nbytes = sum([graph.nbytes[other] for other in graph.outputs[op]])
        if not graph.program.ops[op].recomputable:
            prices.append(1 << 20)
        else:
            prices.append(round(math.log((1 + graph.cost_ns[op]) / nbytes) / ALIKE))
    return np.asarray(prices, dtype=np.int64)


def relieved(schedule: Schedule, pages: tuple[Page, ...]) -> Graph:
    """The graph in which paged values have no bytes, but reserve those that they have on the device.

    Args:
        schedule: without recomputes, so that its steps are its slots.
        pages: some of its pages.
    """
    graph = schedule.graph
    nbytes = graph.arrays.nbytes.copy()
    slack_bytes = np.zeros(len(graph.cost_ns) + 1, dtype=np.int64)
    change = np.zeros(len(graph.cost_ns) + 1, dtype=np.int64)
    last = last_needs(graph)
    for (run, buffer), own in pages_by_range(pages).items():
        nbytes[buffer] = 0
        starts = [run, *(page.in_start for page in own)]
        stops = [*(page.out_done for page in own), min(last[buffer] + 1, len(graph.cost_ns))]
        np.add.at(change, starts, graph.nbytes[buffer])
        np.subtract.at(change, stops, graph.nbytes[buffer])
    slack_bytes[:-1] = np.cumsum(change[:-1])
    return dataclasses.replace(
        graph,
        nbytes=nbytes.tolist(),
        arrays=dataclasses.replace(graph.arrays, nbytes=nbytes),
        slack_bytes=slack_bytes,
    )


def first_pages(schedule: Schedule, pages: tuple[Page, ...]) -> tuple[Page, ...]:
    """Pages of a sequence as if its slots were its steps: those of buffers that are made once."""
    slots = [*schedule.slots, len(schedule.graph.cost_ns)]
    recomputed = {
        b for p in schedule.recompute_positions() for b in schedule.graph.outputs[schedule.steps[p]]
    }
    first = []
    for page in pages:
        if page.run is None or page.buffer in recomputed:
            continue
        out_done = max(slots[page.run] + 1, slots[page.out_done])
        in_start = max(out_done, slots[page.in_start])
        first.append(
            Page(
                buffer=page.buffer,
                run=slots[page.run],
                out_done=out_done,
                in_start=in_start,
                in_done=max(in_start, slots[page.in_done]),
            )
        )
    return tuple(first)
