"""The exact mode with pages: recomputes, pages and both queues in one CP-SAT model over an axis.

Time is the axis of `passes.planners.exact.axis`: every slot offers each op once, in schedule order. In the
moment before a position each buffer is in one of four states, or nowhere:

device    there, to be read; `kept` says that its copy on the host is kept, too
leaving   there, to be read, and on its way to the host
away      on the host
arriving  its bytes are taken, it may not be read yet

and changes it by being made or sent, by `gone` (it is out), `start` (it comes back) and `back` (it is back).
One literal for each buffer and moment says each of that; clocks say when steps start and copies end. Copies
one way are in order: an interval for each, without overlap, none before those of an earlier moment.
The time of the last moment is minimized, or the energy of steps and copies within a limit of time: POET's
program (2022), with copies that overlap with kernels. What is proved holds for plans on the axis, which
recompute an op at most once in a slot, in schedule order: such a plan is called feasible, and its planner
says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from passes.ir import BufferId, OpId, Page, Plan, Program, Status
from passes.link import Link
from passes.liveness import Graph
from passes.planners.exact.axis import Axis
from passes.planners.exact.limits import Clock, ExactConfig
from passes.planners.paging.director import Prices
from passes.planners.paging.energy import with_energy
from passes.planners.paging.queues import traffic
from passes.simulate import simulate

Literal = cp_model.IntVar
STATES = ("device", "leaving", "away", "arriving")
# One for each buffer, state and moment; larger models are not built.
MOST_LITERALS = 60_000
PROVED = "exact, proved for plans that recompute an op once a slot"


@dataclass(slots=True)
class _Model:
    """The model and its variables; moment `i` is just before position `i`, the last one is the end.

    Attributes:
        first: where on the axis every op runs first.
        on: for every position whether its step runs.
        state: (state, moment, buffer), after what happens in the moment.
        event: ("gone" | "start" | "back" | "kept", moment, buffer).
        sent: (position, buffer): the copy made there goes to the host.
        freed, begun: the clock at every moment, after waiting for what leaves, and for what comes back.
        ends: (moment, buffer): when the copy that starts to come back there is back.
    """

    axis: Axis
    link: Link
    horizon_ns: int
    first: list[int] = field(default_factory=list)
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    on: list[Literal] = field(default_factory=list)
    state: dict[tuple[str, int, int], Literal] = field(default_factory=dict)
    event: dict[tuple[str, int, int], Literal] = field(default_factory=dict)
    sent: dict[tuple[int, int], Literal] = field(default_factory=dict)
    freed: list[Literal] = field(default_factory=list)
    begun: list[Literal] = field(default_factory=list)
    ends: dict[tuple[int, int], Literal] = field(default_factory=dict)
    never: Literal = field(init=False)

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.axis.graph

    @property
    def end(self) -> int:
        """The last moment."""
        return len(self.axis.steps)

    def buffers(self, moment: int) -> list[int]:
        """Buffers that may be somewhere in a moment."""
        return [b for b, op in enumerate(self.graph.producer) if op >= 0 and self.first[op] < moment]

    def __post_init__(self) -> None:
        self.never = self.model.new_constant(0)

    def at(self, state: str, moment: int, buffer: int) -> Literal:
        """A state's literal, 0 where it cannot be."""
        return self.state.get((state, moment, buffer), self.never)

    def there(self, moment: int, buffer: int, states: Sequence[str] = STATES) -> cp_model.LinearExpr:
        """1 if the buffer is in one of some states."""
        return total([self.at(state, moment, buffer) for state in states])

    def clock(self, name: str) -> Literal:
        """A time."""
        return self.model.new_int_var(0, self.horizon_ns, name)


def total(terms: Sequence[cp_model.LinearExprT]) -> cp_model.LinearExpr:
    """A sum that is an expression, even of nothing."""
    return cp_model.LinearExpr.sum([*terms, 0, 0])


