"""A program's natural blocks, and the program as if `jax.checkpoint` stood around each of them.

Natural blocks are the bodies of scans that a backward pass reads stacks of, and runs of kernels that repeat:
the same primitives on the same shapes, twice or more in a row, as in the layers of an unrolled model. Names
are not asked for, since most programs give none. What lies between two runs, or before the first and is as
long, is a block, too: the first of a ResNet's stage. Elementwise work belongs to the kernels so that least is
carried across a border.

    forward    embed | block 1 | block 2 | block 3 | loss       what a block takes in is kept, and what lies
    backward   ...   | block 3' (block 3 again first) | ...     outside of blocks; inside, what a policy saves

XLA makes of it what it makes of `jax.checkpoint` around the blocks, to the byte (`tests/test_blocks.py`).
Scans are written by the means of a user's own constraints (`passes.jaxpr.constraints`): what is kept gets a
name, and the policy is asked about all else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from passes.jaxpr import compat
from passes.jaxpr.avals import form_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.constraints import backward_of, blocks_under, constrain
from passes.jaxpr.primitives import CONTROL_FLOW, FUSING, Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.scans.pairs import find_pairs
from passes.jaxpr.values import Constraints, ConstraintUnsupported, Policy

KEPT = "kept outside of blocks"
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")
# Looking for repeats takes the square of the number of equations; in a longer program nothing is looked for.
_MOST_EQUATIONS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What repeats in the forward pass of a program.

    Attributes:
        spans: of equations: one block each, in order.
        scans: lengths of the scans whose bodies are blocks.
    """

    spans: tuple[range, ...] = ()
    scans: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.spans or self.scans)

    def __str__(self) -> str:
        parts = [f"{len(self.spans)} blocks"] if self.spans else []
        return ", ".join([*parts, *(f"a scan of {length}" for length in self.scans)])


@compat.cached_by_jaxpr
def find_blocks(jaxpr: Jaxpr) -> Blocks:
    """The natural blocks of a differentiated program, calls inlined; none where nothing is differentiated."""
    forward = _forward(jaxpr)
    if spans := _spans(jaxpr, forward):
        return Blocks(spans=spans)
    pairs = (pair for pair in find_pairs(jaxpr) if pair.first in forward and pair.second not in forward)
    return Blocks(scans=tuple(pair.length for pair in pairs))


def _spans(jaxpr: Jaxpr, forward: set[int]) -> tuple[range, ...]:
    places = sorted(forward)
    kinds = [eqn_kind(jaxpr.eqns[i]) for i in places]
    kernels = [n for n, kind in enumerate(kinds) if kind not in (*FUSING, Kind.BARRIER)]
    sums = {n for n, kind in enumerate(kinds) if kind is Kind.REDUCTION}
    number: dict[tuple[Any, ...], int] = {}
    words = np.array([number.setdefault(_word(jaxpr.eqns[places[n]]), len(number)) for n in kernels])
    borders = _borders(_runs(words), kernels, sums, _carried_bytes(jaxpr, places))
    return tuple(range(places[start], places[stop - 1] + 1) for start, stop in itertools.pairwise(borders))


def under_policies(jaxpr: Jaxpr) -> dict[str, Jaxpr]:
    """The program with each of its blocks as under `jax.checkpoint`, by the ready policy that blocks have;
    without those that change nothing, or ask for what cannot be run twice."""
    made: dict[str, Jaxpr] = {}
    if not (blocks := find_blocks(jaxpr)):
        return made
    for name in POLICIES:
        try:
            if blocks.spans:
                written = under_each(jaxpr, [name] * len(blocks.spans))
            else:
                written = _scans_under(jaxpr, getattr(jax.checkpoint_policies, name))
        except ConstraintUnsupported:
            continue
        if written is not jaxpr:
            made[name] = written
    return made


def under_each(jaxpr: Jaxpr, names: Sequence[str]) -> Jaxpr:
    """The program with its blocks as under `jax.checkpoint`; the same object if nothing is to be done.

    Args:
        names: of a ready policy for each of the blocks that are spans of equations.

    Raises:
        ConstraintUnsupported: where a policy asks for what cannot be run twice.
    """
    spans = find_blocks(jaxpr).spans
    block_of = {v: n for n, span in enumerate(spans) for i in span for v in jaxpr.eqns[i].outvars}
    policies = [getattr(jax.checkpoint_policies, name) for name in names]
    return blocks_under(jaxpr, policies, block_of, _kept(jaxpr))


def are_alike(one: Jaxpr, other: Jaxpr) -> bool:
    """True for the same equations in the same order: policies that differ in nothing that is there."""
    words = [[(eqn.primitive.name, len(eqn.invars)) for eqn in jaxpr.eqns] for jaxpr in (one, other)]
    return words[0] == words[1]


def _scans_under(jaxpr: Jaxpr, policy: Policy) -> Jaxpr:
    kept, rename, eqns = _kept(jaxpr), dict[Var, Atom](), []
    for eqn in jaxpr.eqns:
        eqns.append(compat.rename_inputs(eqn, rename))
        for v in (v for v in eqn.outvars if v in kept):
            rename[v] = compat.fresh_var(v)
            eqns.append(compat.name_eqn(v, rename[v], KEPT, eqn))
    named = compat.rebuild(jaxpr, eqns=eqns, rename=rename)
    constrained = constrain(named, Constraints(save=(KEPT,), policy=policy))
    return jaxpr if constrained is named else constrained


