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


# Offsets above the ground for every item; None where a packer finds none within the problem's capacity.
PACKERS: dict[str, Callable[[Problem], list[int] | None]] = {
    # The tightest gap, in two orders, whatever the capacity.
    "best fit": lambda problem: best_fit(problem.items),
    # What can lie lowest, by a rule of job shops, in a few passes.
    "ground up": lambda problem: stack(problem.items, problem.room_bytes, CONFIG.passes).offsets,
    # Depth first, section by section, in a few tries.
    "search": lambda problem: search(
        problem.items, problem.room_bytes, CONFIG.tries // max(1, len(problem.items))
    ),
}


def pack(problem: Problem) -> list[int]:
    """Offsets above the ground: of the first packer that keeps the capacity, else best fit's."""
    kept: list[int] = []
    for packer in PACKERS.values():
        offsets = packer(problem)
        kept = kept or offsets or []
        if offsets is not None and problem.holds(height_bytes(problem.items, offsets)):
            return offsets
    return kept
