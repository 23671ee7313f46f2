"""How often a program is compiled once more, to look at another plan (`coop_jax.alternatives`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesConfig:
    """What is tried, and how often; set by `benchmarks.promise` and `benchmarks.side_by_side`.

    Attributes:
        paged_ratios: shares of the temporaries that recompute aims for where pages may do the rest.
        ratios: shares that it aims for before a budget is refused; the last one asks for as little as can be:
            a program of many layers goes far below the others.
        cheaper_ratio: costs are estimates; what is cheaper by less is not worth a compile.
        missed_ratio: a plan whose program costs so much more than planned was made from a wrong estimate:
            DenseNet on the CPU 24 % more, the other programs at most 13 %.
        most_looks: how often a program is compiled once more after the first plan.
        most_looks_if_kept: the same, if that kept the budget.
        most_asked: how often a byte less is asked for than a refusal would name, to name what that gives.
    """

    paged_ratios: tuple[float, ...] = (0.65, 0.4)
    ratios: tuple[float, ...] = (0.85, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08, 0.0)
    cheaper_ratio: float = 0.999
    missed_ratio: float = 1.15
    most_looks: int = 3
    most_looks_if_kept: int = 1
    most_asked: int = 2


TRIES = TriesConfig()
