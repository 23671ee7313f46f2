"""The mark on a program, the one registry of records, and the callback that XLA makes into this package.

A program that contains a decorated function carries a mark: frontend attributes of its module, written
when it is lowered. XLA hands every scheduled module to the callback; an unmarked one goes back
untouched at once, a marked one goes through the enforcing stage. After the compile, XLA's own count is
checked. A program that is loaded from the compilation cache in another process is recognised by its
mark, which tells all but what the enforcing stage did (XLA drops attributes that the callback adds).

Invariant: everything in a mark is a function of the program and the request. It is part of the key of
JAX's compilation cache, so a wall time or a counter in it would defeat that cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import xla as jax_xla

from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError, error_from_text
from passes.cost import DEVICES
from passes.hlo import wire
from passes.hlo.enforce import EnforceRequest, OnFragmentation, enforce
from passes.ir import Status
from passes.jaxpr import compat, module
from passes.outcome import LiveValue, Recomputed, StageOutcome

MARK_FORMAT = "coop-mark/1"
_RECORD = "coop.record"
_FACTS = "coop.facts"
_TRIAL = "coop.trial"
_MODULE_ATTRIBUTES_FIELD = 19
_MOST_UNCHECKED = 256
_UNLIMITED_BYTES = 1 << 62
# Opcodes, as a module has them, within which XLA keeps values longer than they are used. Where only a name
# holds one of them, the program is compiled once more than it needs to be.
_NESTING = (b"conditional", b"while")
SAFE_SIDE_RATIO = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was asked of one program and what each stage did.

    Attributes:
        id: digest of the program and the request.
        budget: the budget as the user gave it, such as "0.5 of the plain program's peak".
        budget_bytes: the same in bytes; the whole program's total must not exceed it.
        planner: the planner that was asked for.
        device_name: the cost model that was used.
        baseline_total_bytes: the total without rematerialization; None if it was not needed.
        baseline_compiled: True if XLA counted it, False if it was predicted.
        baseline_cost_ns: estimated time of the kernels without rematerialization, where they were compiled.
        jaxpr: what the jaxpr stage did; None if it did not run (programs over several devices).
        hlo: what the enforcing stage did; None if it did not run in this process.
        pin: True if the program was asked to be pinned (see `coop_jax.pinning`).
        on_fragmentation: "recompute", "pin" or "error" where only XLA's packing breaks the budget.
        constraints: what was asked about single values, for people.
    """

    id: str = ""
    budget: str
    budget_bytes: int
    planner: str
    device_name: str
    baseline_total_bytes: int | None = None
    baseline_compiled: bool = False
    baseline_cost_ns: int | None = None
    jaxpr: StageOutcome | None = None
    hlo: StageOutcome | None = None
    pin: bool = False
    on_fragmentation: OnFragmentation = "recompute"
    constraints: str = ""


