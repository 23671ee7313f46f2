"""Write a user's constraints into a program, so that every planner keeps them without knowing of them.

A value to be kept, on the device or on the host, passes through a `name` equation of ours that no planner
runs again (`passes.saved`), and all its readers read the result. A value not to be kept is computed once
more, behind a barrier, just before the first equation of the backward pass that needs it: in straight-line
code here, for pairs of scans, or of conds, by choosing what the first one passes on
(`passes.jaxpr.scans.emit`). What it is computed from is kept or not as the planners see fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.halves import closed_halves, join, split
from passes.jaxpr.inline import with_flat_bodies
from passes.jaxpr.primitives import Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import defined, with_equations
from passes.jaxpr.scans.branch_bodies import places_for
from passes.jaxpr.scans.branches import find_cond_pairs
from passes.jaxpr.scans.choice import Choice, InBranches
from passes.jaxpr.scans.cut import joined_body
from passes.jaxpr.scans.emit import rewrite_groups, with_inner
from passes.jaxpr.scans.pairs import Paired, ScanPair, find_pairs
from passes.jaxpr.values import Constraints, Policy, Values
from passes.outcome import RECOMPUTE_SCOPE
from passes.reach import reached
from passes.saved import OFFLOADED, SAVED, is_saved


def constrain_program(closed: ClosedJaxpr, constraints: Constraints) -> ClosedJaxpr:
    """A program that keeps `constraints`; the same object if they ask for nothing in it.

    Args:
        closed: calls inlined, dead code still in it: a name may be all that is dead. The names of its
            equations tell which of them are of a backward pass.

    Raises:
        ConstraintUnsupported: see `passes.jaxpr.values`.
    """
    jaxpr, consts = compat.open_jaxpr(closed)
    constrained = constrain(jaxpr, constraints)
    return closed if constrained is jaxpr else compat.close_jaxpr(constrained, consts)


def constrain(jaxpr: Jaxpr, constraints: Constraints) -> Jaxpr:
    """The same of an open jaxpr."""
    return _constrained(_halves(jaxpr), constraints).jaxpr


def blocks_under(
    jaxpr: Jaxpr, policies: Sequence[Policy], block_of: Mapping[Var, int], kept: Collection[Var]
) -> Jaxpr:
    """An open jaxpr with its blocks as under `jax.checkpoint`: what the backward pass needs of one that its
    policy does not save is computed once more, all at once, behind a barrier. No value is marked.

    Args:
        policies: one for each block.
        block_of: for variables of which block they are.
        kept: what is kept whatever a policy says.

    Returns:
        The same object if nothing is to be done.

    Raises:
        ConstraintUnsupported: see `passes.jaxpr.values`.
    """
    halves = _halves(jaxpr)
    asked = [next((policies[block_of[v]] for v in eqn.outvars if v in block_of), None) for eqn in jaxpr.eqns]
    values = Values(jaxpr.eqns, halves.backward, Constraints(), kept=kept, policies=asked)
    if not values.dropped:
        return jaxpr
    return _without_dead_code(_Cloner(halves, values, block_of).run()).jaxpr


def backward_of(jaxpr: Jaxpr) -> tuple[bool, ...]:
    """For every equation whether it is of a backward pass, recomputed for that, or holds such back."""
    made: set[Var] = set()
    flags = []
    for eqn in jaxpr.eqns:
        holds = eqn_kind(eqn) is Kind.BARRIER and not made.isdisjoint(compat.variables(eqn.invars))
        flags.append(holds or compat.is_transposed(eqn) or compat.is_in_scope(eqn, RECOMPUTE_SCOPE))
        made.update(eqn.outvars if flags[-1] else ())
    return tuple(flags)


def constrain_pair(
    forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int, constraints: Constraints
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A forward and a backward program that keep `constraints` together; see `passes.jaxpr.halves.join`.

    Raises:
        ConstraintUnsupported: see `passes.jaxpr.values`.
    """
    joined = join(forward, backward, n_outs)
    flags = [i >= joined.n_forward_eqns for i in range(len(joined.jaxpr.eqns))]
    n_inputs = joined.n_consts + joined.n_arguments
    halves = _Halves(
        jaxpr=joined.jaxpr, backward=tuple(flags), cotangents=tuple(joined.jaxpr.invars[n_inputs:])
    )
    constrained = _constrained(halves, constraints)
    if constrained is halves:
        return forward, backward
    cut = constrained.backward.count(False)
    written = split(constrained.jaxpr, cut, n_arguments=n_inputs, n_forward_results=n_outs)
    return closed_halves(joined, written)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halves:
    """An open jaxpr with a forward and a backward pass.

    Attributes:
        jaxpr: the program.
        backward: for every equation whether it belongs to a backward pass.
        cotangents: inputs that arrive with the backward pass.
    """

    jaxpr: Jaxpr
    backward: tuple[bool, ...]
    cotangents: tuple[Var, ...] = ()


