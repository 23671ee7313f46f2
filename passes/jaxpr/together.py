"""Kernels that XLA:GPU makes one of, since they read the same: what several of them read is read once.

    a = sum(dy)          b = sum(dy * x)          one kernel reads dy and x and writes both sums
    y = f(x)             c = sum(y)               one kernel reads x and writes y and the sum
    y = f(x)             z = g(y)                 one kernel reads x and writes y and z

These are two cases of its multi-output fusion: elementwise kernels, or reductions, of the same sizes that
read a value of that size (siblings); and what reads the result of an elementwise kernel of its size, and
nothing that is ready later. XLA joins them where neither follows from the other. Here that is known of
kernels which are equally far from the arguments. What goes into a loop's stack is written there by a kernel
of its own.
Planners are not told: what they run again, they run alone.
Set by `benchmarks.side_by_side`: without it the kernels of plain and hand-written programs for an H200 were
estimated at 15 to 48 % more time than those that XLA made, with it at 8 % less to 14 % more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import JaxprEqn, Var
from passes.jaxpr.primitives import SLICING, Kind

_Alike = tuple[Kind, int, int, int, Var]


@dataclass(slots=True, eq=False)
class Group:
    """One kernel of several parts.

    Attributes:
        at_hand: what it has read or made.
        own_ns: that its parts take by their bytes and work, launches apart.
        total_ns: that it takes.
    """

    at_hand: set[Var] = field(default_factory=set)
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

    def __init__(self, kinds: Sequence[Kind], alone: Collection[Var] = ()) -> None:
        """
        Args:
            kinds: what each equation is to the fusion model.
            alone: what is written by kernels of their own.
        """
        self._kinds = kinds
        self._alone = frozenset(alone)
        self._depth: dict[Var, int] = {}
        # What a kernel of several parts has at hand, by the parts that may join it.
        self._siblings: dict[_Alike, Group] = {}
        self._made_with: dict[Var, Group] = {}

    def unread(
        self, root: int, eqn: JaxprEqn, reads: Mapping[Var, int], *, of_product: bool = False
    ) -> tuple[dict[Var, int], Group | None, bool]:
        """What is read for one kernel alone, what it is a part of, and whether others of it were asked about.

        Args:
            root: the place of its last equation, `eqn`.
            reads: bytes of every stored value that it reads.
            of_product: True where it is a product's kernel, in which what follows the product is computed.
        """
        depth = 1 + max((self._depth.get(v, 0) for v in reads), default=0)
        self._depth.update(dict.fromkeys(eqn.outvars, depth))
        kind = self._kinds[root]
        is_alone = of_product or eqn.primitive.name in SLICING or not self._alone.isdisjoint(eqn.outvars)
        if is_alone or kind not in (Kind.FUSIBLE, Kind.REDUCTION):
            return dict(reads), None, False
        result = array_of(eqn.outvars[0]).size
        size = max(result, *(array_of(v).size for v in compat.variables(eqn.invars)), 0)
        alike = [(kind, depth, size, result, v) for v in reads if array_of(v).size == size]
        found = self._maker(reads, size)
        if found is not None and kind is Kind.FUSIBLE:
            self._depth.update(dict.fromkeys(eqn.outvars, depth - 1))
        if found is None:
            found = next((self._siblings[key] for key in alike if key in self._siblings), None)
        group = Group() if found is None else found
        alone = {v: nbytes for v, nbytes in reads.items() if v not in group.at_hand}
        group.at_hand.update(reads)
        self._siblings.update(dict.fromkeys(alike, group))
        if kind is Kind.FUSIBLE:
            group.at_hand.update(eqn.outvars)
            self._made_with.update(dict.fromkeys(eqn.outvars, group))
        return alone, group, found is not None

    def _maker(self, reads: Mapping[Var, int], size: int) -> Group | None:
        """The elementwise kernel that makes some of `reads`, if they are the last to be ready of them."""
        for v in reads:
            made_with = self._made_with.get(v)
            if made_with is None or array_of(v).size != size:
                continue
            others = (self._depth.get(u, 0) for u in reads if self._made_with.get(u) is not made_with)
            if max(others, default=0) < self._depth[v]:
                return made_with
        return None
