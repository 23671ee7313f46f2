"""The callback that XLA makes into this package, the one registry of records, and the check.

A program that contains a decorated function carries a mark (`coop_jax.record`), written when it is lowered.
XLA hands every scheduled module to the callback; an unmarked one goes back untouched at once, a marked one
goes through the enforcing stage, and where that finds no way, or a dearer one than is known, through the
program's alternatives (`coop_jax.alternatives`). After every compile, and every look into JAX's compilation
cache, XLA's own count of a marked program is held against the budget that its mark names: the verdict
belongs to the program, whoever compiled it and however often it is asked for.

A program that is loaded from the compilation cache in another process is recognised by its mark, which tells
all but what the enforcing stage did (XLA drops attributes that the callback adds).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend import xla as jax_xla

from coop_jax import module
from coop_jax.aot import host_bytes
from coop_jax.dumping import dump_enforced
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError, error_from_text
from coop_jax.record import (
    FACTS,
    RECORD,
    TRIAL,
    Record,
    marked,
    read_attributes,
    record_of_mark,
    with_attributes,
)
from coop_jax.tpu import bytes_out_of_memory
from coop_jax.verdict import leave_to_check, of_the_program, over_budget, refused_before
from passes.backend import BACKENDS
from passes.cost import DEVICES
from passes.hlo.enforce import EnforceRequest, OnFragmentation, enforce
from passes.ir import Status
from passes.jaxpr import compat
from passes.outcome import StageOutcome

UNLIMITED_BYTES = 1 << 62
# How many programs are remembered: what the enforcing stage did to them, and how to ask for them again.
MOST_RECORDS = 1024
MOST_ALTERNATIVES = 64
# Opcodes, as a module has them, within which XLA keeps values longer than they are used. Where only a name
# holds one of them, the program is compiled once more than it needs to be.
_NESTING = (b"conditional", b"while")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A program that was compiled to look at it.

    Attributes:
        outcome: what the enforcing stage said; `budget_bytes` is that of the trial.
        module: the scheduled module that it returned.
    """

    outcome: StageOutcome
    module: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to make of a program that the enforcing stage has seen.

    Attributes:
        record: with what was done by both stages.
        module: the scheduled module that XLA should go on with; None for the one that is there.
    """

    record: Record
    module: bytes | None = None


class Alternatives(Protocol):
    """Other ways to write a program; see `coop_jax.alternatives`."""

    def choose(self, record: Record, outcome: StageOutcome, module: bytes) -> Choice:
        """What to take, when the enforcing stage has said `outcome` of the scheduled `module`."""


class _Registry:
    """What is known of programs, by the ids of their records. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._alternatives: OrderedDict[str, Alternatives] = OrderedDict()
        self._trials: dict[str, Trial] = {}
        self._n_trials = 0
        self._pinning: dict[str, bool] = {}
        self._short: OrderedDict[str, int] = OrderedDict()
        self._platforms: set[str] = set()
        self._hooked = False

    def get(self, record_id: str) -> Record | None:
        with self._lock:
            return self._records.get(record_id)

    def put(self, record: Record) -> None:
        """Remember a record; the ones that were put first are forgotten first."""
        with self._lock:
            _remember(self._records, record.id, record, MOST_RECORDS)

    def offer(self, record_id: str, alternatives: Alternatives) -> None:
        """Remember how else the program with this record could be written."""
        with self._lock:
            _remember(self._alternatives, record_id, alternatives, MOST_ALTERNATIVES)

    def alternatives(self, record_id: str) -> Alternatives | None:
        with self._lock:
            return self._alternatives.get(record_id)

    def settle(self, record_id: str) -> None:
        """Forget the alternatives of a program that needs none; they keep the user's function alive."""
        with self._lock:
            self._alternatives.pop(record_id, None)

    def begin_pinning(self, record_id: str, *, keep: bool) -> None:
        """The program with this record will be pinned after its compile, and checked only after that.

        Args:
            record_id: of the record.
            keep: True to leave the program as it is and see what pinning makes of it.
        """
        with self._lock:
            self._pinning[record_id] = keep

    def end_pinning(self, record_id: str) -> None:
        with self._lock:
            self._pinning.pop(record_id, None)

    def pinning(self, record_id: str) -> bool | None:
        """What `begin_pinning` was told last; None if nobody will pin the program."""
        with self._lock:
            return self._pinning.get(record_id)

    def fell_short(self, record_id: str, nbytes: int) -> None:
        """A program was over its budget by so much after it was planned: the next compile is held to less."""
        with self._lock:
            _remember(self._short, record_id, self._short.get(record_id, 0) + nbytes, MOST_RECORDS)

    def shortfall(self, record_id: str) -> int:
        """By how much less than its budget the program with this record is held to."""
        with self._lock:
            return self._short.get(record_id, 0)

    def new_trial(self) -> str:
        """A name for a trial."""
        with self._lock:
            self._n_trials += 1
            return f"trial-{self._n_trials}"

    def end_trial(self, name: str, trial: Trial) -> None:
        with self._lock:
            self._trials[name] = trial

    def take_trial(self, name: str) -> Trial | None:
        """What a trial said, which is then forgotten."""
        with self._lock:
            return self._trials.pop(name, None)

    def first_use(self, platform: str) -> tuple[bool, bool]:
        """(this platform needs the callback, the process needs the hooks); says yes once each."""
        with self._lock:
            answer = (platform not in self._platforms, not self._hooked)
            self._platforms.add(platform)
            self._hooked = True
            return answer


