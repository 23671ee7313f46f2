"""What a pair of scans stacks and what its second half recomputes, for one price of a byte.

One iteration of both bodies is one program (`passes.jaxpr.scans.pairs`). What the second half needs of the
first is either stacked, which costs its bytes times the price and the traffic of writing and reading them, or
made again in the second half from what is stacked, from the carry, and from the first scan's own operands.
The cheapest choice is one minimum cut; a rising price gives a chain of choices from fast to small.

Every iteration does the same, so one iteration decides; the number of iterations multiplies bytes and costs
alike. Pairs inside the bodies are cut first, for the same price. All is weighed by time or by energy
(`passes.jaxpr.scans.weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from passes.backend import BACKENDS
from passes.ir import Op
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import flops_per_element, iterations_of, largest_size
from passes.jaxpr.lift import lift
from passes.jaxpr.primitives import FUSING, Kind
from passes.jaxpr.purity import has_effect, kernel_kind
from passes.jaxpr.rewrite import defined
from passes.jaxpr.scalar_work import scalar_work
from passes.jaxpr.scans.choice import Choice, MadeInside
from passes.jaxpr.scans.loops import Loop
from passes.jaxpr.scans.pairs import ScanPair
from passes.jaxpr.scans.weight import Weight
from passes.jaxpr.slices import FILLING_PASSES
from passes.outcome import Recomputed
from passes.planners.closure import Producer, cheapest_to_keep
from passes.reach import reached

# What is put on a stack is read, and written.
_WRITING_PASSES = 2
# What the last value's byte costs more than the first one's.
TILT_RATIO = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of a pair of scans, or what is made for a loop, as a cut problem.

    Attributes:
        pair: the scans, or the loop.
        values: the first body's variables, inputs and then results of equations; or those of what is made.
        ops, eqns: its equations.
        kernels: what the report says of those that are kernels, and cost something, in one iteration.
        demanded: indices of the values that the second body, or the loop's, reads.
        stacked_bytes: for every value what a slice adds to the stacks if it is kept; or its own bytes.
        traffic: for every value what writing and reading one slice weighs.
        late: as in a `Choice`.
    """

    pair: ScanPair | Loop
    values: tuple[Var, ...]
    ops: tuple[Producer, ...]
    eqns: tuple[JaxprEqn, ...]
    kernels: dict[int, Recomputed]
    demanded: tuple[int, ...]
    stacked_bytes: tuple[int, ...]
    traffic: tuple[int, ...]
    late: bool = False


def iteration_of(pair: ScanPair, weight: Weight) -> Iteration:
    """The cut problem of one pair; costs are those of the kernels that both bodies make together."""
    producer, consumer = pair.producer.jaxpr, pair.consumer.jaxpr
    values = defined(producer)
    index = {v: k for k, v in enumerate(values)}
    read = [v for eqn in consumer.eqns for v in eqn.invars] + list(consumer.outvars)
    nbytes, traffic = _prices(pair, values, weight)
    ops, kernels = _ops(producer, joined_body(pair), index, weight)
    return Iteration(
        pair=pair,
        values=tuple(values),
        ops=tuple(ops),
        eqns=tuple(eqn for eqn in producer.eqns if any(v in index for v in eqn.outvars)),
        kernels=kernels,
        demanded=tuple(sorted({index[v] for v in read if compat.is_variable(v) and v in index})),
        stacked_bytes=tuple(nbytes),
        traffic=tuple(traffic),
        # Elsewhere XLA puts a body in an order of its own, and what it fuses hangs on that of the equations.
        late=BACKENDS[weight.device.platform].runs_branches_together,
    )


def iteration_of_loop(loop: Loop, weight: Weight) -> Iteration:
    """The cut problem of one loop: what is not kept is made again in each of its iterations."""
    values = defined(loop.made)
    index = {v: k for k, v in enumerate(values)}
    ops, kernels = _ops(loop.made, loop.made, index, weight)
    times, there = iterations_of(loop.eqn), {*loop.made.invars}
    return Iteration(
        pair=loop,
        values=tuple(values),
        ops=tuple(replace(op, cost=None if op.cost is None else times * op.cost) for op in ops),
        eqns=tuple(loop.made.eqns),
        kernels=kernels,
        demanded=tuple(sorted({index[v] for v in compat.variables(loop.made.outvars)})),
        stacked_bytes=tuple(0 if v in there else compat.aval_nbytes(v.aval) for v in values),
        traffic=(0,) * len(values),
    )


