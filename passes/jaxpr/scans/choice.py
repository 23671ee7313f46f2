"""What is chosen for the scans of a program, on one level of its frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from passes.jaxpr.compat import Var
from passes.jaxpr.scans.loops import Loop
from passes.jaxpr.scans.pairs import Enclosure, ScanPair
from passes.jaxpr.scans.segments import Segments
from passes.outcome import Recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What passes from the first to the second half of one pair.

    Attributes:
        pair: the scans, pairs inside their bodies rewritten.
        kept: variables of the first body.
        stacked_bytes: bytes of all stacks that are there for this purpose only.
        recomputed: what the second half runs again, for the report; costs of all iterations.
        inner: choices for the pairs inside the bodies.
        segments: how the pair runs in segments; then `kept` and `inner` are of one segment.
    """

    pair: ScanPair
    kept: tuple[Var, ...]
    stacked_bytes: int
    recomputed: tuple[Recomputed, ...]
    inner: Level = ()
    segments: Segments | None = None

    @property
    def in_segments(self) -> bool:
        """True if this pair or one inside it runs in segments."""
        return self.segments is not None or any(c.in_segments for c in self.inner)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same pair apart."""
        count = 1 if self.segments is None else self.segments.count
        return self.stacked_bytes, self.kept, count, tuple(c.signature for c in self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What is chosen inside control flow that is in no pair itself.

    Attributes:
        enclosure: the control flow.
        bodies: for every body of it the choices for what is in there.
    """

    enclosure: Enclosure
    bodies: tuple[Level, ...]

    @property
    def inner(self) -> Level:
        """The choices of all bodies."""
        return tuple(c for body in self.bodies for c in body)

    @property
    def stacked_bytes(self) -> int:
        """Bytes of the stacks in the body that has most; they are there once, whatever the iterations."""
        return max(sum(c.stacked_bytes for c in body) for body in self.bodies)

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """What is recomputed; costs of all iterations."""
        iterations = self.enclosure.iterations
        return tuple(
            replace(r, cost_ns=iterations * r.cost_ns) for c in self.inner for r in all_recomputed(c)
        )

    @property
    def in_segments(self) -> bool:
        """True if some pair runs in segments."""
        return any(c.in_segments for c in self.inner)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same control flow apart."""
        return tuple(c.signature for c in self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInside:
    """What a loop makes in every iteration of what it reads.

    Attributes:
        loop: the loop.
        kept: what is alive through it, of what could be made in it.
        stacked_bytes: the bytes of these.
        recomputed: what is made inside, costs of all iterations.
    """

    loop: Loop
    kept: tuple[Var, ...]
    stacked_bytes: int
    recomputed: tuple[Recomputed, ...]
    in_segments: ClassVar[bool] = False

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same loop apart."""
        return self.stacked_bytes, self.kept


Site = Choice | Inside | MadeInside
Level = tuple[Site, ...]


def all_recomputed(choice: Site) -> tuple[Recomputed, ...]:
    """What a choice and those inside it recompute."""
    if not isinstance(choice, Choice):
        return choice.recomputed
    return choice.recomputed + tuple(r for inner in choice.inner for r in all_recomputed(inner))