class _Registry:
    """Records by id, and the ids of programs that were marked and are yet to be checked. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._unchecked: dict[str, None] = {}
        self._trials: dict[str, StageOutcome | None] = {}
        self._n_trials = 0
        self._pinning: dict[str, bool] = {}
        self._platforms: set[str] = set()
        self._hooked = False

    def get(self, record_id: str) -> Record | None:
        with self._lock:
            return self._records.get(record_id)

    def put(self, record: Record) -> None:
        """Keep a record, and check the program that carries its mark when it has been compiled."""
        with self._lock:
            self._records[record.id] = record
            self._unchecked[record.id] = None
            while len(self._unchecked) > _MOST_UNCHECKED:
                del self._unchecked[next(iter(self._unchecked))]

    def waiting(self) -> bool:
        with self._lock:
            return bool(self._unchecked)

    def checked(self, record_id: str) -> None:
        with self._lock:
            self._unchecked.pop(record_id, None)

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

    def new_trial(self) -> str:
        """A name for a trial, which has no outcome yet."""
        with self._lock:
            name = f"trial-{self._n_trials}"
            self._n_trials += 1
            self._trials[name] = None
            return name

    def end_trial(self, name: str, outcome: StageOutcome) -> None:
        with self._lock:
            self._trials[name] = outcome

    def take_trial(self, name: str) -> StageOutcome | None:
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


REGISTRY = _Registry()


def install(platform: str) -> None:
    """Make sure that XLA calls back for `platform` ("cpu" or "cuda"); cheap after the first time."""
    callback, hooks = REGISTRY.first_use(platform)
    if callback:
        jax_xla.register_hlo_module_transformation(
            lambda data: _callback(data, platform),
            name="coop_jax",
            stage=jax_xla.PipelineStage.POST_SCHEDULER,
            platforms=platform,
        )
    if hooks:
        compat.register_error_conversion(lambda error: error_from_text(str(error)))
        compat.on_compiled(_check)


def mark(ctx: Any, record: Record, digest: str) -> Record:
    """Mark the program that is being lowered; the smallest budget in a program wins.

    Args:
        ctx: the context of a lowering rule.
        record: what is known so far.
        digest: of the part of the program that `record` is about.

    Returns:
        The program's record, with its id.
    """
    for platform in module.module_facts(ctx).platforms:
        if platform in ("cpu", "cuda"):
            install(platform)
    present = module.module_attributes(ctx)
    if _FACTS in present and _record_from(present).budget_bytes <= record.budget_bytes:
        return _record_from(present)
    text = json.dumps(_facts(record), sort_keys=True)
    name = module.module_name(ctx)
    record_id = hashlib.sha256(f"{MARK_FORMAT}|{name}|{digest}|{text}".encode()).hexdigest()[:16]
    record = dataclasses.replace(record, id=record_id)
    REGISTRY.put(record)
    module.set_module_attributes(ctx, {_RECORD: record_id, _FACTS: text})
    return record


def mark_trial(ctx: Any, record: Record) -> str:
    """Mark the program that is being lowered as one to try out; the name of the trial.

    Its compile ends in the callback, with an error, when the enforcing stage has spoken.
    """
    for platform in module.module_facts(ctx).platforms:
        install(platform)
    name = REGISTRY.new_trial()
    text = json.dumps(_facts(record), sort_keys=True)
    module.set_module_attributes(ctx, {_RECORD: name, _FACTS: text, _TRIAL: name})
    return name


def outcome_of_trial(name: str) -> StageOutcome | None:
    """What the enforcing stage said; None if XLA failed before it was asked."""
    return REGISTRY.take_trial(name)


def record_of_lowered(lowered: Any) -> Record | None:
    """The record of a program that is lowered but not compiled; None if it holds no decorated function."""
    attributes = module.attributes_of(lowered.compiler_ir("stablehlo"))
    return _record_from(attributes) if _FACTS in attributes else None


def record_of(compiled: Any) -> Record | None:
    """The record of a compiled program (`jax.stages.Compiled`); None if it holds no decorated function."""
    modules = compiled.runtime_executable().hlo_modules()
    record = _record_of_module(modules[0].as_serialized_hlo_module_proto()) if modules else None
    if record is None or record.hlo is None or record.hlo.status.found:
        return record
    # It was left to the check and passed it.
    return dataclasses.replace(record, hlo=dataclasses.replace(record.hlo, status=Status.FEASIBLE))


def _record_of_module(data: bytes) -> Record | None:
    if _RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    return _record_from(attributes) if _FACTS in attributes else None


def _record_from(attributes: Mapping[str, str]) -> Record:
    record_id = attributes[_RECORD]
    known = REGISTRY.get(record_id)
    return _record_from_facts(record_id, json.loads(attributes[_FACTS])) if known is None else known


def _callback(data: bytes, platform: str) -> bytes | None:
    """Enforce the budget of a scheduled module; None leaves it as it is."""
    if _RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    if _FACTS not in attributes:
        return None
    record = _record_from(attributes)
    request = EnforceRequest(
        budget_bytes=record.budget_bytes,
        device=DEVICES[record.device_name],
        platform="cpu" if platform == "cpu" else "cuda",
        planner=record.planner,
        old_rules=compat.OLD_RULES,
        on_fragmentation=_on_fragmentation(record, platform, trial=_TRIAL in attributes),
    )
    if REGISTRY.pinning(record.id):
        if any(opcode in data for opcode in _NESTING):
            request = dataclasses.replace(request, budget_bytes=_UNLIMITED_BYTES)
        else:
            REGISTRY.begin_pinning(record.id, keep=False)
    returned, outcome = enforce(data, request)
    outcome = dataclasses.replace(outcome, budget_bytes=record.budget_bytes, constraints=record.constraints)
    if _TRIAL in attributes:
        REGISTRY.end_trial(attributes[_TRIAL], outcome)
        raise RuntimeError("coop_jax: the trial is over")
    if not outcome.status.found and not _leave_to_check(outcome):
        REGISTRY.checked(record.id)
        raise RuntimeError(InfeasibleBudgetError.from_outcome(_of_the_program(outcome)).to_text())
    REGISTRY.put(dataclasses.replace(record, hlo=outcome))
    return None if returned is data else returned


def _on_fragmentation(record: Record, platform: str, *, trial: bool) -> OnFragmentation:
    """What the record says; but nobody pins a program that `coop_jax.pinning` does not compile."""
    if record.on_fragmentation != "pin":
        return record.on_fragmentation
    pinned = platform == "cpu" and (trial or REGISTRY.pinning(record.id) is not None)
    return "pin" if pinned else "recompute"


def _of_the_program(outcome: StageOutcome) -> StageOutcome:
    """A proof about the kernels of one module says nothing about other ways to write the program."""
    if outcome.budget_bytes < outcome.fixed_bytes:
        return outcome
    return dataclasses.replace(outcome, status=Status.UNKNOWN, least_proved=False)


def _leave_to_check(outcome: StageOutcome) -> bool:
    """True if XLA's own count should decide: the prediction errs on the safe side, and is close."""
    close = outcome.fixed_bytes + outcome.before_temp_bytes <= outcome.budget_bytes * SAFE_SIDE_RATIO
    return close and outcome.status is Status.UNKNOWN


