"""What is chosen for the scans of a program, on one level of its frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jax.core import ShapedArray

from passes.jaxpr.compat import Var, aval_nbytes
from passes.jaxpr.flops import iterations_of
from passes.jaxpr.rewrite import defined
from passes.jaxpr.scans.branches import CondPair
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
        recomputed: what the second half runs again, for the report, in one iteration.
        inner: choices for the pairs inside the bodies.
        segments: how the pair runs in segments; then `kept` and `inner` are of one segment.
        late: True if the second half runs each equation again just before what reads it. False for the order
            of `jax.checkpoint`, all of them first.
    """

    pair: ScanPair
    kept: tuple[Var, ...]
    stacked_bytes: int
    recomputed: tuple[Recomputed, ...]
    inner: Level = ()
    segments: Segments | None = None
    late: bool = False

    @property
    def parts(self) -> tuple[Choice, ...]:
        """What is chosen for the parts of the pair's iterations, here for all of them."""
        return (self,)

    @property
    def turns(self) -> tuple[range, ...]:
        """Where the steps of each part begin: its iterations, or its segments."""
        return (range(0, self.pair.length, self.step),)

    @property
    def step(self) -> int:
        """How many iterations a step has."""
        return 1 if self.segments is None else self.segments.iterations

    @property
    def in_segments(self) -> bool:
        """True if this pair or one inside it runs in segments."""
        return self.segments is not None or any(c.in_segments for c in self.inner)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same pair apart."""
        # Bodies are in variables of their own on each level.
        place = {v: k for k, v in enumerate(defined(self.pair.producer.jaxpr))}
        kept = tuple(place[v] for v in self.kept)
        return self.stacked_bytes, kept, self.step, tuple(c.signature for c in self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class InParts:
    """What is chosen for one pair on two levels, see `passes.jaxpr.scans.parts`.

    Attributes:
        parts: what is chosen for the first iterations, and for the others.
        first: how many the first are.
    """

    parts: tuple[Choice, Choice]
    first: int

    @property
    def pair(self) -> ScanPair:
        """The scans; what is inside their bodies is as on the first level."""
        return self.parts[0].pair

    @property
    def turns(self) -> tuple[range, ...]:
        """Where the steps of each part begin."""
        one, other = self.parts
        return range(0, self.first, one.step), range(self.first, self.pair.length, other.step)

    @property
    def stacked_bytes(self) -> int:
        """Bytes of all stacks that are there for this purpose only."""
        return sum(map(_stacked_bytes, self.parts, self.turns))

    @property
    def in_segments(self) -> bool:
        """True if some of the pair runs in segments."""
        return any(part.in_segments for part in self.parts)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same pair apart."""
        return self.first, *(part.signature for part in self.parts)


def _stacked_bytes(part: Choice, steps: range) -> int:
    """Bytes of stacks for some steps of what is chosen for a pair; those in a segment are there once."""
    once = 0 if part.segments is None else sum(c.stacked_bytes for c in part.inner)
    return once + (part.stacked_bytes - once) * len(steps) * part.step // part.pair.length


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
    def in_segments(self) -> bool:
        """True if some pair runs in segments."""
        return any(c.in_segments for c in self.inner)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same control flow apart."""
        return tuple(c.signature for c in self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class InBranches:
    """What passes from the branches of one cond to those of a second one.

    Attributes:
        pair: the conds.
        branches: what is chosen for each branch.
        places: abstract values of what is kept; each branch has something for some of them, and nothing for
            the others.
    """

    pair: CondPair
    branches: tuple[Choice, ...]
    places: tuple[ShapedArray, ...]

    @property
    def stacked_bytes(self) -> int:
        """Bytes of all that is kept, and of the stacks inside of the branch that has most."""
        inside = (sum(c.stacked_bytes for c in branch.inner) for branch in self.branches)
        return sum(map(aval_nbytes, self.places)) + max(inside)

    @property
    def in_segments(self) -> bool:
        """True if some pair inside runs in segments."""
        return any(branch.in_segments for branch in self.branches)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tells different choices for the same conds apart."""
        return tuple(branch.signature for branch in self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInside:
    """What a loop makes in every iteration of what it reads.

    Attributes:
        loop: the loop.
        kept: what is alive through it, of what could be made in it.
        stacked_bytes: the bytes of these.
        recomputed: what is made inside, in one iteration.
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


Site = Choice | InParts | InBranches | Inside | MadeInside
Level = tuple[Site, ...]


def place_of(choice: Choice | InParts | InBranches | Inside) -> int:
    """Where the control flow, or the first of the pair, is among the equations of its program."""
    return choice.enclosure.place if isinstance(choice, Inside) else choice.pair.first


def all_recomputed(choice: Site) -> tuple[Recomputed, ...]:
    """What a choice and those inside it recompute; costs of all iterations."""
    if isinstance(choice, Choice | InParts):
        return tuple(r for part in map(_in_steps, choice.parts, choice.turns) for r in part)
    if isinstance(choice, InBranches):
        return tuple(r for branch in choice.branches for r in _in_branch(branch))
    if isinstance(choice, Inside):
        return _inside(choice.inner, choice.enclosure.iterations)
    eqn = choice.loop.eqn
    name = "a scan" if eqn.primitive.name == "scan" else "a loop (estimated)"
    return tuple(in_iterations(r, iterations_of(eqn), name) for r in choice.recomputed)


def _in_steps(part: Choice, steps: range) -> tuple[Recomputed, ...]:
    own = tuple(in_iterations(r, len(steps) * part.step, "a scan") for r in part.recomputed)
    return own + _inside(part.inner, len(steps))


def _in_branch(branch: Choice) -> tuple[Recomputed, ...]:
    own = tuple(replace(r, op=f"{r.op} in a branch") for r in branch.recomputed)
    return own + _inside(branch.inner, 1)


def _inside(level: Level, iterations: int) -> tuple[Recomputed, ...]:
    """What bodies recompute that run so often."""
    return tuple(replace(r, cost_ns=iterations * r.cost_ns) for c in level for r in all_recomputed(c))


def in_iterations(r: Recomputed, iterations: int, of: str) -> Recomputed:
    """What is recomputed in every iteration, of all of them."""
    return replace(
        r,
        op=f"{r.op} in {iterations} iterations of {of}",
        nbytes=iterations * r.nbytes,
        cost_ns=iterations * r.cost_ns,
    )