def choose(iteration: Iteration, of_byte: float) -> Choice | MadeInside:
    """The cheapest choice for one price of a byte, which is a little more for later values.

    So values that are worth the same, as in equal layers of one body, are given up one after the other.
    """
    n_values = len(iteration.values)
    sizes = zip(iteration.stacked_bytes, iteration.traffic, strict=True)
    prices = [
        round(of_byte * (1 + TILT_RATIO * k / n_values) * nbytes) + traffic
        for k, (nbytes, traffic) in enumerate(sizes)
    ]
    return _choice(iteration, prices)


def choose_by_policy(iteration: Iteration, policy: Callable[..., Any]) -> Choice | MadeInside:
    """What `jax.checkpoint` around an iteration keeps: its inputs, and what the policy saves."""
    computed = {
        v
        for op, eqn in zip(iteration.ops, iteration.eqns, strict=True)
        if op.cost is not None and not compat.policy_saves(policy, eqn)
        for v in op.outputs
    }
    return _choice(iteration, [None if v in computed else 0 for v in range(len(iteration.values))])


def _choice(iteration: Iteration, prices: Sequence[int | None]) -> Choice | MadeInside:
    keep = cheapest_to_keep(prices, iteration.ops, iteration.demanded)
    kept = tuple(iteration.values[k] for k in keep)
    nbytes, recomputed = sum(iteration.stacked_bytes[k] for k in keep), _all_recomputed(iteration, keep)
    pair = iteration.pair
    if isinstance(pair, Loop):
        return MadeInside(loop=pair, kept=kept, stacked_bytes=nbytes, recomputed=recomputed)
    return Choice(
        pair=pair,
        kept=kept,
        stacked_bytes=pair.length * nbytes,
        recomputed=recomputed,
        late=iteration.late,
    )


def joined_body(pair: ScanPair, *, passed: bool = True) -> Jaxpr:
    """One iteration of both halves as one open jaxpr; the first half's equations come first.

    Args:
        passed: whether slices of stacks that are there for the second half alone are results, as they are of
            the first half's iteration.
    """
    producer, consumer = pair.producer.jaxpr, pair.consumer.jaxpr
    own = set(defined(producer))
    results = [
        v for k, v in enumerate(producer.outvars, -pair.producer.n_carry) if passed or k not in pair.only
    ]
    return compat.rebuild(
        producer,
        eqns=[*producer.eqns, *consumer.eqns],
        outvars=[*results, *consumer.outvars],
        invars=[*producer.invars, *(v for v in consumer.invars if v not in own)],
        constvars=[],
    )


def kernels_of(iteration: Iteration) -> tuple[Recomputed, ...]:
    """All kernels of the first body."""
    return tuple(iteration.kernels[k] for k in sorted(iteration.kernels))


def recomputed_vars(iteration: Iteration, choice: Choice) -> frozenset[Var]:
    """Results of what the second half runs again."""
    place = {v: k for k, v in enumerate(iteration.values)}
    ops = _recomputed_ops(iteration, [place[v] for v in choice.kept])
    return frozenset(iteration.values[v] for k in ops for v in iteration.ops[k].outputs)


def _all_recomputed(iteration: Iteration, kept: Sequence[int]) -> tuple[Recomputed, ...]:
    """The kernels that are recomputed if `kept` is kept."""
    recomputed = _recomputed_ops(iteration, kept)
    return tuple(iteration.kernels[k] for k in sorted(recomputed & iteration.kernels.keys()))


def _recomputed_ops(iteration: Iteration, kept: Sequence[int]) -> set[int]:
    """The ops that are recomputed if `kept` is kept."""
    op_of = {v: k for k, op in enumerate(iteration.ops) for v in op.outputs}
    there = frozenset(kept)
    read = reached(iteration.demanded, lambda v: () if v in there else iteration.ops[op_of[v]].inputs)
    return {op_of[v] for v in read - there}


