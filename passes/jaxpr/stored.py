"""How many bytes a value has where XLA stores it.

A TPU multiplies matrices of float32 in one pass over bfloat16, unless a product asks for more. XLA rounds the
operands where they are made: what only products read is stored in two bytes an element, behind barriers, too.
A reduction of such a value is computed in the kernel that makes it.

Plans count on that only where nothing else keeps a budget: an MLP's least then falls from .42 of its plain
bytes to .37 on a v5e, but where every plan counted on it an LSTM's step at .5 was refused, and a GPT's
gradient at .4 cost 24 %, not 19.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.lax import Precision

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import MATRIX, Kind
from passes.jaxpr.purity import is_on_host

_ROUNDED = "float32"
_ROUNDED_SHARE = 2
_REDUCE = frozenset(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor"))


def stored_bytes(v: Atom, device: DeviceModel, rounded: frozenset[Var] = frozenset()) -> int:
    """Bytes of a value on the device.

    Args:
        rounded: see `read_rounded`.
    """
    if BACKENDS[device.platform].pages and is_on_host(v.aval):
        return 0
    is_rounded = compat.is_variable(v) and v in rounded
    return compat.aval_nbytes(v.aval) // (_ROUNDED_SHARE if is_rounded else 1)


def read_rounded(jaxpr: Jaxpr, kinds: Sequence[Kind]) -> frozenset[Var]:
    """The values that nothing reads but products that round them, and reductions beside those.

    Args:
        jaxpr: open.
        kinds: of its equations.

    Complexity: linear.
    """
    rounded: set[Var] = set()
    reduced: set[Var] = set()
    whole = set(compat.variables(jaxpr.outvars))
    for eqn, kind in zip(reversed(jaxpr.eqns), reversed(kinds), strict=True):
        for k, v in enumerate(eqn.invars):
            if not compat.is_variable(v):
                continue
            view = _view(eqn, kind, k)
            if _rounds(eqn):
                rounded.add(v)
            elif eqn.primitive.name in _REDUCE:
                reduced.add(v)
            elif view is None or view in whole or (view in reduced and kind is Kind.BARRIER):
                whole.add(v)
            else:
                rounded |= {v} if view in rounded else set()
                reduced |= {v} if view in reduced else set()
    return frozenset(v for v in rounded - whole if str(getattr(v.aval, "dtype", "")) == _ROUNDED)


def _view(eqn: JaxprEqn, kind: Kind, operand: int) -> Atom | None:
    """The result that is a view of an operand; None if none is."""
    if kind is Kind.BARRIER:
        return eqn.outvars[operand]
    return eqn.outvars[0] if kind is Kind.VIEW else None


def _rounds(eqn: JaxprEqn) -> bool:
    """True for a product that asks for no more than one pass."""
    if eqn.primitive.name not in MATRIX:
        return False
    asked = eqn.params.get("precision")
    return all(p in (None, Precision.DEFAULT) for p in (asked if isinstance(asked, tuple) else (asked,)))
