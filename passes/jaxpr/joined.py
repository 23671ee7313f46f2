"""The ops that XLA makes one kernel of (`passes.jaxpr.together`), as one op.

What several of them read is there until the last has run, and what they make comes at once:

    h = f(u, v)    dh = g(u, v)    du = k(u, v)     three values beside u and v; one after the other dh could
                                                    be made once h is gone, and du take the place of v
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from passes.ir import BufferId, Op, OpId, Program
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.moved import waited
from passes.jaxpr.together import Group


def joined(lifted: LiftedJaxpr, kernel_of: Mapping[int, Group]) -> LiftedJaxpr:
    """The same program with one op for all ops of a kernel, each as soon as it may run; the same object where
    there are none of several. For estimates: no plan is emitted of it.

    Args:
        kernel_of: which kernel ops are of, by their last equations.
    """
    members: dict[Group, list[int]] = {}
    for op, body in enumerate(lifted.bodies):
        if body[-1] in kernel_of:
            members.setdefault(kernel_of[body[-1]], []).append(op)
    groups = [group for group in members.values() if len(group) > 1]
    if not groups:
        return lifted
    needs = waited(lifted)
    # A part that joined late may wait for what waits for an earlier one.
    while (order := _order(needs, groups)) is None:
        groups.pop()
    program, n_ops = lifted.program, len(lifted.program.ops)
    kernels = [ops for node in order if (ops := [op for op in node if op < n_ops])]
    inside = _inside(program, groups)
    parts = [[program.ops[op] for op in kernel] for kernel in kernels]
    return replace(
        lifted,
        program=Program.build(
            name=program.name,
            ops=tuple(_one(OpId(k), ops, inside) for k, ops in enumerate(parts)),
            buffers=tuple(replace(b, nbytes=0) if b.id in inside else b for b in program.buffers),
            outputs=program.outputs,
        ),
        bodies=tuple(_body([lifted.bodies[op] for op in kernel]) for kernel in kernels),
    )


def _inside(program: Program, groups: Sequence[Sequence[int]]) -> set[BufferId]:
    """What is made and read in the same kernel alone."""
    readers: dict[BufferId, set[int]] = {}
    for op in program.ops:
        for b in op.inputs:
            readers.setdefault(b, set()).add(op.id)
    made = ((b, group) for group in groups for k in group for b in program.ops[k].outputs)
    results = {*program.outputs}
    return {b for b, group in made if b not in results and readers.get(b, {-1}).issubset(group)}


def _body(bodies: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The equations of several ops, the last one's root at the end."""
    root = bodies[-1][-1]
    return (*sorted({i for body in bodies for i in body} - {root}), root)


def _order(needs: Mapping[int, set[int]], groups: Sequence[list[int]]) -> list[list[int]] | None:
    """Nodes, those of a group as one, each as soon as it may run, in their order; None if they wait for each
    other."""
    first = {op: group[0] for group in groups for op in group}
    nodes: dict[int, list[int]] = {}
    waits: dict[int, set[int]] = {}
    for node, before in needs.items():
        own = first.get(node, node)
        nodes.setdefault(own, []).append(node)
        waits.setdefault(own, set()).update(first.get(other, other) for other in before)
    readers: dict[int, list[int]] = {}
    for own, before in waits.items():
        before.discard(own)
        for other in before:
            readers.setdefault(other, []).append(own)
    place = {own: k for k, own in enumerate(nodes)}
    left = {own: len(before) for own, before in waits.items()}
    ready = [(place[own], own) for own, n in left.items() if not n]
    heapq.heapify(ready)
    order = []
    while ready:
        own = heapq.heappop(ready)[1]
        order.append(nodes[own])
        for reader in readers.get(own, ()):
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, (place[reader], reader))
    return order if len(order) == len(nodes) else None


def _one(op_id: OpId, ops: Sequence[Op], inside: Set[BufferId]) -> Op:
    """One op that does what several do; what only it reads lends the place that it may take to its reader."""
    last = ops[-1]
    if len(ops) == 1:
        return replace(last, id=op_id)
    made = {b for op in ops for b in op.outputs}
    operands: dict[BufferId, list[BufferId]] = {}
    for op in ops:
        for result, operand in op.may_share:
            # What is made inside names what it may take the place of itself.
            operands.setdefault(result, []).extend(
                operands.get(operand, []) if operand in made else [operand]
            )
    return replace(
        last,
        id=op_id,
        inputs=tuple(b for b in dict.fromkeys(b for op in ops for b in op.inputs) if b not in made),
        outputs=tuple(b for op in ops for b in op.outputs),
        cost_ns=sum(op.cost_ns for op in ops),
        energy_pj=sum(op.energy_pj for op in ops),
        workspace_bytes=max(op.workspace_bytes for op in ops),
        recomputable=all(op.recomputable for op in ops),
        may_share=tuple((b, operand) for b in operands if b not in inside for operand in operands[b]),
    )
