"""What a pair of scans stacks and what its second half makes again, for one price of a byte.

One turn of both bodies is one program (`passes.jaxpr.scans`). What the second half needs of the first is
either stacked, which costs its bytes times the price and the traffic of writing and reading them, or made
again in the second half from what is stacked, from the carry, and from the first scan's own operands. The
cheapest choice is one minimum cut; a rising price gives a chain of choices from fast to small.

Every turn does the same, so one turn decides; the number of turns multiplies bytes and costs alike. Pairs
inside the bodies are cut first, for the same price.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from passes.cost import DeviceModel
from passes.ir import Op
from passes.jaxpr import compat
from passes.jaxpr.lift import SLICE_PASSES, lift
from passes.jaxpr.primitives import is_expensive
from passes.jaxpr.rewrite import defined
from passes.jaxpr.scans import Body, ScanPair, find_pairs
from passes.outcome import Recomputed
from passes.planners.closure import MadeBy, cheapest_to_keep

PICO = 1000
# Prices of a byte, in units of the time that the device takes to move one.
FIRST_PRICE = 0.02
GROWTH = 1.35
PRICES = 45
REFINEMENTS = 5
STEP_RATIO = 0.04
EXPENSIVE_FLOPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a pair of scans as a cut problem.

    Attributes:
        pair: the scans.
        values: the first body's variables, inputs and then results of equations.
        ops: its equations.
        kernels: what the report says of those that are kernels.
        demanded: indices of the values that the second body reads.
        stacked_bytes: for every value what a slice adds to the stacks if it is kept.
        traffic_ps: for every value the time of writing and reading one slice.
    """

    pair: ScanPair
    values: tuple[Any, ...]
    ops: tuple[MadeBy, ...]
    kernels: dict[int, Recomputed]
    demanded: tuple[int, ...]
    stacked_bytes: tuple[int, ...]
    traffic_ps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What passes from the first to the second half of one pair.

    Attributes:
        pair: the scans, pairs inside their bodies rewritten.
        kept: variables of the first body.
        stacked_bytes: bytes of all stacks that are there for this purpose only.
        remade: what the second half runs again, for the report; costs of all turns.
        inner: choices for the pairs inside the bodies.
    """

    pair: ScanPair
    kept: tuple[Any, ...]
    stacked_bytes: int
    remade: tuple[Recomputed, ...]
    inner: tuple[Choice, ...] = ()

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same pair apart."""
        return self.stacked_bytes, self.kept, tuple(c.signature for c in self.inner)


def turn_of(pair: ScanPair, device: DeviceModel) -> Turn:
    """The cut problem of one pair; costs are those of the kernels that both bodies make together."""
    make, take = pair.make.jaxpr, pair.take.jaxpr
    values = defined(make)
    index = {v: k for k, v in enumerate(values)}
    read = [v for eqn in take.eqns for v in eqn.invars] + list(take.outvars)
    nbytes, traffic = _prices(pair, values, device)
    ops, kernels = _ops(pair, index, device)
    return Turn(
        pair=pair,
        values=tuple(values),
        ops=tuple(ops),
        kernels=kernels,
        demanded=tuple(sorted({index[v] for v in read if compat.is_variable(v) and v in index})),
        stacked_bytes=tuple(nbytes),
        traffic_ps=tuple(traffic),
    )


def choose(turn: Turn, ns_per_byte: float) -> Choice:
    """The cheapest choice for one price of a byte."""
    prices = [
        round(PICO * ns_per_byte * nbytes) + traffic
        for nbytes, traffic in zip(turn.stacked_bytes, turn.traffic_ps, strict=True)
    ]
    kept = cheapest_to_keep(prices, turn.ops, turn.demanded)
    return Choice(
        pair=turn.pair,
        kept=tuple(turn.values[k] for k in kept),
        stacked_bytes=turn.pair.length * sum(turn.stacked_bytes[k] for k in kept),
        remade=_remade(turn, kept),
    )


