"""The one IR of the compiler: a straight-line program over buffers, and a plan for running it.

Both lifts (from a jaxpr, from a scheduled HLO module) produce a `Program`; every planner turns a
`Program` and a byte budget into a `Plan`; both emitters, the simulator, the validator and the
printer walk the same `Plan`.

Vocabulary, defined here and nowhere else:

program   ops in schedule order over buffers.
op        one kernel: reads `inputs`, writes `outputs`, takes `cost_ns`.
buffer    something with an address of its own. Views (bitcast, reshape, tuple) are not buffers.
argument  a buffer that exists before the first op. It is never evicted.
output    a buffer that must exist after the last op. It is never evicted.
plan      a sequence of op ids, in the order in which they run. Every op of the program runs first in
          schedule order; a further occurrence is a recompute.
range     a buffer's live range: from one run of its producer to the last use that this run serves. A use is
          served by the latest earlier run.
slot      the place just before the first run of op `j` (slot `j`); recomputes live in slots.
live      bytes of all live ranges that are alive at a step.
page      a live range that leaves for the host's memory and comes back: its bytes are free in between.
peak      the largest live bytes over all steps; `passes.simulate` holds its one definition.
budget    the bytes that the peak must not exceed.

A program manages the bytes of its own temporaries. Storage that no plan can shrink (XLA's arguments
and results, which are allocated for the whole run) is given zero bytes by the lifts and is reported
beside the program, so that planners need no special case.

One example, used in the tests and docstrings of this package (bytes in brackets):

    op 0  a  = embed()         a [4]
    op 1  b  = layer(a)        b [4]
    op 2  c  = layer(b)        c [4]
    op 3  dc = loss_grad(c)    dc[1]
    op 4  db = layer_t(b, dc)  db[1]
    op 5  da = layer_t(a, db)  da[1]  (output)

    live bytes      4, 8, 12, 13, 10, 6          peak 13
    plan 0 1 2 3 1 4 5: `b` dies after op 2 and is recomputed from `a` in slot 4
    live bytes      4, 8, 12 (then b dies), 9, 9, 10, 6     peak 12
"""

from __future__ import annotations

import enum
import functools
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from passes.checked import InputError, check_total, flag, json_of, listed, mapped, whole, worded

BufferId = NewType("BufferId", int)
OpId = NewType("OpId", int)

PROGRAM_FORMAT = "coop-program/1"
PLAN_FORMAT = "coop-plan/1"


@functools.singledispatch
def as_text(shown: object) -> str:
    """A program or a plan as a person reads it. `passes.listing`, which simulates them, says how."""
    return repr(shown)