def _forward(jaxpr: Jaxpr) -> set[int]:
    """Places of the equations that a backward pass follows from, less its own."""
    needed: set[Var] = set()
    forward: set[int] = set()
    flags = backward_of(jaxpr)
    for i in reversed(range(len(jaxpr.eqns))):
        eqn, transposed = jaxpr.eqns[i], flags[i]
        if transposed or not needed.isdisjoint(eqn.outvars):
            needed.update(compat.variables(eqn.invars))
            if not transposed:
                forward.add(i)
    return forward


def _word(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The same for equations that do the same."""
    ins = tuple(form_of(v) for v in eqn.invars if hasattr(v.aval, "dtype"))
    return eqn.primitive.name, ins, tuple(getattr(v.aval, "shape", None) for v in eqn.outvars)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Words that repeat with a period: `words[i] == words[i + period]` while both are in the run."""

    start: int
    stop: int
    period: int

    @property
    def count(self) -> int:
        return (self.stop - self.start) // self.period


def _runs(words: Any, start: int = 0) -> list[_Run]:
    """Runs that do not overlap, in order; the one that covers most is taken first, then those beside it.

    Args:
        words: an array of numbers, the same for the same word.
        start: what is added to places.
    """
    best = _longest(words)
    if best is None:
        return []
    after = _runs(words[best.stop :], start + best.stop)
    moved = _Run(start=start + best.start, stop=start + best.stop, period=best.period)
    return [*_runs(words[: best.start], start), moved, *after]


def _longest(words: Any) -> _Run | None:
    """The run that covers most words in whole periods; of equals that of the shortest period."""
    if len(words) > _MOST_EQUATIONS:
        return None
    best, covered = None, 0
    for period in range(1, len(words) // 2 + 1):
        same = words[:-period] == words[period:]
        if np.count_nonzero(same) + period <= covered:
            continue
        borders = np.flatnonzero(np.diff(same, prepend=False, append=False))
        for begin, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
            run = _Run(start=begin, stop=end + period, period=period)
            if run.count > 1 and run.count * period > covered:
                best, covered = run, run.count * period
    return best


def _borders(
    runs: Sequence[_Run], kernels: Sequence[int], sums: Set[int], carried_bytes: Sequence[int]
) -> list[int]:
    """Where blocks begin, and where the last one ends; what lies between two runs is a block, too.

    Args:
        kernels: places of the kernels that the runs are of.
        sums: places of reductions.
        carried_bytes: for every place what is carried across it; of all that a border may be at it is where
            that is least.
    """

    def least(n: int) -> int:
        """The best place between the kernels `n - 1` and `n`. Behind the last kernel something is carried, if
        only into the backward pass: what a loss is taken of. Of equal ones the last, but for what is summed:
        a norm is of the next block."""
        start = kernels[n - 1] + 1 if n else 0
        stop = kernels[n] if n < len(kernels) else len(carried_bytes) - 1
        places = [k for k in range(start, stop + 1) if carried_bytes[k] or n < len(kernels)]
        if not places:
            return start
        least_bytes = min(carried_bytes[k] for k in places)
        equal = [k for k in places if carried_bytes[k] == least_bytes]
        summed = next((k for k in range(equal[0], stop) if k in sums), stop)
        return max(k for k in equal if k <= summed)

    borders: list[int] = []
    for run in runs:
        phases = range(run.start, run.stop - run.count * run.period + 1)
        ways = {first: [least(first + n * run.period) for n in range(run.count + 1)] for first in phases}
        first = min(ways, key=lambda first: sum(carried_bytes[place] for place in ways[first]))
        if not borders and first > run.period:
            # What comes before may begin with something else: a stem.
            before = range(kernels[first - run.period], kernels[0], -1)
            borders.append(min(before, key=lambda place: carried_bytes[place]))
        borders += ways[first]
    return list(dict.fromkeys(borders))


def _carried_bytes(jaxpr: Jaxpr, places: Sequence[int]) -> list[int]:
    """For every place between forward equations, and at both ends, the bytes that are made before and read
    after in the forward pass."""
    eqns = [jaxpr.eqns[i] for i in places]
    last_read = {v: i for i, eqn in enumerate(eqns) for v in compat.variables(eqn.invars)}
    changes = [0] * (len(eqns) + 1)
    for i, eqn in enumerate(eqns):
        for v in eqn.outvars:
            if v in last_read:
                changes[i + 1] += compat.aval_nbytes(v.aval)
                changes[last_read[v] + 1] -= compat.aval_nbytes(v.aval)
    return list(itertools.accumulate(changes))


@compat.cached_by_jaxpr
def _kept(jaxpr: Jaxpr) -> frozenset[Var]:
    """What is made in the forward pass outside of blocks, and what blocks make for what comes after them."""
    blocks, forward = find_blocks(jaxpr), _forward(jaxpr)
    block_of = {i: n for n, span in enumerate(blocks.spans) for i in span}
    makers = {v: i for i in forward for v in jaxpr.eqns[i].outvars}
    loose = forward - block_of.keys()
    if not blocks.spans:
        # No policy is asked about control flow, and stacks must be seen to be a scan's.
        loose = {i for i in loose if jaxpr.eqns[i].primitive.name not in CONTROL_FLOW}
    kept = {v for v, i in makers.items() if i in loose}
    for i in forward:
        for v in compat.variables(jaxpr.eqns[i].invars):
            made = makers.get(v)
            if made in block_of and block_of[made] != block_of.get(i):
                kept.add(v)
    return frozenset(v for v in kept if not isinstance(v, compat.DropVar))
