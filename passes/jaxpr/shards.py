"""Programs whose work is inside `shard_map`: one body for one device, planned as a program of its own.

Differentiation leaves two `shard_map`s, a forward and a backward one, and what the one passes to the other
leaves the first whole and enters the second. As one equation they pass it on inside:

    outs, residuals = shard_map(f)(args)
    grads = shard_map(b)(residuals, cts)       ->     outs, grads = shard_map(f, then b)(args, cts)

Where the cotangents come from the forward results by equations outside, both stay, and the plan of their
joint body is written in two (`passes.jaxpr.shard_pairs`). The body's sizes are those of one device, and its
collectives are kernels with a price. What is outside stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import matrix_work
from passes.jaxpr.halves import Split
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.primitives import CONTROL_FLOW, Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import consts_as_literals, renewed
from passes.jaxpr.shard_pairs import Joint, Pair, write_pair

SHARD_MAP = "shard_map"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """A program with one `shard_map`, or a pair of them, that holds its work.

    Attributes:
        jaxpr: the open jaxpr of the program.
        place: which of its equations it is; of a pair the second.
        body: what is planned, open: values of one device, calls inlined, constants written in.
        pair: how the body is of a pair; None if it is of one equation.
    """

    jaxpr: Jaxpr
    place: int
    body: Jaxpr
    pair: Pair | None = None

    @property
    def eqn(self) -> JaxprEqn:
        """The `shard_map`."""
        return self.jaxpr.eqns[self.place]

    def written(self, body: Jaxpr) -> Jaxpr:
        """The program's open jaxpr with another body of its one equation."""
        eqns = list(self.jaxpr.eqns)
        eqns[self.place] = _with_body(self.eqn, body)
        return compat.rebuild(self.jaxpr, eqns=eqns)

    def written_in_two(self, halves: Split) -> Jaxpr:
        """The program's open jaxpr with other bodies of its pair."""
        assert self.pair is not None, "only asked of a pair"
        return write_pair(self.jaxpr, self.place, self.pair, halves)


@compat.cached_by_jaxpr
def enter(closed: ClosedJaxpr) -> Inside | None:
    """The `shard_map` that a closed jaxpr, calls inlined, has its work in; None if there is no such one."""
    jaxpr = compat.open_jaxpr(closed)[0]
    if not any(_is_shard_map(eqn) for eqn in jaxpr.eqns):
        return None
    inside = _found(_merged(compat.without_dead_code(jaxpr)))
    if inside is None:
        return None
    mine = {inside.place} if inside.pair is None else {inside.place, inside.pair.place}
    others = [eqn for i, eqn in enumerate(inside.jaxpr.eqns) if i not in mine]
    work = inside.eqn.params["mesh"].size * matrix_work(inside.body.eqns).flops
    loops = any(eqn.primitive.name in CONTROL_FLOW for eqn in others)
    return None if loops or matrix_work(others).flops > work else inside


def _found(jaxpr: Jaxpr) -> Inside | None:
    """The pair, if there is one, else the `shard_map` with most work."""
    if (places := _next_pair(jaxpr)) is not None:
        i, j = places
        joint = _joint(jaxpr.eqns[i], jaxpr.eqns[j], _read_beside(jaxpr, i, j))
        if joint is None or eqn_kind(jaxpr.eqns[i]) is Kind.OPAQUE:
            return None
        return Inside(jaxpr=jaxpr, place=j, body=joint.body, pair=Pair(place=i, joint=joint))
    places_of = [i for i, eqn in enumerate(jaxpr.eqns) if _is_shard_map(eqn)]
    if not places_of:
        return None
    place = max(places_of, key=lambda i: (matrix_work([jaxpr.eqns[i]]).flops, i))
    return Inside(jaxpr=jaxpr, place=place, body=_body(jaxpr.eqns[place]))


def _read_beside(jaxpr: Jaxpr, i: int, j: int) -> list[int]:
    """Which results of equation `i` are read by others than `j`."""
    others = [v for k, eqn in enumerate(jaxpr.eqns) if k != j for v in eqn.invars]
    read = set(compat.variables([*others, *jaxpr.outvars]))
    return [k for k, v in enumerate(jaxpr.eqns[i].outvars) if v in read]


def _is_shard_map(eqn: JaxprEqn) -> bool:
    return bool(eqn.primitive.name == SHARD_MAP) and not any(compat.is_ref(v.aval) for v in eqn.invars)


def parts_of(closed: ClosedJaxpr) -> tuple[list[int], ...]:
    """Into how many parts `shard_map`s split each argument and each result of a closed jaxpr, calls inlined.

    An argument that anything else reads, too, is not said to be split.
    """
    jaxpr = compat.open_jaxpr(closed)[0]
    parts: dict[Var, int] = {}
    for eqn in filter(_is_shard_map, jaxpr.eqns):
        specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
        given = zip((*eqn.invars, *eqn.outvars), specs, strict=True)
        parts |= {v: _n_parts(eqn, spec) for v, spec in given if compat.is_variable(v)}
    for eqn in jaxpr.eqns:
        if not _is_shard_map(eqn):
            parts |= dict.fromkeys(compat.variables(eqn.invars), 1)
    return tuple([compat.of_variable(parts, v) or 1 for v in vs] for vs in (jaxpr.invars, jaxpr.outvars))


