"""What XLA would do of its own to a program, and what has to be said to it so that a plan holds.

XLA stores some values that a plan computes in each reader, and computes in each reader some that a plan
stores; it merges small dots and leaves the sums of split ones to their readers. Barriers take these
freedoms away, each where it would hurt: a barrier is not free, since nothing is fused across it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.ir import Op
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import JaxprEqn
from passes.jaxpr.emit import EmitConfig
from passes.jaxpr.lifted import LiftedJaxpr, ready_from_the_start
from passes.jaxpr.primitives import MATRIX, Kind
from passes.jaxpr.purity import eqn_kind, kernel_kind
from passes.liveness import last_readers
from passes.saved import is_saved

# Dots with results up to this size are small: XLA:GPU splits them along their depth, and merges them.
SMALL_DOT_ELEMENTS = 2 << 20


def emit_configs(
    lifted: LiftedJaxpr, as_is: LiftedJaxpr, device: DeviceModel, *, strict: bool = False, deep: bool = False
) -> list[EmitConfig]:
    """The ways to write a plan for `lifted`: with all that has to be said to XLA, and without the barriers
    behind what its own kernels would compute inside of them, where those may do as well, and without those
    that have the parts of a split product summed before they are read. A barrier also keeps XLA from making
    one kernel of the sums of a batch norm's gradient: ResNet-50 on an H200. A strict or deep plan for a TPU
    leaves no such freedom: it is there to take values out of the kernels of products."""
    written = emit_config(lifted, as_is, device, strict=strict, deep=deep)
    if (strict or deep) and BACKENDS[device.platform].fuses_results:
        return [written]
    free = emit_config(lifted, as_is, device, strict=strict, deep=deep, fused=True)
    ways = [free, written]
    if BACKENDS[device.platform].splits_small_dots and not strict:
        ways.insert(0, replace(free, apart=free.apart.difference(small_dots(lifted))))
    return list(dict.fromkeys(ways))


def emit_config(
    lifted: LiftedJaxpr,
    as_is: LiftedJaxpr,
    device: DeviceModel,
    *,
    strict: bool = False,
    deep: bool = False,
    fused: bool = False,
) -> EmitConfig:
    """What has to be said to XLA so that it stores what `lifted` stores and not what it would by itself;
    `fused` leaves to it what it computes inside of kernels.

    On a GPU a small dot is split along its depth, and XLA leaves the sum of the parts, which are several
    times the result, to the readers; small dots that share an operand are merged into one. Neither happens
    through a barrier. On a TPU what follows a dot or convolution is computed in its kernel, with all that
    this reads: two full-size values more, for batch norm behind a residual connection. Where nothing fits,
    `strict` has each of them stored by a kernel of its own, and `deep` those that are smaller than what they
    read: a weight's gradient, whose update is written over a donated argument, and waits with both operands
    for all that reads that argument again.
    """
    wanted = {body[-1] for body in lifted.bodies}
    own = {body[-1] for body in as_is.bodies}
    saved = {i for i in wanted if _is_saved(lifted.jaxpr.eqns[i])}
    backend = BACKENDS[device.platform]
    # Which numbers of a softmax have kernels of their own is left to XLA.
    summed = {i for i, eqn in enumerate(lifted.jaxpr.eqns) if eqn_kind(eqn) is Kind.REDUCTION}
    inside = set() if fused else (wanted - summed) & (_inside(as_is) - _inside(lifted))
    apart, held_back = inside | saved, set()
    if backend.fuses_greedily:  # what a library's kernel has inside it is held back by it
        kinds = {i: kernel_kind(lifted.jaxpr.eqns[i], device.platform) for i in inside}
        apart = {i for i, kind in kinds.items() if kind is Kind.FUSIBLE and not _is_transpose(lifted, i)}
        # XLA takes it apart, and stores its exponential and two quotients for its readers instead.
        apart |= saved | {i for i in wanted if lifted.jaxpr.eqns[i].primitive.name == "erfc"}
    if backend.fuses_results and (strict or deep):
        products = {i for i in wanted if lifted.jaxpr.eqns[i].primitive.name in MATRIX}
        apart |= {i for i in products if strict or _is_smaller(lifted.jaxpr.eqns[i])}
    if backend.splits_small_dots:
        small = small_dots(lifted)
        last = last_readers(lifted.program)
        reach = 0 if strict else EmitConfig().reach
        apart |= {
            root for root, op in small.items() if any(last.get(b, 0) > op.id + reach for b in op.outputs)
        }
        ready = ready_from_the_start(lifted.program)
        held_back = {root for root, op in small.items() if strict or ready.issuperset(op.inputs)}
    return EmitConfig(
        shared=frozenset(own - wanted - summed),
        apart=frozenset(apart),
        held_back=frozenset(held_back),
        free_waits=backend.runs_free_early,
        one_at_a_time=strict,
        as_read=backend.fuses_greedily,
    )


def _is_transpose(lifted: LiftedJaxpr, i: int) -> bool:
    return lifted.jaxpr.eqns[i].primitive.name == "transpose"


def _inside(lifted: LiftedJaxpr) -> set[int]:
    """Equations that kernels compute for themselves, whether their results are stored or not."""
    return {i for body in lifted.bodies for i in body[:-1]}


def _is_saved(eqn: JaxprEqn) -> bool:
    return is_saved(compat.checkpoint_name_of(eqn))


def _is_smaller(product: JaxprEqn) -> bool:
    """True for a product whose result is smaller than each of its operands."""
    result, *operands = (compat.aval_nbytes(v.aval) for v in (*product.outvars, *product.invars))
    return result < min(operands)


def small_dots(lifted: LiftedJaxpr) -> dict[int, Op]:
    """Root equations and ops of dots whose result does not fill a GPU."""
    small = {}
    for op, body in zip(lifted.program.ops, lifted.bodies, strict=True):
        eqn = lifted.jaxpr.eqns[body[-1]]
        if (
            eqn.primitive.name == "dot_general"
            and math.prod(array_of(eqn.outvars[0]).shape) <= SMALL_DOT_ELEMENTS
        ):
            small[body[-1]] = op
    return small
