"""What is compared with its own extreme is computed and compared in one place.

The gradient of a maximum goes to the elements that are equal to it. A plan that keeps the maximum, and
computes the elements anew in another kernel, may find none that is equal: a product and a sum are rounded
once in one kernel, twice in another, and the gradient is lost. (Rays traced to the nearest of eight spheres:
gradients of the centers were half of what they are.) So the comparison is one equation of the elements, which
computes the extreme for itself; where nothing is recomputed XLA finds that to be the one that there is.
Of two elements the larger is the one that is not below the other: `x == max(x, y)` is written `x >= y`.

Where `max(x, 0)` is above 0, `x` is: the mask of a rectifier follows from its result, which the next
product keeps for its gradient anyway. XLA computes it from what was rectified, and keeps that, too. (A
ResNet-50 in the bytes of `nothing_saveable` took 1.21 of its time on an H200, by estimate, and takes 1.06.)
Not where XLA rounds what products alone read: in 32 bits the mask would read twice as many bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from jax import lax

from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import with_flat_bodies
from passes.jaxpr.primitives import CALLS, COMPARED, CONTROL_FLOW, MATRIX, Kind
from passes.jaxpr.purity import eqn_kind

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_EXTREMES = frozenset(
    {"reduce_max", "reduce_min", "cummax", "cummin", "scatter-max", "scatter-min", "scatter_max",
     "scatter_min", "sort"}
)  # fmt: skip
_OF_TWO = {"max": lax.ge_p, "min": lax.le_p}
_CLIPS = {"gt": "max", "lt": "min"}
_PLAIN = (Kind.VIEW, Kind.FUSIBLE, Kind.REDUCTION, Kind.KERNEL)
# How many equations back an extreme is looked for: a view or two, what makes an index.
_MOST = 16

compared_p = compat.new_primitive(COMPARED)
compat.define_abstract(compared_p, lambda jaxpr, **_: (jaxpr.out_avals, jaxpr))
compat.register_lowering(compared_p, lambda ctx, *operands, jaxpr: compat.lower_inline(ctx, jaxpr, operands))


def compared_whole(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, and bodies of control flow in it, where such comparisons are one equation each; the same
    object if there are none."""
    producer = {v: (n, eqn) for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    eqns = [_whole(with_flat_bodies(eqn, compared_whole), producer, jaxpr) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns))


def masked_by_results(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr where what was clipped at a constant, and a product reads, is compared with that, and not
    what it was before. XLA knows the rule, too, and turns it round, so that it is read through a barrier.

    Returns:
        The same object if there is none.
    """
    multiplied: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        is_view = eqn_kind(eqn) is Kind.VIEW and not multiplied.isdisjoint(eqn.outvars)
        if is_view or eqn.primitive.name in MATRIX:
            multiplied.update(compat.variables(eqn.invars))
    clipped: dict[Hashable, Var] = {}
    made: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        value, bound = eqn.invars if name in (*_OF_TWO, *_CLIPS) else (None, None)
        if isinstance(bound, compat.Literal) and isinstance(value, compat.Var):
            key = value, _CLIPS.get(name, name), np.asarray(bound.val).tobytes()
            if name in _OF_TWO and eqn.outvars[0] in multiplied:
                clipped.setdefault(key, eqn.outvars[0])
            elif name in _CLIPS and key in clipped:
                stored = compat.fresh_var(clipped[key])
                made.append(compat.barrier_eqn([clipped[key]], [stored]))
                eqn = compat.replaced(eqn, invars=[stored, bound])
        made.append(eqn)
    return jaxpr if len(made) == len(jaxpr.eqns) else compat.rebuild(jaxpr, eqns=made)


def _whole(eqn: JaxprEqn, producer: Mapping[Var, tuple[int, JaxprEqn]], like: Jaxpr) -> JaxprEqn:
    """A comparison with the equations in it by which one side follows from the other, else `eqn`."""
    if eqn.primitive.name not in _COMPARISONS:
        return eqn
    if (direct := _of_two(eqn, producer)) is not None:
        return direct
    one, other = eqn.invars
    if not (compat.is_variable(one) and compat.is_variable(other)):
        return eqn
    between = _between(one, other, producer) or _between(other, one, producer)
    if not any(found.primitive.name in _EXTREMES for found in between):
        return eqn
    inside = [*between, eqn]
    made = {v for found in inside for v in found.outvars}
    read = compat.variables(v for found in inside for v in found.invars)
    operands = list(dict.fromkeys(v for v in read if v not in made))
    fresh: dict[Var, Any] = {v: compat.fresh_var(v) for v in (*operands, *made)}
    renamed = [
        compat.replaced(compat.rename_inputs(found, fresh), outvars=[fresh[v] for v in found.outvars])
        for found in inside
    ]
    body = compat.rebuild(
        like, eqns=renamed, invars=[fresh[v] for v in operands], outvars=[fresh[eqn.outvars[0]]], constvars=[]
    )
    params = {"jaxpr": compat.close_jaxpr(body, [])}
    return compat.replaced(eqn, primitive=compared_p, invars=operands, params=params)


def _of_two(eqn: JaxprEqn, producer: Mapping[Var, tuple[int, JaxprEqn]]) -> JaxprEqn | None:
    """The same comparison of one of two elements with the other, where it is with the larger or smaller."""
    for value, extreme in (eqn.invars, eqn.invars[::-1]) if eqn.primitive.name == "eq" else ():
        found = compat.of_variable(producer, extreme)
        if found is None or found[1].primitive.name not in _OF_TWO or not compat.is_variable(value):
            continue
        operands = found[1].invars
        if value in compat.variables(operands):
            rest = operands[1] if operands[0] is value else operands[0]
            return compat.replaced(eqn, primitive=_OF_TWO[found[1].primitive.name], invars=[value, rest])
    return None


def _between(value: Var, result: Var, producer: Mapping[Var, tuple[int, JaxprEqn]]) -> list[JaxprEqn]:
    """The equations by which `result` follows from `value`, if it does so by few."""
    back: dict[int, JaxprEqn] = {}
    open_vars = deque([result])
    while open_vars and len(back) < _MOST:
        v = open_vars.popleft()
        if v is not value and v in producer:
            n, eqn = producer[v]
            back[n] = eqn
            open_vars.extend(compat.variables(eqn.invars))
    follow, found = {value}, []
    for n in sorted(back):
        if follow.intersection(compat.variables(back[n].invars)):
            follow.update(back[n].outvars)
            found.append(back[n])
    is_plain = all(eqn_kind(e) in _PLAIN and e.primitive.name not in (*CALLS, *CONTROL_FLOW) for e in found)
    return found if result in follow and is_plain else []
