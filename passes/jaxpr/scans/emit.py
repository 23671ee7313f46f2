"""Write a pair of scans anew: fewer stacks in the first, what is missing recomputed in the second.

The first scan stacks what is kept, and still what others read of it. The second takes these stacks, the
first one's own operands where it needs them, and runs again what lies between them and what it reads
(`passes.jaxpr.scans.bodies`). No barrier is needed: the two bodies are different computations to XLA, which
shares nothing between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.rewrite import defined, leading_to, with_bodies
from passes.jaxpr.scans import branch_bodies
from passes.jaxpr.scans.bodies import without
from passes.jaxpr.scans.choice import Choice, InBranches, InParts, Inside, MadeInside, Site
from passes.jaxpr.scans.pairs import Body, ScanPair
from passes.jaxpr.scans.parts import Written, write_first
from passes.jaxpr.scans.sink import with_moved


def rewrite(jaxpr: Jaxpr, choices: Sequence[Site]) -> Jaxpr:
    """An open jaxpr with its pairs and loops written as chosen."""
    groups, rename = rewrite_groups(jaxpr, choices)
    eqns = [eqn for group in groups for eqn in group]
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns, rename=rename))


def with_inner(pair: ScanPair, joined: Jaxpr, choices: Sequence[Site]) -> ScanPair:
    """`pair` with what is inside its bodies written as chosen.

    Args:
        joined: one iteration of both halves, see `passes.jaxpr.scans.cut.joined_body`.
    """
    return with_groups(pair, *rewrite_groups(joined, choices))


def with_groups(pair: ScanPair, groups: Sequence[Sequence[JaxprEqn]], rename: dict[Var, Atom]) -> ScanPair:
    """`pair` with other equations in the place of each of its joined body's, and other names of results."""
    boundary = len(pair.producer.jaxpr.eqns)

    def half(body: Body, groups: Sequence[Sequence[JaxprEqn]]) -> Body:
        eqns = [eqn for group in groups for eqn in group]
        return replace(body, jaxpr=_without_lost(compat.rebuild(body.jaxpr, eqns=eqns, rename=rename)))

    return replace(
        pair, producer=half(pair.producer, groups[:boundary]), consumer=half(pair.consumer, groups[boundary:])
    )


def _without_lost(body: Jaxpr) -> Jaxpr:
    """A body with nothing in the place of slices that were passed to the second half, and are no more."""
    there = set(defined(body))
    kept = (v if not compat.is_variable(v) or v in there else compat.literal(0) for v in body.outvars)
    return compat.rebuild(body, outvars=list(kept))


def rewrite_groups(jaxpr: Jaxpr, choices: Sequence[Site]) -> tuple[list[list[JaxprEqn]], dict[Var, Atom]]:
    """For every equation of an open jaxpr what stands in its place; and the results' new names."""
    insides = {choice.enclosure.place: choice for choice in choices if isinstance(choice, Inside)}
    loops = {choice.loop.place: choice for choice in choices if isinstance(choice, MadeInside)}
    pairs = [choice for choice in choices if isinstance(choice, Choice | InParts)]
    conds = [choice for choice in choices if isinstance(choice, InBranches)]
    first_conds = {choice.pair.first: choice for choice in conds}
    second_conds = {choice.pair.second: choice for choice in conds}
    firsts = {choice.pair.first: choice for choice in pairs}
    seconds = {choice.pair.second: choice for choice in pairs}
    rename: dict[Var, Atom] = {}
    written: dict[int, Callable[[JaxprEqn], Written]] = {}
    groups: list[list[JaxprEqn]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in loops:
            loop = _with_inside(insides[i], eqn) if i in insides else eqn
            groups.append(_write_loop(loops[i], loop, rename))
            continue
        eqn = compat.rename_inputs(eqn, rename)
        if i in firsts:
            eqns, results, written[i] = write_first(firsts[i], eqn)
            _rename_all(rename, _staying(firsts[i].pair, eqn), results)
            groups.append(eqns)
        elif i in seconds:
            eqns, results = written[seconds[i].pair.first](eqn)
            _rename_all(rename, eqn.outvars, results)
            groups.append(eqns)
        elif i in first_conds:
            groups.append([branch_bodies.write_first(first_conds[i], eqn)])
        elif i in second_conds:
            choice = second_conds[i]
            (first,) = groups[choice.pair.first]
            groups.append([branch_bodies.write_second(choice, first, eqn)])
        elif i in insides:
            groups.append([_with_inside(insides[i], eqn)])
        else:
            groups.append([eqn])
    return groups, rename


def _write_loop(choice: MadeInside, eqn: JaxprEqn, rename: dict[Var, Atom]) -> list[JaxprEqn]:
    made, kept = choice.loop.made, set(choice.kept)
    maker = {v: i for i, e in enumerate(made.eqns) for v in e.outvars if v not in kept}
    moved = [without(made.eqns[i], kept) for i in leading_to(made.outvars, made.eqns, maker.get)]
    if not moved:
        return [compat.rename_inputs(eqn, rename)]
    eqns, results = with_moved(eqn, moved, rename, choice.loop.tie)
    _rename_all(rename, eqn.outvars, results)
    return eqns


def _with_inside(choice: Inside, eqn: JaxprEqn) -> JaxprEqn:
    bodies = zip(choice.enclosure.bodies, choice.bodies, strict=True)
    return with_bodies(eqn, [compat.close_jaxpr(rewrite(body, level), []) for body, level in bodies])


def _staying(pair: ScanPair, eqn: JaxprEqn) -> list[Var]:
    """The results of a pair's first scan that something else than its second reads."""
    n_carry = pair.producer.n_carry
    return [v for k, v in enumerate(eqn.outvars) if k < n_carry or k - n_carry not in pair.only]


def _rename_all(rename: dict[Var, Atom], old: Sequence[Var], new: Sequence[Atom]) -> None:
    """Note new names; `new` may go on after those of `old`."""
    for v, atom in zip(old, new, strict=False):
        if not isinstance(v, compat.DropVar):
            rename[v] = atom
