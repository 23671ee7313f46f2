"""Write a pair of scans anew: fewer stacks in the first, what is missing recomputed in the second.

The first scan stacks what is kept, and still what others read of it. The second takes these stacks, the
first one's own operands where it needs them, and runs again what lies between them and what it reads. No
barrier is needed: the two bodies are different computations to XLA, which shares nothing between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import run_scan, splice, with_bodies
from passes.jaxpr.scans import segments
from passes.jaxpr.scans.choice import Choice, Inside
from passes.jaxpr.scans.pairs import Body, ScanPair


def rewrite(jaxpr: Any, choices: Sequence[Choice | Inside]) -> Any:
    """An open jaxpr with its pairs written as chosen."""
    groups, rename = rewrite_groups(jaxpr, choices)
    eqns = [eqn for group in groups for eqn in group]
    outvars = [compat.renamed(v, rename) for v in jaxpr.outvars]
    new = compat.rebuild(jaxpr, eqns=eqns, outvars=outvars)
    return compat.dce_jaxpr(new, [True] * len(outvars))


def with_inner(pair: ScanPair, joined: Any, choices: Sequence[Choice | Inside]) -> ScanPair:
    """`pair` with what is inside its bodies written as chosen.

    Args:
        joined: one iteration of both halves, see `passes.jaxpr.scans.cut.joined_body`.
    """
    groups, rename = rewrite_groups(joined, choices)
    boundary = len(pair.make.jaxpr.eqns)

    def half(body: Body, groups: list[list[Any]]) -> Body:
        outvars = [compat.renamed(v, rename) for v in body.jaxpr.outvars]
        eqns = [eqn for group in groups for eqn in group]
        return replace(body, jaxpr=compat.rebuild(body.jaxpr, eqns=eqns, outvars=outvars))

    return replace(pair, make=half(pair.make, groups[:boundary]), take=half(pair.take, groups[boundary:]))


def rewrite_groups(jaxpr: Any, choices: Sequence[Choice | Inside]) -> tuple[list[list[Any]], dict[Any, Any]]:
    """For every equation of an open jaxpr what stands in its place; and the results' new names."""
    insides = {choice.enclosure.place: choice for choice in choices if isinstance(choice, Inside)}
    pairs = [choice for choice in choices if isinstance(choice, Choice)]
    firsts = {choice.pair.first: choice for choice in pairs}
    seconds = {choice.pair.second: choice for choice in pairs}
    rename: dict[Any, Any] = {}
    written: dict[int, _First] = {}
    groups: list[list[Any]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        eqn = compat.rename_inputs(eqn, rename)
        if i in firsts:
            written[i] = _write_first(firsts[i], eqn, rename)
            groups.append(written[i].eqns)
        elif i in seconds:
            groups.append(_write_second(seconds[i], eqn, written[seconds[i].pair.first], rename))
        elif i in insides:
            groups.append([_with_inside(insides[i], eqn)])
        else:
            groups.append([eqn])
    return groups, rename


def _with_inside(choice: Inside, eqn: Any) -> Any:
    bodies = zip(choice.enclosure.bodies, choice.bodies, strict=True)
    return with_bodies(eqn, [compat.close_jaxpr(rewrite(body, level), []) for body, level in bodies])


@dataclass(slots=True, kw_only=True)
class _First:
    """The first scan as written.

    Attributes:
        eqns: its equations.
        at_hand: for variables of its body the whole operand or stack that holds them.
        sliced: which of these are stacks.
        operands: what it was given.
        starts: of a scan in segments, stacks of its carry at the start of each.
    """

    eqns: list[Any]
    at_hand: dict[Any, Any] = field(default_factory=dict)
    sliced: set[Any] = field(default_factory=set)
    operands: list[Any] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)