def _halves(jaxpr: Jaxpr) -> _Halves:
    return _Halves(jaxpr=jaxpr, backward=backward_of(jaxpr))


def _constrained(halves: _Halves, constraints: Constraints, passed: Sequence[Atom] = ()) -> _Halves:
    """The same object if nothing is to be done. `passed`: see `Values`."""
    given = halves
    halves = _with_constrained_bodies(halves, constraints, passed)
    halves = _with_saved(halves, Values(halves.jaxpr.eqns, halves.backward, constraints, passed))
    halves = _with_fewer_stacks(halves, constraints)
    values = Values(halves.jaxpr.eqns, halves.backward, constraints, passed)
    halves = _Cloner(halves, values).run() if values.dropped else halves
    return given if halves is given else _without_dead_code(halves)


def _with_constrained_bodies(halves: _Halves, constraints: Constraints, passed: Sequence[Atom]) -> _Halves:
    """Bodies of control flow as programs of their own."""
    equations = list(zip(halves.jaxpr.eqns, halves.backward, strict=True))
    across = {*passed, *(v for eqn, b in equations if b for v in eqn.invars if compat.is_variable(v))}
    eqns = [
        _with_bodies(eqn, b, [not b and v in across for v in eqn.outvars], constraints)
        for eqn, b in equations
    ]
    jaxpr = with_equations(halves.jaxpr, eqns)
    return halves if jaxpr is halves.jaxpr else replace(halves, jaxpr=jaxpr)


def _with_bodies(eqn: JaxprEqn, backward: bool, across: Sequence[bool], constraints: Constraints) -> JaxprEqn:
    """`across`: for every result whether a backward pass reads it."""

    def constrained(body: Jaxpr) -> Jaxpr:
        flags = tuple(backward or inner for inner in backward_of(body))
        passed = [v for v, a in zip(body.outvars, across, strict=True) if a and compat.is_variable(v)]
        return _constrained(_Halves(jaxpr=body, backward=flags), constraints, passed).jaxpr

    return with_flat_bodies(eqn, constrained)


def _with_saved(halves: _Halves, values: Values) -> _Halves:
    """Every saved value passes through an equation that is not recomputed, right after it is made."""
    rename: dict[Var, Atom] = {}
    eqns, flags = [], []
    for eqn, backward in zip(halves.jaxpr.eqns, halves.backward, strict=True):
        name = compat.checkpoint_name_of(eqn)
        if name and not is_saved(name) and values.base(eqn.outvars[0]) in values.offloaded:
            # One form of what waits on the host is enough: another one would stay on the device.
            rename[eqn.outvars[0]] = compat.renamed(eqn.invars[0], rename)
            continue
        kept = [v for v in eqn.outvars if v in values.saved and not is_saved(compat.checkpoint_name_of(eqn))]
        mark = OFFLOADED if any(v in values.offloaded for v in kept) else SAVED
        eqn = compat.rename_inputs(eqn, rename)
        eqns.append(compat.in_scope(eqn, mark) if kept else eqn)
        flags.append(backward)
        for v in kept:
            rename[v] = result = compat.fresh_var(v)
            added = _kept(v, result, mark, eqn)
            eqns += added
            flags += [backward] * len(added)
    if not rename:
        return halves
    return _with_eqns(halves, eqns, flags, rename)


def _kept(value: Atom, result: Var, mark: str, like: JaxprEqn) -> list[JaxprEqn]:
    """Equations that mark a value; one for the host is an array of its own, so that it can be sent."""
    if mark == SAVED:
        return [compat.name_eqn(value, result, mark, like)]
    stored = compat.fresh_var(value)
    return [compat.barrier_eqn([value], [stored]), compat.name_eqn(stored, result, mark, like)]