def _check(executable: Any) -> None:
    """Hold XLA's own count of a program that was just compiled, or found in the cache, against its budget."""
    if not REGISTRY.waiting():
        return
    record = _record_of_module(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    if record is None:
        return
    REGISTRY.checked(record.id)
    if REGISTRY.pinning(record.id) is not None:
        return
    total = int(executable.get_compiled_memory_stats().total_allocation_bytes)
    check_total(record, total)


def check_total(record: Record, total: int) -> None:
    """Hold XLA's count of a program against its budget.

    Raises:
        InfeasibleBudgetError: it is over, as was expected.
        BudgetExceededError: it is over.
    """
    if total > record.budget_bytes:
        if record.hlo is not None and not record.hlo.status.found:
            raise InfeasibleBudgetError.from_outcome(_of_the_program(record.hlo))
        raise BudgetExceededError(budget_bytes=record.budget_bytes, compiled_bytes=total)


def _facts(record: Record) -> dict[str, Any]:
    """The part of a record that a mark may hold: no wall times, nothing that differs between runs."""
    return {
        "format": MARK_FORMAT,
        "budget": record.budget,
        "budget_bytes": record.budget_bytes,
        "planner": record.planner,
        "device": record.device_name,
        "baseline_total_bytes": record.baseline_total_bytes,
        "baseline_compiled": record.baseline_compiled,
        "baseline_cost_ns": record.baseline_cost_ns,
        "pin": record.pin,
        "on_fragmentation": record.on_fragmentation,
        "constraints": record.constraints,
        "jaxpr": None if record.jaxpr is None else _outcome_dict(record.jaxpr),
    }


def _record_from_facts(record_id: str, facts: Mapping[str, Any]) -> Record:
    return Record(
        id=record_id,
        budget=facts["budget"],
        budget_bytes=facts["budget_bytes"],
        planner=facts["planner"],
        device_name=facts["device"],
        baseline_total_bytes=facts["baseline_total_bytes"],
        baseline_compiled=facts["baseline_compiled"],
        baseline_cost_ns=facts["baseline_cost_ns"],
        pin=facts["pin"],
        on_fragmentation=facts["on_fragmentation"],
        constraints=facts["constraints"],
        jaxpr=None if facts["jaxpr"] is None else _outcome_from(facts["jaxpr"]),
    )


def _outcome_dict(outcome: StageOutcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "seconds": 0.0}


def _outcome_from(data: Mapping[str, Any]) -> StageOutcome:
    fields = dict(data)
    fields["status"] = Status(fields["status"])
    fields["recomputed"] = tuple(Recomputed(**r) for r in fields["recomputed"])
    fields["tightest"] = tuple(LiveValue(**v) for v in fields["tightest"])
    return StageOutcome(**fields)


def read_attributes(data: bytes) -> dict[str, str]:
    """Frontend attributes of a serialized HloModuleProto, without parsing the rest of it."""
    found: dict[str, str] = {}
    for number, value in wire.contents(data):
        if number == _MODULE_ATTRIBUTES_FIELD:
            for _, entry in wire.contents(value):
                parts = dict(wire.contents(entry))
                found[parts.get(1, b"").decode()] = parts.get(2, b"").decode()
    return found
