"""A pair of scans in segments, when even one value per iteration is too much.

The first scan keeps its carry at the start of every segment only. The second runs each segment of the
first again from there, stacks what that segment's iterations need, and goes back through it. With L
iterations in segments of M, L/M carries and M slices are there at a time instead of L of each; the first
scan's work is done twice.

    first    scan over segments( keep the carry; scan over the segment's iterations )
    second   scan over segments( first's scan again, with stacks; second's scan )

The body of the second's outer scan is a program with a pair of scans in it, which is cut as any other. Where
L has no such factors, as a prime has none, the last iterations are in no segment: `passes.jaxpr.scans.parts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr
from passes.jaxpr.rewrite import consts_as_literals, run_scan
from passes.jaxpr.scans.pairs import Body, ScanPair, body_of

# Segments of segments aside, a scan needs least with as many segments as each has iterations (Chen 2016).
MOST_COUNTS = 2
# Segments with iterations left over need that much less, or are not worth it: bodies are compiled twice.
LEFT_OVER_RATIO = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """How a pair is run in segments.

    Attributes:
        iterations: how many each has.
        body: an open jaxpr, what the second scan does for one segment: (first's consts, carry, slices,
            second's consts, carry, other slices) -> second's results.
    """

    iterations: int
    body: Jaxpr


def segmentations(length: int) -> list[tuple[int, int]]:
    """Numbers of segments, and of iterations in each, that are worth trying.

    The divisors of `length` nearest to its square root; where they are far from it others, with the fewest
    slices and carries at a time when those of the iterations left over are kept, too.
    """
    divisors = [k for k in range(2, length) if length % k == 0]
    counts = sorted(sorted(divisors, key=lambda k: (abs(k * k - length), k))[:MOST_COUNTS])
    equal = [(count, length // count) for count in counts]
    uneven = [(length // k, k) for k in range(2, math.isqrt(2 * length) + 1) if k < length / 2]
    best = min(uneven, key=lambda s: _at_a_time(length, *s), default=(length, 1))
    most = LEFT_OVER_RATIO * min((_at_a_time(length, *s) for s in equal), default=length)
    return [*equal, best] if _at_a_time(length, *best) < most else equal


def _at_a_time(length: int, count: int, iterations: int) -> int:
    """How many carries and slices are there at a time, those of the iterations left over, too."""
    return count + iterations + length - count * iterations


def segment_program(pair: ScanPair, iterations: int) -> ClosedJaxpr:
    """The pair on one segment as an open jaxpr, nothing chosen yet; see `Segments.body`."""
    producer, second = body_of(pair.producer.eqn), body_of(pair.consumer.eqn)
    other = other_xs(pair, second)
    place: dict[Atom, int] = {v: k for k, v in enumerate(producer.ys)}
    n_first = len(producer.jaxpr.invars)
    n_fixed = n_first + second.n_consts + second.n_carry

    def run(*values: Any) -> Sequence[Any]:
        made = run_scan(
            producer.eqn, producer.jaxpr, values[:n_first], producer.n_consts, producer.n_carry, iterations
        )
        stacks = made[producer.n_carry :]
        given = dict(zip(other, values[n_fixed:], strict=True))
        slices = [given[k] if k in given else stacks[place[v]] for k, v in enumerate(second.xs)]
        operands = [*values[n_first:n_fixed], *slices]
        return run_scan(second.eqn, second.jaxpr, operands, second.n_consts, second.n_carry, iterations)

    fixed = second.n_consts + second.n_carry
    avals = [
        *(v.aval for v in producer.jaxpr.invars[: producer.n_consts + producer.n_carry]),
        *_segment_avals(producer.xs, iterations),
        *(v.aval for v in second.jaxpr.invars[:fixed]),
        *_segment_avals([second.xs[k] for k in other], iterations),
    ]
    return consts_as_literals(compat.trace(run, avals))


def first_segment(pair: ScanPair, segments: Segments, results: Sequence[Atom]) -> Jaxpr:
    """What the first scan does for one segment, as an open jaxpr: (consts, carry, slices) -> (carry, slices
    of its `results`, the carry at the segment's start)."""
    producer = pair.producer
    cut = producer.n_consts + producer.n_carry
    outvars = [*producer.jaxpr.outvars[: producer.n_carry], *results]
    body = compat.without_dead_code(compat.rebuild(producer.jaxpr, outvars=outvars))

    def run(*values: Any) -> Sequence[Any]:
        scanned = run_scan(
            producer.eqn, body, values, producer.n_consts, producer.n_carry, segments.iterations
        )
        return [*scanned, *values[producer.n_consts : cut]]

    avals = [
        *(v.aval for v in producer.jaxpr.invars[:cut]), *_segment_avals(producer.xs, segments.iterations)
    ]  # fmt: skip
    return consts_as_literals(compat.trace(run, avals))


def other_xs(pair: ScanPair, second: Body) -> list[int]:
    """Which sliced operands of the second scan are not stacks of the first."""
    stacks = {v for v in pair.producer.ys if not isinstance(v, compat.DropVar)}
    return [k for k, v in enumerate(second.xs) if not compat.is_variable(v) or v not in stacks]


def _segment_avals(stacks: Sequence[Atom], iterations: int) -> list[Any]:
    avals = [v.aval for v in stacks]
    return list(compat.trace(lambda *xs: [x[:iterations] for x in xs], avals).out_avals)


def folded(stack: Any, count: int) -> Any:
    """A stack with its slices in `count` segments."""
    return jnp.reshape(stack, (count, stack.shape[0] // count, *stack.shape[1:]))


def unfolded(stack: Any) -> Any:
    """A stack without its segments."""
    return jnp.reshape(stack, (stack.shape[0] * stack.shape[1], *stack.shape[2:]))