class Status(enum.StrEnum):
    """What is known about a plan. `INFEASIBLE` is proved; `UNKNOWN` means not found in the limit."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def found(self) -> bool:
        """True if the plan that carries this status keeps the budget."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Something with an address.

    Attributes:
        id: index into `Program.buffers`.
        nbytes: size in bytes; zero for storage that the program does not manage.
        name: for people.
        pageable: False for what cannot be sent to the host, such as a part of a tuple that is used whole.
    """

    id: BufferId
    nbytes: int
    name: str = ""
    pageable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel.

    Attributes:
        id: index into `Program.ops`, which is also its place in the schedule.
        inputs: buffers read; may repeat.
        outputs: buffers written; each buffer is written by exactly one op.
        cost_ns: estimated time of one run.
        recomputable: False for effects, collectives, in-place updates: runs exactly once.
        deadline: the last slot in which a recompute is allowed, because an input's storage is overwritten
            by op `deadline`; None where there is no such limit.
        may_share: pairs (output, input): the output may take the place of the input if this op is the
            input's last use, so that it adds only the difference in size.
        workspace_bytes: scratch memory, alive only while the op runs.
        name: for people, such as "dot_general".
        source: for people, such as "model.py:41 (attention)".
        energy_pj: estimated energy of one run in picojoules; 0 where it is not known.
    """

    id: OpId
    inputs: tuple[BufferId, ...]
    outputs: tuple[BufferId, ...]
    cost_ns: int
    recomputable: bool = True
    deadline: int | None = None
    may_share: tuple[tuple[BufferId, BufferId], ...] = ()
    workspace_bytes: int = 0
    name: str = ""
    source: str = ""
    energy_pj: int = 0

    def can_recompute(self, slot: int) -> bool:
        """True if this op may be recomputed just before the first run of op `slot`."""
        return self.recomputable and (self.deadline is None or slot <= self.deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Ops in schedule order. Construct with `Program.build`, which checks the invariants.

    Attributes:
        name: for people.
        ops: `ops[i].id == i`; every input is an argument or an output of an earlier op.
        buffers: `buffers[i].id == i`.
        arguments: buffers without a producer, sorted.
        outputs: buffers that must survive the last op, sorted.
        producer: for every buffer the op that writes it, None for arguments.
    """

    name: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    arguments: tuple[BufferId, ...]
    outputs: tuple[BufferId, ...]
    producer: tuple[OpId | None, ...] = field(repr=False)

    @classmethod
    def build(
        cls, *, name: str, ops: tuple[Op, ...], buffers: tuple[Buffer, ...], outputs: tuple[BufferId, ...]
    ) -> Program:
        """Check the program's invariants and derive arguments and producers.

        Raises:
            ValueError: ids out of order, a buffer written twice or read before it is written.
        """
        producer: list[OpId | None] = [None] * len(buffers)
        read: set[BufferId] = set()
        for i, buffer in enumerate(buffers):
            if buffer.id != i or buffer.nbytes < 0:
                raise ValueError(f"buffer {i} has id {buffer.id} and {buffer.nbytes} bytes")
        for i, op in enumerate(ops):
            if op.id != i or op.cost_ns < 0 or op.workspace_bytes < 0:
                raise ValueError(f"op {i} ({op.name}) has id {op.id} and cost {op.cost_ns}")
            for b in (*op.inputs, *op.outputs):
                if not 0 <= b < len(buffers):
                    raise ValueError(f"op {i} ({op.name}) names buffer {b} of {len(buffers)}")
            for b in op.outputs:
                if producer[b] is not None or b in read:
                    raise ValueError(f"buffer {b} is written by op {i} and before it")
                producer[b] = op.id
            for b in op.inputs:
                if producer[b] == i:
                    raise ValueError(f"op {i} ({op.name}) reads its own output {b}")
                if producer[b] is None:
                    read.add(b)
            for out, inp in op.may_share:
                if out not in op.outputs or inp not in op.inputs:
                    raise ValueError(f"op {i} ({op.name}) shares {out} with {inp}: not its own")
        for b in outputs:
            if not 0 <= b < len(buffers):
                raise ValueError(f"output {b} is not one of {len(buffers)} buffers")
        return cls(
            name=name,
            ops=ops,
            buffers=buffers,
            arguments=tuple(b.id for b in buffers if producer[b.id] is None),
            outputs=tuple(sorted(set(outputs))),
            producer=tuple(producer),
        )

    @property
    def order(self) -> tuple[OpId, ...]:
        """The ops as they come: the steps of a run without recomputes."""
        return tuple(op.id for op in self.ops)

    @property
    def cost_ns(self) -> int:
        """Cost of running every op once."""
        return sum(op.cost_ns for op in self.ops)

    @property
    def energy_pj(self) -> int:
        """Energy of running every op once; 0 where it is not known."""
        return sum(op.energy_pj for op in self.ops)

    def __str__(self) -> str:
        return as_text(self)

    def to_json(self) -> str:
        """This program in the `coop-program/1` format."""
        ops = []
        for op in self.ops:
            entry: dict[str, Any] = {
                "name": op.name,
                "cost": op.cost_ns,
                "inputs": op.inputs,
                "outputs": op.outputs,
            }
            if not op.recomputable:
                entry["recomputable"] = False
            if op.deadline is not None:
                entry["deadline"] = op.deadline
            if op.may_share:
                entry["may_share"] = op.may_share
            if op.workspace_bytes:
                entry["workspace"] = op.workspace_bytes
            if op.source:
                entry["source"] = op.source
            if op.energy_pj:
                entry["energy"] = op.energy_pj
            ops.append(entry)
        data: dict[str, Any] = {
            "format": PROGRAM_FORMAT,
            "name": self.name,
            "ops": ops,
            "buffers": [b.nbytes for b in self.buffers],
            "outputs": self.outputs,
        }
        stay = [b.id for b in self.buffers if not b.pageable]
        if stay:
            data["stay"] = stay
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Read a program in the `coop-program/1` format.

        Raises:
            InputError: not JSON, another format, or a broken program, with what is wrong.
        """
        data = json_of(text)
        stated = data.get("format") if isinstance(data, Mapping) else data
        if stated != PROGRAM_FORMAT:
            raise InputError(f'expected "format": "{PROGRAM_FORMAT}", found {reprlib.repr(stated)}')
        data = mapped(data, "the program", ("ops", "buffers"))
        ops = tuple(_op_from_json(OpId(i), entry) for i, entry in enumerate(listed(data["ops"], "ops")))
        stay = frozenset(_ids(data.get("stay", []), "stay"))
        buffers = tuple(
            Buffer(id=BufferId(i), nbytes=whole(n, f"buffers[{i}]"), pageable=i not in stay)
            for i, n in enumerate(listed(data["buffers"], "buffers"))
        )
        check_total(sum(b.nbytes for b in buffers) + sum(op.workspace_bytes for op in ops), "all bytes")
        check_total(sum(op.cost_ns for op in ops), "all costs")
        name, outputs = worded(data.get("name", ""), "name"), _ids(data.get("outputs", []), "outputs")
        try:
            return cls.build(name=name, ops=ops, buffers=buffers, outputs=outputs)
        except ValueError as error:
            raise InputError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A live range of a buffer that is sent to the host and brought back.

    Every index is a place in `Plan.steps`; "before step i" is the moment just before that step runs.
    The live range's device bytes are free from `out_done` to `in_start`. Pages of the same live range share
    one copy on the host, which is written once, and lives until the last of them is back.

    Attributes:
        buffer: what is sent.
        run: the step that wrote the live range. The copy to the host starts after it. None would be an
            argument, which is never evicted: the simulator refuses it.
        out_done: before this step the copy has arrived, and the bytes on the device are free.
        in_start: before this step bytes on the device are taken again, and the copy back starts. It is
            a step of the plan, also for an output, whose bytes count at the last step.
        in_done: before this step it is back: uses from here on are served by it.
    """

    buffer: BufferId
    run: int | None
    out_done: int
    in_start: int
    in_done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule with recomputes, and what is known about it.

    Attributes:
        steps: op ids in the order in which they run.
        peak_bytes: the simulated peak.
        budget_bytes: what was asked for.
        overhead_ratio: cost of the recomputes and of waiting for the link over the cost of running every op
            once.
        lower_bound_ratio: no plan for this budget costs less (0.0 where nothing is proved).
        status: see `Status`. With `UNKNOWN` or `INFEASIBLE`, `steps` is the lowest peak found.
        planner: which planner made it.
        seconds: wall time of planning.
        offsets: for every step, the byte offset of each output of that run; empty if not placed.
        pages: live ranges that wait on the host.
        page_offsets: for every page, the byte offset at which it comes back; empty if not placed.
        waiting_ns: how long kernels stand still for the link (`passes.planners.paging.queues`).
        host_peak_bytes: the most bytes on the host at once.
        host_budget_bytes: what was allowed there; 0 for no paging.
        energy_pj: of all steps, and of what the link carries; 0 unless it was the objective.
    """

    steps: tuple[OpId, ...]
    peak_bytes: int
    budget_bytes: int
    overhead_ratio: float
    lower_bound_ratio: float
    status: Status
    planner: str
    seconds: float
    offsets: tuple[tuple[int, ...], ...] = ()
    pages: tuple[Page, ...] = ()
    page_offsets: tuple[int, ...] = ()
    waiting_ns: int = 0
    host_peak_bytes: int = 0
    host_budget_bytes: int = 0
    energy_pj: int = 0

    def recomputes(self) -> tuple[int, ...]:
        """Indices into `steps` that are recomputes."""
        seen: set[OpId] = set()
        recomputed = []
        for i, op in enumerate(self.steps):
            if op in seen:
                recomputed.append(i)
            seen.add(op)
        return tuple(recomputed)

    def __str__(self) -> str:
        return as_text(self)

    def to_json(self) -> str:
        """This plan in the `coop-plan/1` format."""
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "steps": self.steps,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "overhead_ratio": self.overhead_ratio,
            "lower_bound_ratio": self.lower_bound_ratio,
            "status": str(self.status),
            "planner": self.planner,
            "seconds": self.seconds,
        }
        if self.offsets:
            data["offsets"] = self.offsets
        if self.energy_pj:
            data["energy_pj"] = self.energy_pj
        if self.host_budget_bytes:
            data["host"] = {
                "budget_bytes": self.host_budget_bytes,
                "peak_bytes": self.host_peak_bytes,
                "waiting_ns": self.waiting_ns,
                "pages": [[p.buffer, p.run, p.out_done, p.in_start, p.in_done] for p in self.pages],
            }
            if self.page_offsets:
                data["host"]["page_offsets"] = self.page_offsets
        return json.dumps(data)


