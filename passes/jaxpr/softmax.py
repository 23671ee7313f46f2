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
