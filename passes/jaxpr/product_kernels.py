"""What XLA:GPU computes in the kernel of a product of matrices: its operands on the way in, its result on the
way out.

    x = relu(h + b)    y = x @ w    z = tanh(y + c)          one kernel: reads h, b, w and c, stores z

An operand is computed there if each of its steps reads hardly more than it makes, or reads an argument or a
number that is spread; a step that others read, too, is computed twice. What is joined is computed there
unless the product sums over the joined dimension. The result goes on as long as it has one reader, and that
reads nothing else that could be computed there: arguments, and, from JAX 0.12 on, what other kernels make.
Not so a product that is split in parts, which another kernel adds. Source: `GemmFusion` of openxla/xla; that
all elementwise steps may follow, beside anything in memory, was seen in what it compiles to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Set

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name
from passes.jaxpr.compat import Atom, JaxprEqn, Var
from passes.jaxpr.primitives import INSIDE, RESHAPES, Kind
from passes.jaxpr.softmax import DataflowGraph
from passes.jaxpr.split_dots import split_bytes

_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_BY_ELEMENT = """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt le
    log log1p logistic lt max min mul ne neg not or pow rsqrt select_n sin sqrt sub tan tanh xor
"""
_NAMES = frozenset(_BY_ELEMENT.split())
_SPREADS = "broadcast_in_dim"
_JOINS = "concatenate"
# Of how many columns or more the parts are that a kernel reads where they lie.
_TILE = 64
# Elementwise or views, but nothing that the kernel of a product computes.
_APART = frozenset({"dynamic_slice", "pad"})
# What a step may read more than it makes, in bytes (`kIoToleranceBytes`).
_TOLERATED_BYTES = 1024
# What may be read for one operand of a product (`kMaxParameterPerDotOperand`).
_MOST_READ = 4


class ProductKernels:
    """Which values are computed in which product's kernel.

    Attributes:
        reads: for every product the variables that its kernel reads from memory for its operands.
        inner: not stored: products and what follows them, and what only products read, who compute it.
        ends: what is stored instead of them.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        device: DeviceModel,
        *,
        results: Set[Var],
        given: Collection[Var],
        apart: Set[Var],
    ) -> None:
        """
        Args:
            graph: of the jaxpr.
            device: that XLA compiles for.
            results: the jaxpr's.
            given: its arguments, without the slices of a loop's stacks.
            apart: what other kernels compute.
        """
        self._graph, self._results, self._given, self._apart = graph, results, frozenset(given), apart
        self.reads = dict[int, list[Var]]()
        self.inner = set[Var]()
        self.ends = set[Var]()
        computed = set[Var]()
        for i, eqn in enumerate(graph.eqns):
            if is_for_triton(eqn):
                summed, _ = eqn.params["dimension_numbers"]
                self.reads[i] = [
                    u
                    for v, dims in zip(eqn.invars, summed, strict=True)
                    if compat.is_variable(v)
                    for u in self._read_for(v, frozenset(dims), computed)
                ]
                if not split_bytes(eqn, device):
                    self._follow(eqn.outvars[0])
        self.inner |= self._read_by_products_alone(computed)

    def _read_by_products_alone(self, computed: Set[Var]) -> set[Var]:
        """Of what products compute for themselves what nothing else reads."""
        alone, eqns = set[Var](), self._graph.eqns
        for v in sorted(computed - self._results, key=self._graph.producer.__getitem__, reverse=True):
            readers = self._graph.readers[v]
            if all(v not in self.reads.get(i, (v,)) or alone.issuperset(eqns[i].outvars) for i in readers):
                alone.add(v)
        return alone

    def _read_for(self, operand: Var, summed: frozenset[int], computed: set[Var]) -> list[Var]:
        """What the kernel of a product reads to compute an operand, and marks what it computes.

        Args:
            summed: the operand's dimensions that the product sums over.
        """
        inputs, found = {operand: None}, deque([(operand, summed)])
        while found:
            v, summed = found.popleft()
            i = self._graph.producer.get(v)
            if i is None or not self._is_computed_before(i, v, summed):
                continue
            above = {
                **dict.fromkeys(u for u in inputs if u is not v),
                **dict.fromkeys(self._graph.operands[i]),
            }
            if len(above) <= _MOST_READ:
                computed.add(v)
                over = _before(self._graph.eqns[i], summed)
                found.extend((u, over) for u in above if u not in inputs)
                inputs = above
        return [*inputs]

    def _is_computed_before(self, i: int, v: Var, summed: frozenset[int]) -> bool:
        """True if a product that sums over dimensions of `v`, which equation `i` makes, computes it."""
        eqn = self._graph.eqns[i]
        name = eqn.primitive.name
        if v in self._apart or v in self.ends or v in self.inner:
            return False
        if self._graph.kinds[i] is Kind.VIEW or name == _SPREADS:
            return True
        if name == _JOINS:
            joined = eqn.params["dimension"]
            return joined not in summed and all(array_of(u).shape[joined] % _TILE == 0 for u in eqn.invars)
        if name not in _NAMES:
            return False
        if len(eqn.invars) == 2 and any(self._is_spread(u, eqn) for u in eqn.invars):
            return True
        return _more_read(eqn) <= _TOLERATED_BYTES

    def _follow(self, product: Var) -> None:
        """Marks what the kernel of a product computes of its result."""
        inner, end, v = [product], product, product
        while v not in self._results and len({*(readers := self._graph.readers.get(v, ()))}) == 1:
            eqn, kind = self._graph.eqns[readers[0]], self._graph.kinds[readers[0]]
            if kind is not Kind.VIEW and not self._follows(eqn, v):
                break
            v = eqn.outvars[0]
            if v in self._apart or v in self.inner or v in self.ends:
                break
            if kind is not Kind.VIEW:
                end = v
            inner.append(v)
        if end is not product:
            self.inner.update(inner[: inner.index(end)])
            self.ends.add(end)

    def _follows(self, eqn: JaxprEqn, v: Var) -> bool:
        """True if the kernel that makes `v` goes on with an equation that reads it."""
        if eqn.primitive.name not in _NAMES or sum(u is v for u in eqn.invars) != 1:
            return False
        if not all(u is v or self._is_whole(u) for u in eqn.invars):
            return False
        (result,) = eqn.outvars
        is_last = result in self._results and result not in self._graph.readers
        return is_last or _more_read(eqn) >= -_TOLERATED_BYTES

    def _is_spread(self, v: Atom, eqn: JaxprEqn) -> bool:
        """True for an argument or a constant that is spread to be read by an equation."""
        source = self._source(v)
        is_spread = source is not v or array_of(v).size < array_of(eqn.outvars[0]).size
        return not compat.is_variable(source) or (is_spread and self._is_given(source))

    def _source(self, v: Atom) -> Atom:
        """What `v` is spread of, itself if of nothing."""
        i = compat.of_variable(self._graph.producer, v)
        if i is None or self._graph.eqns[i].primitive.name != _SPREADS:
            return v
        return self._graph.eqns[i].invars[0]

    def _is_given(self, v: Atom) -> bool:
        """True for an argument, and what barriers and reshapes hand on of it."""
        source = self._handed_on(v)
        return compat.is_variable(source) and source in self._given

    def _handed_on(self, v: Atom, *, by_barriers: bool = True) -> Atom:
        """What barriers and reshapes hand on as `v`."""
        while compat.is_variable(v) and (i := self._graph.producer.get(v)) is not None:
            eqn = self._graph.eqns[i]
            if by_barriers and self._graph.kinds[i] is Kind.BARRIER:
                v = eqn.invars[eqn.outvars.index(v)]
            elif eqn.primitive.name in RESHAPES:
                v = eqn.invars[0]
            else:
                break
        return v

    def _is_whole(self, v: Atom) -> bool:
        """True for numbers, arguments and what other kernels make, spread or not; before JAX 0.12 for nothing
        that a kernel or a barrier makes."""
        v = self._handed_on(self._source(v), by_barriers=not compat.OLD_RULES)
        if not compat.is_variable(v) or array_of(v).size == 1 or v in self._given:
            return True
        i = self._graph.producer.get(v)
        if compat.OLD_RULES or i is None:
            return False
        if v in self.ends:
            return True
        name = self._graph.eqns[i].primitive.name
        return name in _APART or (self._graph.kinds[i] not in INSIDE and not name.startswith("cum"))


def is_for_triton(eqn: JaxprEqn) -> bool:
    """True for a product of two matrices of floats, or of many."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, batches) = eqn.params["dimension_numbers"]
    if any(dtype_name(v) not in _DTYPES for v in (*eqn.invars, eqn.outvars[0])):
        return False
    inner = zip(eqn.invars, contracted, batches, strict=True)
    return all(array_of(v).ndim > len(dims) + len(batch) for v, dims, batch in inner)


def _before(eqn: JaxprEqn, dims: frozenset[int]) -> frozenset[int]:
    """Which dimensions of an equation's operands some of its result's are; none where that is not known."""
    if eqn.primitive.name == "transpose":
        return frozenset(eqn.params["permutation"][d] for d in dims)
    return dims if array_of(eqn.outvars[0]).shape == array_of(eqn.invars[0]).shape else frozenset()


def _more_read(eqn: JaxprEqn) -> int:
    """How many bytes an equation reads more than it makes; what is smaller is spread before it is read."""
    made = array_of(eqn.outvars[0])
    read = sum(made.size * array_of(v).dtype.itemsize for v in eqn.invars)
    return int(read - made.size * made.dtype.itemsize)