def _ids(value: object, what: str) -> tuple[BufferId, ...]:
    return tuple(BufferId(whole(b, f"{what}[{i}]")) for i, b in enumerate(listed(value, what)))


def _op_from_json(op_id: OpId, value: object) -> Op:
    op = f"op {op_id}"
    entry = mapped(value, op, ("cost", "inputs", "outputs"))
    deadline = entry.get("deadline")
    return Op(
        id=op_id,
        inputs=_ids(entry["inputs"], f"{op}: inputs"),
        outputs=_ids(entry["outputs"], f"{op}: outputs"),
        cost_ns=whole(entry["cost"], f"cost of {op}"),
        recomputable=flag(entry.get("recomputable", True), f"recomputable of {op}"),
        deadline=None if deadline is None else whole(deadline, f"deadline of {op}"),
        may_share=tuple(
            _pair(p, f"may_share of {op}") for p in listed(entry.get("may_share", []), "may_share")
        ),
        workspace_bytes=whole(entry.get("workspace", 0), f"workspace of {op}"),
        name=worded(entry.get("name", ""), f"name of {op}"),
        source=worded(entry.get("source", ""), f"source of {op}"),
        energy_pj=whole(entry.get("energy", 0), f"energy of {op}"),
    )


def _pair(value: object, what: str) -> tuple[BufferId, BufferId]:
    ids = _ids(value, what)
    if len(ids) != 2:
        raise InputError(f"{what} has {reprlib.repr(value)}, expected pairs of an output and an input")
    return ids[0], ids[1]