def _prices(pair: ScanPair, values: list[Var], weight: Weight) -> tuple[list[int], list[int]]:
    """Bytes and traffic of stacking one slice of every value; nothing for what is at hand anyway."""
    producer, platform = pair.producer, weight.device.platform
    # What passes between two conds is written and read where it is.
    stacks = pair.stacks
    writing = _WRITING_PASSES + FILLING_PASSES[BACKENDS[platform].fills_stacks] if stacks else 1
    copied = {
        v
        for eqn in (pair.consumer.jaxpr.eqns if stacks else ())
        if kernel_kind(eqn, platform) not in FUSING
        for v in compat.variables(eqn.invars)
    }
    reading = {v: 2 if v in copied else 1 for v in values}
    own = dict.fromkeys(producer.jaxpr.invars[: producer.n_consts], (False, 0))
    for v, there in zip(producer.x_vars, pair.at_hand, strict=True):
        own[v] = (not there, reading[v])
    for k, y in enumerate(producer.y_vars):
        # A stack that something else reads is there at no price.
        if k not in pair.only and compat.is_variable(y):
            own.setdefault(y, (False, reading[y]))
    nbytes, traffic = [], []
    for v in values:
        size = compat.aval_nbytes(v.aval)
        priced, passes = own.get(v, (True, writing + reading[v]))
        nbytes.append(size if priced else 0)
        # A slice is written to its stack by a kernel of its own.
        launch = weight.of_launch if stacks and v not in own else 0
        traffic.append(round(weight.of_byte * passes * size) + launch)
    return nbytes, traffic


def _ops(
    made: Jaxpr, joined: Jaxpr, index: dict[Var, int], weight: Weight
) -> tuple[list[Producer], dict[int, Recomputed]]:
    """The equations of `made`, the first body, with what it costs to run them in the second half, too.

    What is computed elementwise for kernels that compute their operands joins one that is there.
    """
    lifted = lift(compat.without_dead_code(joined), replace(weight.device, in_body=True), as_xla=False)
    kernel_of: dict[Var, Op] = {}
    for op, body in zip(lifted.program.ops, lifted.bodies, strict=True):
        kernel_of.update(dict.fromkeys(lifted.jaxpr.eqns[body[-1]].outvars, op))
    whole = {
        v
        for eqn in joined.eqns
        if kernel_kind(eqn, weight.device.platform) not in FUSING
        for v in compat.variables(eqn.invars)
    }
    ops: list[Producer] = []
    kernels: dict[int, Recomputed] = {}
    for eqn in made.eqns:
        outputs = tuple(index[v] for v in eqn.outvars if v in index)
        if not outputs:
            continue
        kernel = next((kernel_of[v] for v in eqn.outvars if v in kernel_of), None)
        cost = _fused(eqn, weight)
        if kernel is not None:
            joins = kernel_kind(eqn, weight.device.platform) is Kind.FUSIBLE and not whole & {*eqn.outvars}
            cost = max(cost, weight.of_op(kernel) - weight.of_launch * joins)
            if kernel.cost_ns:
                kernels[len(ops)] = _recomputed(eqn, kernel)
        once = has_effect(eqn) or (kernel is not None and not kernel.recomputable)
        inputs = tuple(index[v] for v in eqn.invars if compat.is_variable(v))
        ops.append(Producer(cost=None if once else cost, inputs=inputs, outputs=outputs))
    return ops, kernels


def _recomputed(eqn: JaxprEqn, op: Op) -> Recomputed:
    nbytes = sum(compat.aval_nbytes(v.aval) for v in eqn.outvars)
    return Recomputed(op=op.name, source=op.source, nbytes=nbytes, cost_ns=op.cost_ns, stage="jaxpr")


def _fused(eqn: JaxprEqn, weight: Weight) -> int:
    """What an equation weighs that is computed inside another kernel."""
    size = largest_size(eqn.outvars)
    return weight.of_flops(size * flops_per_element(eqn)) + weight.of_scalar_work(scalar_work(eqn))
