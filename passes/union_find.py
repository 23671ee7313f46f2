"""Numbers joined into groups. A group is named by its smallest number."""

from __future__ import annotations

from collections.abc import Iterable


class UnionFind:
    """The numbers below `count`, each in a group of its own at first.

    Attributes:
        parent: of every number one of its group that is nearer to the root; itself for a root.
    """

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, number: int) -> int:
        """The root of a number's group."""
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, members: Iterable[int]) -> bool:
        """Make one group of those that some numbers are in; True if they were several."""
        roots = sorted({self.find(n) for n in members})
        for other in roots[1:]:
            self.parent[other] = roots[0]
        return len(roots) > 1
