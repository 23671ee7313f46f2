"""The call of a decorated function, and a whole program as one such call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from coop_jax.budget import Budget
from coop_jax.config import RematConfig
from coop_jax.relowering import PlannedAlreadyError
from coop_jax.sizes import check_sizes
from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn
from passes.jaxpr.primitives import CALLS
from passes.jaxpr.rewrite import with_equations
from passes.jaxpr.values import Constraints

compat.hide_frames(__file__)

coop_remat_p = compat.new_primitive("coop_remat")


def bind(jaxpr: ClosedJaxpr, config: RematConfig, values: Sequence[Any]) -> list[Any]:
    """Apply `jaxpr` to `values` as a part of the program that asks for `config`."""
    jaxpr, consts = compat.hoist_consts(jaxpr)
    check_sizes([*consts, *values], config.name)
    # What nothing reads is no argument of the program, as without this call.
    jaxpr, read = compat.without_unread(jaxpr)
    given = zip([*consts, *values], read, strict=True)
    return list(coop_remat_p.bind(*(x for x, keep in given if keep), jaxpr=jaxpr, config=config))


def as_one(program: Jaxpr, config: RematConfig) -> Callable[[ClosedJaxpr], ClosedJaxpr] | None:
    """Makes one decorated function of a program that has some inside, one of them with `config`.

    None where they do not all ask for the same, or for something of single values: that is about what is in
    them.
    """
    shared = _but_for_budget(config)
    if config.constraints != Constraints() or any(_but_for_budget(c) != shared for c in _inside(program)):
        return None
    return partial(_in_one_call, config)


def is_one_call(program: Jaxpr) -> bool:
    """True if a program does nothing but call one decorated function, whatever it closes over."""
    while len(program.eqns) == 1:
        (eqn,) = program.eqns
        if eqn.primitive is coop_remat_p:
            return True
        inner = compat.inner_jaxprs(eqn)
        if eqn.primitive.name not in CALLS or len(inner) != 1:
            return False
        (program,) = inner
    return False


def _in_one_call(config: RematConfig, program: ClosedJaxpr) -> ClosedJaxpr:
    """A program of the same arguments and results that is one call of `program`.

    Raises:
        PlannedAlreadyError: something is computed again in it.
    """
    jaxpr, consts = compat.open_jaxpr(program)
    whole = compat.close_jaxpr(_opened(jaxpr), consts)
    return compat.trace(lambda *values: bind(whole, config, values), program.in_avals)


def _opened(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, and what its equations hold, with plain calls of what was decorated."""
    return with_equations(jaxpr, list(map(_as_call, jaxpr.eqns)))


def _as_call(eqn: JaxprEqn) -> JaxprEqn:
    planned = eqn.params.get("planned")
    if planned is not None and planned.outcome.changed:
        raise PlannedAlreadyError
    inner = compat.inner_jaxprs(eqn)
    opened = compat.with_inner_jaxprs(eqn, _opened) if any(map(_inside, inner)) else eqn
    return compat.as_call(opened) if eqn.primitive is coop_remat_p or planned is not None else opened


def _but_for_budget(config: RematConfig) -> RematConfig:
    return dataclasses.replace(config, budget=Budget(host=config.budget.host), name="", derived=False)


@compat.cached_by_jaxpr
def _inside(program: Jaxpr) -> tuple[RematConfig, ...]:
    """What the decorated functions in a jaxpr ask for; each of them is lowered by itself, and asks this."""
    return tuple(dict.fromkeys(_each_inside(program)))


def _each_inside(jaxpr: Jaxpr) -> Iterator[RematConfig]:
    """What they ask for, in a jaxpr and in what its equations hold."""
    for eqn in jaxpr.eqns:
        config = eqn.params.get("config")
        if isinstance(config, RematConfig):
            yield config
        for inner in compat.inner_jaxprs(eqn):
            yield from _each_inside(inner)
