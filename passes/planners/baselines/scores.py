"""The scores of DTR, DTE and Coop, as their authors define them.

c is the cost of the op that makes a value, m its bytes, s its staleness: the time since it was last made
or read, on the clock of costs. Evicted values are a graph; e*(v) is what `v`'s eviction would join.

h_DTR(v)    = (c(v) + sum of c over e*(v)) / (m * s); e* is the evicted values that would have to be made
              before `v`, and those that would have to wait for it (Kirisame et al., ICLR 2021).
h_DTR_eq(v) = the same with e* as the evicted components next to `v`, kept in a union-find whose costs are
              taken off when a value is recomputed (components are not split).
h_DTE(v)    = (c + components' cost) * 1.1 ** (times recomputed) / ((m + adjacent free bytes) * s), as in
              MegEngine.
Coop        = the contiguous window whose sum of (c + components' cost) / s is least and whose bytes, free
              ones included, hold the request; cheap values are allocated from one end of the pool,
              expensive ones from the other, and in-place outputs keep their address (Zhang et al.,
              NeurIPS 2023).
"""

from __future__ import annotations

from passes.offsets.pool import FREE
from passes.planners.baselines.runtime import Policy, Runtime, adjacent_free_bytes
from passes.planners.pool_run import byte_ns
from passes.reach import reached
from passes.union_find import UnionFind

# MegEngine's own factor, see above.
RECOMPUTE_FACTOR = 1.1


class Components:
    """Evicted values joined to components with the sum of their costs; a value recomputed leaves a trace."""

    def __init__(self, count: int) -> None:
        self.groups = UnionFind(count)
        self.cost_ns = [0] * count
        self.evicted = [False] * count

    def next_to(self, runtime: Runtime, buffer: int) -> int:
        """Cost of the components that a value touches."""
        return sum(self.cost_ns[r] for r in self._roots(runtime, buffer))

    def evict(self, runtime: Runtime, buffer: int) -> None:
        """Join a value with the evicted ones around it."""
        roots = self._roots(runtime, buffer)
        self.groups.parent[buffer] = buffer
        self.cost_ns[buffer] = _cost_ns(runtime, buffer) + sum(self.cost_ns[r] for r in roots)
        self.evicted[buffer] = True
        for r in roots:
            self.groups.parent[r] = buffer

    def make(self, runtime: Runtime, buffer: int) -> None:
        """Take a value's cost off its component, which stays as it is."""
        if self.evicted[buffer]:
            self.evicted[buffer] = False
            root = self.groups.find(buffer)
            self.cost_ns[root] = max(0, self.cost_ns[root] - _cost_ns(runtime, buffer))

    def _roots(self, runtime: Runtime, buffer: int) -> list[int]:
        roots = (self.groups.find(b) for b in _neighbours(runtime, buffer) if self.evicted[b] and b != buffer)
        own = self.groups.find(buffer)
        return [r for r in dict.fromkeys(roots) if r != own or self.evicted[buffer]]


class _OneByOne(Policy):
    """Evicts the value of least score until the request fits."""

    def make_room(self, runtime: Runtime, nbytes: int) -> None:
        """Evict the value of least score."""
        best: tuple[float, int] | None = None
        for index, block in enumerate(runtime.pool.blocks):
            if runtime.evictable(block.owner):
                score = (self.score(runtime, block.owner, index), block.owner)
                best = score if best is None or score < best else best
        if best is not None:
            runtime.evict(best[1])

    def score(self, runtime: Runtime, buffer: int, index: int) -> float:
        """The score of a value in the pool's block `index`; the least goes first."""
        raise NotImplementedError


class Dtr(_OneByOne):
    """h_DTR, with the exact neighbourhood."""

    def score(self, runtime: Runtime, buffer: int, index: int) -> float:
        """(c + e*) / (m * s)."""
        cost_ns = _cost_ns(runtime, buffer) + _around_ns(runtime, buffer)
        return cost_ns / (runtime.graph.nbytes[buffer] * _staleness(runtime, buffer))