def solve_paged(
    program: Program, budget_bytes: int, hint: Plan, link: Link, config: ExactConfig,
    energy: Prices | None = None,
) -> Plan:  # fmt: skip
    """The quickest plan with pages within both budgets, with a proof where the limit allows it.

    Args:
        hint: a plan of the same program for the same budgets; need not keep them.
        energy: the plan of least energy instead.

    Returns:
        Never worse than a hint that keeps the budgets, by `PROVED` if no plan on the axis takes less time
        (energy). The hint as it is where nothing better is found. The lower bound stays the hint's, which
        holds for all plans.
    """
    graph = Graph.of(program)
    axis = Axis.around(graph, range(len(graph.cost_ns)), range(len(graph.cost_ns) + 1))
    if hint.status is Status.OPTIMAL or len(axis.steps) * len(graph.nbytes) * 8 > MOST_LITERALS:
        return hint
    horizon_ns = _horizon_ns(axis, link, hint, energy)
    made = _build(axis, link, horizon_ns, budget_bytes, hint.host_budget_bytes)
    made.model.minimize(made.begun[made.end] if energy is None else _energy_pj(made, energy))
    solver = cp_model.CpSolver()
    status = Clock(config).solve(solver, made.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint
    answer = _plan_of(made, solver, program, hint)
    if answer.peak_bytes > budget_bytes or answer.host_peak_bytes > hint.host_budget_bytes:
        return hint
    planner = PROVED if status == cp_model.OPTIMAL else hint.planner
    answer = with_energy(program, answer, link) if energy else answer
    worse = answer.energy_pj >= hint.energy_pj if energy else answer.overhead_ratio >= hint.overhead_ratio
    if hint.status.found and worse:
        return dataclasses.replace(hint, planner=planner)
    return dataclasses.replace(answer, planner=planner, status=Status.FEASIBLE)


def _horizon_ns(axis: Axis, link: Link, hint: Plan, energy: Prices | None) -> int:
    """No plan that is looked for takes longer."""
    graph = axis.graph
    base_ns = sum(graph.cost_ns)
    if energy is None and hint.status.found:
        return base_ns + round(hint.overhead_ratio * base_ns)
    moved = sum(link.to_host_ns(n) + link.from_host_ns(n) for n in graph.nbytes)
    longest_ns = sum(graph.cost_ns[op] for op in axis.steps) + len(axis.steps) * moved
    return longest_ns if energy is None else int(min(longest_ns, energy.limit_ns))


def _energy_pj(made: _Model, energy: Prices) -> cp_model.LinearExpr:
    """Of all steps, and of what the link carries."""
    runs = [energy.op[op] * on for op, on in zip(made.axis.steps, made.on, strict=True)]
    starts = [(b, literal) for (event, _, b), literal in made.event.items() if event == "start"]
    copies = [(b, literal) for (_, b), literal in made.sent.items()] + starts
    return total(runs) + total([round(energy.byte * made.graph.nbytes[b]) * literal for b, literal in copies])


def _build(axis: Axis, link: Link, horizon_ns: int, budget_bytes: int, host_bytes: int) -> _Model:
    """All families."""
    made = _Model(axis, link, horizon_ns, [i for i, first in enumerate(axis.is_first) if first])
    add_variables(made)
    add_changes(made)
    add_reads(made)
    add_memory(made, budget_bytes)
    add_host_memory(made, host_bytes)
    add_clocks(made)
    add_queue_out(made)
    add_queue_in(made)
    return made


def add_variables(made: _Model) -> None:
    """One literal for each step, state and event; outputs are on the device at the end."""
    model, graph = made.model, made.graph
    for i, first in enumerate(made.axis.is_first):
        made.on.append(model.new_constant(1) if first else model.new_bool_var(f"run at {i}"))
        for b in graph.outputs[made.axis.steps[i]]:
            if graph.arrays.pageable[b]:
                made.sent[i, b] = model.new_bool_var(f"send {b} at {i}")
                model.add_implication(made.sent[i, b], made.on[i])
    for i in range(made.end + 1):
        for b in made.buffers(i):
            for state in STATES if graph.arrays.pageable[b] else STATES[:1]:
                made.state[state, i, b] = model.new_bool_var(f"{b} {state} at {i}")
            model.add(made.there(i, b) <= 1)
            for event in ("gone", "start", "back", "kept") if graph.arrays.pageable[b] else ():
                made.event[event, i, b] = model.new_bool_var(f"{b} {event} at {i}")
    for b in graph.results:
        model.add(made.at("device", made.end, b) + made.at("leaving", made.end, b) == 1)


def add_changes(made: _Model) -> None:
    """What is somewhere was there before, or came there by what happened in between."""
    for (event, i, b), gone in made.event.items():
        if event == "gone":
            _add_changes_of(made, i, b, gone)
    for (state, i, b), here in made.state.items():
        if state == "device" and ("gone", i, b) not in made.event:
            made.model.add(here <= made.at("device", i - 1, b) + _made(made, i - 1, b))


def _made(made: _Model, position: int, buffer: int) -> Literal:
    """1 if the step at a position makes a buffer."""
    is_produced = position >= 0 and buffer in made.graph.outputs[made.axis.steps[position]]
    return made.on[position] if is_produced else made.never


def _add_changes_of(made: _Model, i: int, b: int, gone: Literal) -> None:
    model = made.model
    start, back, kept = (made.event[event, i, b] for event in ("start", "back", "kept"))
    before = {state: made.at(state, i - 1, b) for state in STATES}
    here = {state: made.state[state, i, b] for state in STATES}
    sent = made.sent.get((i - 1, b), made.never)
    held = made.event.get(("kept", i - 1, b), made.never)
    model.add(gone <= before["leaving"] + sent + held)
    model.add(start <= before["away"] + gone)
    model.add(back <= before["arriving"] + start)
    model.add(here["device"] <= before["device"] + _made(made, i - 1, b) - sent + back)
    model.add(here["leaving"] <= before["leaving"] + sent)
    model.add(here["away"] <= before["away"] + gone)
    model.add(here["arriving"] <= before["arriving"] + start)
    model.add(kept <= held + back)
    model.add(kept <= here["device"])
    model.add(gone <= here["away"] + start)
    model.add(start <= here["arriving"] + back)
    model.add(back <= here["device"])
    real = made.on[i] if i < made.end else model.new_constant(1)
    for event in (gone, start, back):
        model.add(event <= real)
    if i == made.end:
        model.add(gone + start == 0)


def add_reads(made: _Model) -> None:
    """A step finds its inputs on the device, and what it makes nowhere."""
    for i, op in enumerate(made.axis.steps):
        for b in made.graph.inputs[op]:
            made.model.add(made.at("device", i, b) + made.at("leaving", i, b) >= made.on[i])
        for b in made.graph.outputs[op]:
            made.model.add(made.there(i, b) + made.on[i] <= 1)


def add_memory(made: _Model, budget_bytes: int) -> None:
    """Whatever is on the device while a step runs is within the budget."""
    graph = made.graph
    for i, op in enumerate(made.axis.steps):
        held = [
            graph.nbytes[b] * made.there(i, b, ("device", "leaving", "arriving"))
            for b in made.buffers(i)
            if graph.nbytes[b]
        ]
        own = sum(graph.nbytes[b] for b in graph.outputs[op]) + graph.workspace_bytes[op]
        saved = _saved(made, i, op)
        limit = budget_bytes - graph.argument_bytes - own
        made.model.add(total(held) - total(saved) <= limit).only_enforce_if(made.on[i])


def _saved(made: _Model, position: int, op: int) -> list[cp_model.LinearExpr]:
    """What outputs save in the places of inputs that die; each place and each output once."""
    graph = made.graph
    saved: list[cp_model.LinearExpr] = []
    by_buffer: dict[tuple[str, int], list[Literal]] = {}
    for out, inp in graph.shares[op]:
        dies = made.model.new_bool_var(f"{inp} gives its place at {position}")
        made.model.add(dies <= made.at("device", position, inp))
        made.model.add(dies + made.there(position + 1, inp) <= 1)
        by_buffer.setdefault(("out", out), []).append(dies)
        by_buffer.setdefault(("in", inp), []).append(dies)
        saved.append(total([min(graph.nbytes[out], graph.nbytes[inp]) * dies]))
    for literals in by_buffer.values():
        made.model.add_at_most_one(literals)
    return saved


def add_host_memory(made: _Model, host_bytes: int) -> None:
    """What is on the host, or on its way there or back, is within its budget."""
    for i in range(1, made.end + 1):
        terms = []
        for b in made.buffers(i):
            on_host = [made.at(state, i - 1, b) for state in STATES[1:]]
            on_host += [made.event.get(("kept", i - 1, b), made.never), made.sent.get((i - 1, b), made.never)]
            terms.append(made.graph.nbytes[b] * total(on_host))
        made.model.add(total(terms) <= host_bytes)


def add_clocks(made: _Model) -> None:
    """Steps follow each other; in a moment the program waits first for what leaves."""
    for i in range(made.end + 1):
        made.freed.append(made.clock(f"settled {i}"))
        made.begun.append(made.clock(f"begun {i}"))
        made.model.add(made.begun[i] >= made.freed[i])
        if i:
            cost_ns = made.graph.cost_ns[made.axis.steps[i - 1]]
            made.model.add(made.freed[i] >= made.begun[i - 1] + cost_ns * made.on[i - 1])


def add_queue_out(made: _Model) -> None:
    """Copies to the host, in the order of their runs, and of their buffers."""
    model, free = made.model, made.model.new_constant(0)
    arrival: dict[int, list[tuple[Literal, Literal]]] = {}
    for i, op in enumerate(made.axis.steps):
        for b in sorted(made.graph.outputs[op]):
            if (i, b) in made.sent:
                sent, end = made.sent[i, b], made.clock(f"{b} out from {i}")
                copy_ns = made.link.to_host_ns(made.graph.nbytes[b])
                ready = made.begun[i] + made.graph.cost_ns[op] + copy_ns
                model.add(end >= ready).only_enforce_if(sent)
                model.add(end >= free + copy_ns * sent)
                free = end
                arrival.setdefault(b, []).append((sent, end))
        for b in made.buffers(i + 1):
            if ("gone", i + 1, b) in made.event:
                gone = made.event["gone", i + 1, b]
                for sent, end in arrival.get(b, ()):
                    model.add(made.freed[i + 1] >= end).only_enforce_if(gone, sent)


def add_queue_in(made: _Model) -> None:
    """Copies from the host, those of an earlier moment first."""
    model, free = made.model, made.model.new_constant(0)
    intervals = []
    returned: dict[int, list[tuple[Literal, Literal]]] = {}
    for i in range(1, made.end + 1):
        after = made.clock(f"the link is free of what started by {i}")
        model.add(after >= free)
        for b in made.buffers(i):
            if ("start", i, b) not in made.event:
                continue
            start, end = made.event["start", i, b], made.clock(f"{b} in from {i}")
            copy_ns = made.link.from_host_ns(made.graph.nbytes[b])
            model.add(end >= made.freed[i] + copy_ns).only_enforce_if(start)
            model.add(end >= free + copy_ns).only_enforce_if(start)
            model.add(after >= end).only_enforce_if(start)
            intervals.append(
                model.new_optional_interval_var(end - copy_ns, copy_ns, end, start, f"in {b} {i}")
            )
            made.ends[i, b] = end
            returned.setdefault(b, []).append((start, end))
            for began, over in returned[b]:
                model.add(made.begun[i] >= over).only_enforce_if(made.event["back", i, b], began)
        free = after
    model.add_no_overlap(intervals)


def _plan_of(made: _Model, solver: cp_model.CpSolver, program: Program, hint: Plan) -> Plan:
    """The plan that an answer stands for."""
    on = [bool(solver.value(literal)) for literal in made.on]
    index = [sum(on[:i]) for i in range(made.end + 1)]
    steps = tuple(OpId(op) for op, runs in zip(made.axis.steps, on, strict=True) if runs)
    started: list[tuple[int, int, Page]] = []
    for b, op in enumerate(made.graph.producer):
        if op >= 0 and made.graph.arrays.pageable[b]:
            started += _pages_of(made, solver, b, on, index)
    started.sort(key=lambda s: s[:2])
    pages = tuple(page for _, _, page in started)
    peak_bytes = simulate(program, steps, pages).peak_bytes
    moved = traffic(program, steps, pages, made.link)
    base_ns = program.cost_ns
    return dataclasses.replace(
        hint,
        steps=steps,
        pages=pages,
        peak_bytes=peak_bytes,
        overhead_ratio=(moved.total_ns - base_ns) / base_ns if base_ns else 0.0,
        waiting_ns=moved.waiting_ns,
        host_peak_bytes=moved.host_peak_bytes,
        offsets=(),
        page_offsets=(),
    )


def _pages_of(
    made: _Model, solver: cp_model.CpSolver, buffer: int, on: list[bool], index: list[int]
) -> list[tuple[int, int, Page]]:
    """Pages of one buffer that come back, with the moment and the end of their way back."""

    def happens(event: str, moment: int) -> bool:
        literal = made.event.get((event, moment, buffer))
        return literal is not None and bool(solver.value(literal))

    returned: list[tuple[int, int, Page]] = []
    run = out = start = 0
    for i in range(made.end + 1):
        if happens("gone", i):
            out = i
        if happens("start", i):
            start = i
        if happens("back", i):
            uses = range(i, made.end + 1)
            if _is_used(made, buffer, on, uses):
                page = Page(
                    buffer=BufferId(buffer),
                    run=index[run],
                    out_done=index[out],
                    in_start=index[start],
                    in_done=index[i],
                )
                returned.append((start, int(solver.value(made.ends[start, buffer])), page))
        if i < made.end and on[i] and buffer in made.graph.outputs[made.axis.steps[i]]:
            run = i
    return returned


def _is_used(made: _Model, buffer: int, on: list[bool], moments: range) -> bool:
    """Whether something needs a copy from some moment on, before it is recomputed."""
    for i in moments:
        if i == made.end:
            return made.graph.is_output[buffer]
        op = made.axis.steps[i]
        if on[i] and buffer in made.graph.inputs[op]:
            return True
        if on[i] and buffer in made.graph.outputs[op]:
            return False
    return False
