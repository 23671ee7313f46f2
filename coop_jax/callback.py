"""The callback that XLA makes into this package, and the check after every compile.

XLA hands every scheduled module to the callback; an unmarked one (`coop_jax.mark`) goes back unchanged at
once, a marked one goes through the enforcing stage, and where that finds no way, or a dearer one than is
known, through the program's alternatives (`coop_jax.alternatives`). After every compile, and every look into
JAX's compilation cache, XLA's own count of a marked program is held against the budget that its mark names:
the verdict belongs to the program, whoever compiled it and however often it is asked for.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from jax.extend import xla as jax_xla

from coop_jax.aot import host_bytes
from coop_jax.dumping import dump_enforced
from coop_jax.errors import BudgetExceededError, CoopError, InfeasibleBudgetError, error_from_text
from coop_jax.record import (
    FACTS,
    RECORD,
    TRIAL,
    UNLIMITED_BYTES,
    Record,
    read_attributes,
    with_attributes,
    with_hlo,
)
from coop_jax.registry import REGISTRY, Choice, PinMode, Trial, record_from, record_of_module
from coop_jax.tpu import bytes_out_of_memory
from coop_jax.verdict import leave_to_check, of_the_program, over_budget, refused_before
from passes import pipeline
from passes.backend import BACKENDS
from passes.cost import DEVICES
from passes.counts import MemoryBytes, Verdict
from passes.hlo.enforce import EnforceRequest, OnFragmentation
from passes.interpreter import on_deep_stack
from passes.jaxpr import compat
from passes.outcome import StageOutcome, changes

# Opcodes, as a module has them, within which XLA keeps values longer than they are used. Where only a name
# holds one of them, the program is compiled once more than it needs to be.
_NESTING = (b"conditional", b"while")


class _Thread(threading.local):
    """What this thread does: it took a Ctrl-C, and what it compiles after the enforcing stage has spoken."""

    interrupted: bool = False
    compiling: Record | None = None


_THREAD = _Thread()


def install(platform: str) -> None:
    """Make sure that XLA calls back for a backend, by its name; cheap after the first time."""
    callback, hooks = REGISTRY.first_use(platform)
    if callback:
        jax_xla.register_hlo_module_transformation(
            lambda data: _callback(data, platform),
            name="coop_jax",
            stage=jax_xla.PipelineStage.POST_SCHEDULER,
            platforms=platform,
        )
    if hooks:
        compat.register_error_conversion(_as_ours)
        compat.on_compiled(_check)


def _as_ours(error: Exception) -> BaseException | None:
    """The error that a failed compile is about, where it is one of ours or a Ctrl-C; else None.

    Where XLA itself refuses a program that it was left with, for its memory, that is the refusal of a budget.
    """
    if _THREAD.interrupted:
        _THREAD.interrupted = False
        return KeyboardInterrupt()
    record, _THREAD.compiling = _THREAD.compiling, None
    needed_bytes = bytes_out_of_memory(str(error))
    if record is None or needed_bytes is None:
        return error_from_text(str(error))
    return _fell_short(record, needed_bytes)


def _fell_short(record: Record, total_bytes: int) -> CoopError:
    """The error for a program that needs more than was promised; its next compile is held to so much less.

    So much is what the plan fell short of what it promised itself. That may be far below the budget: held to
    less by what the budget is exceeded by alone, the next compile would take the same plan.
    """
    refused = record.hlo is not None and not record.hlo.status.found
    if refused or not BACKENDS[DEVICES[record.device_name].platform].fast_bytes:
        return over_budget(record, total_bytes)
    held_bytes = record.budget_bytes - REGISTRY.of(record).short_bytes
    promised_bytes = held_bytes if record.hlo is None else min(held_bytes, record.hlo.planned_total_bytes)
    missed_bytes = total_bytes - promised_bytes
    REGISTRY.update(record, short_bytes=missed_bytes)
    return over_budget(record, total_bytes, record.budget_bytes - missed_bytes)


@on_deep_stack
def _callback(data: bytes, platform: str) -> bytes | None:
    """Enforce the budget of a scheduled module; None leaves it as it is."""
    if RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    if FACTS not in attributes:
        return None
    try:
        return _enforced(data, attributes, platform)
    except CoopError as error:
        raise RuntimeError(error.to_text()) from None
    except KeyboardInterrupt:
        # XLA makes an error of its own of whatever is raised here; `_as_ours` takes it back.
        _THREAD.interrupted = True
        raise


def nests(data: bytes) -> bool:
    """True if XLA may keep values of a module longer than they are used."""
    return any(opcode in data for opcode in _NESTING)


@on_deep_stack
def tried(scheduled: bytes, record: Record, platform: str) -> Trial | None:
    """What the enforcing stage makes of a scheduled module within a record's budget; None where it fails."""
    try:
        return _tried(scheduled, record, platform)
    except CoopError:
        return None


def _tried(scheduled: bytes, record: Record, platform: str) -> Trial:
    returned, outcome = _held(scheduled, record, record.budget_bytes, platform, pinned=True)
    return Trial(outcome=outcome, module=returned, scheduled=scheduled)