def _with_fewer_stacks(halves: _Halves, constraints: Constraints) -> _Halves:
    """Pairs of scans or conds, forward and backward, whose first one does not pass on what is not to be
    kept."""
    if not constraints.recompute and not constraints.offload and constraints.policy is None:
        return halves

    def is_across(pair: Paired) -> bool:
        return not halves.backward[pair.first] and halves.backward[pair.second]

    choices = _choices(halves.jaxpr, constraints, is_across)
    if not choices:
        return halves
    groups, rename = rewrite_groups(halves.jaxpr, choices)
    flags = [b for group, b in zip(groups, halves.backward, strict=True) for _ in group]
    return _with_eqns(halves, [eqn for group in groups for eqn in group], flags, rename)


def _choices(
    jaxpr: Jaxpr, constraints: Constraints, is_across: Callable[[Paired], bool]
) -> list[Choice | InBranches]:
    """What passes in some pairs instead of what must not be kept, where that is another thing."""
    choices: list[Choice | InBranches] = []
    for pair in filter(is_across, find_pairs(jaxpr)):
        choice, is_other = _choice(pair, constraints)
        if is_other:
            choices.append(choice)
    for conds in filter(is_across, find_cond_pairs(jaxpr)):
        branches, are_others = zip(*(_choice(pair, constraints) for pair in conds.branches), strict=True)
        if any(are_others):
            choices.append(InBranches(pair=conds, branches=branches, places=places_for(branches)))
    return choices


def _choice(pair: ScanPair, constraints: Constraints) -> tuple[Choice, bool]:
    """What passes in one pair, and in those inside its bodies; and whether that is another thing."""
    boundary = len(pair.producer.jaxpr.eqns)
    joined = joined_body(pair)
    inner = tuple(_choices(joined, constraints, lambda p: p.first < boundary <= p.second))
    if inner:
        pair = with_inner(pair, joined, inner)
    producer, consumer = pair.producer.jaxpr, pair.consumer.jaxpr
    own = set(defined(producer))
    read = [v for eqn in consumer.eqns for v in eqn.invars] + list(consumer.outvars)
    demanded = dict.fromkeys(v for v in read if compat.is_variable(v) and v in own)
    values = Values(producer.eqns, [False] * len(producer.eqns), constraints, list(demanded))
    is_other = bool(inner) or any(map(values.is_dropped, demanded))

    def sources(v: Var) -> list[Var]:
        return compat.variables(producer.eqns[values.place[v]].invars) if values.is_dropped(v) else []

    kept = {v for v in reached(demanded, sources) if not values.is_dropped(v)}
    stacked = tuple(v for v in defined(producer) if v in kept)
    return Choice(pair=pair, kept=stacked, stacked_bytes=0, recomputed=(), inner=inner), is_other


def _without_dead_code(halves: _Halves) -> _Halves:
    """Also without operands that a scan's body does not read."""
    pairs = zip(halves.jaxpr.eqns, halves.backward, strict=True)
    is_backward = {v: b for eqn, b in pairs for v in eqn.outvars}
    jaxpr = compat.without_dead_code(halves.jaxpr)
    flags: list[bool] = []
    for eqn in jaxpr.eqns:
        known = [is_backward[v] for v in eqn.outvars if v in is_backward]
        flags.append(known[0] if known else bool(flags) and flags[-1])
    return replace(halves, jaxpr=jaxpr, backward=tuple(flags))


