"""Softmaxes of rows, of which XLA:GPU makes one kernel: it reads the rows once and stores no number of a row.

    m = max(x); e = exp(x - m); s = sum(e); y = e / s

A sum that two kernels read, of the forward and of the backward pass, is made and stored by one more, and
each of the three reads the rows. What a backward pass sums up of such rows is summed in the kernel that reads
the sum, if one alone does:

    t = sum(dy * e / s ** 2); dx = (dy / s - t) * e
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import INSIDE, Kind
from passes.jaxpr.rewrite import readers_of
from passes.reach import reached

_IN_ANY_LAYOUT = ("broadcast_in_dim", "iota")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowGraph:
    """Who makes and who reads the values of an open jaxpr, calls inlined.

    Attributes:
        eqns, kinds: its equations, and what each is to the fusion model.
        operands: the variables that each of them reads, repeated ones too.
        producer: the equation that makes a value.
        readers: the equations that read it.
    """

    eqns: Sequence[JaxprEqn]
    kinds: Sequence[Kind]
    operands: Sequence[Sequence[Var]]
    producer: Mapping[Var, int]
    readers: Mapping[Var, Sequence[int]]

    @classmethod
    def of(cls, jaxpr: Jaxpr, kinds: Sequence[Kind]) -> DataflowGraph:
        """That of an open jaxpr, with what each equation is to the fusion model."""
        return cls(
            eqns=jaxpr.eqns,
            kinds=kinds,
            operands=[compat.variables(eqn.invars) for eqn in jaxpr.eqns],
            producer={v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars},
            readers=readers_of(jaxpr.eqns),
        )

    def primitive(self, v: Atom) -> str:
        """The name of the primitive that makes a value, "" for none."""
        i = compat.of_variable(self.producer, v)
        return "" if i is None else str(self.eqns[i].primitive.name)

    def unconverted(self, v: Atom) -> Atom:
        """What a value was before it was converted to other types."""
        while compat.is_variable(v) and self.primitive(v) == "convert_element_type":
            v = self.eqns[self.producer[v]].invars[0]
        return v

    def rows_of(self, i: int) -> Atom:
        """What a reduction reduces."""
        return self.unconverted(self.eqns[i].invars[0])

    def is_along_rows(self, v: Atom, axis: int) -> bool:
        """True if what is next to each other along an axis of a value is so in memory, too.

        XLA leaves a kernel's result as it was written; what transposes it has another layout instead.
        """
        while (i := compat.of_variable(self.producer, v)) is not None and self.kinds[i] in INSIDE:
            eqn, shape = self.eqns[i], array_of(v).shape
            if eqn.primitive.name == "transpose":
                axis, v = eqn.params["permutation"][axis], eqn.invars[0]
                continue
            alike = (u for u in self.operands[i] if array_of(u).shape == shape)
            before = next((u for u in alike if self.primitive(u) not in _IN_ANY_LAYOUT), None)
            if before is None:
                break
            v = before
        return bool(axis == array_of(v).ndim - 1)

    def row_length(self, v: Var) -> int | None:
        """How many elements of a value are combined with their own reduction, as in a softmax."""
        for i in self.readers.get(v, ()):
            for u in self.operands[i]:
                reduced = None if u is v else self._reduction(u)
                if reduced is not None and v in self.operands[reduced]:
                    return int(array_of(v).size // max(array_of(self.eqns[reduced].outvars[0]).size, 1))
        return None

    def _reduction(self, v: Atom) -> int | None:
        """The reduction that `v` is a broadcast of, if it is one."""
        while (i := compat.of_variable(self.producer, v)) is not None:
            eqn = self.eqns[i]
            if self.kinds[i] is Kind.REDUCTION:
                return i
            if self.kinds[i] is not Kind.VIEW and eqn.primitive.name != "broadcast_in_dim":
                break
            v = eqn.invars[0]
        return None

    def made_of(self, v: Var) -> set[Var]:
        """What is computed elementwise from a value."""
        readers = [r for r in self.readers.get(v, ()) if self.kinds[r] in INSIDE]
        return {result for r in readers for result in self.eqns[r].outvars}

    def leads_to(self, start: Set[Var], needed: Set[Var]) -> bool:
        """True if one of the values, or something elementwise of it, is needed in memory."""
        return not needed.isdisjoint(reached(start, self.made_of))

    def has_one_kernel(self, reduced: Sequence[Var], needed: Set[Var], inside: Set[Var]) -> bool:
        """True if one kernel alone takes rows with what they are reduced to, where only what is `needed` is
        stored, and kernels sum up what is `inside` of them."""
        small, met, stack = array_of(reduced[0]).size, set[Var](), [*reduced]
        while stack:
            for reader in self.readers.get(stack.pop(), ()):
                made = self.eqns[reader].outvars
                is_row = array_of(made[0]).size > small
                if self.kinds[reader] not in INSIDE or not (is_row or needed.isdisjoint(made)):
                    return False
                (met.update if is_row else stack.extend)(made)

        def following(v: Var) -> Iterable[Var]:
            readers = () if v in needed else self.readers.get(v, ())
            made = (self.eqns[r].outvars for r in readers if self.kinds[r] in INSIDE)
            summed = (self.eqns[r].outvars for r in readers if not inside.isdisjoint(self.eqns[r].outvars))
            return itertools.chain(*made, *summed)

        first, *others = (reached([v], following) for v in met) if met else (set[Var](),)
        return all(not first.isdisjoint(other) for other in others)

    def is_made_of(self, v: Atom, values: Set[Var], needed: Set[Var]) -> bool:
        """True if a value is one of others, or what kernels compute of them for themselves."""

        def operands(v: Var) -> Sequence[Var]:
            i = None if v in needed or v in values else self.producer.get(v)
            return () if i is None or self.kinds[i] not in INSIDE else self.operands[i]

        return compat.is_variable(v) and not values.isdisjoint(reached([v], operands))

    def meetings(self, i: int, primitive: str, results: Set[Var]) -> tuple[set[Var], set[Var]]:
        """Where a primitive takes rows with what they are reduced to, and what else is made of that alone.

        Nothing, if another kernel reads it or if it is among `results`.
        """
        rows, axes = self.rows_of(i), self.eqns[i].params["axes"]
        if len(axes) != 1 or not self.is_along_rows(rows, axes[0]):
            return set(), set()
        met, alone, stack = set[Var](), {*self.eqns[i].outvars}, [*self.eqns[i].outvars]
        while stack:
            for reader in self.readers.get(stack.pop(), ()):
                eqn = self.eqns[reader]
                if self.kinds[reader] not in INSIDE:
                    return set(), set()
                if eqn.primitive.name == primitive and self.unconverted(eqn.invars[0]) is rows:
                    met.update(eqn.outvars)
                elif len({*compat.variables(eqn.invars)}) == 1:
                    alone.update(eqn.outvars)
                    stack += eqn.outvars
        return (set(), set()) if alone & results else (met, alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmaxes:
    """Those of a program.

    Attributes:
        inside: what is reduced in the kernels that read it.
        exponentials: of rows less their maxima.
    """

    inside: Set[Var] = frozenset()
    exponentials: Set[Var] = frozenset()


def find_softmaxes(graph: DataflowGraph, results: Set[Var], needed: Set[Var], *, as_xla: bool) -> Softmaxes:
    """The softmaxes of an open jaxpr.

    Args:
        graph: who makes and who reads its values.
        results: variables that must be stored.
        needed: variables that some kernel reads from memory: what a kernel computes for itself, such as one
            that sums columns, is no softmax.
        as_xla: True for what XLA does by itself. A planner keeps no sum: of GPT-2's it made three kernels of
            each softmax, for +15.9 % of its time; +9.2 without.
    """
    of_softmaxes: set[Var] = set()
    exponentials: set[Var] = set()
    sums: dict[int, set[Var]] = {}
    others: list[int] = []
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name != "reduce_sum":
            continue
        if graph.primitive(graph.rows_of(i)) == "exp":
            normalised, inside = graph.meetings(i, "div", results)
            if graph.leads_to(normalised, needed):
                sums[i] = inside
                exponentials.update(compat.variables([graph.rows_of(i)]))
                continue
        others.append(i)
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name == "reduce_max":
            shifted, inside = graph.meetings(i, "sub", results)
            if any(exponentials & graph.made_of(v) for v in shifted):
                of_softmaxes |= inside
    for i in others if exponentials and as_xla else ():
        rows, made, axes = graph.eqns[i].invars[0], graph.eqns[i].outvars, graph.eqns[i].params["axes"]
        if len(axes) != 1 or not results.isdisjoint(made) or not graph.is_along_rows(rows, axes[0]):
            continue
        if graph.is_made_of(rows, exponentials, needed) and graph.has_one_kernel(made, needed, of_softmaxes):
            of_softmaxes.update(made)
    for i, inside in sums.items():
        if not as_xla or graph.has_one_kernel(graph.eqns[i].outvars, needed, of_softmaxes):
            of_softmaxes |= inside
    return Softmaxes(inside=of_softmaxes, exponentials=exponentials)