def all_remade(choice: Choice) -> tuple[Recomputed, ...]:
    """What a choice and those inside it run again."""
    return choice.remade + tuple(r for inner in choice.inner for r in all_remade(inner))


def joined_body(pair: ScanPair) -> Any:
    """One turn of both halves as one open jaxpr; the first half's equations come first."""
    make, take = pair.make.jaxpr, pair.take.jaxpr
    own = set(defined(make))
    return compat.rebuild(
        make,
        eqns=[*make.eqns, *take.eqns],
        outvars=[*make.outvars, *take.outvars],
        invars=[*make.invars, *(v for v in take.invars if v not in own)],
        constvars=[],
    )


def _remade(turn: Turn, kept: tuple[int, ...]) -> tuple[Recomputed, ...]:
    """The kernels that run again if `kept` is kept."""
    op_of = {v: k for k, op in enumerate(turn.ops) for v in op.outputs}
    there, stack, again = set(kept), list(turn.demanded), set()
    while stack:
        v = stack.pop()
        if v not in there:
            there.add(v)
            again.add(op_of[v])
            stack.extend(turn.ops[op_of[v]].inputs)
    return tuple(turn.kernels[k] for k in sorted(again) if k in turn.kernels)


def _prices(pair: ScanPair, values: list[Any], device: DeviceModel) -> tuple[list[int], list[int]]:
    """Bytes and traffic of stacking one slice of every value; nothing for what is at hand anyway."""
    make = pair.make
    own = dict.fromkeys(make.jaxpr.invars[: make.n_consts], (False, 0))
    for v, there in zip(make.slices_in, pair.at_hand, strict=True):
        own[v] = (not there, SLICE_PASSES)
    for k, v in enumerate(make.slices_out):
        # A stack that something else reads is there at no price.
        if k not in pair.only and compat.is_variable(v):
            own.setdefault(v, (False, SLICE_PASSES))
    nbytes, traffic = [], []
    for v in values:
        size = compat.aval_nbytes(v.aval)
        priced, passes = own.get(v, (True, 2 * SLICE_PASSES))
        nbytes.append(size if priced else 0)
        traffic.append(round(PICO * 1e9 * passes * size / device.bytes_per_second))
    return nbytes, traffic


def _ops(
    pair: ScanPair, index: dict[Any, int], device: DeviceModel
) -> tuple[list[MadeBy], dict[int, Recomputed]]:
    """The first body's equations with what it costs to run them in the second half, too."""
    joined = joined_body(pair)
    lifted = lift(compat.dce_jaxpr(joined, [True] * len(joined.outvars)), device, as_xla=False)
    kernel_of: dict[Any, Op] = {}
    for op, body in zip(lifted.program.ops, lifted.bodies, strict=True):
        kernel_of.update(dict.fromkeys(lifted.jaxpr.eqns[body[-1]].outvars, op))
    ops: list[MadeBy] = []
    kernels: dict[int, Recomputed] = {}
    for eqn in pair.make.jaxpr.eqns:
        outputs = tuple(index[v] for v in eqn.outvars if v in index)
        if not outputs:
            continue
        kernel = next((kernel_of[v] for v in eqn.outvars if v in kernel_of), None)
        cost = _fused_ps(eqn, device) if kernel is None else PICO * kernel.cost_ns
        if kernel is not None:
            kernels[len(ops)] = _recomputed(eqn, kernel, pair.length)
        once = eqn.effects or (kernel is not None and not kernel.recomputable)
        inputs = tuple(index[v] for v in eqn.invars if compat.is_variable(v))
        ops.append(MadeBy(cost=None if once else cost, inputs=inputs, outputs=outputs))
    return ops, kernels


def _recomputed(eqn: Any, op: Op, turns: int) -> Recomputed:
    return Recomputed(
        op=f"{op.name} in {turns} turns of a scan",
        source=op.source,
        nbytes=turns * sum(compat.aval_nbytes(v.aval) for v in eqn.outvars),
        cost_ns=turns * op.cost_ns,
        stage="jaxpr",
    )