class _WithComponents(_OneByOne):
    """Keeps the components of evicted values."""

    components: Components | None = None

    def near_ns(self, runtime: Runtime, buffer: int) -> int:
        """c and the cost of the components next to a value."""
        if self.components is None:
            self.components = Components(len(runtime.graph.nbytes))
        return _cost_ns(runtime, buffer) + self.components.next_to(runtime, buffer)

    def evicted(self, runtime: Runtime, buffer: int) -> None:
        """Join the components around an evicted value."""
        if self.components is not None:
            self.components.evict(runtime, buffer)

    def made(self, runtime: Runtime, buffer: int) -> None:
        """Take a value that is back off its component."""
        if self.components is not None:
            self.components.make(runtime, buffer)


class DtrEq(_WithComponents):
    """h_DTR with equivalence classes."""

    def score(self, runtime: Runtime, buffer: int, index: int) -> float:
        """(c + components) / (m * s)."""
        nbytes = runtime.graph.nbytes[buffer]
        return self.near_ns(runtime, buffer) / (nbytes * _staleness(runtime, buffer))


class Dte(_WithComponents):
    """MegEngine's score: free neighbours count as bytes, and values that came back often stay."""

    def score(self, runtime: Runtime, buffer: int, index: int) -> float:
        """(c + components) * 1.1 ** recomputes / ((m + free) * s)."""
        nbytes = runtime.graph.nbytes[buffer] + adjacent_free_bytes(runtime.pool, index)
        factor = RECOMPUTE_FACTOR ** min(1000, runtime.recomputes[buffer])
        return self.near_ns(runtime, buffer) * factor / (nbytes * _staleness(runtime, buffer))


class CoopOnline(_WithComponents):
    """Coop's sliding window over addresses, its two ends and its in-place rule."""

    in_place = True

    def __init__(self, middle: float) -> None:
        self.middle = middle

    def from_top(self, runtime: Runtime, buffer: int) -> bool:
        """Expensive values, for their bytes, grow from the top."""
        return byte_ns(runtime.graph, buffer) > self.middle

    def make_room(self, runtime: Runtime, nbytes: int) -> None:
        """Evict the cheapest window that holds the request."""
        blocks = runtime.pool.blocks
        pinned = frozenset(b.owner for b in blocks if b.owner != FREE and not runtime.evictable(b.owner))
        scores = [
            0.0 if b.owner == FREE or b.owner in pinned else self.score(runtime, b.owner, 0) for b in blocks
        ]
        sums = [0.0]
        for score in scores:
            sums.append(sums[-1] + score)
        windows = runtime.pool.windows(nbytes, pinned)
        best = min(windows, key=lambda w: (sums[w[1] + 1] - sums[w[0]], w), default=None)
        if best is not None:
            for owner in [b.owner for b in blocks[best[0] : best[1] + 1] if b.owner != FREE]:
                runtime.evict(owner)

    def score(self, runtime: Runtime, buffer: int, index: int) -> float:
        """(c + components) / s: bytes count by the window."""
        return self.near_ns(runtime, buffer) / _staleness(runtime, buffer)


def _cost_ns(runtime: Runtime, buffer: int) -> int:
    return runtime.graph.cost_ns[runtime.graph.producer[buffer]]


def _staleness(runtime: Runtime, buffer: int) -> int:
    return max(1, runtime.clock_ns - runtime.last_use_ns[buffer])


def _neighbours(runtime: Runtime, buffer: int) -> list[int]:
    """What a value is made from, and what has been made from it."""
    graph = runtime.graph
    made = [o for op in runtime.readers[buffer] for o in graph.outputs[op] if runtime.ever[o]]
    return [*graph.inputs[graph.producer[buffer]], *made]


def _around_ns(runtime: Runtime, buffer: int) -> int:
    """Cost of the ops that make the evicted ancestors and the evicted descendants of a value."""
    graph = runtime.graph

    def missing(op: int) -> list[int]:
        return [graph.producer[b] for b in graph.inputs[op] if not runtime.present[b]]

    ops = reached(missing(graph.producer[buffer]), missing)
    seen: set[int] = set()
    stack = [buffer]
    while stack:
        for op in runtime.readers[stack.pop()]:
            gone = [o for o in graph.outputs[op] if runtime.ever[o] and not runtime.present[o]]
            if gone and op not in seen and any(runtime.references[o] for o in gone):
                seen.add(op)
                stack.extend(gone)
    return sum(graph.cost_ns[op] for op in sorted(ops | seen))
