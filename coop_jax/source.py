"""What a planned part of a program is derived from, whatever was made of it since.

A plan is written for equations, so the calls in it are opened, and with them goes what was to be said of
their derivatives. A part therefore names its source, the jaxpr before that, which every derivative is taken
of. What a transformation does to a part it notes in the source as a step; the steps are done when a
derivative asks for them, which most programs never do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp

from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.rewrite import with_results, without_inputs


class Step(Protocol):
    """One transformation; hashable, and the same object for the same jaxpr."""

    def __call__(self, closed: ClosedJaxpr) -> Any:
        """What it makes of a closed jaxpr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Equal to another one that is made in the same way.

    Attributes:
        jaxpr: what all begins with.
        steps: what was done to it, in this order.
        operands: for each of its operands, once all is done, which operand of the part that is.
        n_results: how many of the part's results it gives, the first ones. The others are saved values: they
            follow from the operands, and have no tangents of their own.
        is_forward: True for a forward part: what no result depends on any more can go. A backward part reads
            saved values in the place of arguments, which all stay.
    """

    jaxpr: ClosedJaxpr
    steps: tuple[Step, ...] = ()
    operands: tuple[int, ...]
    n_results: int
    is_forward: bool = False

    def closed(self) -> tuple[Any, list[Any]]:
        """A jaxpr without constants, and what are its first operands instead of them."""
        made = self.jaxpr
        for step in self.steps:
            made = step(made)
        return compat.hoist_consts(made)

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Those of a part's operands, or of what goes with them, that it takes."""
        return [values[i] for i in self.operands]

    def spread(self, values: Sequence[Any], n_operands: int) -> list[Any]:
        """`values` for its operands as a list for the part's operands, None for the others."""
        every: list[Any] = [None] * n_operands
        for i, x in zip(self.operands, values, strict=True):
            every[i] = x
        return every

    def behind(self, n: int) -> Source:
        """The source of a part with `n` more operands before those that it has."""
        return dataclasses.replace(self, operands=tuple(i + n for i in self.operands)) if n else self

    def pruned(self, used: Sequence[bool]) -> Source:
        """The source of a part whose other results are gone."""
        kept = tuple(used[: self.n_results])
        if all(kept):
            return self
        return dataclasses.replace(self, steps=(*self.steps, Kept(results=kept)), n_results=sum(kept))

    def needs(self, n_operands: int) -> list[bool]:
        """For every operand of the part whether a derivative will ask for it, though the part may not."""
        if not self.n_results:
            return [False] * n_operands
        needed = set(self.operands)
        if self.is_forward and any(isinstance(step, Kept) for step in self.steps):
            made, consts = self.closed()
            read = compat.needed_inputs(made, [True] * len(made.out_avals))[len(consts) :]
            needed = {i for i, is_read in zip(self.operands, read, strict=True) if is_read}
        return [i in needed for i in range(n_operands)]

    def moved(self, kept: Sequence[bool]) -> Source:
        """The source of a part whose other operands are gone."""
        place = {i: n for n, i in enumerate(i for i, k in enumerate(kept) if k)}
        if not self.n_results:
            return dataclasses.replace(self, steps=(*self.steps, Nothing()), operands=())
        needed = tuple(i in place for i in self.operands)
        steps = self.steps if all(needed) else (*self.steps, Needed(operands=needed))
        operands = tuple(place[i] for i in self.operands if i in place)
        return dataclasses.replace(self, steps=steps, operands=operands)

    def batched(self, axis: Any, dims: Sequence[Any], on_axis: Sequence[bool]) -> Source:
        """The source of a part under `vmap`, whose results are batched where `on_axis` says so."""
        step = Batched(axis=axis, dims=tuple(self.of(dims)), on_axis=tuple(on_axis[: self.n_results]))
        return dataclasses.replace(self, steps=(*self.steps, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Some of the results."""

    results: tuple[bool, ...]

    def __call__(self, closed: ClosedJaxpr) -> Any:
        """`closed` without the others."""
        return with_results(closed, [i for i, kept in enumerate(self.results) if kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Some of the operands: no result depends on the others."""

    operands: tuple[bool, ...]

    def __call__(self, closed: ClosedJaxpr) -> Any:
        """`closed` without the others."""
        jaxpr, consts = compat.open_jaxpr(closed)
        pruned = compat.without_dead_code(jaxpr)
        unread = [i for i, needed in enumerate(self.operands) if not needed]
        return without_inputs(compat.close_jaxpr(pruned, consts), unread, [])


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nothing of the results, and of the operands."""

    def __call__(self, closed: ClosedJaxpr) -> Any:
        """An empty jaxpr."""
        return compat.trace(list, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Over a batch, with results as the part has them."""

    axis: Any
    dims: tuple[Any, ...]
    on_axis: tuple[bool, ...]

    def __call__(self, closed: ClosedJaxpr) -> Any:
        """`closed` over the batch."""
        batched, is_batched = compat.batch_jaxpr(closed, self.axis, self.dims)
        return batched if tuple(is_batched) == self.on_axis else _as_in(batched, tuple(is_batched), self)


@compat.cached_by_jaxpr
def _as_in(batched: Any, is_batched: tuple[bool, ...], asked: Batched) -> Any:
    """`batched` where one of two equal programs knows of a result that it is the same for the whole batch."""

    def run(*values: Any) -> list[Any]:
        results = compat.evaluate(batched, values)
        both = zip(results, is_batched, asked.on_axis, strict=True)
        return [
            x if f == a else jnp.broadcast_to(x, (asked.axis.size, *x.shape)) if a else x[0]
            for x, f, a in both
        ]

    return compat.trace(run, batched.in_avals)
