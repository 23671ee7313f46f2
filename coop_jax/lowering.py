"""What happens when a decorated function is lowered: find out about the program, plan, mark, emit.

Only now is the whole program known: its arguments and results, which of them are donated, and the
device. A function that was decorated as a whole is planned here; forward and backward parts were
planned together when they were differentiated (`coop_jax.autodiff`) and only take their mark here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from coop_jax import aot, mark, module, relowering
from coop_jax.alternatives import OtherWays
from coop_jax.apart import alone, needed_bytes, planned_apart
from coop_jax.baseline import Baseline, Part, baseline, is_whole, joined_programs, pinned_plain_bytes
from coop_jax.call import as_one, is_one_call
from coop_jax.config import RematConfig
from coop_jax.digests import digest, unplanned_digest
from coop_jax.errors import ConstraintError, InfeasibleBudgetError, UnsupportedError
from coop_jax.record import UNLIMITED_BYTES, Record
from coop_jax.relowering import PlannedAlreadyError, Wish
from coop_jax.requests import Devices, as_wished, devices_of, request_of, unlimited
from coop_jax.tuning import refuse_what_cannot_run
from passes.backend import BACKENDS, CUDA
from passes.cost import DEVICES, DeviceModel
from passes.ir import Status
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.constraints import constrain_pair, constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.scans.host_stacks import offloaded_bytes, uses_host, with_host_stacks
from passes.jaxpr.values import ConstraintUnsupported, keeps_marked, names_in
from passes.outcome import StageOutcome, scaled
from passes.pipeline import plan_joint, plan_program
from passes.saved import OFFLOADED

compat.hide_frames(__file__)

SAVED_INSIDE = "what a policy of `jax.checkpoint` inside it saves"


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Planned:
    """A forward and a backward part that were planned together. Compared by identity.

    Attributes:
        outcome: what the jaxpr stage did.
        forward: the part without a plan, args -> (*outs, *residuals).
        backward: the part without a plan, (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
        constraints: what holds about single values, for people.
    """

    outcome: StageOutcome
    forward: ClosedJaxpr
    backward: ClosedJaxpr
    n_outs: int
    constraints: str

    def __repr__(self) -> str:
        return f"Planned({self.outcome.status}, {self.outcome.planned_temp_bytes} bytes)"


def lower(ctx: Any, *operands: Any, jaxpr: ClosedJaxpr, config: RematConfig, planned: Planned | None) -> Any:
    """The lowering rule: write the planned function in place and mark the program."""
    asked = relowering.wish()
    if asked is not None and asked.plain and (planned is None or not planned.outcome.changed):
        return compat.lower_inline(ctx, jaxpr, operands)
    if asked is not None and asked.replans and planned is not None and (asked.plain or not asked.traced):
        raise PlannedAlreadyError
    with relowering.nothing_wished():
        written = _planned_and_marked(ctx, jaxpr, config, planned, asked)
    if uses_host(compat.open_jaxpr(written)[0]):
        module.keep_memory_moves(ctx)
    return compat.lower_inline(ctx, written, operands)


def _planned_and_marked(
    ctx: Any, jaxpr: ClosedJaxpr, config: RematConfig, planned: Planned | None, asked: Wish | None
) -> ClosedJaxpr:
    """The jaxpr to write in the place of `jaxpr`, in a program that is marked."""
    if asked is not None and asked.alone:
        config = dataclasses.replace(config, budget=dataclasses.replace(config.budget, host=None))
    facts = module.module_facts(ctx)
    _refuse_what_cannot_be_kept(ctx, facts)
    if config.tune and asked is None:
        refuse_what_cannot_run(facts.device)
    program = None if asked is not None else compat.being_lowered()
    device = _model(config, facts)
    plain = _inlined(jaxpr) if planned is None else None
    constrained = None if plain is None else _constrained(plain, config)
    devices = devices_of(facts, constrained)
    known = None
    if asked is None and config.budget.needs_baseline:
        request = request_of(devices, UNLIMITED_BYTES, device, config.planner, config.objective)
        known = baseline(program, _part(jaxpr, planned, apart=config.apart), facts, devices, request)
    budget_bytes = _budget_bytes(config, facts, known, asked)
    if constrained is not None:
        is_plain = constrained is plain and not devices.several
        known_bytes = known.total_bytes if known is not None and known.compiled and is_plain else None
        request = request_of(devices, budget_bytes, device, config.planner, config.objective, known_bytes)
        jaxpr, outcome = _plan_whole(constrained, request, devices, facts, config, asked)
    else:
        assert planned is not None, "the program is planned here or was"
        outcome = _as_planned(planned, devices, budget_bytes)
    if BACKENDS[facts.platforms[0]].pages:
        jaxpr, paged = with_host_stacks(jaxpr)
        outcome = None if outcome is None else dataclasses.replace(outcome, paged=outcome.paged + paged)
    forced = _must_wait(jaxpr if constrained is None else constrained)
    record = Record(
        budget=str(config.budget),
        budget_bytes=budget_bytes,
        planner=config.planner,
        device_name=device.name,
        baseline_total_bytes=None if known is None else known.total_bytes,
        baseline_compiled=known is not None and known.compiled,
        baseline_cost_ns=None if known is None else known.cost_ns,
        baseline_energy_pj=None if known is None else known.energy_pj,
        jaxpr=outcome,
        pin=config.pin,
        on_fragmentation=config.on_fragmentation,
        constraints=_constraints_text(config, constrained) if planned is None else planned.constraints,
        objective=config.objective,
        tune=config.tune,
        host_budget_bytes=_host_budget_bytes(config, facts, forced=forced),
        whole=asked is not None and asked.whole,
        apart=planned is not None and is_whole(jaxpr, facts),
        unsplit=devices.parts > 1 and planned is not None and planned.outcome.changed,
    )
    alternatives = None
    if program is not None:
        without = dataclasses.replace(record, host_budget_bytes=0)
        # Without host memory a program whose values must wait there is another one.
        may_page = bool(config.budget.host_bytes and BACKENDS[facts.platforms[0]].pages and not forced)
        if not is_one_call(program.jaxpr):
            program = dataclasses.replace(program, as_one=as_one(program.jaxpr, config))
        alternatives = OtherWays(
            program=program,
            key=_program_key(program, facts, record),
            alone=_program_key(program, facts, without) if may_page else "",
            settings=program.inside(compat.trace_context),
            calls=module.python_calls(ctx),
        )
    if asked is None:
        _refuse_too_large_arguments(record, devices, alternatives)
    # What is only looked at is marked once more, for that.
    told_apart = "" if asked is not None else digest(jaxpr if program is None else program.jaxpr)
    mark.write(ctx, record, told_apart, alternatives)
    return jaxpr


def _part(jaxpr: ClosedJaxpr, planned: Planned | None, *, apart: bool) -> Part:
    """What of the program is known where the whole cannot be had; `apart` as in `RematConfig`."""
    if planned is None:
        return Part(jaxpr=_inlined(jaxpr), is_plain=True, plains=tuple)
    forward, backward, n_outs = planned.forward, planned.backward, planned.n_outs
    made, gradients = (list(map(compat.aval_nbytes, p.out_avals)) for p in (jaxpr, backward))
    both: tuple[ClosedJaxpr, ...] = (backward, forward) if made == gradients else ()
    if made[:n_outs] == list(map(compat.aval_nbytes, forward.out_avals[:n_outs])):
        both = forward, backward  # else it was batched since
    return Part(
        jaxpr=_inlined(jaxpr),
        is_plain=not planned.outcome.changed,
        plains=partial(joined_programs, forward, backward, n_outs),
        apart=both if apart else (),
    )


def _budget_bytes(
    config: RematConfig, facts: module.ModuleFacts, baseline: Baseline | None, asked: Wish | None
) -> int:
    """What is asked for, in bytes; on some platforms XLA refuses what needs more than the device's memory."""
    memory_bytes = None if facts.device is None else aot.device_memory_bytes(facts.device)
    if asked is None:
        baseline_bytes = None if baseline is None else (lambda: baseline.total_bytes)
        budget_bytes = config.budget.resolve(device_bytes=memory_bytes, baseline_bytes=baseline_bytes)
    else:
        budget_bytes = asked.budget_bytes
    limited = memory_bytes is not None and BACKENDS[facts.platforms[0]].limits_memory
    return min(budget_bytes, memory_bytes) if memory_bytes is not None and limited else budget_bytes


def _must_wait(written: ClosedJaxpr) -> bool:
    """True for a program with values that must wait on the host."""
    return OFFLOADED in names_in(compat.open_jaxpr(written)[0])


def _host_budget_bytes(config: RematConfig, facts: module.ModuleFacts, *, forced: bool) -> int:
    """What the user gives of the host's memory, as far as JAX can use it; all of that where values must wait
    there."""
    limit_bytes = aot.host_limit_bytes(facts.platforms[0]) or UNLIMITED_BYTES
    asked_bytes = config.budget.host_bytes or (limit_bytes if forced else 0)
    return min(asked_bytes, limit_bytes)


def _refuse_what_cannot_be_kept(ctx: Any, facts: module.ModuleFacts) -> None:
    """Refuse platforms without a callback, and exports: what is exported is compiled by others, elsewhere.

    Raises:
        UnsupportedError: with what to do instead.
    """
    if module.is_for_export(ctx):
        raise UnsupportedError(
            "a decorated function cannot be exported: the exported program would be compiled without its "
            "budget, perhaps where coop_jax is not. Export the function as it was (`f.__wrapped__`), and "
            'decorate its call where it is compiled: coop.remat(exported.call, budget="8GiB").'
        )
    if len(facts.platforms) != 1 or facts.platforms[0] not in BACKENDS:
        raise UnsupportedError(
            f"a budget cannot be enforced on {' and '.join(facts.platforms)}: that is supported on "
            f"{', '.join(BACKENDS)}, and on one of them at a time. Leave `coop.remat` out there."
        )
    if any(facts.output_on_host) and not facts.has_host_memory:
        # XLA:CPU forgets the memory of results when the callback returns another module.
        raise UnsupportedError(
            f"{sum(facts.output_on_host)} results of this program are in the host's memory, which on "
            f"{facts.platforms[0]} is the device's own: leave `coop.on_host` and moves to the host out there."
        )


def _program_key(program: compat.BeingLowered, facts: module.ModuleFacts, record: Record) -> str:
    """Tells programs apart that may share what is known of them: all but their budgets."""
    parts = [
        unplanned_digest(program.jaxpr),
        str(facts.device_argument_nbytes),
        str(facts.device_output_nbytes),
    ]
    parts += [str(facts.aliased), str(facts.num_devices), str(facts.argument_parts), str(facts.platforms)]
    parts += [record.device_name, record.planner, record.on_fragmentation, record.constraints]
    parts += [str(record.host_budget_bytes), str(record.objective)]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def plan_pair(
    forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int, config: RematConfig
) -> tuple[tuple[ClosedJaxpr, ClosedJaxpr], Planned]:
    """Plan a forward and a backward part together, for a program that holds nothing else.

    Args:
        forward: args -> (*outs, *residuals).
        backward: (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
        config: what the user asked for.
    """
    cotangents = backward.in_avals[len(forward.out_avals) - n_outs :]
    request = JaxprRequest(
        budget_bytes=UNLIMITED_BYTES,
        argument_bytes=_nbytes([*forward.in_avals, *cotangents]),
        output_bytes=_nbytes([*forward.out_avals[:n_outs], *backward.out_avals]),
        alias_bytes=0,
        device=_expected_model(config, forward.in_avals),
        planner=config.planner,
        objective=config.objective,
    )

    def predicted_bytes() -> int:
        if config.apart:
            return max(map(needed_bytes, alone((forward, backward), n_outs, request)))
        return needed_bytes(plan_joint(forward, backward, n_outs, request)[1])

    asked = relowering.wish()
    if asked is None:
        memory_bytes = _expected_memory_bytes(config) if config.budget.needs_device else None
        budget_bytes = config.budget.resolve(device_bytes=memory_bytes, baseline_bytes=predicted_bytes)
        request = dataclasses.replace(request, budget_bytes=budget_bytes)
    else:
        request = as_wished(request, asked, lambda: plan_joint(forward, backward, n_outs, request)[1])

    try:
        halves = constrain_pair(forward, backward, n_outs, config.constraints)
    except ConstraintUnsupported as impossible:
        raise ConstraintError(str(impossible)) from None

    parts, outcome = plan_joint(*halves, n_outs, request)
    if config.apart and asked is None:
        parts, outcome = planned_apart(halves, n_outs, request, (parts, outcome))
    said = _constraints_text(config, *halves)
    return parts, Planned(
        outcome=outcome, forward=forward, backward=backward, n_outs=n_outs, constraints=said
    )


def _constrained(plain: ClosedJaxpr, config: RematConfig) -> ClosedJaxpr:
    """`plain` with what the user asked about single values; the same object if that is nothing."""
    try:
        return constrain_program(plain, config.constraints)
    except ConstraintUnsupported as impossible:
        raise ConstraintError(str(impossible)) from None


def _constraints_text(config: RematConfig, *constrained: ClosedJaxpr | None) -> str:
    """What holds about single values, for people: what was asked, and what a `jax.checkpoint` inside holds.

    Args:
        constrained: the program, or its parts, with everything that is kept marked.
    """
    asked = config.constraints
    by_user = asked.save or asked.offload or asked.policy is not None
    opened = [compat.open_jaxpr(part)[0] for part in constrained if part is not None]
    inside = () if by_user or not any(map(keeps_marked, opened)) else (SAVED_INSIDE,)
    return ", ".join((*filter(None, (str(asked),)), *inside))


def _plan_whole(
    plain: ClosedJaxpr,
    request: JaxprRequest,
    devices: Devices,
    facts: module.ModuleFacts,
    config: RematConfig,
    asked: Wish | None,
) -> tuple[ClosedJaxpr, StageOutcome | None]:
    """Plan a whole function. The outcome is of one device; None where nothing is left to plan."""
    budget_bytes = request.budget_bytes
    request = as_wished(request, asked, lambda: plan_program(plain, unlimited(request))[1], devices.parts)
    if BACKENDS[facts.platforms[0]].pages:
        # The jaxpr stage counts what waits on the host as kept on the device.
        beyond = offloaded_bytes(compat.open_jaxpr(plain)[0])
        host_bytes = _host_budget_bytes(config, facts, forced=_must_wait(plain))
        own_bytes = devices.parts * (host_bytes - facts.host_bytes)
        request = dataclasses.replace(
            request, budget_bytes=request.budget_bytes + beyond, host_bytes=max(0, own_bytes - beyond)
        )
    if devices.several:
        if request.temp_budget_bytes <= 0:
            return plain, None
        made, outcome = plan_program(plain, request)
        return made, scaled(outcome, over=devices.parts)
    may_pin = config.on_fragmentation == "pin" and BACKENDS[facts.platforms[0]].pins_as_compiled
    may_pin = may_pin and is_whole(plain, facts)
    if may_pin and pinned_plain_bytes(plain, facts.device, facts.donated) <= budget_bytes:
        kept, outcome = plan_program(plain, unlimited(request))
        return kept, dataclasses.replace(outcome, budget_bytes=budget_bytes)
    return plan_program(plain, request)


def _as_planned(planned: Planned, devices: Devices, budget_bytes: int) -> StageOutcome:
    """What was planned before the whole program was known, with what is known of it now."""
    if devices.several:
        return planned.outcome
    return dataclasses.replace(
        planned.outcome,
        budget_bytes=budget_bytes,
        argument_bytes=devices.argument_bytes,
        output_bytes=devices.output_bytes,
        alias_bytes=devices.alias_bytes,
    )


def _refuse_too_large_arguments(record: Record, devices: Devices, alternatives: OtherWays | None) -> None:
    """Refuse a budget below arguments and results, with the least that is known to be met; what they take is
    needed, and not known to be enough.

    Raises:
        InfeasibleBudgetError: it is.
    """
    outcome = record.jaxpr
    if devices.several or outcome is None or outcome.fixed_bytes <= record.budget_bytes:
        return
    refused = dataclasses.replace(
        outcome, budget_bytes=record.budget_bytes, constraints=record.constraints, apart=record.apart
    )
    refused = refused if alternatives is None else alternatives.refusal(record, refused)
    known = refused.least_total_bytes
    least = None if known is None else max(refused.fixed_bytes, known)
    proved = least == refused.fixed_bytes
    raise InfeasibleBudgetError.from_outcome(
        dataclasses.replace(refused, status=Status.INFEASIBLE, least_total_bytes=least, least_proved=proved)
    )


def _model(config: RematConfig, facts: module.ModuleFacts) -> DeviceModel:
    if config.device is not None:
        return _with_power(DEVICES[config.device], config)
    kind = "" if facts.device is None else facts.device.device_kind
    return _with_power(aot.model_for(facts.platforms[0], kind), config)


def _with_power(device: DeviceModel, config: RematConfig) -> DeviceModel:
    """The same; for the least energy its power must be known.

    Raises:
        UnsupportedError: it is not.
    """
    if config.objective.least == "energy" and not device.watts:
        known = ", ".join(sorted(d.name for d in DEVICES.values() if d.watts))
        raise UnsupportedError(
            f"objective is 'energy', but what a {device.name} takes is not known: its maker publishes no "
            f"power. It is known of {known}; leave objective out for the least time."
        )
    return device


def _expected_memory_bytes(config: RematConfig) -> int | None:
    """Memory of the device that a program is probably for; sure only when it is lowered."""
    if config.device in aot.TARGETS:
        return aot.target(config.device).memory_bytes
    return aot.device_memory_bytes(jax.devices()[0])


def _expected_model(config: RematConfig, avals: Sequence[Any]) -> DeviceModel:
    """The cost model of the device that a program is probably for; sure only when it is lowered."""
    if config.device is not None:
        return _with_power(DEVICES[config.device], config)
    kind, device = _device_kind(avals), jax.devices()[0]
    if kind is not None and kind != device.device_kind:
        device = aot.devices(aot.model_for(CUDA.name, kind).name)[0]
    return _with_power(aot.model_for(device.platform, device.device_kind), config)


def _device_kind(avals: Sequence[Any]) -> str | None:
    """The kind of device, such as "NVIDIA H200", that the first of `avals` with a mesh says; else None."""
    for aval in avals:
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        kind = getattr(getattr(mesh, "abstract_device", None), "device_kind", None)
        if kind is not None:
            return str(kind)
    return None


@compat.cached_by_jaxpr
def _inlined(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` as straight-line code; the same object every time."""
    return inline_calls(jaxpr)


def _nbytes(avals: Sequence[Any]) -> int:
    return sum(map(compat.aval_nbytes, avals))
