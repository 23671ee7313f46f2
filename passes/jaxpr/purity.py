"""Which equations may run twice, and what kind of kernel each one is.

The rule is JAX's own, by which `jax.checkpoint` runs anything again: an equation does nothing but return its
results unless it declares an effect. So a kernel of another maker (Pallas, an FFI call, cuDNN, a
partitioning of one's own) is pure if its equation has no effect and its parameters claim none, if all it
reads and returns are plain arrays, and if nothing inside it must run once. In-place kernels are pure here:
an equation never changes its operands, XLA copies what is still read. Semaphores, seeds and dropout masks
of a kernel are its operands or its own.

Not trusted are the few primitives that declare no effect and have one, or that somebody outside sees.
"""

from __future__ import annotations

from typing import Any

import jax

from passes.backend import BACKENDS
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name, form_of, is_bitcast, size_of
from passes.jaxpr.compat import Jaxpr, JaxprEqn
from passes.jaxpr.library_kernels import is_by_windows
from passes.jaxpr.primitives import CALLS, CONTROL_FLOW, Kind, kind_of
from passes.saved import is_saved

# Python is told nothing twice; generators with hidden state; what crosses memories, devices or programs;
# functions that hold a budget of their own.
ONCE = frozenset(
    {"pure_callback", "rng_uniform", "psend", "precv", "device_put", "inspect_sharding",
     "coop_remat", "coop_remat_part", "coop_linear", "coop_trial"}
)  # fmt: skip


# One element reduced is that element.
_REDUCED_TO_ITSELF = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})


def eqn_kind(eqn: JaxprEqn) -> Kind:
    """The kind of one equation: effects, impure insides and `passes.saved` make it opaque."""
    if has_effect(eqn) or is_saved(compat.checkpoint_name_of(eqn)):
        return Kind.OPAQUE
    name = eqn.primitive.name
    if name in CONTROL_FLOW or name in CALLS:
        return Kind.OPAQUE if any(map(_has_opaque, compat.inner_jaxprs(eqn))) else Kind.KERNEL
    kind = kind_of(name)
    if kind is Kind.OPAQUE and is_pure_kernel(eqn):
        return Kind.FOREIGN
    if kind is Kind.REDUCTION and _reduces_nothing(eqn):
        return Kind.VIEW
    return Kind.VIEW if kind is Kind.FUSIBLE and returns_its_operand(eqn) else kind


@compat.cached_by_jaxpr
def _has_opaque(jaxpr: Jaxpr) -> bool:
    return any(eqn_kind(eqn) is Kind.OPAQUE for eqn in jaxpr.eqns)


def returns_its_operand(eqn: JaxprEqn) -> bool:
    """True for an equation that XLA takes out, since it returns its operand: `jnp.fft.irfft2(x, s=...)` pads
    with nothing, weak types are converted to what they are."""
    if eqn.primitive.name == "pad":
        return not any(n for widths in eqn.params["padding_config"] for n in widths)
    shaped = eqn.primitive.name in ("slice", "convert_element_type", "broadcast_in_dim")
    return shaped and form_of(eqn.invars[0]) == form_of(eqn.outvars[0])


def _reduces_nothing(eqn: JaxprEqn) -> bool:
    """True for a reduction along dimensions of one element, of which XLA makes a view: the transpose of what
    broadcasts, as of each softmax."""
    if eqn.primitive.name not in _REDUCED_TO_ITSELF:
        return False
    operand, result = eqn.invars[0], eqn.outvars[0]
    return size_of(operand) == size_of(result) and dtype_name(operand) == dtype_name(result)


def kernel_kind(eqn: JaxprEqn, platform: str) -> Kind:
    """The kind of one equation on one platform: what joins rows, or reduces, may be a kernel that computes
    nothing inside of itself, and what transposes may move elements."""
    kind, backend = eqn_kind(eqn), BACKENDS[platform]
    if eqn.primitive.name == "transpose" and backend.fuses_greedily and kind is Kind.VIEW:
        bitcast = is_bitcast(array_of(eqn.invars[0]).shape, eqn.params["permutation"])
        return Kind.VIEW if bitcast else Kind.FUSIBLE
    if kind is Kind.REDUCTION and backend.fuses_greedily and is_by_windows(eqn):
        return Kind.KERNEL
    least_bytes = backend.joined_row_bytes
    if eqn.primitive.name != "concatenate" or least_bytes is None:
        return kind
    joined = array_of(eqn.outvars[0])
    by_rows = 1 < joined.ndim == eqn.params["dimension"] + 1
    return Kind.KERNEL if by_rows and joined.shape[-1] * joined.dtype.itemsize >= least_bytes else kind


def has_effect(eqn: JaxprEqn) -> bool:
    """True for an equation that does something besides returning its results, as far as it declares it."""
    return bool(eqn.effects and compat.side_effects(eqn))


def is_on_host(aval: Any) -> bool:
    """True for an array in the host's memory."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def moves_memory(eqn: JaxprEqn) -> bool:
    """True for a copy between the device's memory and the host's, which runs beside the kernels."""
    atoms = (*eqn.invars, *eqn.outvars)
    return eqn.primitive.name == "device_put" and len({is_on_host(v.aval) for v in atoms}) > 1


def is_pure_kernel(eqn: JaxprEqn) -> bool:
    """True for an equation of whatever primitive that may be recomputed; see the head of this file."""
    atoms = (*eqn.invars, *eqn.outvars)
    return (
        not has_effect(eqn)
        and all(isinstance(v.aval, jax.core.ShapedArray) for v in atoms)
        and _claims_nothing(eqn)
    )


def _claims_nothing(eqn: JaxprEqn) -> bool:
    """True if neither an equation's parameters nor what is inside it claims to be run once.

    Effects inside are those of references that a kernel makes for itself; others are the equation's, too.
    """
    if eqn.primitive.name in ONCE or _claims_side_effect(eqn):
        return False
    return all(_claims_nothing(inner) for jaxpr in compat.inner_jaxprs(eqn) for inner in jaxpr.eqns)


def _claims_side_effect(eqn: JaxprEqn) -> bool:
    """True for a kernel whose maker says in its parameters that it must not be merged or dropped."""
    claims = getattr(eqn.params.get("compiler_params"), "has_side_effects", False)
    claims = getattr(claims, "value", claims) not in (False, "pure")
    return claims or bool(eqn.params.get("has_side_effect", False))
