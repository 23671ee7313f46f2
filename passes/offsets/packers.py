"""The packers of live ranges, in the order in which they are asked: the first packing that fits is taken.

XLA's own heaps are not among them (`passes.offsets.xla_heap`): these are replayed, not chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes.offsets.best_fit import best_fit
from passes.offsets.packing import Problem, height_bytes
from passes.offsets.skyline import stack
from passes.offsets.solver import search


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerConfig:
    """How long each packer may take; set by `benchmarks.planners`.

    Attributes:
        passes: from the ground up.
        tries: of the search, shared by the items: each takes longer where there are more.
    """

    passes: int = 24
    tries: int = 1_000_000


CONFIG = PackerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """One way to pack.

    Attributes:
        name: of the packer.
        does: what it does, for people.
        pack: offsets above the ground for every item; None if it finds none within the problem's capacity.
    """

    name: str
    does: str
    pack: Callable[[Problem], list[int] | None]


def _searched(problem: Problem) -> list[int] | None:
    return search(problem.items, problem.room_bytes, CONFIG.tries // max(1, len(problem.items)))


PACKERS = (
    Packer(
        name="best fit",
        does="the tightest gap, in two orders, whatever the capacity",
        pack=lambda problem: best_fit(problem.items),
    ),
    Packer(
        name="ground up",
        does="what can lie lowest, by a rule of job shops, in a few passes",
        pack=lambda problem: stack(problem.items, problem.room_bytes, CONFIG.passes).offsets,
    ),
    Packer(name="search", does="depth first, section by section, in a few tries", pack=_searched),
)


def pack(problem: Problem) -> list[int]:
    """Offsets above the ground: of the first packer that keeps the capacity, else best fit's."""
    kept: list[int] = []
    for packer in PACKERS:
        offsets = packer.pack(problem)
        kept = kept or offsets or []
        if offsets is not None and problem.holds(height_bytes(problem.items, offsets)):
            return offsets
    return kept