def _remember[V](table: OrderedDict[str, V], key: str, value: V, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)


REGISTRY = _Registry()


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
    return over_budget(record, needed_bytes)


def mark(ctx: Any, record: Record, digest: str, alternatives: Alternatives | None = None) -> Record:
    """Mark the program that is being lowered; the smallest budget in a program wins.

    Args:
        ctx: the context of a lowering rule.
        record: what is known so far.
        digest: of the part of the program that `record` is about.
        alternatives: how else the program could be written.

    Returns:
        The program's record, with its id.
    """
    for platform in module.module_facts(ctx).platforms:
        if platform in BACKENDS:
            install(platform)
    present = module.module_attributes(ctx)
    if FACTS in present and _record_from(present).budget_bytes <= record.budget_bytes:
        return _record_from(present)
    record, attributes = marked(record, name=module.module_name(ctx), digest=digest)
    REGISTRY.put(record)
    if alternatives is not None:
        REGISTRY.offer(record.id, alternatives)
    module.set_module_attributes(ctx.module_context.module, attributes)
    return record


def look(lowered: Any, record: Record) -> Trial | None:
    """Compile a lowered program as far as XLA's schedule, before code is generated, to look at it.

    Args:
        lowered: a `jax.stages.Lowered`, which is of no use afterwards.
        record: the budget of the trial, planner and cost model.

    Returns:
        What the enforcing stage made of it; None if XLA failed before it was asked.
    """
    for platform in module.platforms_of(lowered):
        install(platform)
    name = REGISTRY.new_trial()
    _, attributes = marked(record, name=name, digest="")
    module.set_module_attributes(lowered.compiler_ir("stablehlo"), {**attributes, TRIAL: name})
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        lowered.compile(compiler_options=compat.compiler_options())
    return REGISTRY.take_trial(name)


def record_of_lowered(lowered: Any) -> Record | None:
    """The record of a program that is lowered but not compiled; None if it holds no decorated function."""
    attributes = module.attributes_of(lowered.compiler_ir("stablehlo"))
    return _record_from(attributes) if FACTS in attributes else None


def record_of(compiled: Any) -> Record | None:
    """The record of a compiled program (`jax.stages.Compiled`); None if it holds no decorated function."""
    modules = compiled.runtime_executable().hlo_modules()
    record = _record_of_module(modules[0].as_serialized_hlo_module_proto()) if modules else None
    if record is None or record.hlo is None or record.hlo.status.found:
        return record
    # It was left to the check and passed it.
    return dataclasses.replace(record, hlo=dataclasses.replace(record.hlo, status=Status.FEASIBLE))


def with_hlo(record: Record, outcome: StageOutcome) -> Record:
    """The record with what the enforcing stage did."""
    return dataclasses.replace(record, hlo=outcome)


def _record_of_module(data: bytes) -> Record | None:
    if RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    return _record_from(attributes) if FACTS in attributes and TRIAL not in attributes else None


def _record_from(attributes: Mapping[str, str]) -> Record:
    return REGISTRY.get(attributes[RECORD]) or record_of_mark(attributes)


def _callback(data: bytes, platform: str) -> bytes | None:
    """Enforce the budget of a scheduled module; None leaves it as it is."""
    if RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    if FACTS not in attributes:
        return None
    try:
        return _enforced(data, attributes, platform)
    except KeyboardInterrupt:
        # XLA makes an error of its own of whatever is raised here; `_as_ours` takes it back.
        _THREAD.interrupted = True
        raise