class _Cloner:
    """Walks the equations and makes what is dropped once more where a backward pass first needs it: of a
    block all that one needs."""

    def __init__(self, halves: _Halves, values: Values, block_of: Mapping[Var, int] | None = None) -> None:
        self.halves = halves
        self.values = values
        self.block_of = block_of or {}
        self.eqns: list[JaxprEqn] = []
        self.backward: list[bool] = []
        # For variables that passed a barrier, or were recomputed, what later equations read instead.
        self.current: dict[Var, Atom] = {}
        eqns = enumerate(halves.jaxpr.eqns)
        self.last_read = {v: i for i, eqn in eqns for v in compat.variables(eqn.invars)}
        self.arrived: list[Var] = [v for v in halves.cotangents if v in self.last_read]
        self.of_block: dict[int, list[Var]] = {}
        pairs = zip(halves.jaxpr.eqns, halves.backward, strict=True)
        for v in dict.fromkeys(v for eqn, b in pairs if b for v in compat.variables(eqn.invars)):
            if v in self.block_of:
                self.of_block.setdefault(self.block_of[v], []).append(v)

    def run(self) -> _Halves:
        for i, (eqn, backward) in enumerate(zip(self.halves.jaxpr.eqns, self.halves.backward, strict=True)):
            missing = [v for v in eqn.invars if backward and self.is_missing(v)]
            if missing:
                blocks = {b for v in missing if (b := compat.of_variable(self.block_of, v)) is not None}
                of_blocks = [v for b in sorted(blocks) for v in self.of_block[b] if self.is_missing(v)]
                # A derivative of a derivative has equations of a backward pass amid the forward one.
                missing += [v for v in of_blocks if self.values.place[v] < i]
                self._recompute(missing, self._trigger(i, eqn))
            # Around blocks others read what they read: an update the weights, not those behind a barrier.
            is_behind = backward or not self.block_of
            self._add(compat.rename_inputs(eqn, self.current) if is_behind else eqn, backward)
            if backward:
                self.arrived += [v for v in eqn.outvars if self.last_read.get(v, -1) > i]
        return _with_eqns(self.halves, self.eqns, self.backward, {})

    def is_missing(self, v: Atom) -> TypeGuard[Var]:
        """True for a dropped variable that was not recomputed yet."""
        return self.values.is_dropped(v) and v not in self.current

    def _add(self, eqn: JaxprEqn, backward: bool) -> None:
        self.eqns.append(eqn)
        self.backward.append(backward)

    def _trigger(self, i: int, eqn: JaxprEqn) -> Var | None:
        """A value of the backward pass that is there before equation `i` and read by it or later; or None."""
        known = set(self.arrived)
        own = [v for v in eqn.invars if compat.is_variable(v) and v in known]
        later = [v for v in self.arrived if self.last_read[v] >= i]
        return next((vs[-1] for vs in (own, later) if vs), None)

    def _recompute(self, missing: Sequence[Var], trigger: Var | None) -> None:
        eqns = self.halves.jaxpr.eqns
        place = self.values.place
        recomputed = reached(
            [place[v] for v in missing], lambda i: [place[u] for u in eqns[i].invars if self.is_missing(u)]
        )
        made = {v for i in recomputed for v in eqns[i].outvars}
        read = [v for i in sorted(recomputed) for v in compat.variables(eqns[i].invars) if v not in made]
        held = dict.fromkeys([*read, *([] if trigger is None else [trigger])])
        waiting: list[JaxprEqn] = []
        if held:
            operands = [compat.renamed(v, self.current) for v in held]
            results = [compat.fresh_var(v) for v in held]
            if self.block_of and trigger is not None:
                waiting = self._taken_back(compat.renamed(trigger, self.current), operands)
            self._add(compat.barrier_eqn(operands, results), True)
            self.current.update(zip(held, results, strict=True))
            behind = dict(zip(compat.variables(operands), results, strict=True))
            waiting = [compat.rename_inputs(eqn, behind) for eqn in waiting]
        for i in sorted(recomputed):
            eqn = compat.rename_inputs(eqns[i], self.current)
            fresh = [v if isinstance(v, compat.DropVar) else compat.fresh_var(v) for v in eqn.outvars]
            self._add(compat.in_scope(eqn.replace(outvars=fresh), RECOMPUTE_SCOPE), True)
            self.current.update(zip(eqn.outvars, fresh, strict=True))
        for eqn in waiting:
            self._add(eqn, True)

    def _taken_back(self, trigger: Atom, operands: Sequence[Atom]) -> list[JaxprEqn]:
        """The equations of the backward pass since the first that reads a trigger: they are of its block,
        too. None where they make what waits with it."""
        first = len(self.eqns)
        while first and self.backward[first - 1] and not {*self.eqns[first - 1].outvars} & {*operands}:
            first -= 1
        read = [k for k in range(first, len(self.eqns)) if trigger in self.eqns[k].invars]
        first = min(read, default=len(self.eqns))
        taken = self.eqns[first:]
        del self.eqns[first:], self.backward[first:]
        return taken


def _with_eqns(
    halves: _Halves, eqns: Sequence[JaxprEqn], backward: Sequence[bool], rename: Mapping[Var, Atom]
) -> _Halves:
    jaxpr = compat.rebuild(halves.jaxpr, eqns=eqns, rename=rename)
    return replace(halves, jaxpr=jaxpr, backward=tuple(backward))