def _fused_ps(eqn: Any, device: DeviceModel) -> int:
    """Time of an equation that is computed inside another kernel; never nothing, so that it is avoided."""
    size = max((int(getattr(v.aval, "size", 0)) for v in eqn.outvars), default=0)
    flops = size * (EXPENSIVE_FLOPS if is_expensive(eqn.primitive.name) else 1)
    return 1 + round(PICO * 1e9 * flops / device.vector_flops)


def ladder(jaxpr: Any, device: DeviceModel) -> list[tuple[Choice, ...]]:
    """Choices for all pairs of an open jaxpr at rising prices of a byte, from fast to small.

    The first one stacks what is faster to read than to make; the last one as little as possible.
    """
    pairs = find_pairs(jaxpr)
    if not pairs:
        return []
    flat = {k: turn_of(pair, device) for k, pair in enumerate(pairs) if not find_pairs(joined_body(pair))}

    def rung(price: float) -> tuple[Choice, ...]:
        ns_per_byte = price * 1e9 / device.bytes_per_second
        return tuple(
            choose(flat[k], ns_per_byte) if k in flat else choose_nested(pair, device, ns_per_byte)
            for k, pair in enumerate(pairs)
        )

    prices = [0.0, *(FIRST_PRICE * GROWTH**k for k in range(PRICES))]
    found = {price: rung(price) for price in prices}
    step_bytes = STEP_RATIO * _bytes(found[0.0])
    for low, high in itertools.pairwise(prices):
        _refine(found, low, high, step_bytes, rung)
    rungs = [found[price] for price in sorted(found)]
    return [r for k, r in enumerate(rungs) if k == 0 or _signatures(r) != _signatures(rungs[k - 1])]


def _refine(
    found: dict[float, tuple[Choice, ...]],
    low: float,
    high: float,
    step_bytes: float,
    rung: Callable[[float], tuple[Choice, ...]],
    depth: int = REFINEMENTS,
) -> None:
    """Look between two prices while their choices lie far apart."""
    if depth and _bytes(found[low]) - _bytes(found[high]) > step_bytes:
        middle = (low + high) / 2
        found[middle] = rung(middle)
        _refine(found, low, middle, step_bytes, rung, depth - 1)
        _refine(found, middle, high, step_bytes, rung, depth - 1)


def _bytes(rung: Sequence[Choice]) -> int:
    return sum(c.stacked_bytes for c in rung)


def _signatures(rung: Sequence[Choice]) -> list[Any]:
    return [c.signature for c in rung]


def choices_at(jaxpr: Any, device: DeviceModel, ns_per_byte: float) -> list[Choice]:
    """A choice for every pair of an open jaxpr, at one price of a byte."""
    return [choose_nested(pair, device, ns_per_byte) for pair in find_pairs(jaxpr)]


def choose_nested(pair: ScanPair, device: DeviceModel, ns_per_byte: float) -> Choice:
    """The choice for one pair after the pairs inside its bodies have been rewritten for the same price."""
    from passes.jaxpr.scan_emit import rewrite_groups

    joined = joined_body(pair)
    inner = tuple(choices_at(joined, device, ns_per_byte))
    if inner:
        groups, rename = rewrite_groups(joined, inner)
        boundary = len(pair.make.jaxpr.eqns)
        pair = dataclasses.replace(
            pair,
            make=_with_eqns(pair.make, groups[:boundary], rename),
            take=_with_eqns(pair.take, groups[boundary:], rename),
        )
    return dataclasses.replace(choose(turn_of(pair, device), ns_per_byte), inner=inner)


def _with_eqns(body: Body, groups: list[list[Any]], rename: dict[Any, Any]) -> Body:
    outvars = [compat.renamed(v, rename) for v in body.jaxpr.outvars]
    eqns = [eqn for group in groups for eqn in group]
    return dataclasses.replace(body, jaxpr=compat.rebuild(body.jaxpr, eqns=eqns, outvars=outvars))
