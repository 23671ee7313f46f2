"""What XLA:CPU stores of a jaxpr's values: its fusion goes from the results to the arguments.

What its library does not take (`passes.jaxpr.library_kernels`) is computed inside of each kernel that reads
it, but for

    y = exp(x)                 what is dear, and read by several kernels, or spread by its reader,
    y = a + b                  what reads more elements than it makes, and has a reader on the way to which
                               something must be stored,
    y = slice(..slice(x))      what a kernel would have to compute at too many places.

What is cheap and reads no more than it makes is computed in every kernel that can, also where it has to be
stored for one that cannot, such as a product of matrices: it is **copied**.

Source: `CpuInstructionFusion`, `InstructionFusion::ComputeGloballyUnfusible` and
`FusionNodeIndexingEvaluation` of openxla/xla.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import JaxprEqn, Var
from passes.jaxpr.library_kernels import SPREADS, LibraryKernels
from passes.jaxpr.primitives import BRANCHES, FUSING, INSIDE, MOVING, WRITES_SLICE, Kind, is_dear_to_xla_cpu
from passes.jaxpr.softmax import DataflowGraph

# Readers farther than so many equations away do not compute a value of several operands in one kernel.
_FARTHEST = 200
# Of the kernels that read a value so many are told apart.
_TOLD_APART = 2
# At so many places a kernel computes a value. What branches is computed at one place of one kernel: it has no
# other reader then, unless XLA looks at it before anything else has joined its readers.
_MOST_PLACES = 15


class GreedyFusion:
    """What is stored and what is copied, found on one backward walk.

    Attributes:
        stored: values that are, because XLA does not compute them in some kernel.
        inner: what is computed inside a library's kernel, of whatever kind it is.
        copied: values that the kernels that can compute again, whether they are stored or not.
        from_memory: equations whose kernels read from memory what is stored, copied or not.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        results: Collection[Var],
        needed: Collection[Var],
    ) -> None:
        """
        Args:
            graph: of the jaxpr.
            results: the jaxpr's.
            needed: what some kernel reads from memory, results included.
        """
        self.stored: set[Var] = set()
        self.copied: set[Var] = set()
        library, kinds = LibraryKernels(graph, results), graph.kinds
        self.inner = library.inner
        self._eqns, self._kinds, self._operands = graph.eqns, kinds, graph.operands
        self.from_memory = {i for i, kind in enumerate(kinds) if kind not in FUSING} | library.members
        self.from_memory -= {i for i, eqn in enumerate(graph.eqns) if eqn.primitive.name == WRITES_SLICE}
        self._producer, self._readers = graph.producer, graph.readers
        read = {v for i in library.members for v in self._operands[i]}
        self._results = results
        self._needed = {*needed, *(read - self.inner)}
        self._apart: set[Var] = set()
        # Per value, the places in up to two kernels at which it is computed there.
        self._places: dict[Var, dict[int, frozenset[int]]] = {}
        self._times: dict[tuple[int, int], int] = {}
        # What some kernel uses several times.
        self._spread: set[Var] = set()
        for i in reversed(range(len(self._eqns))):
            if i in library.members:
                self._alone(i)
                self.stored.update(self._eqns[i].outvars if i in library.kernels else ())
            elif kinds[i] not in INSIDE:
                self._alone(i)
            else:
                if kinds[i] is Kind.VIEW and not self._needed.isdisjoint(self._eqns[i].outvars):
                    self._needed.update(self._operands[i])
                for v in self._eqns[i].outvars:
                    self._place(i, v)

    def _alone(self, i: int) -> None:
        """Equation `i` is the last of a kernel."""
        self._times[i, i] = 1
        for v in self._eqns[i].outvars:
            self._places[v] = {i: frozenset({i})}

    def _place(self, i: int, v: Var) -> None:
        self._times[i, i] = 1
        places, spread = self._computed_at(i, v)
        name = self._eqns[i].primitive.name
        times = {kernel: sum(self._times[kernel, j] for j in at) for kernel, at in places.items()}
        most = 1 if name in BRANCHES else _MOST_PLACES
        if name in BRANCHES and sum(times.values()) > 1 and not self._is_read_alone(v):
            most = 0
        cheap = not self._is_dear(i)
        if cheap and self._is_apart(i, v):
            self._apart.add(v)
            copies = False
        elif name != SPREADS and any(n > most for n in times.values()):
            copies = False
        else:
            copies = cheap or (len(places) <= 1 and v not in self._needed and not spread)
        if self._kinds[i] is Kind.FUSIBLE and (not copies or v in self._needed):
            self.stored.add(v)
        at = {} if copies else {i: frozenset({i})}
        if copies:
            self.copied.add(v)
            for kernel, found in places.items():
                if len(at) < _TOLD_APART:
                    at[kernel] = frozenset({i}) if name in MOVING else found
                    self._times[kernel, i] = times[kernel]
            if spread:
                self._spread.add(v)
        self._places[v] = at

    def _is_read_alone(self, v: Var) -> bool:
        """True if whatever reads `v` reads nothing else, so that XLA meets it before its kernel has grown."""
        return all(len(self._eqns[j].invars) == 1 for j in self._readers.get(v, ()))

    def _computed_at(self, i: int, v: Var) -> tuple[dict[int, frozenset[int]], bool]:
        """At which places of which kernels `v` would be computed, which equation `i` makes, and whether one
        of them uses its elements several times. For what reads memory it is computed in a kernel of its own.
        """
        places = {i: frozenset({i})} if v in self._results else {}
        spread = False
        for j in self._readers.get(v, ()):
            reader = self._eqns[j]
            if j in self.from_memory:
                places[i] = frozenset({i})
                continue
            if self._kinds[j] not in INSIDE:
                places.setdefault(j, frozenset({j}))
                continue
            for out in reader.outvars:
                for kernel, at in self._places.get(out, {}).items():
                    places[kernel] = places.get(kernel, frozenset()) | at
                spread |= out in self._spread
            spread |= _spreads(reader)
        return places, spread

    def _is_apart(self, i: int, v: Var) -> bool:
        """True for what XLA does not write twice, nor into one kernel alone."""
        readers = self._readers.get(v, ())
        if self._kinds[i] is Kind.VIEW or (len(readers) < 2 and v not in self._results):
            return False
        if self._reads_one(i) or sum(map(_size, {*self._operands[i]})) <= _size(v):
            return False
        direct = [j for j in readers if not self._is_scattered(v, j)]
        return v in self._results or not self._is_clear(i, direct)

    def _is_scattered(self, v: Var, j: int) -> bool:
        """True if equation `j` writes `v` into an array, at given places: XLA reshapes it for that."""
        eqn = self._eqns[j]
        return eqn.primitive.name.startswith("scatter") and v not in eqn.invars[:2]

    def _reads_one(self, i: int) -> bool:
        """True if at most one operand has the result's rank, those that are spread not counted."""
        rank = max(map(_true_rank, self._eqns[i].outvars), default=0)
        full = 0
        for u in self._operands[i]:
            k = self._producer.get(u)
            spread = k is not None and self._eqns[k].primitive.name in (SPREADS, "iota")
            full += not spread and _true_rank(u) >= rank
        return full <= 1

    def _is_clear(self, i: int, readers: Sequence[int]) -> bool:
        """True if everything on the ways from equation `i` to its readers can be computed inside of those."""
        last = max(readers, default=i)
        if last - i > _FARTHEST:
            return False
        below = {i}
        for j in range(i + 1, last + 1):
            if not below.isdisjoint(self._makers(j)):
                below.add(j)
        waiting, seen = list(readers), set(readers)
        while waiting:
            j = waiting.pop()
            if j in self.from_memory:
                return False
            for u in self._operands[j]:
                k = self._producer.get(u)
                if k is None or k == i or k not in below:
                    continue
                if u in self._apart or not self._may_join(k, u, j):
                    return False
                if k not in seen:
                    seen.add(k)
                    waiting.append(k)
        return True

    def _makers(self, j: int) -> list[int | None]:
        """The equations that make what equation `j` reads; None for arguments."""
        return [self._producer.get(u) for u in self._operands[j]]

    def _may_join(self, k: int, u: Var, j: int) -> bool:
        """True if `u`, which equation `k` makes, can be computed inside equation `j`."""
        if k in self.from_memory:
            return False
        if self._kinds[k] not in INSIDE:
            return self._kinds[k] is Kind.REDUCTION and len(self._readers.get(u, ())) == 1
        if not self._is_dear(k):
            return True
        return len(self._readers.get(u, ())) == 1 and not _spreads(self._eqns[j])

    def _is_dear(self, i: int) -> bool:
        """True for what XLA:CPU does not compute twice; a division by what is spread is a product."""
        eqn = self._eqns[i]
        if eqn.primitive.name == "div" and compat.is_variable(eqn.invars[1]):
            k = self._producer.get(eqn.invars[1])
            return k is None or not _spreads(self._eqns[k]) or _size(self._eqns[k].invars[0]) == 1
        return self._kinds[i] is Kind.FUSIBLE and is_dear_to_xla_cpu(eqn)


def _size(v: object) -> int:
    return array_of(v).size if compat.is_variable(v) else 1


def _true_rank(v: Var) -> int:
    return sum(n != 1 for n in array_of(v).shape)


def _spreads(eqn: JaxprEqn) -> bool:
    """True for what reads elements of its operand several times."""
    return eqn.primitive.name == SPREADS and _size(eqn.outvars[0]) > _size(eqn.invars[0])
