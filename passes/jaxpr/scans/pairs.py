"""Pairs of scans: one stacks values, a later one reads the stacks slice by slice.

After differentiation a scan over layers is such a pair: the first runs forward and stacks what the second,
which runs the other way, needs of every iteration. XLA cannot shrink the stacks. Here the two bodies become
one straight-line program, in which a stacked value is an ordinary value that passes from the first half
to the second.

    first                                second
    carry, stacks = scan(f, c0, xs)      carry, grads = scan(b, c1, (stacks, ys), reverse)

    joined body of iteration i           inputs: consts and slices of both, both carries
      f's equations                      `boundary` is where they end
      b's equations                      reading f's variables instead of slices of the stacks

Iteration i of the one meets iteration i of the other whatever way each of them runs, because stacks are
indexed by i.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import iterations_of
from passes.jaxpr.inline import flat_body
from passes.jaxpr.primitives import CONTROL_FLOW, RESHAPES
from passes.jaxpr.rewrite import bodies_of, readers_of, renewed
from passes.jaxpr.scans.sink import sink_into_scans
from passes.jaxpr.scans.views import view_inside_scans


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A scan and its body, calls inlined, constants written in.

    Attributes:
        eqn: the scan.
        jaxpr: its body, open: (*consts, *carry, *slices) -> (*carry, *slices), variables of its own.
        n_consts, n_carry: how many of the inputs are constants, and carried.
        length: the number of iterations.
    """

    eqn: JaxprEqn
    jaxpr: Jaxpr
    n_consts: int
    n_carry: int
    length: int

    @property
    def x_vars(self) -> list[Var]:
        """The body's variables of sliced operands."""
        return list(self.jaxpr.invars[self.n_consts + self.n_carry :])

    @property
    def xs(self) -> list[Atom]:
        """The operands that are sliced."""
        return list(self.eqn.invars[self.n_consts + self.n_carry :])

    @property
    def y_vars(self) -> list[Atom]:
        """The body's results that are stacked."""
        return list(self.jaxpr.outvars[self.n_carry :])

    @property
    def ys(self) -> list[Var]:
        """The scan's results that are stacks."""
        return list(self.eqn.outvars[self.n_carry :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPair:
    """Two scans of one program, where the second reads stacks of the first; or one branch of two conds, which
    is as a scan of one iteration (`passes.jaxpr.scans.branches`).

    Attributes:
        first, second: their places among the program's equations.
        producer, consumer: their bodies; `consumer`'s reads variables of `producer`'s where it read slices of
            its stacks.
        only: indices of `producer`'s stacks that `consumer` reads and nothing else.
        at_hand: for every sliced operand of `producer` whether its stack is there for `consumer` at no price.
        of_inputs: for every one whether it is an input of the program in another shape, and so alive anyway.
        stacks: False for a branch of conds in no loop, of which what passes is in no stack.
    """

    first: int
    second: int
    producer: Body
    consumer: Body
    only: frozenset[int]
    at_hand: tuple[bool, ...]
    of_inputs: tuple[bool, ...]
    stacks: bool = True

    @property
    def length(self) -> int:
        """The number of iterations."""
        return self.producer.length

    @property
    def dropped(self) -> frozenset[Var]:
        """Inputs of the first body that the second has only if they are kept for it."""
        carry = self.producer.jaxpr.invars[self.producer.n_consts :][: self.producer.n_carry]
        slices = zip(self.producer.x_vars, self.at_hand, self.of_inputs, strict=True)
        return frozenset([*carry, *(v for v, there, of_input in slices if not there and not of_input)])


class Paired(Protocol):
    """What has two places among a program's equations."""

    @property
    def first(self) -> int:
        """The earlier one."""

    @property
    def second(self) -> int:
        """The later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosure:
    """Control flow that is in no pair, but may have pairs in its bodies, such as microbatches over layers.

    Attributes:
        place: its place among the program's equations.
        bodies: open jaxprs, calls inlined, constants written in.
        iterations: how often they are known to run.
    """

    place: int
    bodies: tuple[Jaxpr, ...]
    iterations: int


def find_enclosures(jaxpr: Jaxpr, pairs: Iterable[Paired]) -> list[Enclosure]:
    """The control flow of an open jaxpr, calls inlined, that is in none of `pairs` and has some inside."""
    paired = {place for pair in pairs for place in (pair.first, pair.second)}
    enclosures = []
    for i, eqn in enumerate(jaxpr.eqns):
        has_refs = any(compat.is_ref(v.aval) for v in eqn.invars)
        if i in paired or eqn.primitive.name not in CONTROL_FLOW or has_refs:
            continue
        bodies = tuple(map(flat, bodies_of(eqn)))
        if any(inner.primitive.name in CONTROL_FLOW for body in bodies for inner in body.eqns):
            enclosures.append(Enclosure(place=i, bodies=bodies, iterations=iterations_of(eqn)))
    return enclosures


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a pair's program says of values.

    Attributes:
        readers: for every variable the places of the equations that read it.
        results: what the program returns.
        there: its inputs, but for those that are dropped before the second scan.
        of_inputs: these in another shape.
    """

    readers: dict[Var, list[int]]
    results: set[Var]
    there: set[Var]
    of_inputs: set[Var]


def seen_around(jaxpr: Jaxpr, dropped: Collection[Var]) -> Around:
    """What an open jaxpr says of its values.

    Args:
        dropped: inputs that are there for its first half only.
    """
    there = {*jaxpr.constvars, *jaxpr.invars}.difference(dropped)
    of_inputs: set[Var] = set()
    for eqn in jaxpr.eqns:
        read = compat.variables(eqn.invars) if eqn.primitive.name in RESHAPES else ()
        if any(v in there or v in of_inputs for v in read):
            of_inputs.update(eqn.outvars)
    return Around(
        readers=readers_of(jaxpr.eqns),
        results={*compat.variables(jaxpr.outvars)},
        there=there,
        of_inputs=of_inputs,
    )


def find_pairs(jaxpr: Jaxpr, dropped: Collection[Var] = ()) -> list[ScanPair]:
    """Pairs of an open jaxpr, calls inlined, in the order of their second scan; no scan is in two.

    Args:
        dropped: see `seen_around`.
    """
    found = sources(jaxpr)
    places = most_passing((n, first, second) for second, read in found.items() for first, n in read.items())
    around = seen_around(jaxpr, dropped)
    return [pair_of(i, j, body_of(jaxpr.eqns[i]), body_of(jaxpr.eqns[j]), around) for i, j in places]


def most_passing(possible: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Pairs of places (first, second), in the order of the second; no place is in two.

    Args:
        possible: (bytes that pass, first, second); those that pass most come first.
    """
    chosen: dict[int, int] = {}
    used: set[int] = set()
    for _, first, second in sorted(possible, key=lambda p: (-p[0], p[2], -p[1])):
        if not used & {first, second}:
            used |= {first, second}
            chosen[second] = first
    return [(chosen[second], second) for second in sorted(chosen)]


def sources(jaxpr: Jaxpr) -> dict[int, dict[int, int]]:
    """For every scan that reads stacks of earlier ones of as many iterations these, each with the bytes."""
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    scans = [i for i, eqn in enumerate(jaxpr.eqns) if _is_plain_scan(eqn)]
    return {i: read for i in scans if (read := _sources(jaxpr, i, producer))}


def _is_plain_scan(eqn: JaxprEqn) -> bool:
    """True for a scan that may be written anew: it carries no references."""
    return eqn.primitive.name == "scan" and not any(compat.is_ref(v.aval) for v in eqn.invars)


def _sources(jaxpr: Jaxpr, second: int, producer: dict[Var, int]) -> dict[int, int]:
    """Earlier scans of as many iterations, each with the bytes of its stacks that the second one reads."""
    eqn = jaxpr.eqns[second]
    nbytes: dict[int, int] = {}
    for v in eqn.invars[sum(compat.scan_sizes(eqn)) :]:
        i = producer.get(v) if compat.is_variable(v) else None
        if i is None or not _is_plain_scan(jaxpr.eqns[i]):
            continue
        source = jaxpr.eqns[i]
        stacks = source.outvars[compat.scan_sizes(source)[1] :]
        if source.params["length"] == eqn.params["length"] and v in stacks:
            nbytes[i] = nbytes.get(i, 0) + compat.aval_nbytes(v.aval)
    return nbytes


def body_of(eqn: JaxprEqn) -> Body:
    """A scan's body in variables of its own."""
    n_consts, n_carry = compat.scan_sizes(eqn)
    return Body(
        eqn=eqn,
        jaxpr=renewed(flat(eqn.params["jaxpr"])),
        n_consts=n_consts,
        n_carry=n_carry,
        length=int(eqn.params["length"]),
    )


def with_open_pairs(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, calls inlined, where nothing stands between the scans of a pair.

    Views of stacks are inside, what comes from little is sunk.
    """
    return sink_into_scans(view_inside_scans(jaxpr))


def flat(body: Jaxpr) -> Jaxpr:
    """A closed body as an open jaxpr, calls inlined, constants written in, with open pairs."""
    return with_open_pairs(flat_body(body))


def pair_of(first: int, second: int, producer: Body, consumer: Body, around: Around) -> ScanPair:
    """The pair of the equations at two places, with these bodies."""
    place = {v: k for k, v in enumerate(producer.ys)}
    known, passed = {}, []
    for operand, variable in zip(consumer.xs, consumer.x_vars, strict=True):
        k = place.get(operand) if compat.is_variable(operand) else None
        if k is not None and compat.is_variable(producer.y_vars[k]):
            known[variable] = producer.y_vars[k]
            passed.append(k)
    # A stack that is also a whole operand of the second scan, or read by anything else, stays.
    whole = {v for v in consumer.eqn.invars[: consumer.n_consts + consumer.n_carry] if compat.is_variable(v)}
    only = frozenset(
        k
        for k in passed
        if set(around.readers[producer.ys[k]]) == {second}
        and producer.ys[k] not in around.results
        and producer.ys[k] not in whole
    )
    at_hand = tuple(
        not compat.is_variable(v)
        or v in around.there
        or v in around.results
        or any(reader >= second for reader in around.readers.get(v, []))
        for v in producer.xs
    )
    return ScanPair(
        first=first,
        second=second,
        producer=producer,
        consumer=replace(consumer, jaxpr=renewed(consumer.jaxpr, known)),
        only=only,
        at_hand=at_hand,
        of_inputs=tuple(compat.is_variable(v) and v in around.of_inputs for v in producer.xs),
    )
