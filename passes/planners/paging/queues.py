"""Two queues beside the kernels: when copies to and from the host run, and how long the program waits.

Kernels run one after the other. A copy to the host joins the first queue when the step that made it has
run; a copy back joins the second one just before step `in_start`. Each queue is in order, one copy at a
time, at its own rate of the link, and both run beside the kernels. Just before step `i` the program waits
for the copies that are out before `i`, then starts those that begin there, in the order of the plan's pages,
and then waits for those that are back before `i`. Copies of one run go to the host in the order of their
buffers. A copy whose page is not its first is on the host already.

A copy has its bytes on the host from the moment after its run until its last page is back: they are
sampled in the moments before the steps and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir import OpId, Page, Program
from passes.link import Link
from passes.liveness import IntArray
from passes.returned import pages_by_range


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """What a plan's pages come to in time and host memory.

    Attributes:
        total_ns: time of the whole program, waiting included.
        waiting_ns: how long kernels stand still for the link.
        waits_ns: waiting just before each step and at the end; shape (steps + 1,).
        host_bytes: bytes on the host in the moment before each step and at the end; shape (steps + 1,).
        host_peak_bytes: their maximum.
        moved_bytes: bytes of all copies, both ways together.
    """

    total_ns: int
    waiting_ns: int
    waits_ns: IntArray
    host_bytes: IntArray
    host_peak_bytes: int
    moved_bytes: int


def traffic(program: Program, steps: Sequence[OpId], pages: Sequence[Page], link: Link | None) -> Traffic:
    """Replay a plan's pages on a link; O(steps + pages).

    Args:
        link: None where there are no pages.

    Raises:
        ValueError: a page is out of order or of an argument; pages without a link.
    """
    cost_ns = [program.ops[step].cost_ns for step in steps]
    return replay(cost_ns, [b.nbytes for b in program.buffers], pages, link)


def replay(
    cost_ns: Sequence[int], nbytes: Sequence[int], pages: Sequence[Page], link: Link | None
) -> Traffic:
    """`traffic` for callers that have the time of each step and the bytes of each buffer."""
    if pages and link is None:
        raise ValueError(f"there are {len(pages)} pages, but no link that could carry them")
    events = _Events(pages, len(cost_ns))
    waits_ns = [0] * (len(cost_ns) + 1)
    out_free = in_free = clock = 0
    arrival: dict[int, int] = {}
    returned: dict[int, int] = {}
    for step in range(len(cost_ns) + 1):
        before = clock
        for k in events.out_done.get(step, ()):
            clock = max(clock, arrival[k])
        for k in events.in_start.get(step, ()):
            assert link is not None
            in_free = max(in_free, clock) + link.from_host_ns(nbytes[pages[k].buffer])
            returned[k] = in_free
        for k in events.in_done.get(step, ()):
            clock = max(clock, returned[k])
        waits_ns[step] = clock - before
        if step < len(cost_ns):
            clock += cost_ns[step]
        for k in events.made.get(step, ()):
            assert link is not None
            out_free = max(out_free, clock) + link.to_host_ns(nbytes[pages[k].buffer])
            arrival[k] = out_free
    host = _host_bytes(nbytes, pages, len(cost_ns))
    moved = sum(nbytes[p.buffer] for p in pages) + sum(
        nbytes[pages[k].buffer] for made in events.made.values() for k in made
    )
    return Traffic(
        total_ns=clock,
        waiting_ns=sum(waits_ns),
        waits_ns=np.asarray(waits_ns, dtype=np.int64),
        host_bytes=host,
        host_peak_bytes=int(host.max()),
        moved_bytes=moved,
    )


class _Events:
    """What happens just before each step, and after the run of each step that makes a paged copy."""

    def __init__(self, pages: Sequence[Page], n_steps: int) -> None:
        self.made: dict[int, list[int]] = {}
        self.out_done: dict[int, list[int]] = {}
        self.in_start: dict[int, list[int]] = {}
        self.in_done: dict[int, list[int]] = {}
        place = {id(page): k for k, page in enumerate(pages)}
        first = {place[id(own[0])] for own in pages_by_range(pages).values()}
        for k, page in enumerate(pages):
            if page.in_done > n_steps:
                raise ValueError(f"there are {n_steps} steps, but a page is back before step {page.in_done}")
            if k in first:
                assert page.run is not None
                self.made.setdefault(page.run, []).append(k)
                self.out_done.setdefault(page.out_done, []).append(k)
            self.in_start.setdefault(page.in_start, []).append(k)
            self.in_done.setdefault(page.in_done, []).append(k)
        for made in self.made.values():
            made.sort(key=lambda k: pages[k].buffer)


def _host_bytes(nbytes: Sequence[int], pages: Sequence[Page], n_steps: int) -> IntArray:
    """Bytes on the host in the moment before each step and at the end."""
    change = np.zeros(n_steps + 2, dtype=np.int64)
    for (run, buffer), own in pages_by_range(pages).items():
        change[run + 1] += nbytes[buffer]
        change[own[-1].in_done + 1] -= nbytes[buffer]
    host: IntArray = np.cumsum(change[:-1])
    return host
