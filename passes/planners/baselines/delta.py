"""DELTA (Tang et al., 2022): a filter picks what to let go of, a director how: swap it or recompute it.

Online, in the order of the program. Where a step does not fit, the filter takes the value with the least
worth for its bytes and for the time since it was last touched (DTR's staleness); the director swaps it to
the host if the link's two ways cost less time than making it again from what is there, else drops it. A
swapped value comes back when it is asked for.

Simplified: the next use is not known, as in DELTA; profiled costs are the program's own. Addresses are not
replayed: the budget is of live bytes, which flatters it.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir import BufferId, Page
from passes.link import Link
from passes.liveness import Graph


class DeltaError(Exception):
    """It runs out of memory, or asks for an op that must not be recomputed."""


@dataclass(slots=True)
class _LiveRange:
    """A value's latest live range; `out_done` is where it left, None while it is on the device."""

    run: int
    last_use_ns: int
    out_done: int | None = None


class Delta:
    """One run of a program."""

    def __init__(self, graph: Graph, budget_bytes: int, host_bytes: int, link: Link) -> None:
        self.graph, self.link = graph, link
        self.capacity_bytes, self.host_capacity_bytes = budget_bytes - graph.argument_bytes, host_bytes
        self.ranges: dict[int, _LiveRange] = {}
        self.steps: list[int] = []
        self.pages: list[Page] = []
        self.slot = self.clock_ns = 0
        self._readers = [len(ops) for ops in graph.readers()]

    def run(self) -> tuple[list[int], list[Page]]:
        """Steps and pages.

        Raises:
            DeltaError: it cannot go on.
        """
        for op in range(len(self.graph.cost_ns)):
            self.slot = op
            self._run(op, frozenset(), 0)
            for b in self.graph.inputs[op]:
                self._readers[b] -= 1
            for b in [b for b in self.ranges if not self._readers[b] and not self.graph.is_output[b]]:
                del self.ranges[b]
        self.slot = len(self.graph.cost_ns)
        if not all(map(self._is_here, self.graph.results)):
            raise DeltaError
        return self.steps, self.pages

    def _is_here(self, buffer: int) -> bool:
        return buffer in self.ranges and self.ranges[buffer].out_done is None

    def _run(self, op: int, locked: frozenset[int], depth: int) -> None:
        graph = self.graph
        if depth > len(graph.cost_ns) or (depth and not graph.program.ops[op].can_recompute(self.slot)):
            raise DeltaError
        own = locked | {*graph.inputs[op], *graph.outputs[op]}
        for b in graph.inputs[op]:
            if not self._is_here(b) and b not in self.ranges:
                self._run(graph.producer[b], own, depth + 1)
        away = [b for b in graph.inputs[op] if not self._is_here(b)]
        if any(b not in self.ranges for b in away):
            raise DeltaError
        made = [b for b in graph.outputs[op] if not self._is_here(b)]
        need_bytes = sum(graph.nbytes[b] for b in (*made, *away)) + graph.workspace_bytes[op]
        self._make_room(need_bytes, own)
        for b in away:
            self._swap_in(b)
        position = len(self.steps)
        self.steps.append(op)
        self.clock_ns += graph.cost_ns[op]
        for b in graph.inputs[op]:
            self.ranges[b].last_use_ns = self.clock_ns
        for b in graph.outputs[op]:
            self._forget(b)
            self.ranges[b] = _LiveRange(run=position, last_use_ns=self.clock_ns)

    def _swap_in(self, buffer: int) -> None:
        live_range, now = self.ranges[buffer], len(self.steps)
        assert live_range.out_done is not None, "only what is away comes back"
        out_done, live_range.out_done = live_range.out_done, None
        self.pages.append(
            Page(buffer=BufferId(buffer), run=live_range.run, out_done=out_done, in_start=now, in_done=now)
        )

    def _forget(self, buffer: int) -> None:
        if self._is_away(buffer):
            raise DeltaError
        self.ranges.pop(buffer, None)

    def _make_room(self, need_bytes: int, locked: frozenset[int]) -> None:
        """The filter: let go of the least worthy values until a step fits."""
        nbytes = self.graph.nbytes
        while sum(nbytes[b] for b in self.ranges if self._is_here(b)) + need_bytes > self.capacity_bytes:
            choices = [b for b in self.ranges if self._is_here(b) and b not in locked and nbytes[b]]
            choices = [b for b in choices if self._price_ns(b)[0] < (1 << 60)]
            if not choices:
                raise DeltaError
            self._let_go(min(choices, key=lambda b: (self._worth(b), b)))

    def _worth(self, buffer: int) -> float:
        idle_ns = 1 + self.clock_ns - self.ranges[buffer].last_use_ns
        return self._price_ns(buffer)[0] / (self.graph.nbytes[buffer] * idle_ns)

    def _price_ns(self, buffer: int) -> tuple[int, bool]:
        """The director: the cheaper of making a value again and of swapping it, and whether to swap."""
        nbytes = self.graph.nbytes[buffer]
        swap_ns = self.link.to_host_ns(nbytes) + self.link.from_host_ns(nbytes)
        on_host = sum(self.graph.nbytes[p] for p, c in self.ranges.items() if c.out_done is not None)
        if on_host + nbytes > self.host_capacity_bytes or not self.graph.arrays.pageable[buffer]:
            swap_ns = 1 << 60
        recompute_ns = self._recompute_ns(buffer) if not self.graph.is_output[buffer] else 1 << 60
        return min(recompute_ns, swap_ns), swap_ns < recompute_ns

    def _recompute_ns(self, buffer: int) -> int:
        """Cost of making a value again from what is on the device or on the host."""
        total, stack, seen = 0, [self.graph.producer[buffer]], set[int]()
        while stack:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            outs = [b for b in self.graph.outputs[op] if b != buffer and self._is_away(b)]
            if outs or not self.graph.program.ops[op].recomputable:
                return 1 << 60
            total += self.graph.cost_ns[op]
            stack += [self.graph.producer[b] for b in self.graph.inputs[op] if b not in self.ranges]
        return total

    def _is_away(self, buffer: int) -> bool:
        return buffer in self.ranges and self.ranges[buffer].out_done is not None

    def _let_go(self, buffer: int) -> None:
        if self._price_ns(buffer)[1]:
            self.ranges[buffer].out_done = len(self.steps)
        else:
            del self.ranges[buffer]
