"""Helpers for passes that replace equations of a jaxpr by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.reach import reached

_BODY = {"scan": "jaxpr", "while": "body_jaxpr"}


def renewed(jaxpr: Jaxpr, known: dict[Var, Atom] | None = None) -> Jaxpr:
    """A copy of an open jaxpr with variables of its own, but for those that `known` gives."""
    env: dict[Var, Atom] = dict(known or {})

    def new(v: Any) -> Any:
        if not compat.is_variable(v) or isinstance(v, compat.DropVar):
            return v
        if v not in env:
            env[v] = compat.fresh_var(v)
        return env[v]

    eqns = [
        eqn.replace(invars=list(map(new, eqn.invars)), outvars=list(map(new, eqn.outvars)))
        for eqn in jaxpr.eqns
    ]
    return compat.rebuild(
        jaxpr,
        eqns=eqns,
        outvars=list(map(new, jaxpr.outvars)),
        invars=list(map(new, jaxpr.invars)),
        constvars=list(map(new, jaxpr.constvars)),
    )


def consts_as_literals(closed: ClosedJaxpr) -> Jaxpr:
    """The open jaxpr of `closed` with its constants written into the equations that read them."""
    jaxpr, consts = compat.open_jaxpr(closed)
    if not consts:
        return jaxpr
    pairs = zip(jaxpr.constvars, consts, strict=True)
    values = {v: compat.literal(x) for v, x in pairs}
    eqns = [compat.rename_inputs(eqn, values) for eqn in jaxpr.eqns]
    return compat.rebuild(jaxpr, eqns=eqns, constvars=[], rename=values)


def with_results(closed: ClosedJaxpr, order: Sequence[int]) -> ClosedJaxpr:
    """`closed` with these of its results, in this order."""
    jaxpr, consts = compat.open_jaxpr(closed)
    outvars = [jaxpr.outvars[i] for i in order]
    return compat.close_jaxpr(compat.rebuild(jaxpr, outvars=outvars), consts)


def with_unread_inputs(closed: ClosedJaxpr, like: Sequence[Any]) -> ClosedJaxpr:
    """`closed` with inputs before its own that nothing reads, with the abstract values of `like`."""
    jaxpr, consts = compat.open_jaxpr(closed)
    invars = [*map(compat.fresh_var, like), *jaxpr.invars]
    return compat.close_jaxpr(compat.rebuild(jaxpr, invars=invars), consts)


def without_inputs(closed: ClosedJaxpr, unread: Sequence[int], results: Sequence[int]) -> ClosedJaxpr:
    """`closed` without inputs that no equation reads, and without these results."""
    if not unread and not results:
        return closed
    jaxpr, consts = compat.open_jaxpr(closed)
    assert not any(reads_input(closed, i) for i in unread), "an input that is read is needed"
    invars = [v for i, v in enumerate(jaxpr.invars) if i not in unread]
    outvars = [v for i, v in enumerate(jaxpr.outvars) if i not in results]
    return compat.close_jaxpr(compat.rebuild(jaxpr, outvars=outvars, invars=invars), consts)


def reads_input(closed: ClosedJaxpr, i: int) -> bool:
    """True if some equation of `closed` has its input `i` as an operand."""
    jaxpr, _ = compat.open_jaxpr(closed)
    return any(v is jaxpr.invars[i] for eqn in jaxpr.eqns for v in eqn.invars)


def is_needed(closed: ClosedJaxpr, i: int) -> bool:
    """True if `closed` returns its input `i`, or reads it."""
    jaxpr, _ = compat.open_jaxpr(closed)
    return any(v is jaxpr.invars[i] for v in jaxpr.outvars) or reads_input(closed, i)


def bodies_of(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """The closed bodies of a `scan`, `cond` or `while` that may be rewritten."""
    name, params = eqn.primitive.name, eqn.params
    return tuple(params["branches"]) if name == "cond" else (params[_BODY[name]],)


def with_bodies(eqn: JaxprEqn, bodies: Sequence[ClosedJaxpr]) -> JaxprEqn:
    """`eqn` with other bodies; see `bodies_of`. The same object if they are its own."""
    if all(new is old for new, old in zip(bodies, bodies_of(eqn), strict=True)):
        return eqn
    name = eqn.primitive.name
    new = {"branches": tuple(bodies)} if name == "cond" else {_BODY[name]: bodies[0]}
    return compat.replaced(eqn, params={**eqn.params, **new})


def with_changed_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Control flow with what `change` makes of each of its open bodies, conditions included; `eqn` itself if
    that is the body itself, or if it is no control flow."""
    is_control_flow = eqn.primitive.name in CONTROL_FLOW
    if not is_control_flow or all(change(body) is body for body in compat.inner_jaxprs(eqn)):
        return eqn
    return compat.with_inner_jaxprs(eqn, change)


