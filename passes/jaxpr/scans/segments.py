"""Two levels: a pair of scans in segments, when even one value per iteration is too much.

The first scan keeps its carry at the start of every segment only. The second runs each segment of the
first again from there, stacks what that segment's iterations need, and goes back through it. With L
iterations in segments of M, L/M carries and M slices are there at a time instead of L of each; the first
scan's work is done twice.

    first    scan over segments( keep the carry; scan over the segment's iterations )
    second   scan over segments( first's scan again, with stacks; second's scan )

The body of the second's outer scan is a program with a pair of scans in it, which is cut as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn
from passes.jaxpr.rewrite import consts_as_literals, run_scan, splice
from passes.jaxpr.scans.pairs import Body, ScanPair, body_of

# Two levels of a scan need least with as many segments as each has iterations (Chen 2016).
MOST_COUNTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """How a pair is run in segments.

    Attributes:
        count: how many segments.
        iterations: how many iterations each has.
        body: an open jaxpr, what the second scan does for one segment: (first's consts, carry, slices,
            second's consts, carry, other slices) -> second's results.
    """

    count: int
    iterations: int
    body: Jaxpr


def segment_counts(length: int) -> list[int]:
    """Numbers of equal segments worth trying: the divisors of `length` nearest to its square root."""
    divisors = [k for k in range(2, length) if length % k == 0]
    return sorted(sorted(divisors, key=lambda k: (abs(k * k - length), k))[:MOST_COUNTS])


def segment_program(pair: ScanPair, count: int) -> ClosedJaxpr:
    """The pair on one segment as an open jaxpr, nothing chosen yet; see `Segments.body`."""
    producer, second = body_of(pair.producer.eqn), body_of(pair.consumer.eqn)
    iterations = pair.length // count
    other = _other_xs(pair, second)
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
        *_segment_avals(producer.xs, count),
        *(v.aval for v in second.jaxpr.invars[:fixed]),
        *_segment_avals([second.xs[k] for k in other], count),
    ]
    return consts_as_literals(compat.trace(run, avals))


def write_first(
    pair: ScanPair, segments: Segments, operands: Sequence[Atom], staying: Sequence[int]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations of the first scan in segments; atoms of its carry, of its stacks that are `staying`, and of
    the carry at the start of every segment.

    Args:
        operands: the scan's.
        staying: indices of stacks that others read.
    """
    producer = body_of(pair.producer.eqn)
    results = [*producer.jaxpr.outvars[: producer.n_carry], *(producer.y_vars[k] for k in staying)]
    body = compat.rebuild(producer.jaxpr, eqns=producer.jaxpr.eqns, outvars=results)
    body = compat.without_dead_code(body)
    n_fixed = producer.n_consts + producer.n_carry

    def run(values: list[Any]) -> list[Any]:
        consts = values[: producer.n_consts]

        def segment(carry: Any, slices: Any) -> tuple[Any, Any]:
            given = [*consts, *carry, *slices]
            scanned = run_scan(
                producer.eqn, body, given, producer.n_consts, producer.n_carry, segments.iterations
            )
            return scanned[: producer.n_carry], [scanned[producer.n_carry :], list(carry)]

        xs = [_folded(x, segments.count) for x in values[n_fixed:]]
        init, reverse = values[producer.n_consts : n_fixed], producer.eqn.params["reverse"]
        carry, (stacks, starts) = jax.lax.scan(segment, init, xs, length=segments.count, reverse=reverse)
        return [*carry, *map(_unfolded, stacks), *starts]

    return splice(run, list(operands), producer.eqn)


def write_second(
    pair: ScanPair, segments: Segments, first: Sequence[Atom], starts: Sequence[Atom], second: Sequence[Atom]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations and results of the second scan in segments.

    Args:
        first, second: operands of the two scans.
        starts: stacks of the first scan's carry at the start of every segment.
    """
    producer, consumer = body_of(pair.producer.eqn), body_of(pair.consumer.eqn)
    n_consts, fixed = consumer.n_consts, consumer.n_consts + consumer.n_carry
    first_consts, first_xs = first[: producer.n_consts], first[producer.n_consts + producer.n_carry :]
    other_xs = [second[fixed + k] for k in _other_xs(pair, consumer)]
    closed = compat.close_jaxpr(segments.body, [])

    def run(values: Any) -> list[Any]:
        (consts, xs, begin), (consumer_consts, init, others) = values

        def segment(carry: Any, slices: Any) -> tuple[Any, Any]:
            mine, start, rest = slices
            results = compat.evaluate(closed, [*consts, *start, *mine, *consumer_consts, *carry, *rest])
            return results[: consumer.n_carry], results[consumer.n_carry :]

        mine, rest = ([_folded(x, segments.count) for x in part] for part in (xs, others))
        reverse = consumer.eqn.params["reverse"]
        carry, stacks = jax.lax.scan(
            segment, init, [mine, begin, rest], length=segments.count, reverse=reverse
        )
        return [*carry, *map(_unfolded, stacks)]

    read = (list(first_consts), list(first_xs), list(starts))
    own = (list(second[:n_consts]), list(second[n_consts:fixed]), other_xs)
    return splice(run, (read, own), consumer.eqn)


def _other_xs(pair: ScanPair, second: Body) -> list[int]:
    """Which sliced operands of the second scan are not stacks of the first."""
    stacks = {v for v in pair.producer.ys if not isinstance(v, compat.DropVar)}
    return [k for k, v in enumerate(second.xs) if not compat.is_variable(v) or v not in stacks]


def _segment_avals(stacks: Sequence[Atom], count: int) -> list[Any]:
    avals = [v.aval for v in stacks]
    return list(compat.trace(lambda *xs: [_folded(x, count)[0] for x in xs], avals).out_avals)


def _folded(stack: Any, count: int) -> Any:
    return jnp.reshape(stack, (count, stack.shape[0] // count, *stack.shape[1:]))


def _unfolded(stack: Any) -> Any:
    return jnp.reshape(stack, (stack.shape[0] * stack.shape[1], *stack.shape[2:]))
