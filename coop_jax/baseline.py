"""What a program needs without rematerialization: what a budget that is a fraction is a fraction of.

It is found by tracing and compiling the whole program once more without `coop.remat` (`coop_jax.relowering`).
Where it cannot be had (the program was traced apart from its lowering, or is a part that runs outside `jit`),
the plain function is compiled; if that is only a part of the program, the total is taken as the program's own
arguments and results and the plain function's temporaries, but at least as what the program needs with the
plans that are written in it already, so that 1.0 is met; it is reported as predicted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from coop_jax import aot, module, relowering
from coop_jax.errors import UnsupportedError
from coop_jax.pinning import pin
from coop_jax.requests import Devices
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr
from passes.pipeline import plan_program

compat.hide_frames(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The total of the program without rematerialization; time and energy of its kernels where compiled."""

    total_bytes: int
    compiled: bool
    cost_ns: int | None = None
    energy_pj: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a program is known where the whole cannot be had.

    Attributes:
        jaxpr: the part that is being lowered, calls inlined.
        is_plain: True if nothing is recomputed in it.
        plains: gives more programs that the enclosing one may be without rematerialization.
        apart: the part without rematerialization and the other one, where each is a program of its own.
    """

    jaxpr: ClosedJaxpr
    is_plain: bool
    plains: Callable[[], Sequence[ClosedJaxpr]]
    apart: tuple[ClosedJaxpr, ...] = ()


def baseline(
    program: compat.BeingLowered | None,
    part: Part,
    facts: module.ModuleFacts,
    devices: Devices,
    request: JaxprRequest,
) -> Baseline:
    """The total of the program that is being lowered, without rematerialization.

    Args:
        program: how to lower it again; None where that is not known.
        part: what is known else.
        facts: of its module.
        devices: where it runs.
        request: for an unlimited budget.

    Raises:
        UnsupportedError: over several devices only the whole program can tell.
    """
    plain = None if program is None else relowering.plain_program(program, request.device.name)
    if plain is not None:
        return Baseline(
            total_bytes=plain.memory.total_bytes,
            compiled=True,
            cost_ns=plain.cost_ns,
            energy_pj=plain.energy_pj,
        )
    if devices.several:
        raise UnsupportedError(
            f"a fraction of a program over {devices.num_devices} devices: the plain program cannot be "
            'compiled from here to take a fraction of it. Give bytes per device, such as "8GiB".'
        )
    of_part = _of_a_part(part, facts, request)
    written_bytes = 0 if program is None or of_part.compiled else relowering.written_bytes(program)
    return (
        of_part
        if written_bytes <= of_part.total_bytes
        else Baseline(total_bytes=written_bytes, compiled=False)
    )


def _of_a_part(part: Part, facts: module.ModuleFacts, request: JaxprRequest) -> Baseline:
    """The total of a part: where it is compiled alone, as by an eager `vjp`, it is the program.

    Where forward and backward are planned to keep one budget each, it is of the larger one.
    """
    alone = is_whole(part.jaxpr, facts)
    known = [made[0] for p in part.apart if (made := _compiled(p, facts, request, ())) is not None]
    if known and len(known) == len(part.apart):
        own_bytes = request.fixed_bytes + known[0].temp_bytes  # arguments that nothing reads count, too
        return Baseline(total_bytes=max(own_bytes, *(m.total_bytes for m in known)), compiled=False)
    if alone and part.is_plain:
        plains: Sequence[ClosedJaxpr] = (part.jaxpr,)
    else:
        plains = (*part.plains(), *([part.jaxpr] if part.is_plain else []))
    exact = next((plain for plain in plains if is_whole(plain, facts)), None)
    plain = plains[-1] if exact is None else exact
    baseline = _compiled(plain, facts, request, () if exact is None else facts.donated)
    if baseline is None:
        outcome = plan_program(plain, request)[1]
        return Baseline(total_bytes=max(1, request.fixed_bytes + outcome.before_temp_bytes), compiled=False)
    memory, (cost_ns, energy_pj) = baseline
    if exact is not None:
        return Baseline(total_bytes=memory.total_bytes, compiled=True, cost_ns=cost_ns, energy_pj=energy_pj)
    total_bytes = max(memory.total_bytes, request.fixed_bytes + memory.temp_bytes)
    planned = _compiled(part.jaxpr, facts, request, facts.donated) if alone else None
    if planned is not None:  # 1.0 is met by the part as it was planned
        total_bytes = max(total_bytes, planned[0].total_bytes)
    return Baseline(total_bytes=total_bytes, compiled=False)


def _compiled(
    plain: ClosedJaxpr, facts: module.ModuleFacts, request: JaxprRequest, donated: tuple[int, ...]
) -> tuple[aot.Memory, tuple[int, int]] | None:
    """What XLA says a jaxpr needs; None where it cannot be compiled by itself."""
    try:
        return None if facts.device is None else _compiled_plain(plain, facts.device, donated, request.device)
    except jax.errors.JaxRuntimeError:
        return None


@compat.cached_by_jaxpr
def joined_programs(forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int) -> tuple[ClosedJaxpr, ...]:
    """args -> (*outs, *gradients) and args -> gradients for a cotangent of one, if there is one scalar
    cotangent; and (*args, *cotangents) -> (*outs, *gradients)."""
    n_args = len(forward.in_avals)
    cotangents = backward.in_avals[len(forward.out_avals) - n_outs :]

    def both(*values: Any) -> list[Any]:
        results = compat.evaluate(forward, values[:n_args])
        return [*results[:n_outs], *compat.evaluate(backward, [*results[n_outs:], *values[n_args:]])]

    anything = compat.trace(both, [*forward.in_avals, *cotangents])
    if len(cotangents) != 1 or cotangents[0].shape != () or compat.varies_over_mesh(cotangents[0]):
        return (anything,)
    one = np.ones((), cotangents[0].dtype)
    value_and_grad = compat.trace(lambda *args: both(*args, one), forward.in_avals)
    grad = compat.trace(lambda *args: both(*args, one)[n_outs:], forward.in_avals)
    return value_and_grad, grad, anything


def is_whole(plain: ClosedJaxpr, facts: module.ModuleFacts) -> bool:
    """True if the enclosing program has just this program's arguments and results."""
    return (
        tuple(map(compat.aval_nbytes, plain.in_avals)) == facts.argument_nbytes
        and tuple(map(compat.aval_nbytes, plain.out_avals)) == facts.output_nbytes
    )


@compat.cached_by_jaxpr
def _compiled_plain(
    plain: ClosedJaxpr, device: jax.Device, donated: tuple[int, ...], model: DeviceModel
) -> tuple[aot.Memory, tuple[int, int]]:
    """What XLA says the plain program needs, and the estimated time and energy of its kernels."""
    compiled = _compile_plain(plain, device, donated)
    return aot.memory(compiled), aot.run_cost(compiled, model)


@compat.cached_by_jaxpr
def pinned_plain_bytes(plain: ClosedJaxpr, device: jax.Device, donated: tuple[int, ...]) -> int:
    """What the plain program needs when it is pinned."""
    return aot.memory(pin(_compile_plain(plain, device, donated))).total_bytes


def _compile_plain(plain: ClosedJaxpr, device: jax.Device, donated: tuple[int, ...]) -> Compiled:
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in plain.in_avals]
    run: Callable[..., Sequence[Any]] = lambda *values: compat.evaluate(plain, values)  # noqa: E731
    with warnings.catch_warnings(), jax.debug_key_reuse(False):
        warnings.simplefilter("ignore")
        jitted = jax.jit(run, donate_argnums=donated, keep_unused=True)
        return jitted.lower(*aot.sharded_specs(specs, device)).compile()