def with_equations(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """An open jaxpr with each of its equations replaced; the same object if they are its own."""
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else compat.rebuild(jaxpr, eqns=eqns)


def body_consts(loop: JaxprEqn) -> tuple[int, int]:
    """Which operands of a `scan` or `while` its body reads whole, and as they are, in every iteration."""
    if loop.primitive.name == "scan":
        return 0, compat.scan_sizes(loop)[0]
    first = int(loop.params["cond_nconsts"])
    return first, first + int(loop.params["body_nconsts"])


def carried_inputs(loop: JaxprEqn) -> range:
    """Which inputs of the body of a `scan` or `while` are carried from one iteration to the next."""
    first, end = body_consts(loop)
    n_carry = compat.scan_sizes(loop)[1] if loop.primitive.name == "scan" else len(loop.invars) - end
    return range(end - first, end - first + n_carry)


def spread_eqn(value: Atom, result: Var, like: JaxprEqn) -> JaxprEqn:
    """`result` as a scalar broadcast to its shape, at the source line of equation `like`."""
    params = {"shape": array_of(result).shape, "broadcast_dimensions": (), "sharding": None}
    return compat.unary_eqn(lax.broadcast_in_dim_p, value, result, like, **params)


def reshape_eqn(operand: Var, result: Var, like: JaxprEqn) -> JaxprEqn:
    """`operand` in the shape of `result`, at the source line of equation `like`."""
    params = {"new_sizes": array_of(result).shape, "dimensions": None, "sharding": None}
    return compat.unary_eqn(lax.reshape_p, operand, result, like, **params)


def convert_eqn(operand: Var, result: Var, like: JaxprEqn) -> JaxprEqn:
    """`operand` in the type of `result`, at the source line of equation `like`."""
    params = {"new_dtype": array_of(result).dtype, "weak_type": False, "sharding": None}
    return compat.unary_eqn(lax.convert_element_type_p, operand, result, like, **params)


def with_operands_in(eqn: JaxprEqn, dtype: Any) -> tuple[list[JaxprEqn], JaxprEqn]:
    """The conversions of an equation's operands that are not of a type, and the equation that reads these."""
    others = [v for v in dict.fromkeys(compat.variables(eqn.invars)) if array_of(v).dtype != dtype]
    made = {v: compat.fresh_var(v, dtype=dtype) for v in others}
    return [convert_eqn(v, made[v], eqn) for v in others], compat.rename_inputs(eqn, made)


def defined(jaxpr: Jaxpr) -> list[Var]:
    """Inputs of an open jaxpr and results of its equations, each once."""
    results = [v for eqn in jaxpr.eqns for v in eqn.outvars if not isinstance(v, compat.DropVar)]
    return list(dict.fromkeys([*jaxpr.constvars, *jaxpr.invars, *results]))


def readers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[int]]:
    """For every variable that is read the places of the equations that read it, in order."""
    readers: dict[Var, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in compat.variables(eqn.invars):
            readers.setdefault(v, []).append(i)
    return readers


def leading_to(
    atoms: Iterable[Atom], eqns: Sequence[JaxprEqn], maker: Callable[[Var], int | None]
) -> list[int]:
    """Places of the equations that lead to `atoms`, in order.

    Args:
        maker: the place of the equation that makes a variable; None for what is there.
    """

    def makers(read: Iterable[Atom]) -> set[int]:
        return {i for v in compat.variables(read) if (i := maker(v)) is not None}

    return sorted(reached(makers(atoms), lambda i: makers(eqns[i].invars)))


def when_needed(early: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """`eqns` in their order, each after those of `early` that it needs and that are not there yet."""
    maker = {v: i for i, eqn in enumerate(early) for v in eqn.outvars}
    done: set[int] = set()
    ordered: list[JaxprEqn] = []
    for eqn in eqns:
        needed = leading_to(eqn.invars, early, lambda v: None if (i := maker.get(v)) in done else i)
        ordered.extend(early[i] for i in needed)
        done.update(needed)
        ordered.append(eqn)
    return [*ordered, *(eqn for i, eqn in enumerate(early) if i not in done)]


def splice(
    function: Callable[[Any], Sequence[Any]], operands: Any, like: JaxprEqn
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that compute `function` of a list or tree of atoms, and the atoms of its results.

    What `function` adds of its own comes from the same line of the user's as the equation `like`, and from
    the same pass, forward or backward.
    """
    variables = list(dict.fromkeys(compat.variables(jax.tree.leaves(operands))))

    def run(*values: Any) -> Sequence[Any]:
        env = dict(zip(variables, values, strict=True))

        def value_of(v: Atom) -> Any:
            return jnp.asarray(v.val, array_of(v).dtype) if isinstance(v, compat.Literal) else env[v]

        return function(jax.tree.map(value_of, operands))

    with compat.at_source_of(like):
        traced = consts_as_literals(compat.trace(run, [v.aval for v in variables]))
    new = renewed(traced, dict(zip(traced.invars, variables, strict=True)))
    return [_named_as(like, eqn) for eqn in new.eqns], list(new.outvars)


def _named_as(like: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`, if it was traced outside of every name and transformation, within those of `like`."""
    info = eqn.source_info
    stack = info.name_stack if info.name_stack.stack else like.source_info.name_stack
    return compat.replaced(eqn, source_info=info.replace(name_stack=stack))


def run_scan(
    like: JaxprEqn,
    body: Jaxpr,
    operands: Sequence[Any],
    n_consts: int,
    n_carry: int,
    iterations: int | None = None,
) -> list[Any]:
    """Results (carry, then stacks) of a scan of an open `body` that runs as the equation `like` does.

    Args:
        iterations: the number of iterations, if it is not that of `like`.
    """
    closed = compat.close_jaxpr(body, [])
    consts, init = operands[:n_consts], operands[n_consts : n_consts + n_carry]

    def iteration(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = compat.evaluate(closed, [*consts, *carry, *slices])
        return results[:n_carry], results[n_carry:]

    carry, ys = jax.lax.scan(
        iteration,
        list(init),
        list(operands[n_consts + n_carry :]),
        length=like.params["length"] if iterations is None else iterations,
        reverse=like.params["reverse"],
        unroll=like.params["unroll"],
    )
    return [*carry, *ys]
