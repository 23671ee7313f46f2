"""A function as it is recomputed: what its first run told Python is not told again.

A derivative of a derivative is taken from the arguments, so it runs what the call of the function has run.
Calls into Python that give nothing back (`jax.debug.print`, `jax.debug.callback`, `io_callback`), and the
checks of `checkify`, would then be made once more. Effects on references stay: the caller runs on copies.
"""

from __future__ import annotations

from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn

_TELLING = frozenset({"debug_callback", "debug_print", "io_callback", "check"})


class ToldTwiceError(Exception):
    """What an `io_callback` gave back is needed again."""


@compat.cached_by_jaxpr
def quiet(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` without the calls into Python whose results nothing reads, in inner jaxprs too.

    Raises:
        ToldTwiceError: something reads them.
    """
    jaxpr, consts = compat.open_jaxpr(closed)
    quieted = _quiet(jaxpr)
    return closed if quieted is jaxpr else compat.close_jaxpr(quieted, consts)


def _quiet(jaxpr: Jaxpr) -> Jaxpr:
    if not jaxpr.effects:
        return jaxpr
    needed = set(compat.variables(jaxpr.outvars))
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in _TELLING:
            if not needed.isdisjoint(eqn.outvars):
                raise ToldTwiceError(compat.source_line(eqn))
            continue
        needed.update(compat.variables(eqn.invars))
        eqns.append(_quiet_eqn(eqn) if eqn.effects else eqn)
    return compat.rebuild(jaxpr, eqns=eqns[::-1])


def _quiet_eqn(eqn: JaxprEqn) -> JaxprEqn:
    before = set().union(*(inner.effects for inner in compat.inner_jaxprs(eqn)))
    quieted = compat.with_inner_jaxprs(eqn, _quiet)
    after = set().union(*(inner.effects for inner in compat.inner_jaxprs(quieted)))
    return compat.replaced(quieted, effects=eqn.effects - (before - after))