def _write_first(choice: Choice, eqn: Any, rename: dict[Any, Any]) -> _First:
    pair, make = choice.pair, choice.pair.make
    staying = [k for k in range(len(make.slices_out)) if k not in pair.only]
    if choice.segments is not None:
        return _write_first_in_segments(choice, eqn, staying, rename)
    there = {v for v in (*make.jaxpr.invars[: make.n_consts], *make.slices_in) if compat.is_variable(v)}
    there.update(make.slices_out[k] for k in staying if compat.is_variable(make.slices_out[k]))
    added = [v for v in choice.kept if v not in there]
    outvars = [*make.jaxpr.outvars[: make.n_carry], *(make.slices_out[k] for k in staying), *added]
    body = compat.rebuild(make.jaxpr, eqns=make.jaxpr.eqns, outvars=outvars)
    body = compat.dce_jaxpr(body, [True] * len(outvars))
    eqns, found = splice(
        lambda values: run_scan(eqn, body, values, make.n_consts, make.n_carry), eqn.invars, eqn
    )
    old = [*eqn.outvars[: make.n_carry], *(make.stacks_out[k] for k in staying)]
    _rename_all(rename, old, found[: len(old)])
    first = _First(eqns=eqns)
    first.at_hand.update(zip(make.jaxpr.invars[: make.n_consts], eqn.invars[: make.n_consts], strict=True))
    stacks = dict(zip(make.slices_in, eqn.invars[make.n_consts + make.n_carry :], strict=True))
    stacks |= {
        make.slices_out[k]: stack
        for k, stack in zip(staying, found[make.n_carry :], strict=False)
        if compat.is_variable(make.slices_out[k]) and make.slices_out[k] not in first.at_hand
    }
    stacks |= dict(zip(added, found[len(old) :], strict=True))
    first.sliced.update(stacks)
    first.at_hand.update(stacks)
    return first


def _write_first_in_segments(choice: Choice, eqn: Any, staying: list[int], rename: dict[Any, Any]) -> _First:
    assert choice.segments is not None, "only called for these"
    make = choice.pair.make
    eqns, found = segments.write_first(choice.pair, choice.segments, eqn.invars, staying)
    old = [*eqn.outvars[: make.n_carry], *(eqn.outvars[make.n_carry + k] for k in staying)]
    _rename_all(rename, old, found[: len(old)])
    return _First(eqns=eqns, operands=list(eqn.invars), starts=found[len(old) :])


def _write_second(choice: Choice, eqn: Any, first: _First, rename: dict[Any, Any]) -> list[Any]:
    make, take = choice.pair.make, choice.pair.take
    if choice.segments is not None:
        eqns, found = segments.write_second(
            choice.pair, choice.segments, first.operands, first.starts, eqn.invars
        )
        _rename_all(rename, eqn.outvars, found)
        return eqns
    own = {*make.jaxpr.invars, *(v for e in make.jaxpr.eqns for v in e.outvars)}
    consts = [v for v in choice.kept if v not in first.sliced]
    slices = [v for v in choice.kept if v in first.sliced]
    others = [
        (v, x)
        for v, x in zip(take.slices_in, eqn.invars[take.n_consts + take.n_carry :], strict=True)
        if v not in own
    ]
    cut = take.n_consts + take.n_carry
    invars = [*consts, *take.jaxpr.invars[:cut], *slices, *(v for v, _ in others)]
    operands = [
        *(first.at_hand[v] for v in consts), *eqn.invars[:cut],
        *(first.at_hand[v] for v in slices), *(x for _, x in others),
    ]  # fmt: skip
    kept = set(choice.kept)
    again = [
        _without(e, kept) for e in make.jaxpr.eqns if not has_effect(e) and not kept.issuperset(e.outvars)
    ]
    body = compat.rebuild(
        take.jaxpr,
        eqns=when_needed(again, take.jaxpr.eqns),
        outvars=take.jaxpr.outvars,
        invars=invars,
        constvars=[],
    )
    body = compat.dce_jaxpr(body, [True] * len(take.jaxpr.outvars))
    n_consts = len(consts) + take.n_consts
    eqns, found = splice(lambda values: run_scan(eqn, body, values, n_consts, take.n_carry), operands, eqn)
    _rename_all(rename, eqn.outvars, found)
    return eqns


def when_needed(early: Sequence[Any], eqns: Sequence[Any]) -> list[Any]:
    """`eqns` in their order, each after those of `early` that it needs and that are not there yet."""
    maker = {v: i for i, eqn in enumerate(early) for v in eqn.outvars}
    done: set[int] = set()
    ordered: list[Any] = []
    for eqn in eqns:
        needed, stack = set(), [v for v in eqn.invars if compat.is_variable(v)]
        while stack:
            i = maker.get(stack.pop())
            if i is not None and i not in done and i not in needed:
                needed.add(i)
                stack.extend(v for v in early[i].invars if compat.is_variable(v))
        ordered.extend(early[i] for i in sorted(needed))
        done |= needed
        ordered.append(eqn)
    return [*ordered, *(eqn for i, eqn in enumerate(early) if i not in done)]


def _without(eqn: Any, kept: set[Any]) -> Any:
    """`eqn` not defining what is kept."""
    return eqn.replace(outvars=[compat.fresh_var(v) if v in kept else v for v in eqn.outvars])


def _rename_all(rename: dict[Any, Any], old: Sequence[Any], new: Sequence[Any]) -> None:
    for v, atom in zip(old, new, strict=True):
        if not isinstance(v, compat.DropVar):
            rename[v] = atom