def _held(
    data: bytes, record: Record, held_bytes: int, platform: str, *, pinned: bool
) -> tuple[bytes, StageOutcome]:
    """What the enforcing stage returns for a budget, and says of it."""
    planned = record.jaxpr if record.jaxpr is not None and record.jaxpr.changed else None
    request = EnforceRequest(
        budget_bytes=held_bytes,
        device=DEVICES[record.device_name],
        platform=platform,
        planner=record.planner,
        old_rules=compat.OLD_RULES,
        host_bytes=record.host_budget_bytes,
        objective=record.objective.after(changes(filter(None, [record.jaxpr]))[0]),
        on_fragmentation=_on_fragmentation(record, platform, pinned=pinned),
        expected_bytes=None if planned is None else planned.planned_temp_bytes,
    )
    returned, outcome = pipeline.enforce(data, request)
    dump_enforced(data, returned, request, outcome)
    return returned, dataclasses.replace(
        outcome, budget_bytes=record.budget_bytes, constraints=record.constraints, apart=record.apart
    )


def _enforced(data: bytes, attributes: Mapping[str, str], platform: str) -> bytes | None:
    record = record_from(attributes)
    if TRIAL in attributes:
        REGISTRY.update(record, trial=_tried(data, record, platform))
        raise RuntimeError("coop_jax: the trial is over")
    state = REGISTRY.of(record)
    held_bytes = record.budget_bytes - state.short_bytes
    kept, pinned = state.pin is PinMode.KEEP and nests(data), state.pin is not PinMode.NONE
    returned, outcome = _held(data, record, UNLIMITED_BYTES if kept else held_bytes, platform, pinned=pinned)
    choice = Choice(record=with_hlo(record, outcome))
    if state.alternatives is not None and state.pin is PinMode.NONE:
        held = dataclasses.replace(record, budget_bytes=held_bytes)
        choice = _for_budget(state.alternatives.choose(held, outcome, returned), record.budget_bytes)
        is_kept = choice.record.hlo is not None and choice.record.hlo.status.found
        if choice.module is None and is_kept:
            REGISTRY.update(record, alternatives=None)
        elif outcome.status.found:  # XLA does not pack as it was steered to: the program is left as it came
            returned = data
    return _taken(choice, returned, data, platform)


def _for_budget(choice: Choice, budget_bytes: int) -> Choice:
    """A choice that was made for fewer bytes, since XLA needed so many more, in the user's own budget."""
    hlo, more_bytes = choice.record.hlo, budget_bytes - choice.record.budget_bytes
    assert hlo is not None, "the enforcing stage has spoken"
    if more_bytes and hlo.least_total_bytes is not None:
        is_counted = hlo.least_total_bytes > budget_bytes
        least_bytes = hlo.least_total_bytes + (0 if is_counted else more_bytes)
        hlo = dataclasses.replace(hlo, least_total_bytes=least_bytes, least_proved=False)
    hlo = dataclasses.replace(hlo, budget_bytes=budget_bytes)
    record = dataclasses.replace(choice.record, budget_bytes=budget_bytes, hlo=hlo)
    return dataclasses.replace(choice, record=record)


def _taken(choice: Choice, returned: bytes, data: bytes, platform: str) -> bytes | None:
    """Go on with a choice: the bytes for XLA, or the refusal."""
    record, outcome = choice.record, choice.record.hlo
    assert outcome is not None, "the enforcing stage has spoken"
    if choice.module is None and not outcome.status.found and not leave_to_check(outcome, BACKENDS[platform]):
        raise InfeasibleBudgetError.from_outcome(of_the_program(outcome))
    REGISTRY.update(record, record=record)
    _THREAD.compiling = record
    if choice.module is not None:  # the program keeps the mark that it came with, whatever is returned
        return with_attributes(choice.module, read_attributes(data))
    return None if returned is data else returned


def _on_fragmentation(record: Record, platform: str, *, pinned: bool) -> OnFragmentation:
    """What the record says; but nobody pins a program that `coop_jax.pinning` does not compile."""
    if record.on_fragmentation != "pin" or (pinned and BACKENDS[platform].pins_as_compiled):
        return record.on_fragmentation
    return "recompute"


def _check(executable: Any) -> None:
    """Hold XLA's own count of a program that was just compiled, or found in the cache, against its budget."""
    _THREAD.compiling = None
    modules = executable.hlo_modules()
    record = record_of_module(modules[0].as_serialized_hlo_module_proto()) if modules else None
    if record is None or REGISTRY.of(record).pin is not PinMode.NONE:
        return
    check_total(record, executable.get_compiled_memory_stats())


def check_total(record: Record, memory: Any) -> None:
    """Hold XLA's count of a program against its budget.

    Args:
        memory: XLA's `CompiledMemoryStats`.

    Raises:
        InfeasibleBudgetError: it is over, as was expected, or as was found by another process from whose
            compile it comes, through JAX's compilation cache.
        BudgetExceededError: it is over, though the enforcing stage had found a way.
    """
    counted = MemoryBytes(total=int(memory.total_allocation_bytes), host=host_bytes(memory))
    budget = MemoryBytes(total=record.budget_bytes, host=record.host_budget_bytes)
    verdict = pipeline.check(budget, counted)
    if verdict is Verdict.KEPT:
        return
    if verdict is Verdict.OVER_ON_HOST:
        raise BudgetExceededError(budget_bytes=budget.host, compiled_bytes=counted.host, memory="host")
    if record.hlo is None:
        raise refused_before(record, memory)
    raise _fell_short(record, counted.total)
