"""What each JAX primitive is to the fusion model: one line per fact, a conservative default.

A primitive that is not named here is `OPAQUE`: it keeps its operands in memory, is never recomputed and
never moved, unless its equation shows that it may be (`passes.jaxpr.purity`). Naming a primitive states
that running it twice gives the same value twice and does nothing else.
"""

from __future__ import annotations

import enum

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of, dtype_name
from passes.jaxpr.compat import JaxprEqn


class Kind(enum.Enum):
    """How XLA treats a primitive when it forms kernels.

    VIEW: no work and no bytes of its own (layout is chosen by the consumer).
    FUSIBLE: computed inside the kernels that read it.
    REDUCTION: computes its operands inside its own kernel; its result is stored.
    KERNEL: a kernel of its own whose operands and results are stored.
    FOREIGN: a kernel that XLA sees only from outside, such as Pallas's: nothing is fused into it.
    BARRIER: `optimization_barrier`: its results are views of its stored operands.
    OPAQUE: unknown; stored operands and results, runs exactly once.
    """

    VIEW = enum.auto()
    FUSIBLE = enum.auto()
    REDUCTION = enum.auto()
    KERNEL = enum.auto()
    FOREIGN = enum.auto()
    BARRIER = enum.auto()
    OPAQUE = enum.auto()


INSIDE = (Kind.VIEW, Kind.FUSIBLE)
"""What a kernel can compute inside of itself."""
FUSING = (*INSIDE, Kind.REDUCTION)
"""Kernels that compute their operands inside of themselves."""


_VIEW = "copy name pvary reshape reshard sharding_constraint squeeze stop_gradient transpose"

_FUSIBLE = """
    abs add add_any and bitcast_convert_type broadcast_in_dim broadcast_to ceil clamp clz complex
    concatenate conj convert_element_type dynamic_slice empty empty2 eq eq_to floor gather ge gt imag
    integer_pow iota iota_2x32_shape is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not
    one_minus_square or pad polynomial population_count real reduce_precision rem rev round select_n
    shift_left shift_right_arithmetic shift_right_logical sign slice split square stack sub tile unstack
    xor div sqrt rsqrt random_clone random_wrap random_unwrap axis_index
"""

# Elementwise, but many instructions per element.
_EXPENSIVE = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic pow polygamma
    regularized_incomplete_beta sin sinh tan tanh zeta
"""

_REDUCTION = """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    reduce_window reduce_window_max reduce_window_min reduce_window_sum coop_compared
"""

_KERNEL = """
    approx_top_k cholesky cholesky_update conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum
    dot_general dynamic_update_slice eig eigh fft geqp3 geqrf hessenberg householder_product lu
    lu_pivots_to_permutation ormqr qr ragged_dot_general random_bits random_fold_in random_gamma
    random_seed random_split philox2x32 philox4x32 rng_bit_generator scaled_dot scaled_matmul scan cond
    while scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
    select_and_scatter select_and_scatter_add sort svd symmetric_product threefry2x32 threefry4x32 top_k
    triangular_solve tridiagonal tridiagonal_solve custom_linear_solve
"""

KINDS: dict[str, Kind] = {
    **dict.fromkeys(_VIEW.split(), Kind.VIEW),
    **dict.fromkeys(_FUSIBLE.split(), Kind.FUSIBLE),
    **dict.fromkeys(_EXPENSIVE.split(), Kind.FUSIBLE),
    **dict.fromkeys(_REDUCTION.split(), Kind.REDUCTION),
    **dict.fromkeys(_KERNEL.split(), Kind.KERNEL),
    "optimization_barrier": Kind.BARRIER,
}
"""All primitives that are known; each exists in every version of JAX that is supported."""

_EXPENSIVE_NAMES = frozenset(_EXPENSIVE.split())

# XLA:CPU does not compute these twice.
_DEAR_TO_XLA_CPU = _EXPENSIVE_NAMES - {"cos", "sin", "tan"} | {"div", "gather", "rem", "rsqrt", "sqrt"}
# Nor these in bfloat16, which it computes in float32 and rounds: to round is dear.
_ROUNDED = """
    add add_any ceil cos floor integer_pow mul one_minus_square reduce_precision round sin square sub tan
"""
_ROUNDED_BY_XLA_CPU = _DEAR_TO_XLA_CPU | frozenset(_ROUNDED.split())

# XLA:GPU computes them again for every reader: by its table of clock cycles (`hlo_op_profiles_data.h`) an
# exponential in float32 takes 79, a tanh 467; what is not there, as most in bfloat16, costs next to nothing.
_CHEAP_TO_XLA = frozenset({"exp", "exp2", "log", "logistic"})
_CHEAP_IN = {"bfloat16": _CHEAP_TO_XLA, "float32": _CHEAP_TO_XLA | {"asinh", "expm1", "log1p"}}

MATRIX = frozenset({"dot_general", "conv_general_dilated"})
"""Products of matrices, and convolutions."""

SLICING = frozenset({"slice", "dynamic_slice", "gather"})
"""Primitives that read only as many bytes of their first operand as they return."""

_MOVING = """
    broadcast_in_dim concatenate dynamic_slice gather pad reshape rev slice split squeeze stack tile transpose
    unstack
"""

WRITES_SLICE = "dynamic_update_slice"
"""Computes inside what it writes into its first operand."""

MOVING = frozenset(_MOVING.split())
# What gives some elements of one operand and some of another; XLA emits conditionals for it.
BRANCHES = frozenset({"concatenate", "dynamic_update_slice", "pad"})
"""Primitives that take an element from another place than that at which it will be."""

RESHAPES = frozenset({"copy", "reshape", "squeeze"})
"""Views whose result lies in memory as their operand does."""

COMPARED = "coop_compared"
"""See `passes.jaxpr.extremes`."""

CALLS = {
    "jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr", "remat2": "jaxpr",
}  # fmt: skip
"""Primitives that only group equations, with the parameter that holds them."""

LOOPS = frozenset({"scan", "while"})
"""Primitives that run a jaxpr again and again."""

CONTROL_FLOW = LOOPS | {"cond"}
"""Primitives that carry jaxprs and are planned as one kernel each."""


def kind_of(primitive_name: str) -> Kind:
    """The kind of a primitive; `Kind.OPAQUE` for one that is not known."""
    return KINDS.get(primitive_name, Kind.OPAQUE)


def is_expensive(primitive_name: str) -> bool:
    """True for elementwise primitives that cost many instructions per element."""
    return primitive_name in _EXPENSIVE_NAMES


def is_dear_to_xla(primitive_name: str, dtype: str) -> bool:
    """True if XLA:GPU takes an elementwise primitive on such elements for expensive."""
    return is_expensive(primitive_name) and primitive_name not in _CHEAP_IN.get(dtype, ())


def is_dear_to_xla_cpu(eqn: JaxprEqn) -> bool:
    """True if XLA:CPU takes an elementwise equation for expensive."""
    name, (result,) = eqn.primitive.name, eqn.outvars[:1]
    if dtype_name(result) == "bfloat16":
        if name == "convert_element_type":
            return dtype_name(eqn.invars[0]) == "float32"
        return name in _ROUNDED_BY_XLA_CPU
    if name in ("cos", "sin", "tan", "abs", "sign"):
        return bool(array_of(result).dtype.kind == "c")
    if name == "div" and not compat.is_variable(eqn.invars[1]):
        # By a constant it multiplies with the inverse.
        return bool(array_of(result).dtype.kind in "iu")
    return name in _DEAR_TO_XLA_CPU
