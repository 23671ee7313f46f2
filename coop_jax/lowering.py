"""What happens when a decorated function is lowered: find out about the program, plan, mark, emit.

Only now is the whole program known: its arguments and results, which of them are donated, and the
device. A function that was decorated as a whole is planned here; forward and backward parts were
planned together when they were differentiated (`coop_jax.autodiff`) and only take their mark here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from coop_jax import again, aot, module, xla
from coop_jax.again import PlannedAlreadyError, Wish
from coop_jax.alternatives import OtherWays
from coop_jax.baseline import Baseline, Part, baseline, is_whole, joined_programs, pinned_plain_bytes
from coop_jax.budget import Budget
from coop_jax.errors import ConstraintError, InfeasibleBudgetError, UnsupportedError
from passes.backend import BACKENDS, CUDA
from passes.cost import DEVICES, DeviceModel
from passes.hlo.enforce import OnFragmentation
from passes.ir import Status
from passes.jaxpr import compat
from passes.jaxpr.candidate import JaxprRequest
from passes.jaxpr.constraints import constrain_pair, constrain_program
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.scans.host_stacks import offloaded_bytes, uses_host, with_host_stacks
from passes.jaxpr.shards import enter
from passes.jaxpr.stage import JointResult, plan_joint, plan_program
from passes.jaxpr.values import Constraints, ConstraintUnsupported, names_in
from passes.outcome import StageOutcome, scaled
from passes.saved import OFFLOADED

compat.hide_frames(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RematConfig:
    """What the user asked of one decorated function.

    Attributes:
        budget: see `coop_jax.budget`.
        planner: one of `passes.planners.config.PLANNERS`.
        device: name of a cost model; None takes that of the device that is compiled for.
        name: the function's name, for people.
        pin, on_fragmentation: see `coop_jax.remat`.
        constraints: what was asked about single values.
        derived: True for a derivative of what was planned already, which may use random keys again.
    """

    budget: Budget
    planner: str = "auto"
    device: str | None = None
    name: str = ""
    pin: bool = False
    on_fragmentation: OnFragmentation = "recompute"
    constraints: Constraints = field(default_factory=Constraints)
    derived: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Planned:
    """A forward and a backward part that were planned together. Compared by identity.

    Attributes:
        outcome: what the jaxpr stage did.
        forward: the part without a plan, args -> (*outs, *residuals).
        backward: the part without a plan, (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
    """

    outcome: StageOutcome
    forward: Any
    backward: Any
    n_outs: int

    def __repr__(self) -> str:
        return f"Planned({self.outcome.status}, {self.outcome.planned_temp_bytes} bytes)"


def lower(ctx: Any, *operands: Any, jaxpr: Any, config: RematConfig, planned: Planned | None) -> Any:
    """The lowering rule: write the planned function in place and mark the program."""
    asked = again.wish()
    if asked is not None and asked.plain and (planned is None or not planned.outcome.changed):
        return compat.lower_inline(ctx, jaxpr, operands)
    if asked is not None and asked.replans and planned is not None and (asked.plain or not asked.traced):
        raise PlannedAlreadyError
    with again.nothing_wished():
        written = _planned_and_marked(ctx, jaxpr, config, planned, asked)
    if uses_host(compat.open_jaxpr(written)[0]):
        module.keep_memory_moves(ctx)
    return compat.lower_inline(ctx, written, operands)


def _planned_and_marked(
    ctx: Any, jaxpr: Any, config: RematConfig, planned: Planned | None, asked: Wish | None
) -> Any:
    """The jaxpr to write in the place of `jaxpr`, in a program that is marked."""
    facts = module.module_facts(ctx)
    _refuse_what_cannot_be_kept(ctx, facts)
    program = None if asked is not None else compat.being_lowered()
    device = _model(config, facts)
    plain = _inlined(jaxpr) if planned is None else None
    found: list[Baseline] = []

    def baseline_bytes() -> int:
        unlimited = _request(facts, device, config, xla.UNLIMITED_BYTES)
        plains = (lambda: ()) if planned is None else (lambda: _plain_programs(planned))
        is_plain = planned is None or not planned.outcome.changed
        part = Part(jaxpr=_inlined(jaxpr), is_plain=is_plain, plains=plains)
        found.append(baseline(program, part, facts, unlimited, device))
        return found[0].total_bytes

    memory_bytes = None if facts.device is None else aot.device_memory_bytes(facts.device)
    if asked is None:
        budget_bytes = config.budget.resolve(device_bytes=memory_bytes, baseline_bytes=baseline_bytes)
    else:
        budget_bytes = asked.budget_bytes
    if memory_bytes is not None and BACKENDS[facts.platforms[0]].limits_memory:
        budget_bytes = min(budget_bytes, memory_bytes)  # XLA refuses what needs more
    constrained = None if plain is None else _constrained(plain, config)
    is_known = bool(found) and found[0].compiled and constrained is plain
    request = _request(facts, device, config, budget_bytes, found[0].total_bytes if is_known else None)
    if planned is None:
        jaxpr, outcome = _plan_whole(constrained, request, facts, config, budget_bytes, asked)
    else:
        outcome = _as_planned(planned, request)
    if BACKENDS[facts.platforms[0]].pages:
        jaxpr, paged = with_host_stacks(jaxpr)
        outcome = None if outcome is None else dataclasses.replace(outcome, paged=paged)
    record = xla.Record(
        budget=str(config.budget),
        budget_bytes=budget_bytes,
        planner=config.planner,
        device_name=device.name,
        baseline_total_bytes=found[0].total_bytes if found else None,
        baseline_compiled=found[0].compiled if found else False,
        baseline_cost_ns=found[0].cost_ns if found else None,
        jaxpr=outcome,
        pin=config.pin,
        on_fragmentation=config.on_fragmentation,
        constraints=str(config.constraints),
        host_budget_bytes=_host_budget_bytes(config, facts, jaxpr if constrained is None else constrained),
    )
    alternatives = None
    if program is not None:
        unplanned = (plain,) if planned is None else (planned.forward, planned.backward)
        alternatives = OtherWays(
            program=program,
            key=_program_key(unplanned, facts, record),
            settings=program.settings(),
            calls=module.python_calls(ctx),
        )
    if asked is None and request is not None and outcome is not None and request.fixed_bytes > budget_bytes:
        refused = dataclasses.replace(outcome, budget_bytes=budget_bytes, constraints=record.constraints)
        raise _arguments_over_budget(
            refused if alternatives is None else alternatives.refusal(record, refused)
        )
    xla.mark(ctx, record, _digest(jaxpr), alternatives)
    return jaxpr


def _host_budget_bytes(config: RematConfig, facts: module.ModuleFacts, written: Any) -> int:
    """What the user gives of the host's memory, as far as JAX can use it; all of that for a program, as it
    is written, with values that must wait there."""
    limit_bytes = aot.host_limit_bytes(facts.platforms[0]) or xla.UNLIMITED_BYTES
    forced = OFFLOADED in names_in(compat.open_jaxpr(written)[0])
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


def _program_key(unplanned: Sequence[Any], facts: module.ModuleFacts, record: xla.Record) -> str:
    """Tells programs apart that may share what is known of them: all but their budgets."""
    parts = [*map(_digest, unplanned), str(facts.device_argument_nbytes), str(facts.device_output_nbytes)]
    parts += [str(facts.aliased), str(facts.num_devices), str(facts.argument_parts), str(facts.platforms)]
    parts += [record.device_name, record.planner, record.on_fragmentation, record.constraints]
    parts += [str(record.host_budget_bytes)]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def plan_pair(forward: Any, backward: Any, n_outs: int, config: RematConfig) -> tuple[JointResult, Planned]:
    """Plan a forward and a backward part together, for a program that holds nothing else.

    Args:
        forward: args -> (*outs, *residuals).
        backward: (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
        config: what the user asked for.
    """
    cotangents = backward.in_avals[len(forward.out_avals) - n_outs :]
    request = JaxprRequest(
        budget_bytes=xla.UNLIMITED_BYTES,
        argument_bytes=_nbytes([*forward.in_avals, *cotangents]),
        output_bytes=_nbytes([*forward.out_avals[:n_outs], *backward.out_avals]),
        alias_bytes=0,
        device=_expected_model(config, forward.in_avals),
        planner=config.planner,
    )

    def predicted_bytes() -> int:
        outcome = plan_joint(forward, backward, n_outs, request).outcome
        return max(1, outcome.fixed_bytes + outcome.before_temp_bytes)

    asked = again.wish()
    if asked is None:
        memory_bytes = _expected_memory_bytes(config) if config.budget.needs_device else None
        budget_bytes = config.budget.resolve(device_bytes=memory_bytes, baseline_bytes=predicted_bytes)
        request = dataclasses.replace(request, budget_bytes=budget_bytes)
    else:
        request = _as_wished(request, asked, lambda: plan_joint(forward, backward, n_outs, request).outcome)

    try:
        halves = constrain_pair(forward, backward, n_outs, config.constraints)
    except ConstraintUnsupported as impossible:
        raise ConstraintError(str(impossible)) from None

    joint = plan_joint(*halves, n_outs, request)
    return joint, Planned(outcome=joint.outcome, forward=forward, backward=backward, n_outs=n_outs)


def _constrained(plain: Any, config: RematConfig) -> Any:
    """`plain` with what the user asked about single values; the same object if that is nothing."""
    try:
        return constrain_program(plain, config.constraints)
    except ConstraintUnsupported as impossible:
        raise ConstraintError(str(impossible)) from None


def _plan_whole(
    plain: Any,
    request: JaxprRequest | None,
    facts: module.ModuleFacts,
    config: RematConfig,
    budget_bytes: int,
    asked: Wish | None,
) -> tuple[Any, StageOutcome | None]:
    """Plan a whole function."""
    if request is None:
        return _plan_partitioned(plain, facts, config, budget_bytes, asked)
    request = _as_wished(request, asked, lambda: plan_program(plain, _unlimited(request))[1])
    if BACKENDS[facts.platforms[0]].pages:
        # The jaxpr stage counts what waits on the host as kept on the device.
        beyond = offloaded_bytes(compat.open_jaxpr(plain)[0])
        request = dataclasses.replace(request, budget_bytes=request.budget_bytes + beyond)
    may_pin = config.on_fragmentation == "pin" and BACKENDS[facts.platforms[0]].pins_as_compiled
    may_pin = may_pin and is_whole(plain, facts)
    if may_pin and pinned_plain_bytes(plain, facts.device, facts.donated) <= budget_bytes:
        kept, outcome = plan_program(plain, _unlimited(request))
        return kept, dataclasses.replace(outcome, budget_bytes=budget_bytes)
    return plan_program(plain, request)


def _plan_partitioned(
    plain: Any, facts: module.ModuleFacts, config: RematConfig, budget_bytes: int, asked: Wish | None
) -> tuple[Any, StageOutcome | None]:
    """Plan a program over several devices, of which only the whole's sizes are known here.

    XLA decides how temporaries are split. They are taken to be split as finely as the argument that is split
    most, which a batch usually is; the enforcing stage sees the real sizes. Inside `shard_map` the sizes are
    one device's.
    """
    parts = 1 if enter(plain) is not None else max(facts.argument_parts, default=1)
    arguments = [n // p for n, p in zip(facts.device_argument_nbytes, facts.argument_parts, strict=True)]
    outputs = [n // p for n, p in zip(facts.device_output_nbytes, facts.output_parts, strict=True)]
    request = JaxprRequest(
        budget_bytes=parts * budget_bytes,
        argument_bytes=parts * sum(arguments),
        output_bytes=parts * (sum(outputs) + facts.table_bytes),
        alias_bytes=parts * sum(arguments[i] for i in facts.donated),
        device=_model(config, facts),
        planner=config.planner,
    )
    request = _as_wished(request, asked, lambda: plan_program(plain, _unlimited(request))[1], parts)
    if request.temp_budget_bytes <= 0:
        return plain, None
    made, outcome = plan_program(plain, request)
    return made, scaled(outcome, over=parts) if outcome.changed else None


def _as_wished(
    request: JaxprRequest, asked: Wish | None, unplanned: Callable[[], StageOutcome], parts: int = 1
) -> JaxprRequest:
    """The request with what is wished for, if anything is, in the place of the user's budget.

    Args:
        unplanned: what the jaxpr stage says of the function without a plan.
        parts: how many devices' bytes the request is of.
    """
    if asked is None:
        return request
    if asked.temp_ratio is not None:
        aim_bytes = request.fixed_bytes + max(1, int(asked.temp_ratio * unplanned().before_temp_bytes))
    else:
        aim_bytes = parts * (asked.aim_bytes or asked.budget_bytes)
    return dataclasses.replace(request, budget_bytes=aim_bytes, calibration=asked.calibration.of_parts(parts))


def _unlimited(request: JaxprRequest) -> JaxprRequest:
    return dataclasses.replace(request, budget_bytes=xla.UNLIMITED_BYTES)


def _as_planned(planned: Planned, request: JaxprRequest | None) -> StageOutcome:
    """What was planned before the whole program was known, with what is known of it now."""
    if request is None:
        return planned.outcome
    return dataclasses.replace(
        planned.outcome,
        budget_bytes=request.budget_bytes,
        argument_bytes=request.argument_bytes,
        output_bytes=request.output_bytes,
        alias_bytes=request.alias_bytes,
    )


def _arguments_over_budget(outcome: StageOutcome) -> InfeasibleBudgetError:
    least = max(outcome.fixed_bytes, outcome.least_total_bytes or 0)
    return InfeasibleBudgetError.from_outcome(
        dataclasses.replace(
            outcome,
            status=Status.INFEASIBLE,
            least_total_bytes=least,
            least_proved=least == outcome.fixed_bytes,
        )
    )


def _request(
    facts: module.ModuleFacts,
    device: DeviceModel,
    config: RematConfig,
    budget_bytes: int,
    baseline_total_bytes: int | None = None,
) -> JaxprRequest | None:
    if facts.num_devices > 1:
        return None
    return JaxprRequest(
        budget_bytes=budget_bytes,
        argument_bytes=sum(facts.device_argument_nbytes),
        output_bytes=sum(facts.device_output_nbytes) + facts.table_bytes,
        alias_bytes=sum(facts.device_argument_nbytes[i] for i in facts.donated),
        device=device,
        planner=config.planner,
        baseline_total_bytes=baseline_total_bytes,
    )


def _model(config: RematConfig, facts: module.ModuleFacts) -> DeviceModel:
    if config.device is not None:
        return DEVICES[config.device]
    return aot.model_for(facts.platforms[0], "" if facts.device is None else facts.device.device_kind)


def _expected_memory_bytes(config: RematConfig) -> int | None:
    """Memory of the device that a program is probably for; sure only when it is lowered."""
    if config.device in aot.TARGETS:
        return aot.target(config.device).memory_bytes
    return aot.device_memory_bytes(jax.devices()[0])


def _expected_model(config: RematConfig, avals: Sequence[Any]) -> DeviceModel:
    """The cost model of the device that a program is probably for; sure only when it is lowered."""
    if config.device is not None:
        return DEVICES[config.device]
    device = _expected_device(avals)
    return aot.model_for(device.platform, device.device_kind)


def _expected_device(avals: Sequence[Any]) -> Any:
    """A device like the one that arguments of these abstract values live on, present or absent."""
    kind = compat.device_kind(avals)
    present = jax.devices()[0]
    if kind is None or kind == present.device_kind:
        return present
    return aot.devices(aot.model_for(CUDA.name, kind).name)[0]


@compat.cached_by_jaxpr
def _inlined(jaxpr: Any) -> Any:
    """`jaxpr` as straight-line code; the same object every time."""
    return inline_calls(jaxpr)


def _plain_programs(planned: Planned) -> tuple[Any, ...]:
    """Programs that the enclosing one may be: value and gradient, gradient alone, or some other."""
    return joined_programs(planned.forward, planned.backward, planned.n_outs)


def _nbytes(avals: Sequence[Any]) -> int:
    return sum(map(compat.aval_nbytes, avals))


def _digest(jaxpr: Any) -> str:
    """Tells programs apart by their equations and shapes, the same in every process."""
    parts = [str(aval) for aval in jaxpr.in_avals]
    for eqn in jaxpr.eqns:
        parts.append(eqn.primitive.name)
        parts += [str(v.aval) for v in eqn.outvars]
    return "|".join(parts)
