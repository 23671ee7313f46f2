"""Write a pair of scans anew: fewer stacks in the first, what is missing recomputed in the second.

The first scan stacks what is kept, and still what others read of it. The second takes these stacks, the
first one's own operands where it needs them, and runs again what lies between them and what it reads. No
barrier is needed: the two bodies are different computations to XLA, which shares nothing between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import leading_to, run_scan, splice, when_needed, with_bodies
from passes.jaxpr.scans import segments
from passes.jaxpr.scans.choice import Choice, Inside, MadeInside, Site
from passes.jaxpr.scans.pairs import Body, ScanPair
from passes.jaxpr.scans.sink import with_moved


def rewrite(jaxpr: Jaxpr, choices: Sequence[Site]) -> Jaxpr:
    """An open jaxpr with its pairs and loops written as chosen."""
    groups, rename = rewrite_groups(jaxpr, choices)
    eqns = [eqn for group in groups for eqn in group]
    outvars = [compat.renamed(v, rename) for v in jaxpr.outvars]
    new = compat.rebuild(jaxpr, eqns=eqns, outvars=outvars)
    return compat.without_dead_code(new)


def with_inner(pair: ScanPair, joined: Jaxpr, choices: Sequence[Site]) -> ScanPair:
    """`pair` with what is inside its bodies written as chosen.

    Args:
        joined: one iteration of both halves, see `passes.jaxpr.scans.cut.joined_body`.
    """
    groups, rename = rewrite_groups(joined, choices)
    boundary = len(pair.producer.jaxpr.eqns)

    def half(body: Body, groups: list[list[JaxprEqn]]) -> Body:
        outvars = [compat.renamed(v, rename) for v in body.jaxpr.outvars]
        eqns = [eqn for group in groups for eqn in group]
        return replace(body, jaxpr=compat.rebuild(body.jaxpr, eqns=eqns, outvars=outvars))

    return replace(
        pair, producer=half(pair.producer, groups[:boundary]), consumer=half(pair.consumer, groups[boundary:])
    )


def rewrite_groups(jaxpr: Jaxpr, choices: Sequence[Site]) -> tuple[list[list[JaxprEqn]], dict[Var, Atom]]:
    """For every equation of an open jaxpr what stands in its place; and the results' new names."""
    insides = {choice.enclosure.place: choice for choice in choices if isinstance(choice, Inside)}
    loops = {choice.loop.place: choice for choice in choices if isinstance(choice, MadeInside)}
    pairs = [choice for choice in choices if isinstance(choice, Choice)]
    firsts = {choice.pair.first: choice for choice in pairs}
    seconds = {choice.pair.second: choice for choice in pairs}
    rename: dict[Var, Atom] = {}
    written: dict[int, _First] = {}
    groups: list[list[JaxprEqn]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in loops:
            loop = _with_inside(insides[i], eqn) if i in insides else eqn
            groups.append(_write_loop(loops[i], loop, rename))
            continue
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


def _write_loop(choice: MadeInside, eqn: JaxprEqn, rename: dict[Var, Atom]) -> list[JaxprEqn]:
    made, kept = choice.loop.made, set(choice.kept)
    maker = {v: i for i, e in enumerate(made.eqns) for v in e.outvars if v not in kept}
    moved = [_without(made.eqns[i], kept) for i in leading_to(made.outvars, made.eqns, maker.get)]
    if not moved:
        return [compat.rename_inputs(eqn, rename)]
    eqns, results = with_moved(eqn, moved, rename, choice.loop.tie)
    _rename_all(rename, eqn.outvars, results)
    return eqns


def _with_inside(choice: Inside, eqn: JaxprEqn) -> JaxprEqn:
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

    eqns: list[JaxprEqn]
    at_hand: dict[Var, Atom] = field(default_factory=dict)
    sliced: set[Var] = field(default_factory=set)
    operands: list[Atom] = field(default_factory=list)
    starts: list[Atom] = field(default_factory=list)


def _write_first(choice: Choice, eqn: JaxprEqn, rename: dict[Var, Atom]) -> _First:
    pair, producer = choice.pair, choice.pair.producer
    staying = [k for k in range(len(producer.y_vars)) if k not in pair.only]
    if choice.segments is not None:
        return _write_first_in_segments(choice, eqn, staying, rename)
    there = {
        v for v in (*producer.jaxpr.invars[: producer.n_consts], *producer.x_vars) if compat.is_variable(v)
    }
    there.update(compat.variables([producer.y_vars[k] for k in staying]))
    added = [v for v in choice.kept if v not in there]
    outvars = [*producer.jaxpr.outvars[: producer.n_carry], *(producer.y_vars[k] for k in staying), *added]
    body = compat.rebuild(producer.jaxpr, eqns=producer.jaxpr.eqns, outvars=outvars)
    body = compat.without_dead_code(body)
    eqns, atoms = splice(
        lambda values: run_scan(eqn, body, values, producer.n_consts, producer.n_carry), eqn.invars, eqn
    )
    old = [*eqn.outvars[: producer.n_carry], *(producer.ys[k] for k in staying)]
    _rename_all(rename, old, atoms[: len(old)])
    first = _First(eqns=eqns)
    first.at_hand.update(
        zip(producer.jaxpr.invars[: producer.n_consts], eqn.invars[: producer.n_consts], strict=True)
    )
    stacks = dict(zip(producer.x_vars, eqn.invars[producer.n_consts + producer.n_carry :], strict=True))
    stacks |= {
        y: stack
        for y, stack in zip((producer.y_vars[k] for k in staying), atoms[producer.n_carry :], strict=False)
        if compat.is_variable(y) and y not in first.at_hand
    }
    stacks |= dict(zip(added, atoms[len(old) :], strict=True))
    first.sliced.update(stacks)
    first.at_hand.update(stacks)
    return first


def _write_first_in_segments(
    choice: Choice, eqn: JaxprEqn, staying: list[int], rename: dict[Var, Atom]
) -> _First:
    assert choice.segments is not None, "only called for these"
    producer = choice.pair.producer
    eqns, atoms = segments.write_first(choice.pair, choice.segments, eqn.invars, staying)
    old = [*eqn.outvars[: producer.n_carry], *(eqn.outvars[producer.n_carry + k] for k in staying)]
    _rename_all(rename, old, atoms[: len(old)])
    return _First(eqns=eqns, operands=list(eqn.invars), starts=atoms[len(old) :])


def _write_second(choice: Choice, eqn: JaxprEqn, first: _First, rename: dict[Var, Atom]) -> list[JaxprEqn]:
    producer, consumer = choice.pair.producer, choice.pair.consumer
    if choice.segments is not None:
        eqns, results = segments.write_second(
            choice.pair, choice.segments, first.operands, first.starts, eqn.invars
        )
        _rename_all(rename, eqn.outvars, results)
        return eqns
    own = {*producer.jaxpr.invars, *(v for e in producer.jaxpr.eqns for v in e.outvars)}
    consts = [v for v in choice.kept if v not in first.sliced]
    slices = [v for v in choice.kept if v in first.sliced]
    others = [
        (v, x)
        for v, x in zip(consumer.x_vars, eqn.invars[consumer.n_consts + consumer.n_carry :], strict=True)
        if v not in own
    ]
    cut = consumer.n_consts + consumer.n_carry
    invars = [*consts, *consumer.jaxpr.invars[:cut], *slices, *(v for v, _ in others)]
    operands = [
        *(first.at_hand[v] for v in consts), *eqn.invars[:cut],
        *(first.at_hand[v] for v in slices), *(x for _, x in others),
    ]  # fmt: skip
    kept = set(choice.kept)
    recomputed = [
        _without(e, kept) for e in producer.jaxpr.eqns if not has_effect(e) and not kept.issuperset(e.outvars)
    ]
    body = compat.rebuild(
        consumer.jaxpr,
        eqns=when_needed(recomputed, consumer.jaxpr.eqns),
        outvars=consumer.jaxpr.outvars,
        invars=invars,
        constvars=[],
    )
    body = compat.without_dead_code(body)
    n_consts = len(consts) + consumer.n_consts
    eqns, results = splice(
        lambda values: run_scan(eqn, body, values, n_consts, consumer.n_carry), operands, eqn
    )
    _rename_all(rename, eqn.outvars, results)
    return eqns


def _without(eqn: JaxprEqn, kept: set[Var]) -> JaxprEqn:
    """`eqn` not defining what is kept."""
    changed: JaxprEqn = eqn.replace(outvars=[compat.fresh_var(v) if v in kept else v for v in eqn.outvars])
    return changed


def _rename_all(rename: dict[Var, Atom], old: Sequence[Var], new: Sequence[Atom]) -> None:
    for v, atom in zip(old, new, strict=True):
        if not isinstance(v, compat.DropVar):
            rename[v] = atom
