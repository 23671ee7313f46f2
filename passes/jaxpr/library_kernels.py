"""Kernels that XLA:CPU leaves to a library: reductions of floats with what is computed around them.

A reduction takes in what only it reads, and what reads only it, as far as the library can compute that:

    s = q @ k          m = max(s)          e = exp(s - m)          one kernel: only e is stored

What such a kernel reads from outside is in memory. Source: `LibraryRewriter` and `YnnMatcher` of openxla/xla.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name, is_bitcast
from passes.jaxpr.compat import JaxprEqn, Var
from passes.jaxpr.softmax import DataflowGraph

_DTYPES = frozenset({"bfloat16", "float32", "float64"})
_STARTS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
_REDUCES = _STARTS | {"reduce_and", "reduce_or", "reduce_prod", "reduce_xor"}
# What XLA:CPU reduces itself it reduces by windows of so many elements first.
_WINDOW = 32
_COMPUTES = """
    abs add add_any broadcast_in_dim ceil convert_element_type copy cos div dot_general erf exp expm1 floor
    integer_pow log log1p logistic max min mul name neg one_minus_square pow reduce_max reduce_min reduce_sum
    reshape round rsqrt sign sin sqrt square squeeze stop_gradient sub tan tanh transpose
"""
_OF_ANY_SIZE = "broadcast_in_dim copy dot_general name reshape squeeze stop_gradient transpose"
_NAMES = frozenset(_COMPUTES.split())
_NAMES_OF_ANY_SIZE = frozenset(_OF_ANY_SIZE.split())
_LEAST_SIZE = 4096
# Spread out by whoever reads it: the last step of no kernel, from JAX 0.12 on.
SPREADS = "broadcast_in_dim"
# The reader of a program's results.
_END = -1


class LibraryKernels:
    """Which equations are in which of them.

    Attributes:
        kernels: the equations of each, by the one whose results are stored.
        members: equations that are in one.
        inner: results that are not stored.
    """

    def __init__(self, graph: DataflowGraph, results: Collection[Var]) -> None:
        """
        Args:
            graph: of the jaxpr.
            results: the jaxpr's.
        """
        self._eqns, self._operands, self._producer = graph.eqns, graph.operands, graph.producer
        self._users = [{j for v in eqn.outvars for j in graph.readers.get(v, ())} for eqn in graph.eqns]
        for v in results:
            if v in graph.producer:
                self._users[graph.producer[v]].add(_END)
        self.kernels = dict[int, set[int]]()
        self.members = set[int]()
        for i in reversed(range(len(self._eqns))):
            if i not in self.members and _is_for_library(self._eqns[i], _STARTS):
                root, kernel = self._grown(i)
                self.kernels[root] = kernel
        self.inner = {v for i in self.members - self.kernels.keys() for v in self._eqns[i].outvars}

    def _grown(self, start: int) -> tuple[int, set[int]]:
        """What the kernel of equation `start` takes in, and the equation whose results it stores then."""
        kernel, roots = {start}, [start]
        self.members.add(start)
        before = 0
        while len(kernel) > before:
            before = len(kernel)
            seen = set(kernel)
            found = deque([*self._above(kernel, kernel, seen), *self._below(roots[-1], seen)])
            while found:
                i, below = found.popleft()
                if i in self.members or not is_computed_in_them(self._eqns[i]):
                    continue
                kernel.add(i)
                self.members.add(i)
                if below:
                    roots.append(i)
                found.extend(self._below(i, seen) if below else self._above((i,), kernel, seen))
        while not compat.OLD_RULES and self._eqns[roots[-1]].primitive.name == SPREADS:
            kernel.remove(i := roots.pop())
            self.members.remove(i)
        return roots[-1], kernel

    def _above(self, of: Iterable[int], kernel: set[int], seen: set[int]) -> list[tuple[int, bool]]:
        """What makes the operands of equations and is read in the kernel alone."""
        made = (self._producer.get(v) for i in of for v in self._operands[i])
        found = [
            i for i in dict.fromkeys(made) if i is not None and i not in seen and self._users[i] <= kernel
        ]
        seen.update(found)
        return [(i, False) for i in found]

    def _below(self, i: int, seen: set[int]) -> list[tuple[int, bool]]:
        """The reader of an equation, if there is but one."""
        users = self._users[i]
        if len(users) != 1 or users <= seen | {_END}:
            return []
        seen.update(users)
        return [(j, True) for j in users]


def is_computed_in_them(eqn: JaxprEqn) -> bool:
    """True for an equation that may be in a library's kernel."""
    return _is_for_library(eqn, _NAMES)


def is_by_windows(eqn: JaxprEqn) -> bool:
    """True for a reduction that is no library's and takes more elements than a window of some dimension: sums
    of complex numbers and of integers, products, counts.

    It is two kernels then; the first computes nothing inside of itself. Source: `TreeReductionRewriter`.
    """
    if eqn.primitive.name not in _REDUCES or _is_for_library(eqn, _STARTS):
        return False
    shape = array_of(eqn.invars[0]).shape
    return any(shape[d] > _WINDOW for d in eqn.params["axes"])


def _is_for_library(eqn: JaxprEqn, names: Collection[str]) -> bool:
    """True if the library has an operation of one of these names for such values, and they are worth it."""
    name = eqn.primitive.name
    if name not in names or len(eqn.outvars) != 1:
        return False
    if name == "transpose" and not is_bitcast(array_of(eqn.invars[0]).shape, eqn.params["permutation"]):
        return False
    values = (*compat.variables(eqn.invars), *eqn.outvars)
    if any(dtype_name(v) not in _DTYPES for v in values):
        return False
    return name in _NAMES_OF_ANY_SIZE or any(array_of(v).size >= _LEAST_SIZE for v in values)
