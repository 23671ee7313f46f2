"""The best plan of a tiny program, by shortest path over (next op, what is in memory).

It knows no bound on the number of recomputes and shares nothing with the planners or the simulator. Every
output may be offered at most one input's place (`tests.strategies` keeps to that): then holding a value
longer than needed never saves bytes, and the shortest path is the optimum over all sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import combinations

from passes.ir import Op, Program

State = tuple[int, frozenset[int]]


def least_cost_ns(program: Program, budget_bytes: int) -> int | None:
    """Cost of the cheapest sequence whose peak is within the budget; None if there is none."""
    start: State = (0, frozenset())
    best = {start: 0}
    queue: list[tuple[int, int, list[int]]] = [(0, 0, [])]
    while queue:
        cost_ns, slot, held_list = heapq.heappop(queue)
        held = frozenset(held_list)
        if best.get((slot, held), -1) != cost_ns:
            continue
        if _is_done(program, slot, held):
            return cost_ns
        for op in program.ops[: slot + 1]:
            if op.id != slot and not op.can_recompute(slot):
                continue
            for after, live_bytes in _runs(program, op, held):
                state = (max(slot, op.id + 1), after)
                reached_ns = cost_ns + op.cost_ns
                if live_bytes <= budget_bytes and reached_ns < best.get(state, reached_ns + 1):
                    best[state] = reached_ns
                    heapq.heappush(queue, (reached_ns, state[0], sorted(after)))
    return None


def least_peak_bytes(program: Program) -> int:
    """The lowest peak of any sequence."""
    low = 0
    high = sum(b.nbytes for b in program.buffers) + sum(op.workspace_bytes for op in program.ops)
    while low < high:
        middle = (low + high) // 2
        if least_cost_ns(program, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _is_done(program: Program, slot: int, held: frozenset[int]) -> bool:
    wanted = [b for b in program.outputs if program.producer[b] is not None]
    return slot == len(program.ops) and all(b in held for b in wanted)


def _runs(program: Program, op: Op, held: frozenset[int]) -> Iterator[tuple[frozenset[int], int]]:
    """What can be held after running `op`, and the live bytes while it runs."""
    arguments = frozenset(program.arguments)
    if not all(b in held or b in arguments for b in op.inputs):
        return
    everything = sorted(held | set(op.outputs))
    fixed_bytes = sum(program.buffers[b].nbytes for b in arguments) + op.workspace_bytes
    for count in range(len(everything) + 1):
        for after in combinations(everything, count):
            saved_bytes = 0
            taken: list[int] = []
            for out, inp in op.may_share:
                if inp in held and inp not in after and inp not in taken:
                    saved_bytes += min(program.buffers[out].nbytes, program.buffers[inp].nbytes)
                    taken.append(inp)
            live_bytes = sum(program.buffers[b].nbytes for b in everything) + fixed_bytes - saved_bytes
            yield frozenset(after), live_bytes
