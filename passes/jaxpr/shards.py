"""Programs whose work is inside `shard_map`: one body for one device, planned as a program of its own.

Differentiation leaves two `shard_map`s, a forward and a backward one, and what the one passes to the other
leaves the first whole and enters the second. As one equation they pass it on inside:

    outs, residuals = shard_map(f)(args)
    grads = shard_map(b)(residuals, cts)       ->     outs, grads = shard_map(f, then b)(args, cts)

Where the cotangents come from the forward results by equations outside, the first stays for these, and the
second runs the first's body again behind a barrier. The body's sizes are those of one device, and its
collectives are kernels with a price. What is outside stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.flops import matrix_work
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.primitives import CONTROL_FLOW, Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import consts_as_literals, renewed

SHARD_MAP = "shard_map"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """A program with one `shard_map` that holds its work.

    Attributes:
        jaxpr: the open jaxpr of the program.
        place: which of its equations it is.
        body: its body, open: values of one device, calls inlined, constants written in.
    """

    jaxpr: Any
    place: int
    body: Any

    @property
    def eqn(self) -> Any:
        """The `shard_map`."""
        return self.jaxpr.eqns[self.place]

    def written(self, body: Any) -> Any:
        """The program's open jaxpr with another body."""
        eqns = list(self.jaxpr.eqns)
        eqns[self.place] = _with_body(self.eqn, body)
        return compat.rebuild(self.jaxpr, eqns=eqns, outvars=self.jaxpr.outvars)


@compat.cached_by_jaxpr
def enter(closed: Any) -> Inside | None:
    """The `shard_map` that a closed jaxpr, calls inlined, has its work in; None if there is no such one."""
    jaxpr = compat.open_jaxpr(closed)[0]
    if not any(_is_shard_map(eqn) for eqn in jaxpr.eqns):
        return None
    jaxpr = _merged(compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars)))
    found = [i for i, eqn in enumerate(jaxpr.eqns) if _is_shard_map(eqn)]
    if not found:
        return None
    place = max(found, key=lambda i: (_work(jaxpr.eqns[i]), i))
    others = [eqn for eqn in jaxpr.eqns if not _is_shard_map(eqn)]
    work = int(jaxpr.eqns[place].params["mesh"].size) * _work(jaxpr.eqns[place])
    if any(eqn.primitive.name in CONTROL_FLOW for eqn in others) or matrix_work(others)[0] > work:
        return None
    return Inside(jaxpr=jaxpr, place=place, body=_body(jaxpr.eqns[place]))


def _is_shard_map(eqn: Any) -> bool:
    return bool(eqn.primitive.name == SHARD_MAP) and not any(compat.is_ref(v.aval) for v in eqn.invars)


def _work(eqn: Any) -> int:
    return matrix_work([eqn])[0]


def _body(eqn: Any) -> Any:
    with compat.inside_shard_map(eqn):
        return consts_as_literals(inline_calls(compat.close_jaxpr(eqn.params["jaxpr"], [])))


def _with_body(eqn: Any, body: Any) -> Any:
    return eqn.replace(params={**eqn.params, "jaxpr": compat.without_axis_effects(body, eqn)})


def _merged(jaxpr: Any) -> Any:
    """An open jaxpr whose pairs of `shard_map`s are one equation each, dead code removed."""
    while (pair := _next_pair(jaxpr)) is not None:
        eqns = _joined(jaxpr.eqns, *pair)
        if eqns is None:
            break
        jaxpr = compat.rebuild(jaxpr, eqns=eqns, outvars=jaxpr.outvars)
        jaxpr = compat.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return jaxpr


def _next_pair(jaxpr: Any) -> tuple[int, int] | None:
    """The first `shard_map` that reads results of an earlier one over the same devices, and the latter."""
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for j, eqn in enumerate(jaxpr.eqns):
        if _is_shard_map(eqn):
            sources = {producer[v] for v in compat.variables(eqn.invars) if v in producer}
            alike = [i for i in sources if _alike(jaxpr.eqns[i], eqn)]
            if alike:
                return max(alike), j
    return None


def _alike(first: Any, second: Any) -> bool:
    names = ("mesh", "newly_manual_axes", "check_vma")
    return _is_shard_map(first) and all(first.params[name] == second.params[name] for name in names)


def _joined(eqns: Sequence[Any], i: int, j: int) -> list[Any] | None:
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
    again = any(v in reached and v not in own for v in compat.variables(second.invars))
    if again:
        one = None if eqn_kind(first) is Kind.OPAQUE else _as_one(first, second, again=True)
        return None if one is None else [*eqns[:j], one, *eqns[j + 1 :]]
    one = _as_one(first, second, again=False)
    moved = set(map(id, after))
    before = [eqn for eqn in eqns[i + 1 : j] if id(eqn) not in moved]
    return None if one is None else [*eqns[:i], *before, one, *after, *eqns[j + 1 :]]


def _as_one(first: Any, second: Any, *, again: bool) -> Any:
    """Both as one equation; with `again` of the second's results only. None if nothing is passed inside."""
    head, tail = renewed(_body(first)), _body(second)
    made = {v: k for k, v in enumerate(first.outvars) if not isinstance(v, compat.DropVar)}
    known: dict[Any, Any] = {}
    for v, inner, spec in zip(second.invars, tail.invars, second.params["in_specs"], strict=True):
        k = compat.of_variable(made, v)
        if k is None:
            continue
        given = head.outvars[k]
        fits = compat.is_variable(given) and spec == first.params["out_specs"][k]
        if fits and given.aval == inner.aval:
            known[inner] = given
        elif not again:
            return None
    if not known:
        return None
    places = [k for k, inner in enumerate(tail.invars) if inner not in known]
    tail = renewed(tail, known)
    invars = [*head.invars, *(tail.invars[k] for k in places)]
    eqns = [*head.eqns, *tail.eqns]
    if again:
        given = {v: compat.fresh_var(v) for v in invars if v.aval.shape}
        eqns = [compat.barrier_eqn(list(given.values()), list(given)), *eqns]
        invars = [given.get(v, v) for v in invars]
    kept = [] if again else sorted(made.values())
    params = {
        **second.params,
        "in_specs": (*first.params["in_specs"], *(second.params["in_specs"][k] for k in places)),
        "out_specs": (*(first.params["out_specs"][k] for k in kept), *second.params["out_specs"]),
    }
    outvars = [*(head.outvars[k] for k in kept), *tail.outvars]
    body = compat.rebuild(tail, eqns=eqns, outvars=outvars, invars=invars, constvars=[])
    return _with_body(
        second.replace(
            invars=[*first.invars, *(second.invars[k] for k in places)],
            outvars=[*(first.outvars[k] for k in kept), *second.outvars],
            params=params,
        ),
        body,
    )