def _enforced(data: bytes, attributes: Mapping[str, str], platform: str) -> bytes | None:
    trial, record = attributes.get(TRIAL), _record_from(attributes)
    held_bytes = record.budget_bytes - REGISTRY.shortfall(record.id)
    request = EnforceRequest(
        budget_bytes=held_bytes,
        device=DEVICES[record.device_name],
        platform=platform,
        planner=record.planner,
        old_rules=compat.OLD_RULES,
        host_bytes=record.host_budget_bytes,
        on_fragmentation=_on_fragmentation(record, platform, trial=trial is not None),
    )
    pinning = REGISTRY.pinning(record.id)
    if pinning:
        if any(opcode in data for opcode in _NESTING):
            request = dataclasses.replace(request, budget_bytes=UNLIMITED_BYTES)
        else:
            REGISTRY.begin_pinning(record.id, keep=False)
    returned, outcome = enforce(data, request)
    dump_enforced(data, returned, request, outcome)
    outcome = dataclasses.replace(outcome, budget_bytes=record.budget_bytes, constraints=record.constraints)
    if trial is not None:
        REGISTRY.end_trial(trial, Trial(outcome=outcome, module=returned))
        raise RuntimeError("coop_jax: the trial is over")
    alternatives = REGISTRY.alternatives(record.id) if pinning is None else None
    choice = Choice(record=with_hlo(record, outcome))
    if alternatives is not None:
        choice = alternatives.choose(dataclasses.replace(record, budget_bytes=held_bytes), outcome, returned)
        choice = _for_budget(choice, record.budget_bytes)
        if choice.module is None and outcome.status.found:
            REGISTRY.settle(record.id)
    return _taken(choice, returned, data, platform)


def _for_budget(choice: Choice, budget_bytes: int) -> Choice:
    """A choice that was made for fewer bytes, in the words of the user's own budget."""
    assert choice.record.hlo is not None, "the enforcing stage has spoken"
    hlo = dataclasses.replace(choice.record.hlo, budget_bytes=budget_bytes)
    record = dataclasses.replace(choice.record, budget_bytes=budget_bytes, hlo=hlo)
    return dataclasses.replace(choice, record=record)


def _taken(choice: Choice, returned: bytes, data: bytes, platform: str) -> bytes | None:
    """Go on with a choice: the bytes for XLA, or the refusal."""
    record, outcome = choice.record, choice.record.hlo
    assert outcome is not None, "the enforcing stage has spoken"
    if choice.module is None and not outcome.status.found and not leave_to_check(outcome, BACKENDS[platform]):
        raise RuntimeError(InfeasibleBudgetError.from_outcome(of_the_program(outcome)).to_text())
    REGISTRY.put(record)
    _THREAD.compiling = record
    if choice.module is not None:  # the program keeps the mark that it came with, whatever is returned
        return with_attributes(choice.module, read_attributes(data))
    return None if returned is data else returned


def _on_fragmentation(record: Record, platform: str, *, trial: bool) -> OnFragmentation:
    """What the record says; but nobody pins a program that `coop_jax.pinning` does not compile."""
    if record.on_fragmentation != "pin":
        return record.on_fragmentation
    pinned = BACKENDS[platform].pins_as_compiled and (trial or REGISTRY.pinning(record.id) is not None)
    return "pin" if pinned else "recompute"


def _check(executable: Any) -> None:
    """Hold XLA's own count of a program that was just compiled, or found in the cache, against its budget."""
    _THREAD.compiling = None
    modules = executable.hlo_modules()
    record = _record_of_module(modules[0].as_serialized_hlo_module_proto()) if modules else None
    if record is None or REGISTRY.pinning(record.id) is not None:
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
    total, on_host = int(memory.total_allocation_bytes), host_bytes(memory)
    if on_host > record.host_budget_bytes > 0:
        raise BudgetExceededError(
            budget_bytes=record.host_budget_bytes, compiled_bytes=on_host, memory="host"
        )
    if total <= record.budget_bytes:
        return
    if record.hlo is None:
        raise refused_before(record, memory)
    if not BACKENDS[DEVICES[record.device_name].platform].fast_bytes:
        raise over_budget(record, total)
    REGISTRY.fell_short(record.id, total - record.budget_bytes)
    raise over_budget(record, total, record.budget_bytes - REGISTRY.shortfall(record.id))