def _n_parts(eqn: JaxprEqn, spec: Any) -> int:
    names = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    return math.prod(eqn.params["mesh"].shape[name] for name in names if name is not None)


def _body(eqn: JaxprEqn) -> Jaxpr:
    with compat.inside_shard_map(eqn):
        return consts_as_literals(inline_calls(compat.close_jaxpr(eqn.params["jaxpr"], [])))


def _with_body(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    return compat.replaced(eqn, params={**eqn.params, "jaxpr": compat.without_axis_effects(body, eqn)})


def _merged(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr whose pairs of `shard_map`s are one equation each, dead code removed."""
    while (pair := _next_pair(jaxpr)) is not None:
        eqns = _joined(jaxpr.eqns, *pair)
        if eqns is None:
            break
        jaxpr = compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns))
    return jaxpr


def _next_pair(jaxpr: Jaxpr) -> tuple[int, int] | None:
    """The first `shard_map` that reads results of an earlier one over the same devices, and the latter."""
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for j, eqn in enumerate(jaxpr.eqns):
        if _is_shard_map(eqn):
            sources = {producer[v] for v in compat.variables(eqn.invars) if v in producer}
            alike = [i for i in sources if _alike(jaxpr.eqns[i], eqn)]
            if alike:
                return max(alike), j
    return None


def _alike(first: JaxprEqn, second: JaxprEqn) -> bool:
    names = ("mesh", "newly_manual_axes", "check_vma")
    return _is_shard_map(first) and all(first.params[name] == second.params[name] for name in names)


def _joined(eqns: Sequence[JaxprEqn], i: int, j: int) -> list[JaxprEqn] | None:
    """`eqns` with the `i`-th and the `j`-th as one; None if they cannot be."""
    first, second = eqns[i], eqns[j]
    if any(eqn.effects for eqn in eqns[i : j + 1]):
        return None
    after, reached = [], set(first.outvars)
    for eqn in eqns[i + 1 : j]:
        if not reached.isdisjoint(compat.variables(eqn.invars)):
            after.append(eqn)
            reached.update(eqn.outvars)
    own = set(first.outvars)
    if any(v in reached and v not in own for v in compat.variables(second.invars)):
        return None
    kept = [k for k, v in enumerate(first.outvars) if not isinstance(v, compat.DropVar)]
    joint = _joint(first, second, kept)
    if joint is None or len(joint.places) + joint.n_passed != len(second.invars):
        return None
    moved = set(map(id, after))
    before = [eqn for eqn in eqns[i + 1 : j] if id(eqn) not in moved]
    return [*eqns[:i], *before, _as_one(first, second, joint), *after, *eqns[j + 1 :]]


def _as_one(first: JaxprEqn, second: JaxprEqn, joint: Joint) -> JaxprEqn:
    """Both as one equation."""
    heads, tails = first.params, second.params
    params = {
        **tails,
        "in_specs": (*heads["in_specs"], *(tails["in_specs"][k] for k in joint.places)),
        "out_specs": (*(heads["out_specs"][k] for k in joint.kept), *tails["out_specs"]),
    }
    one = second.replace(
        invars=[*first.invars, *(second.invars[k] for k in joint.places)],
        outvars=[*(first.outvars[k] for k in joint.kept), *second.outvars],
        params=params,
    )
    return _with_body(one, joint.body)


def _joint(first: JaxprEqn, second: JaxprEqn, kept: Sequence[int]) -> Joint | None:
    """One body of both; None if nothing is passed on inside.

    Args:
        kept: which results of the first stay results.
    """
    head, tail = renewed(_body(first)), _body(second)
    made = {v: k for k, v in enumerate(first.outvars) if not isinstance(v, compat.DropVar)}
    known: dict[Var, Atom] = {}
    for v, inner, spec in zip(second.invars, tail.invars, second.params["in_specs"], strict=True):
        k = compat.of_variable(made, v)
        given = None if k is None else head.outvars[k]
        if given is None or not compat.is_variable(given) or spec != first.params["out_specs"][k]:
            continue
        if given.aval == inner.aval:
            known[inner] = given
    if not known:
        return None
    places = [k for k, inner in enumerate(tail.invars) if inner not in known]
    tail = renewed(tail, known)
    body = compat.rebuild(
        tail,
        eqns=[*head.eqns, *tail.eqns],
        outvars=[*(head.outvars[k] for k in kept), *tail.outvars],
        invars=[*head.invars, *(tail.invars[k] for k in places)],
        constvars=[],
    )
    return Joint(body=body, kept=tuple(kept), places=tuple(places), n_passed=len(known))
