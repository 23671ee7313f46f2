"""Open the calls of a jaxpr, so that planners see straight-line code.

Opened is what only groups equations: `jit` without shardings or layouts of its own, closed calls, and
functions with a derivative rule (after differentiation the rule has done its work), linear solves among
them, of which the solver is what runs. The backward half of
`jax.checkpoint` is opened behind the barrier that JAX puts there, so that what a user recomputes stays
recomputed. The forward part of a decorated function inside is opened: the plan around it decides what it
saves. Its backward part stays one equation, which tells the program its budget. Control flow and everything
unknown stays one equation, but for what puts a value where it is. An inner constant becomes an outer one.

Nothing that went through here is differentiated any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array

from passes.jaxpr import compat
from passes.jaxpr.avals import form_of
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.interned import interned
from passes.jaxpr.primitives import CALLS, CONTROL_FLOW
from passes.jaxpr.rewrite import bodies_of, consts_as_literals, with_bodies, with_equations

CHECKPOINT = "remat2"
LINEAR_SOLVE = "custom_linear_solve"


@dataclass(slots=True, kw_only=True)
class _Flat:
    """The straight-line jaxpr as it grows."""

    constvars: list[Var]
    consts: list[Any]
    eqns: list[JaxprEqn] = field(default_factory=list)

    def walk(self, jaxpr: Jaxpr, env: dict[Var, Atom], caller: Any) -> None:
        """Append the equations of `jaxpr`; `env` has its variables' atoms, `caller` is where it is called."""
        for eqn in map(_inlined, jaxpr.eqns):
            source = compat.called_from(caller, eqn.source_info)
            operands = [compat.renamed(v, env) for v in eqn.invars]
            if _names_no_device(eqn):
                env.update(zip(eqn.outvars, operands, strict=True))
                continue
            body = _opened(eqn)
            if body is None:
                results = [_write(env, v, fresh=caller is not None) for v in eqn.outvars]
                self.eqns.append(eqn.replace(invars=operands, outvars=results, source_info=source))
                continue
            if eqn.primitive.name == CHECKPOINT:
                operands = self._barred(eqn, operands)
            elif eqn.primitive.name == LINEAR_SOLVE:
                operands = _of_solver(eqn, operands)
            inner, inner_env = self._enter(body, operands)
            self.walk(inner, inner_env, source)
            for v, inner_v in zip(eqn.outvars, inner.outvars, strict=True):
                env[v] = compat.renamed(inner_v, inner_env)

    def _barred(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        """`operands` behind a barrier, where `jax.checkpoint` has one."""
        prevent = eqn.params["prevent_cse"] if eqn.params["differentiated"] else False
        masks = prevent if isinstance(prevent, tuple) else (prevent,) * len(operands)
        masked = list(zip(operands, masks, strict=True))
        held = {v: compat.fresh_var(v) for v in compat.variables(v for v, mask in masked if mask)}
        if held:
            self.eqns.append(compat.barrier_eqn(list(held), list(held.values())))
        return [compat.renamed(v, held) if mask else v for v, mask in masked]

    def _enter(self, body: Jaxpr, operands: list[Atom]) -> tuple[Jaxpr, dict[Var, Atom]]:
        inner, consts = compat.open_jaxpr(body)
        env = dict(zip(inner.invars, operands, strict=True))
        for v, value in zip(inner.constvars, consts, strict=True):
            env[v] = const = compat.fresh_var(v)
            self.constvars.append(const)
            self.consts.append(value)
        return inner, env


def inline_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with every call opened that only groups equations; derivative rules are dropped."""
    jaxpr, consts = compat.open_jaxpr(compat.without_refs(compat.lower_high(closed)))
    flat = _Flat(constvars=list(jaxpr.constvars), consts=list(consts))
    env: dict[Var, Atom] = {}
    flat.walk(jaxpr, env, None)
    rebuilt = compat.rebuild(jaxpr, eqns=flat.eqns, constvars=flat.constvars, rename=env)
    return compat.close_jaxpr(rebuilt, flat.consts)


@compat.cached_by_jaxpr
def flat_body(closed: ClosedJaxpr) -> Jaxpr:
    """A closed body as an open jaxpr, calls inlined, constants written in; the same object every time,
    and for all that are alike."""
    return interned(consts_as_literals(inline_calls(closed)))


def with_flat_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Control flow with what `change` makes of each of its bodies (see `flat_body`); `eqn` itself if that is
    the body itself, or if it is no control flow."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return eqn

    def changed(closed: ClosedJaxpr) -> ClosedJaxpr:
        flat = flat_body(closed)
        new = change(flat)
        return closed if new is flat else compat.close_jaxpr(new, [])

    return with_bodies(eqn, list(map(changed, bodies_of(eqn))))


def _inlined(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn` without the operands of planned parts, itself or in bodies, that only derivatives need."""
    name = eqn.primitive.name
    if name in CONTROL_FLOW:
        return with_bodies(eqn, [_inlined_body(body) for body in bodies_of(eqn)])
    body = eqn.params.get(CALLS[name]) if name in CALLS and name != CHECKPOINT else None
    if body is None or (inlined := _inlined_body(body)) is body:
        return compat.without_source(eqn)
    return compat.replaced(eqn, params={**eqn.params, CALLS[name]: inlined})


@compat.cached_by_jaxpr
def _inlined_body(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr, consts = compat.open_jaxpr(closed)
    inlined = with_equations(jaxpr, list(map(_inlined, jaxpr.eqns)))
    return closed if inlined is jaxpr else compat.close_jaxpr(inlined, consts)


def _opened(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The closed jaxpr of a call that may be opened, else None."""
    if compat.is_forward_part(eqn):
        opened: ClosedJaxpr = eqn.params["jaxpr"]
        return opened
    if eqn.primitive.name == LINEAR_SOLVE:
        solver: ClosedJaxpr = eqn.params["jaxprs"].solve
        return solver
    param = CALLS.get(eqn.primitive.name)
    body = None if param is None else eqn.params.get(param)
    if body is None or getattr(body, "is_high", False) or compat.is_pinned(eqn):
        return None
    if eqn.primitive.name == CHECKPOINT:
        body = compat.close_jaxpr(body, [])
    return body if len(body.in_avals) == len(eqn.invars) else None


def _names_no_device(eqn: JaxprEqn) -> bool:
    """True for a `device_put` to where its operands are: `jax.scipy.sparse.linalg` has one around what it is
    given. In a program it does nothing, and as something that acts it could not be run again."""
    if eqn.primitive.name != "device_put" or any(device is not None for device in eqn.params["devices"]):
        return False
    return all(v.aval == x.aval for v, x in zip(eqn.outvars, eqn.invars, strict=True))


def _of_solver(eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
    """The operands of a linear solve that its solver reads: its constants and the right-hand sides."""
    lengths = eqn.params["const_lengths"]
    first, last = lengths.matvec + lengths.vecmat, sum(lengths)
    return [*operands[first : first + lengths.solve], *operands[last:]]


def _write(env: dict[Var, Atom], var: Var, *, fresh: bool) -> Var:
    if fresh and not isinstance(var, compat.DropVar):
        env[var] = new = compat.fresh_var(var)
        return new
    return var


def traced_for(eqn: JaxprEqn, function: Callable[..., Array]) -> list[JaxprEqn]:
    """The equations of a function of the operands of `eqn`, variables all, that make its one result."""
    operands, result = compat.variables(eqn.invars), eqn.outvars[0]
    with compat.at_source_of(eqn):
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*form_of(v)) for v in operands))
    jaxpr, _ = compat.open_jaxpr(inline_calls(closed))
    return named(
        jaxpr, dict(zip((*jaxpr.invars, *compat.variables(jaxpr.outvars)), (*operands, result), strict=True))
    )


def named(jaxpr: Jaxpr, names: Mapping[Var, Atom]) -> list[JaxprEqn]:
    """The equations of an open jaxpr with other names for some of its inputs and results."""
    read = (compat.rename_inputs(eqn, names) for eqn in jaxpr.eqns)
    return [compat.replaced(eqn, outvars=[compat.renamed(v, names) for v in eqn.outvars]) for eqn in read]
