"""What was asked of one program and what was done: the record, and the mark that carries it in a module.

A mark is two frontend attributes of a module: the record's id, and its facts as JSON.

Invariant: everything in a mark is a function of the program and the request. It is part of the key of
JAX's compilation cache, so a wall time or a counter in it would defeat that cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from passes.hlo import proto, wire
from passes.hlo.enforce import OnFragmentation
from passes.objective import LEAST_TIME, Objective
from passes.outcome import StageOutcome, changes

UNLIMITED_BYTES = 1 << 62
MARK_FORMAT = "coop-mark/1"
RECORD, FACTS, TRIAL = "coop.record", "coop.facts", "coop.trial"
_MODULE_ATTRIBUTES_FIELD = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One program that was run to see how fast it is (see `coop_jax.tuning`).

    Attributes:
        run_ns: the least time of a few runs, on made-up arguments.
        estimated_ns: what its kernels were estimated to take.
        total_bytes: what it was expected to need.
    """

    run_ns: int
    estimated_ns: int
    total_bytes: int


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
        baseline_cost_ns, baseline_energy_pj: estimated time and energy of the kernels without
            rematerialization, where XLA made them.
        jaxpr: what the jaxpr stage did; None if it did not run (programs over several devices).
        hlo: what the enforcing stage did; None if it did not run in this process.
        pin: True if the program was asked to be pinned (see `coop_jax.pinning`).
        on_fragmentation: "recompute", "pin" or "error" where only XLA's packing breaks the budget.
        constraints: what was asked about single values, for people.
        host_budget_bytes: what may wait in the host's memory, as far as JAX can use it; 0: no paging.
        objective: what is least.
        tune: how many candidates were asked to be run; 0: none.
        timed: those that were, the fastest, which was taken, first.
        whole: True where the whole program was planned in the place of the decorated functions in it.
        apart: True for a forward or a backward part that is a program of its own, as outside `jit`.
        unsplit: True where parts were planned, and changed, before it was known that their values are split
            over devices: for the budget of one device with the bytes of all.
    """

    id: str = ""
    budget: str
    budget_bytes: int
    planner: str
    device_name: str
    baseline_total_bytes: int | None = None
    baseline_compiled: bool = False
    baseline_cost_ns: int | None = None
    baseline_energy_pj: int | None = None
    jaxpr: StageOutcome | None = None
    hlo: StageOutcome | None = None
    pin: bool = False
    on_fragmentation: OnFragmentation = "recompute"
    constraints: str = ""
    host_budget_bytes: int = 0
    objective: Objective = LEAST_TIME
    tune: int = 0
    timed: tuple[Timed, ...] = ()
    whole: bool = False
    apart: bool = False
    unsplit: bool = False

    @property
    def stages(self) -> tuple[StageOutcome, ...]:
        """What the stages did that ran."""
        return tuple(stage for stage in (self.jaxpr, self.hlo) if stage is not None)

    @property
    def is_changed(self) -> bool:
        """True if one of both stages changed the program."""
        return any(stage.changed for stage in self.stages)

    @property
    def changes(self) -> tuple[float, float]:
        """By which shares time and energy change, by the kernels of both programs where both are known.

        Else what each stage says of what it was given: before XLA that is an estimate of its kernels, so that
        programs with and without a plan of the jaxpr stage cannot be compared by it.
        """
        time_ratio, energy_ratio = changes(self.stages)
        if self.hlo is None or not self.baseline_cost_ns:
            return time_ratio, energy_ratio
        if self.baseline_energy_pj:
            energy_ratio = (self.hlo.energy_pj + self.hlo.recompute_pj) / self.baseline_energy_pj - 1
        return self.hlo.run_ns / self.baseline_cost_ns - 1, energy_ratio


def with_hlo(record: Record, outcome: StageOutcome) -> Record:
    """The record with what the enforcing stage did."""
    return dataclasses.replace(record, hlo=outcome)


def marked(record: Record, *, name: str, digest: str) -> tuple[Record, dict[str, str]]:
    """The record with its id, and the attributes that mark a module with it.

    Args:
        name: the module's.
        digest: of the part of the program that `record` is about.
    """
    text = json.dumps(_facts(record), sort_keys=True)
    record_id = hashlib.sha256(f"{MARK_FORMAT}|{name}|{digest}|{text}".encode()).hexdigest()[:16]
    return dataclasses.replace(record, id=record_id), {RECORD: record_id, FACTS: text}


def record_of_mark(attributes: Mapping[str, str]) -> Record:
    """The record of a marked module, without what the enforcing stage did."""
    facts = json.loads(attributes[FACTS])
    given = {name: facts[name] for name in _IN_MARK}
    jaxpr = None if facts["jaxpr"] is None else StageOutcome.from_dict(facts["jaxpr"])
    objective = Objective(**facts["objective"])
    return Record(id=attributes[RECORD], jaxpr=jaxpr, objective=objective, **given)


_OWN = ("id", "jaxpr", "hlo", "timed", "objective")
_IN_MARK = tuple(f.name for f in dataclasses.fields(Record) if f.name not in _OWN)


def _facts(record: Record) -> dict[str, Any]:
    """The part of a record that a mark may hold: no wall times, nothing that differs between runs."""
    given = {name: getattr(record, name) for name in _IN_MARK}
    jaxpr = None if record.jaxpr is None else {**record.jaxpr.to_dict(), "seconds": 0.0}
    objective = dataclasses.asdict(record.objective)
    return {**given, "format": MARK_FORMAT, "jaxpr": jaxpr, "objective": objective}


def read_attributes(data: bytes) -> dict[str, str]:
    """Frontend attributes of a serialized HloModuleProto, without parsing the rest of it."""
    attributes: dict[str, str] = {}
    for number, value in wire.contents(data):
        if number == _MODULE_ATTRIBUTES_FIELD:
            for _, entry in wire.contents(value):
                parts = dict(wire.contents(entry))
                attributes[parts.get(1, b"").decode()] = parts.get(2, b"").decode()
    return attributes


def with_attributes(data: bytes, attributes: Mapping[str, str]) -> bytes:
    """A serialized module with these frontend attributes in the place of its own."""
    module = proto.parse(data)
    del module.frontend_attributes.map[:]
    for key, value in attributes.items():
        module.frontend_attributes.map.add(key=key, value=value)
    return proto.serialize(module)
