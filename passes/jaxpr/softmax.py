"""Softmaxes of rows, of which XLA:GPU makes one kernel: it reads the rows once and stores no number of a row.

    m = max(x); e = exp(x - m); y = e / sum(e)

If the maximum or the sum is kept for the backward pass, XLA makes several kernels instead, and each of them
reads the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, JaxprEqn, Var
from passes.jaxpr.primitives import Kind
from passes.reach import reached

_ELEMENTWISE = (Kind.VIEW, Kind.FUSIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowGraph:
    """Who makes and who reads the values of an open jaxpr, calls inlined.

    Attributes:
        eqns, kinds: its equations, and what each is to the fusion model.
        producer: the equation that makes a value.
        readers: the equations that read it.
    """

    eqns: Sequence[JaxprEqn]
    kinds: Sequence[Kind]
    producer: Mapping[Var, int]
    readers: Mapping[Var, Sequence[int]]

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

    def made_of(self, v: Var) -> set[Var]:
        """What is computed elementwise from a value."""
        readers = [r for r in self.readers.get(v, ()) if self.kinds[r] in _ELEMENTWISE]
        return {result for r in readers for result in self.eqns[r].outvars}

    def leads_to(self, start: Set[Var], needed: Set[Var]) -> bool:
        """True if one of the values, or something elementwise of it, is needed in memory."""
        return not needed.isdisjoint(reached(start, self.made_of))

    def meetings(self, i: int, primitive: str, results: Set[Var]) -> tuple[set[Var], set[Var]]:
        """Where a primitive takes rows with what they are reduced to, and what else is made of that alone.

        Nothing, if another kernel reads it or if it is among `results`.
        """
        eqn, rows = self.eqns[i], self.rows_of(i)
        if tuple(eqn.params["axes"]) != (array_of(rows).ndim - 1,):
            return set(), set()
        met, alone, stack = set[Var](), {*eqn.outvars}, [*eqn.outvars]
        while stack:
            for reader in self.readers.get(stack.pop(), ()):
                eqn = self.eqns[reader]
                if self.kinds[reader] not in _ELEMENTWISE:
                    return set(), set()
                if eqn.primitive.name == primitive and self.unconverted(eqn.invars[0]) is rows:
                    met.update(eqn.outvars)
                elif len({*compat.variables(eqn.invars)}) == 1:
                    alone.update(eqn.outvars)
                    stack += eqn.outvars
        return (set(), set()) if alone & results else (met, alone)


def inside_softmax(graph: DataflowGraph, results: Set[Var], needed: Set[Var]) -> set[Var]:
    """What maxima and sums of rows make for softmaxes, in variables of an open jaxpr.

    Args:
        graph: who makes and who reads its values.
        results: variables that must be stored.
        needed: variables that some kernel reads from memory: what a kernel computes for itself, such as one
            that sums columns, is no softmax.
    """
    of_softmaxes: set[Var] = set()
    exponentials: set[Var] = set()
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name == "reduce_sum" and graph.primitive(graph.rows_of(i)) == "exp":
            normalised, inside = graph.meetings(i, "div", results)
            if graph.leads_to(normalised, needed):
                of_softmaxes |= inside
                exponentials.update(compat.variables([graph.rows_of(i)]))
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name == "reduce_max":
            shifted, inside = graph.meetings(i, "sub", results)
            if any(exponentials & graph.made_of(v) for v in shifted):
                of_softmaxes |= inside
    return of_softmaxes
