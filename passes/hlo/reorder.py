"""Orders of a scheduled module's kernels that need fewer bytes than XLA's own.

Not moved: what has an effect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_

from passes.hlo.lift import LiftedModule
from passes.hlo.purity import Purity
from passes.ir import OpId
from passes.reorder import Reorder
from passes.simulate import simulate

# What leaves as much of what it frees gains too little to leave its place. Set by `benchmarks.side_by_side`:
# in a scanned model's attention a product of a sixteenth of its operand came last in XLA's order. With it in
# its place 9.2 GiB under `nothing_saveable` are 7.6; if only 1/64 may be left 8.8, if half may 8.0.
MOST_LEFT = 0.9


def reordered(lifted: LiftedModule) -> tuple[OpId, ...] | None:
    """The ops of a lifted computation in the new order; None where nothing moves."""
    work = Reorder(lifted.program, _movable(lifted), _needs(lifted), lifted.overwriters, most_left=MOST_LEFT)
    work.run()
    return tuple(work.order) if work.moved else None


def depth_first(lifted: LiftedModule) -> tuple[OpId, ...] | None:
    """The ops in an order in which what is made is read soon; None if no such order has a lower peak.

    XLA:CPU runs what does not depend on each other side by side: four branches of a contrastive loss within
    half of its bytes took 9.8 MiB of temporaries, one after the other 6.0. A NeRF's two nets take turns in
    XLA's order, so that their gradients do, too: 22.5 MiB, 14.3 where those of one come first. What may not
    be moved stays in its order.
    """
    program, needs = lifted.program, [set(needed) for needed in _needs(lifted)]
    last = None
    for op, movable in zip(program.ops, _movable(lifted), strict=True):
        if not movable:
            needs[op.id].update(() if last is None else (last,))
            last = op.id
        for other in lifted.overwriters[op.id]:
            needs[other].add(op.id)
    found = [_depth_first(needs, latest_first) for latest_first in (False, True)]
    found.append(_least_first(needs))
    peaks = [simulate(program, order).peak_bytes for order in found]
    lower = min(peaks) < simulate(program).peak_bytes
    return found[peaks.index(min(peaks))] if lower else None


def _depth_first(needs: Sequence[Collection[OpId]], latest_first: bool) -> tuple[OpId, ...]:
    """Each op right behind the last of those that it needs, which are run from the first on or the last."""
    order: dict[OpId, None] = {}
    for root in _roots(needs):
        _run(root, needs, order, latest_first=latest_first)
    return tuple(order)


def _least_first(needs: Sequence[Collection[OpId]]) -> tuple[OpId, ...]:
    """Of what nothing needs always that next for which the fewest ops are missing, right behind those."""
    # Every op with all that it follows from, as bits.
    follows: list[int] = []
    for k, before in enumerate(needs):
        follows.append(reduce(or_, (follows[other] for other in before), 1 << k))
    roots, missing = dict.fromkeys(_roots(needs)), ~0
    order: dict[OpId, None] = {}
    while roots:
        root = min(roots, key=lambda k: (follows[k] & missing).bit_count())
        del roots[root]
        missing &= ~follows[root]
        _run(root, needs, order, latest_first=False)
    return tuple(order)


def _roots(needs: Sequence[Collection[OpId]]) -> list[OpId]:
    """What nothing needs."""
    needed = {other for before in needs for other in before}
    return [OpId(k) for k in range(len(needs)) if k not in needed]


def _run(
    root: OpId, needs: Sequence[Collection[OpId]], order: dict[OpId, None], *, latest_first: bool
) -> None:
    """Append an op to an order, behind those that it needs and that are missing."""
    stack = [root]
    while stack:
        missing = [other for other in needs[stack[-1]] if other not in order]
        if missing:
            stack.extend(sorted(missing, reverse=not latest_first))
        else:
            order[stack.pop()] = None


def _movable(lifted: LiftedModule) -> list[bool]:
    """For every op whether it may run earlier or later than it does."""
    purity = Purity(lifted.module)
    return [purity.instruction(lifted.scope.by_id[i]) for i in lifted.instructions]


def _needs(lifted: LiftedModule) -> list[frozenset[OpId]]:
    """For every op those that must run before it: what it reads, and what a barrier in between waits for, and
    by control dependencies. But for readers of what it writes over, as in the bodies of loops: those are
    `overwriters`."""
    op_of = {i: op.id for op, i in zip(lifted.program.ops, lifted.instructions, strict=True)}
    by_id = lifted.scope.by_id
    behind: dict[int, frozenset[OpId]] = {}
    for i in lifted.scope.order:
        before = [*by_id[i].operands, *(c for c in by_id[i].control if not _overwrites(lifted, op_of, i, c))]
        needed = [frozenset({op_of[o]}) if o in op_of else behind.get(o, frozenset()) for o in before]
        behind[i] = frozenset[OpId]().union(*needed)
    return [behind[i] for i in lifted.instructions]


def _overwrites(lifted: LiftedModule, op_of: dict[int, OpId], instruction: int, reader: int) -> bool:
    """True if an instruction waits for a reader of what it writes over."""
    return reader in op_of and op_of.get(instruction) in lifted.overwriters[op_of[reader]]
