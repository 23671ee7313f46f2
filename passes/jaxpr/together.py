"""Kernels that XLA:GPU makes one of, since they read the same: what several of them read is read once.

    a = sum(dy)          b = sum(dy * x)          one kernel reads dy and x and writes both sums
    y = f(x)             c = sum(y)               one kernel reads x and writes y and the sum
    y = f(x)             z = g(y)                 one kernel reads x and writes y and z

These are two cases of its multi-output fusion: elementwise kernels, or reductions, of the same sizes that
read the same value, be it a bias, unless each reads a part of its own (siblings); and what reads the result
of an elementwise kernel of its size. XLA joins them where neither follows from the other, and computes once
what both compute. What goes into a loop's stack is written there by a kernel of its own.
Source: `MultiOutputFusion` of openxla/xla's GPU compiler.
Planners are not told: what they run again, they run alone.
Set by `benchmarks.side_by_side`: without it the kernels of plain and hand-written programs for an H200 were
estimated at 15 to 48 % more time than those that XLA made, with it at 8 % less to 14 % more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.jaxpr.avals import array_of, dtype_name, size_of
from passes.jaxpr.compat import JaxprEqn, Var
from passes.jaxpr.primitives import FUSING, INSIDE, MOVING, SLICING, Kind, is_dear_to_xla
from passes.jaxpr.product_kernels import is_for_triton
from passes.jaxpr.softmax import DataflowGraph
from passes.jaxpr.storage import MOST_INSIDE

_Alike = tuple[Kind, int, int, Var]
# Where a part of a value starts and stops, in every dimension.
_Part = tuple[tuple[int, int], ...]
# Of a reduction along columns; longer ones XLA splits: `ReductionIsRaceFree` of openxla/xla.
_LONGEST_COLUMN = 4096
# Of what is reduced along its columns: XLA gives 32 of them to each core, and weighs time by the cores that
# have work. Compiled for an H200, 512 to 4096 rows: 4096 columns of float32 and 8192 of bfloat16 are enough,
# half of that is not.
_BUSY_ROW_BYTES = 16 * 1024


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """One kernel of several parts.

    Attributes:
        place: which it is of all, as a bit.
        follows: which others its parts follow from, as bits.
        at_hand: what it has read or made.
        parts: of what it reads in one part alone, that part; None for the others.
        body: the places of all equations in it.
        own_ns: that its parts take by their bytes and work, launches apart.
        total_ns: that it takes.
    """

    place: int
    follows: int = 0
    at_hand: set[Var] = field(default_factory=set)
    parts: dict[Var, _Part | None] = field(default_factory=dict)
    body: set[int] = field(default_factory=set)
    own_ns: int = 0
    total_ns: int = 0

    def longer_by_ns(self, own_ns: int, least_ns: int) -> int:
        """How much longer it takes with a part, for which it takes `least_ns` at least."""
        before_ns = self.total_ns
        self.own_ns += own_ns
        self.total_ns = max(before_ns, self.own_ns, least_ns)
        return self.total_ns - before_ns


class Together:
    """What the kernels of a program read that no kernel before them reads with them; asked in their order."""

    def __init__(
        self,
        graph: DataflowGraph,
        stored: Collection[Var],
        alone: Collection[Var] = (),
        of_softmax: Collection[Var] = (),
    ) -> None:
        """
        Args:
            graph: the program.
            stored: what kernels make.
            alone: what is written by kernels of their own.
            of_softmax: what Triton's kernels of softmaxes make for themselves: XLA joins these with no other.
        """
        self._eqns, self._kinds, self._operands = graph.eqns, graph.kinds, graph.operands
        self._summed_at = _summed_at(graph, stored)
        self._dear: set[Var] = set()
        pairs = list(zip(graph.operands, graph.kinds, strict=True))
        inside, whole = (
            {v for operands, kind in pairs if (kind in FUSING) is fuses for v in operands}
            for fuses in (True, False)
        )
        self._read_inside = inside - whole
        self._alone, self._of_softmax = frozenset(alone), of_softmax
        # Which kernels every variable follows from, as bits; of the equations so far.
        self._follows: dict[Var, int] = {}
        self._passed = self._n_groups = 0
        self._of_triton: set[Var] = set()
        # What a kernel of several parts has at hand, by the parts that may join it.
        self._siblings: dict[_Alike, list[Group]] = {}
        self._made_with: dict[Var, Group] = {}

    def unread(
        self, root: int, body: Sequence[int], reads: Mapping[Var, int], *, of_product: bool = False
    ) -> tuple[dict[Var, int], Sequence[int], Group | None, bool]:
        """What is read for one kernel alone, which places are computed for it alone, what it is a part of,
        and whether others of it were asked about.

        Args:
            root: the place of its last equation.
            body: the places of all.
            reads: bytes of every stored value that it reads.
            of_product: True where it is a product's kernel, in which what follows the product is computed.
        """
        self._pass_to(root)
        eqn, kind = self._eqns[root], self._kinds[root]
        follows = self._before(root)
        is_alone = of_product or eqn.primitive.name in SLICING or not self._alone.isdisjoint(eqn.outvars)
        is_alone |= any(v in self._of_softmax for i in body for v in self._eqns[i].outvars)
        joins = not is_alone and kind in (Kind.FUSIBLE, Kind.REDUCTION)
        found: Group | None = None
        alike: list[_Alike] = []
        parts: dict[Var, _Part | None] = {}
        if joins:
            result = size_of(eqn.outvars[0])
            size = max([result, *map(size_of, self._operands[root])])
            readers: dict[Var, list[JaxprEqn]] = {}
            for i in body:
                for v in self._operands[i]:
                    readers.setdefault(v, []).append(self._eqns[i])
            own = {v for i in body for v in self._eqns[i].outvars}
            read = [v for v in readers if v not in own]
            shared = [v for v in read if size_of(v) > 1 and v not in self._of_triton]
            shared += self._dear_in(i for i in body if i != root)
            parts = {v: _part(v, readers) for v in shared}
            alike = [(kind, size if kind is Kind.REDUCTION else result, result, v) for v in parts]
            if kind is Kind.FUSIBLE or _is_summed_beside(eqn):
                found = self._maker(root, body, read, size, follows)
            found = found or self._sibling(alike, parts, follows)
        group = self._new() if found is None else found
        group.follows |= follows
        self._follows.update(dict.fromkeys(eqn.outvars, group.follows | group.place))
        if of_product and any(is_for_triton(self._eqns[i]) for i in body):
            self._of_triton.update(eqn.outvars)
        if not joins:
            return dict(reads), body, None, False
        alone = {v: nbytes for v, nbytes in reads.items() if v not in group.at_hand}
        group.at_hand.update(reads)
        new = [i for i in body if i not in group.body]
        group.body.update(body)
        for v, part in parts.items():
            group.parts[v] = part if group.parts.get(v, part) == part else None
        for key in alike:
            others = self._siblings.setdefault(key, [])
            others += [] if group in others else [group]
        if kind is Kind.FUSIBLE:
            group.at_hand.update(eqn.outvars)
            self._made_with.update(dict.fromkeys(eqn.outvars, group))
            self._dear.update(self._read_inside.intersection(eqn.outvars) if self._dear_in(body) else ())
        return alone, new, group, found is not None

    def _dear_in(self, body: Iterable[int]) -> list[Var]:
        """What XLA takes for dear to compute."""
        return [
            v
            for eqn in (self._eqns[i] for i in body)
            for v in eqn.outvars
            if is_dear_to_xla(eqn.primitive.name, dtype_name(v))
        ]

    def _new(self) -> Group:
        self._n_groups += 1
        return Group(place=1 << self._n_groups)

    def _before(self, i: int) -> int:
        """The kernels that an equation follows from."""
        follows = 0
        for v in self._operands[i]:
            follows |= self._follows.get(v, 0)
        return follows

    def _pass_to(self, root: int) -> None:
        """What lies between two kernels: is computed inside of them, or a barrier."""
        for i in range(self._passed, root):
            made = self._eqns[i].outvars
            if made and made[0] not in self._follows:
                self._follows.update(dict.fromkeys(made, self._before(i)))
        self._passed = max(self._passed, root)

    def _sibling(
        self, alike: Sequence[_Alike], parts: Mapping[Var, _Part | None], follows: int
    ) -> Group | None:
        """A kernel of the same form that reads the same, and that this one does not follow from."""
        for key in alike:
            v = key[-1]
            for group in self._siblings.get(key, ()):
                if not follows & group.place and not _are_apart(group.parts[v], parts[v]):
                    return group
        return None

    def _is_beside_a_sum(self, v: Var, root: int, body: Sequence[int]) -> bool:
        """True for a value that is dear to make, that only such kernels read, and that one with a sum reads,
        or what becomes part of that one: XLA does not make it there."""
        place = self._summed_at.get(v)
        if v not in self._dear or place is None:
            return False
        if place in body:
            return True
        if not root < place <= root + MOST_INSIDE:
            return False
        following = {*self._eqns[root].outvars}
        for i in range(root + 1, place + 1):
            if not following.isdisjoint(self._operands[i]):
                following.update(self._eqns[i].outvars)
        return following.isdisjoint(self._eqns[place].outvars)

    def _maker(
        self, root: int, body: Sequence[int], read: Collection[Var], size: int, follows: int
    ) -> Group | None:
        """The elementwise kernel that makes some of `read`, if nothing else of these follows from it."""
        apart: set[Var] | None = None
        for v in read:
            made_with = self._made_with.get(v)
            if made_with is None or size_of(v) != size or self._is_beside_a_sum(v, root, body):
                continue
            others = (self._follows.get(u, 0) for u in read if self._made_with.get(u) is not made_with)
            if any(other & made_with.place for other in others):
                continue
            apart = self._read_at_several_places(root, body) if apart is None else apart
            if v not in apart:
                return made_with
        return None

    def _read_at_several_places(self, root: int, body: Sequence[int]) -> set[Var]:
        """What a kernel would compute more than once, as it takes elements of it from several places.

        That includes what such a value is computed from; `Storage` looks for where it is to be stored.
        """
        places: dict[Var, set[tuple[int, int]]] = {}
        for i in sorted(body, reverse=True):
            eqn = self._eqns[i]
            moves = eqn.primitive.name in MOVING
            for k, out in enumerate(eqn.outvars):
                at = {(root, 0)} if i == root else places.get(out, set())
                if not at:
                    continue
                at = {(i, k)} if moves else at
                for v in self._operands[i]:
                    places.setdefault(v, set()).update(at)
        return {v for v, at in places.items() if len(at) > 1}


def _part(v: Var, readers: Mapping[Var, Sequence[JaxprEqn]]) -> _Part | None:
    """The part of a value that equations read, if they read no other."""
    if len(readers.get(v, ())) != 1:
        return None
    (eqn,) = readers[v]
    if eqn.primitive.name == "slice":
        return tuple(zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True))
    shown = [k for k, u in enumerate(eqn.outvars) if u in readers] if eqn.primitive.name == "split" else []
    if len(shown) != 1:
        return None
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    start = sum(sizes[: shown[0]])
    whole = [(0, n) for n in array_of(v).shape]
    return (*whole[:axis], (start, start + sizes[shown[0]]), *whole[axis + 1 :])


def _are_apart(one: _Part | None, other: _Part | None) -> bool:
    """True for two parts that have nothing in common."""
    if one is None or other is None:
        return False
    return any(b <= c or d <= a for (a, b), (c, d) in zip(one, other, strict=True))


def _is_summed_beside(eqn: JaxprEqn) -> bool:
    """True for a reduction that keeps a GPU busy, so that XLA computes what it reads in its kernel: along
    rows, or along columns that are many, or so long that it splits them in parts."""
    axes, operand = eqn.params.get("axes"), array_of(eqn.invars[0])
    if not axes or operand.ndim - 1 in axes:
        return True
    rows = math.prod(operand.shape[axis] for axis in axes)
    row_bytes = operand.size * operand.dtype.itemsize // max(rows, 1)
    return bool(rows > _LONGEST_COLUMN or row_bytes >= _BUSY_ROW_BYTES)


def _summed_at(graph: DataflowGraph, stored: Collection[Var]) -> dict[Var, int]:
    """For what elementwise kernels read whose results are summed beside them: the first place."""
    summed: set[Var] = set()
    found: dict[Var, int] = {}
    for i in reversed(range(len(graph.eqns))):
        eqn, kind, read = graph.eqns[i], graph.kinds[i], graph.operands[i]
        if kind is Kind.REDUCTION and _is_summed_beside(eqn):
            summed.update(read)
        if kind not in INSIDE:
            continue
        for v in eqn.outvars:
            if v not in stored and v in summed:
                summed.update(read)
            if v in (summed if v in stored else found):
                found.update(dict.fromkeys(read, i))
    return found
