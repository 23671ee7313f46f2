"""The time axis of the exact mode: slots joined to blocks, and what may be recomputed or kept in each.

A breakpoint is an op `t`; block `k` holds the slots after breakpoint `k-1` up to and with breakpoint `k`, and
the last block ends with the slot after the last op. Fewer breakpoints are a relaxation: inside a block order
and lifetimes are free. Invariant: every plan, however it orders its recomputes, is a point of every frame.

In the example of `passes.ir` with the breakpoints 2 and 3 the blocks are the slots {0 1 2}, {3} and {4 5 6}.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from passes.liveness import Graph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A program's slots in blocks.

    Attributes:
        graph: the program.
        breakpoints: ops after whose first run a block ends, ascending; the budget is enforced at each.
        ordered: slots whose recomputes are held to the budget in schedule order; each is its own block.
        last_slot: for every buffer the last slot in which it can be of use, -1 if in none.
    """

    graph: Graph
    breakpoints: tuple[int, ...]
    ordered: tuple[int, ...]
    last_slot: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph, breakpoints: tuple[int, ...], ordered: tuple[int, ...] = ()) -> Frame:
        """Blocks that end at `breakpoints`, at deadlines, and around every slot of `ordered`."""
        n_ops = len(graph.cost_ns)
        wanted = [*breakpoints, *(op.deadline for op in graph.program.ops if op.deadline is not None)]
        wanted += [t for slot in ordered for t in (slot - 1, slot)]
        kept = tuple(sorted({t for t in wanted if 0 <= t < n_ops}))
        return cls(graph=graph, breakpoints=kept, ordered=tuple(sorted(ordered)), last_slot=last_slots(graph))

    @property
    def n_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.breakpoints) + 1

    def block(self, slot: int) -> int:
        """The block of a slot (and of the op that first runs there)."""
        return bisect_left(self.breakpoints, slot)

    def slots(self, block: int) -> range:
        """The slots of a block; the last one ends with the slot after the last op."""
        first = self.breakpoints[block - 1] + 1 if block else 0
        last = self.breakpoints[block] if block < len(self.breakpoints) else len(self.graph.cost_ns)
        return range(first, last + 1)

    def may_recompute(self, block: int, op: int) -> bool:
        """True if a plan may run `op` again in this block, to some use; not so in its own block."""
        if self.block(op) >= block:
            return False
        first, last = self.slots(block)[0], self.slots(block)[-1]
        if not self.graph.program.ops[op].can_recompute(last):
            return False
        return any(self.last_slot[b] >= first for b in self.graph.outputs[op])

    def may_keep(self, block: int, buffer: int) -> bool:
        """True if whether `buffer` is there when the block begins is for the plan to choose."""
        producer = self.graph.producer[buffer]
        if producer < 0 or not self.graph.nbytes[buffer] or self.block(producer) >= block:
            return False
        return self.last_slot[buffer] >= self.slots(block)[0]

    def is_free(self, block: int, buffer: int) -> bool:
        """True if a use in this block needs no thought: made in the block, an argument, or of no bytes."""
        producer = self.graph.producer[buffer]
        return producer < 0 or not self.graph.nbytes[buffer] or self.block(producer) == block


def last_slots(graph: Graph) -> tuple[int, ...]:
    """For every buffer the last slot in which it, or what is made from it, is of use; O(edges)."""
    n_ops = len(graph.cost_ns)
    last = [n_ops if is_output else -1 for is_output in graph.is_output]
    for op in reversed(range(n_ops)):
        reach = max([op, *(last[b] for b in graph.outputs[op])])
        for b in graph.inputs[op]:
            last[b] = max(last[b], reach)
    return tuple(last)


def unit_bytes(graph: Graph, budget_bytes: int, steps: int) -> int:
    """Bytes to a unit so that the budget is about `steps` units; exact where the sizes allow it."""
    exact = math.gcd(*graph.nbytes, *graph.workspace_bytes)
    return max(1, exact) * max(1, budget_bytes // (steps * max(1, exact)))
