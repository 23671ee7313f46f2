"""What the body of a `while` computes from its constants alone XLA computes once, in front of the loop.

    while c:                             r = f(x)
        c = g(c, f(x))         ->        while c:
                                             c = g(c, r)

A solver whose body takes the derivative of a gradient (`jax.jvp` of `jax.grad` in conjugate gradients)
traces the forward pass and the gradient in it, which no iteration changes. XLA moves both out, and what the
rest of the body reads of them lives through the loop: six layers in 305 MiB, not in the 239 of a body that
computes them. A plan has to know that; what is in front of the loop may then be made in its iterations again
(`passes.jaxpr.scans.loops`).

What reads nothing from outside stays (`iota`, bits from a key that is written in the body), as do calls,
control flow and random bits, which are loops themselves, and what only moves or repeats values, unless
something that is moved needs it. Not done for `scan`: those of a derivative are planned in pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.backend import BACKENDS, HoistRule
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import flat_body
from passes.jaxpr.primitives import Kind
from passes.jaxpr.purity import eqn_kind, has_effect
from passes.jaxpr.rewrite import bodies_of, body_consts, leading_to, readers_of

# XLA moves none of these by themselves.
_NOT_ALONE = frozenset({"broadcast_in_dim", "iota", "reshape", "rev", "slice", "squeeze", "transpose"})
_LOOPS = frozenset({"random_bits", "random_fold_in", "random_gamma", "random_split"})
_STAY = (Kind.OPAQUE, Kind.FOREIGN, Kind.BARRIER)


def hoisted(jaxpr: Jaxpr, device: DeviceModel) -> Jaxpr:
    """An open jaxpr with what XLA moves out of its `while` loops in front of them.

    Returns:
        The same object if there is nothing.
    """
    rule = BACKENDS[device.platform].hoists
    if rule == "nothing":
        return jaxpr
    eqns = [new for eqn in jaxpr.eqns for new in _in_front(eqn, rule)]
    return jaxpr if len(eqns) == len(jaxpr.eqns) else compat.rebuild(jaxpr, eqns=eqns)


def _in_front(loop: JaxprEqn, rule: HoistRule) -> list[JaxprEqn]:
    """An equation; a `while` after what is moved out of it."""
    if loop.primitive.name != "while" or has_effect(loop) or any(compat.is_ref(v.aval) for v in loop.invars):
        return [loop]
    first, end = body_consts(loop)
    (closed,) = bodies_of(loop)
    body = compat.without_dead_code(flat_body(closed))
    consts = body.invars[: end - first]
    moved = _moved(body, consts, rule)
    if not moved:
        return [loop]
    known: dict[Var, Atom] = dict(zip(consts, loop.invars[first:end], strict=True))
    front = []
    for eqn in moved:
        results = [compat.fresh_var(v) for v in eqn.outvars]
        front.append(compat.replaced(compat.rename_inputs(eqn, known), outvars=results))
        known.update(zip(eqn.outvars, results, strict=True))
    places = {id(eqn) for eqn in moved}
    rest = [eqn for eqn in body.eqns if id(eqn) not in places]
    read = {*compat.variables(body.outvars), *readers_of(rest)}
    held = [v for v in known if v in read]
    new = compat.rebuild(body, eqns=rest, invars=[*held, *body.invars[end - first :]])
    params = {**loop.params, "body_jaxpr": compat.close_jaxpr(new, []), "body_nconsts": len(held)}
    operands = [*loop.invars[:first], *(known[v] for v in held), *loop.invars[end:]]
    return [*front, compat.replaced(loop, invars=operands, params=params)]


def _moved(body: Jaxpr, consts: Sequence[Var], rule: HoistRule) -> list[JaxprEqn]:
    """The equations of a loop's body that XLA computes in front of it, in order."""
    fixed, outside = set(consts), set(consts)
    places = []
    for i, eqn in enumerate(body.eqns):
        read = compat.variables(eqn.invars)
        if not fixed.issuperset(read) or not _may_move(eqn, rule):
            continue
        fixed.update(eqn.outvars)
        if outside.isdisjoint(read):
            continue
        outside.update(eqn.outvars)
        if eqn.primitive.name not in _NOT_ALONE:
            places.append(i)
    maker = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars if v in fixed}
    results = [v for i in places for v in body.eqns[i].outvars]
    return [body.eqns[i] for i in leading_to(results, body.eqns, maker.get)]


def _may_move(eqn: JaxprEqn, rule: HoistRule) -> bool:
    name = eqn.primitive.name
    if name in _LOOPS or compat.inner_jaxprs(eqn) or eqn_kind(eqn) in _STAY:
        return False
    return rule == "all" or name in _NOT_ALONE or _nbytes(eqn.outvars) <= _nbytes(eqn.invars)


def _nbytes(atoms: Collection[Atom]) -> int:
    return sum(compat.aval_nbytes(v.aval) for v in atoms)
