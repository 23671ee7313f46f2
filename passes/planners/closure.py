"""Keep a value or recompute it: the cheapest choice for a set of demanded values, by one minimum cut.

A value that is demanded is either kept, at its price, or its op runs again, at its cost, and then the
op's inputs are demanded in turn. An op that runs again makes all its outputs.

Nodes: the source, the sink, one per value, one per op. Arcs: source -> demanded value (infinite), value
-> its op (price of keeping), value without an op -> sink (price), op -> sink (cost), op -> input (infinite).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow  # type: ignore[import-untyped]

SOURCE, SINK = 0, 1
INFINITE = 1 << 56
LARGEST = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """One op: what it costs to recompute (None: it must not), what it reads and what it writes."""

    cost: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cheapest_to_keep(
    prices: Sequence[int | None], ops: Sequence[Producer], demanded: Sequence[int]
) -> tuple[int, ...]:
    """The values to keep, ascending.

    Args:
        prices: for every value what keeping it costs; None if it must not be kept.
        ops: producers; a value without one can only be kept.
        demanded: values that must be at hand.

    Complexity: one maximum flow over values + ops.
    """
    if not demanded:
        return ()
    op_of = {v: k for k, op in enumerate(ops) for v in op.outputs}
    value_node = {v: 2 + v for v in range(len(prices))}
    op_node = [2 + len(prices) + k for k in range(len(ops))]
    arcs: list[tuple[int, int, int]] = [(SOURCE, value_node[v], INFINITE) for v in sorted(set(demanded))]
    for v, price in enumerate(prices):
        head = op_node[op_of[v]] if v in op_of else SINK
        arcs.append((value_node[v], head, INFINITE if price is None else min(price, LARGEST)))
    for k, op in enumerate(ops):
        arcs.append((op_node[k], SINK, INFINITE if op.cost is None else min(op.cost, LARGEST)))
        arcs.extend((op_node[k], value_node[v], INFINITE) for v in dict.fromkeys(op.inputs))
    flow = max_flow.SimpleMaxFlow()
    tails, heads, capacities = (np.array(column, dtype=np.int64) for column in zip(*arcs, strict=True))
    flow.add_arcs_with_capacity(tails, heads, capacities)
    status = flow.solve(SOURCE, SINK)
    assert status == flow.OPTIMAL, f"maximum flow ended with {status}"
    near = {int(node) for node in flow.get_source_side_min_cut()}
    return tuple(
        v
        for v in range(len(prices))
        if value_node[v] in near and (v not in op_of or op_node[op_of[v]] not in near)
    )
