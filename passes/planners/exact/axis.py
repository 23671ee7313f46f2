"""The time axis of the model with lifetimes: one long sequence of steps, of which a plan takes some.

A plan lies on an axis if it is the axis' steps without some recomputes. After Moccasin (ICML 2023) the whole
axis offers in every slot each op once, in schedule order; an axis around a plan offers that in some slots
only, beside the plan's own recomputes. Invariant: an axis is itself a valid sequence.

In the example of `passes.ir` the slots 3 and 4 of the whole axis are `0 1 2 3` and `0 1 2 3 4`, without
the ops that are of no more use there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from passes.liveness import Graph
from passes.planners.exact.frame import last_slots
from passes.planners.schedule import slots_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """A sequence of steps, and which of them are first runs.

    Attributes:
        graph: the program.
        steps: op ids; every op's first occurrence is its first run, which each plan has.
        is_first: for every position whether it is a first run.
    """

    graph: Graph
    steps: tuple[int, ...]
    is_first: tuple[bool, ...]

    @classmethod
    def of(cls, graph: Graph, steps: Sequence[int]) -> Axis:
        """The axis of a sequence: its plans are what deleting recomputes from it can give."""
        first = tuple(op == slot for op, slot in zip(steps, slots_of(steps), strict=True))
        return cls(graph=graph, steps=tuple(steps), is_first=first)

    @classmethod
    def around(
        cls,
        graph: Graph,
        steps: Sequence[int],
        window: Collection[int],
        *,
        cost_limit_ns: int | None = None,
        offered: Collection[int] | None = None,
    ) -> Axis:
        """The axis of a sequence with all recomputes of use in the slots of `window`.

        Args:
            steps: a valid sequence; it lies on the axis.
            window: slots in which every op is offered, in schedule order; again wherever `steps` goes back.
            cost_limit_ns: ops that cost more are not offered; they cannot be part of a plan with that cost.
            offered: ops to offer; None for all.
        """
        last = last_slots(graph)

        def is_offered(op: int, slot: int) -> bool:
            cheap = cost_limit_ns is None or graph.cost_ns[op] <= cost_limit_ns
            useful = any(last[b] >= slot for b in graph.outputs[op])
            wanted = offered is None or op in offered
            return wanted and cheap and useful and graph.program.ops[op].can_recompute(slot)

        merged: list[int] = []
        for slot, recomputes in enumerate(_by_slot(graph, steps)):
            for run in _ascending(recomputes) if slot in window else ():
                merged += [op for op in range(slot) if op in run or is_offered(op, slot)]
            merged += [*([] if slot in window else recomputes), *range(slot, len(graph.cost_ns))[:1]]
        return cls.of(graph, merged)

    def positions(self, steps: Sequence[int]) -> list[int]:
        """Where on the axis a sequence takes its steps.

        Raises:
            ValueError: the sequence does not lie on the axis.
        """
        positions: list[int] = []
        at = 0
        for op in steps:
            while at < len(self.steps) and self.steps[at] != op:
                if self.is_first[at]:
                    break
                at += 1
            if at == len(self.steps) or self.steps[at] != op:
                raise ValueError(f"step {len(positions)} (op {op}) is not on the axis")
            positions.append(at)
            at += 1
        return positions


def _by_slot(graph: Graph, steps: Sequence[int]) -> list[list[int]]:
    """The recomputes in every slot, in their order."""
    by_slot: list[list[int]] = [[] for _ in range(len(graph.cost_ns) + 1)]
    for op, slot in zip(steps, slots_of(steps), strict=True):
        if op != slot:
            by_slot[slot].append(op)
    return by_slot


def _ascending(recomputes: Sequence[int]) -> list[list[int]]:
    """Cut in front of every op that does not come after the one before it; at least one part."""
    parts: list[list[int]] = [[]]
    for op in recomputes:
        if parts[-1] and op <= parts[-1][-1]:
            parts.append([])
        parts[-1].append(op)
    return parts
