"""Emit a jaxpr that runs a plan: explicit recompute behind optimization barriers.

XLA merges equal expressions and schedules freely, so recompute written in a jaxpr holds only if its
inputs pass through an `optimization_barrier`. Every slot with recomputes gets ONE barrier over the stored
values that its recomputes read and a trigger: a value that arrived late before the slot. All later readers
of these values read the barrier's results; without that XLA prunes the dependence on the trigger and runs
every recompute early. Where XLA runs early what reads nothing but arguments, such a recompute opens a
barrier of its own with those that follow it: nothing else makes it wait for what is run before it.

Virtual values are recomputed on each new version of their leaves, exactly once per version, as views are:
so a program without recomputes comes out as it went in, and one that reads a recompute copy or a value behind
a barrier computes its elementwise chains from there. The program's own barriers stay where they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from passes.ir import BufferId, OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.halves import Split, split
from passes.jaxpr.lifted import (
    LiftedJaxpr,
    made_by,
    ready_from_the_start,
    reshaped_for_products,
    spread_constant,
)
from passes.jaxpr.primitives import MATRIX, Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import reshape_eqn, spread_eqn
from passes.liveness import last_readers
from passes.outcome import RECOMPUTE_SCOPE
from passes.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitConfig:
    """How recomputes are written.

    Attributes:
        shared: equations whose values XLA would store and share between distant kernels, though the plan
            computes them inside each.
        apart: equations whose values are stored though XLA would compute them inside their readers.
        held_back: equations that read nothing but arguments and must not run before their turn.
        reach: how many ops apart two kernels may be and still share such a value.
        free_waits: True where a recompute that reads nothing but arguments has a barrier of its own.
        one_at_a_time: True for a barrier before each recompute, so that XLA can neither merge recomputes nor
            reorder them.
        as_read: True where a barrier holds what products read reshaped in that form: XLA:CPU would compute it
            for the product and once more for the barrier, and keep both.
    """

    shared: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    held_back: frozenset[int] = frozenset()
    reach: int = 8
    free_waits: bool = False
    one_at_a_time: bool = False
    as_read: bool = False


def emit(lifted: LiftedJaxpr, steps: Sequence[OpId], config: EmitConfig) -> Jaxpr:
    """The open jaxpr that runs `steps`, with the constvars, invars and results of `lifted.jaxpr`."""
    emitter = _Emitter(lifted, steps, config)
    emitter.run()
    return compat.rebuild(lifted.jaxpr, eqns=emitter.eqns, outvars=emitter.results())


def emit_split(
    lifted: LiftedJaxpr,
    steps: Sequence[OpId],
    config: EmitConfig,
    *,
    n_arguments: int,
    n_forward_results: int,
) -> Split:
    """Run `steps` in two halves: all forward results are ready at the end of the first.

    Args:
        lifted: a program without constvars whose first `n_arguments` invars are the forward half's (the
            others are cotangents) and whose first `n_forward_results` results are the forward half's.
        steps: a plan of `lifted.program`.
    """
    emitter = _Emitter(lifted, steps, config)
    emitter.run()
    jaxpr, outvars = lifted.jaxpr, emitter.results()
    cut = emitter.cut_after(jaxpr.outvars[:n_forward_results])
    whole = compat.rebuild(jaxpr, eqns=emitter.eqns, outvars=outvars)
    return split(whole, cut, n_arguments=n_arguments, n_forward_results=n_forward_results)


def _when(program: Program, steps: Sequence[OpId]) -> tuple[list[list[int]], list[list[int]]]:
    """For every buffer the steps that read it, and those that make it."""
    readers: list[list[int]] = [[] for _ in program.buffers]
    runs: list[list[int]] = [[] for _ in program.buffers]
    for step, op in enumerate(steps):
        for b in program.ops[op].inputs:
            readers[b].append(step)
        for b in program.ops[op].outputs:
            runs[b].append(step)
    return readers, runs


class _Emitter:
    """Walks a plan and keeps, for every buffer, the variable of its current copy."""

    def __init__(self, lifted: LiftedJaxpr, steps: Sequence[OpId], config: EmitConfig) -> None:
        self.lifted = lifted
        self.steps = steps
        self.config = config
        self.eqns: list[JaxprEqn] = []
        self.current: list[Var] = list(lifted.var_of)
        self.version: list[int] = [0] * len(lifted.var_of)
        self.made: dict[tuple[int | Var, ...], list[Var]] = {}
        self.used_original: set[int] = set()
        # When every buffer was run last, and what was run when, and in which step, the last one behind.
        self.run_at: list[int] = [-1] * len(lifted.var_of)
        self.runs_made: list[tuple[int, int, BufferId]] = []
        self.live_bytes = simulate(lifted.program, steps).live_bytes
        self.arguments = frozenset(lifted.program.arguments)
        self.ready = ready_from_the_start(lifted.program)
        self.last_reader = last_readers(lifted.program)
        self.readers, self.runs = _when(lifted.program, steps)
        self.products = made_by(lifted, MATRIX, but_for=config.apart)
        self.transposed = made_by(lifted, ("transpose",))
        self.reshaped = reshaped_for_products(lifted) if config.as_read else {}
        # Whose present copy has passed a barrier.
        self.behind: set[BufferId] = set()
        # For equations that read nothing but constants: the first of them as it came out of a barrier last.
        self.constant: dict[int, Var] = {}
        # How many kernels that compute shared equations have run, and which everything follows from, as bits.
        self.n_sharing = 0
        self.sharing_before: dict[Var, int] = {}
        # For shared equations of a version: the step that computes them first, and which of these it is.
        self.made_at: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        # For what is shared and follows from arguments alone: where it is in `made`.
        self.tables: dict[int, tuple[int | Var, ...]] = {}
        self.step = self.reached = 0
        eqns = enumerate(lifted.jaxpr.eqns)
        self.own_barriers = [i for i, eqn in eqns if eqn_kind(eqn) is Kind.BARRIER]
        self.final: dict[BufferId, Var] = {}

    def run(self) -> None:
        first_runs = 0
        segment: list[OpId] = []
        for step, op in enumerate(self.steps):
            self.step = step
            if op < first_runs:
                segment.append(op)
                continue
            self.reached = step - len(segment)
            for part in self._parts(segment):
                self._open_segment(part, op)
                for recompute in part:
                    self._run_op(recompute, is_recompute=True)
                self.reached += len(part)
            segment = []
            self._pass_own_barriers(self.lifted.bodies[op][-1])
            self._part_from_distant_kernels(op)
            self._hold_back(op)
            self._run_op(op)
            first_runs += 1

    def results(self) -> list[Atom]:
        return [self._result(v) for v in self.lifted.jaxpr.outvars]

    def cut_after(self, outvars: Sequence[Atom]) -> int:
        """How many equations make `outvars`, counted from the start."""
        made = [self._result(v) for v in compat.variables(outvars)]
        place = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        return max((place[v] + 1 for v in made if v in place), default=0)

    def _result(self, v: Atom) -> Atom:
        """The atom of a result: what the last run made, or an argument (seen through own barriers)."""
        b = compat.of_variable(self.lifted.buffer_of, v)
        return v if b is None else self.final.get(b, self.lifted.var_of[b])

    def _parts(self, segment: list[OpId]) -> list[list[OpId]]:
        """The recomputes of one slot, as many together as share a barrier: from one that nothing holds back,
        since it reads arguments alone, to the next."""
        parts: list[list[OpId]] = []
        for op in segment:
            free = self.config.free_waits and self.arguments.issuperset(self.lifted.program.ops[op].inputs)
            if self.config.one_at_a_time or free or not parts:
                parts.append([])
            parts[-1].append(op)
        return parts

    def _open_segment(self, segment: Sequence[OpId], before: OpId) -> None:
        """One barrier over what the recomputes read and what triggers them."""
        made: set[BufferId] = set()
        operands: dict[BufferId, None] = {}
        for op_id in segment:
            op = self.lifted.program.ops[op_id]
            outside = [b for b in op.inputs if b not in made]
            # What is transposed XLA writes as it was in front of a barrier, and transposes behind it.
            straight = [b for b in outside if b not in self.transposed]
            stored = [b for b in straight if b not in self.arguments]
            # An op that reads nothing but arguments would be merged with its first run.
            chosen = stored if stored or any(b in made for b in op.inputs) else straight or outside
            operands.update(dict.fromkeys(chosen))
            made.update(op.outputs)
        trigger = self._trigger(before, made)
        if trigger is not None:
            operands[trigger] = None
        if operands:
            # Without a trigger nothing is waited for.
            spread = () if trigger is None else [spread_constant(self.lifted, op_id) for op_id in segment]
            self._barrier(list(operands), constants=[i for i in spread if i is not None])

    def _pass_own_barriers(self, root: int) -> None:
        """The program's own barriers that stand before equation `root`, but for those whose operands come
        later: an update may run long before it was written."""
        waiting: list[int] = []
        pending: set[Var] = set()
        for k, i in enumerate(self.own_barriers):
            if i >= root:
                waiting += self.own_barriers[k:]
                break
            eqn = self.lifted.jaxpr.eqns[i]
            read = compat.variables(eqn.invars)
            operands = list(dict.fromkeys(self.lifted.buffer_of[v] for v in read))
            if not pending.isdisjoint(read) or any(not self._is_made(b) for b in operands):
                waiting.append(i)
                pending.update(eqn.outvars)
            elif operands:
                self._barrier(operands)
        self.own_barriers = waiting

    def _is_made(self, b: BufferId) -> bool:
        return b in self.arguments or self.run_at[b] >= 0

    def _part_from_distant_kernels(self, op_id: OpId) -> None:
        """A barrier before an op that would share an expensive value with a kernel far away, or with one that
        it follows from.

        Tables, such as the sines of positions, stay stored, but XLA:GPU makes one kernel of many that read
        the same one, where none follows from another: of all layers' gradients behind a rotary embedding,
        say, which weights' gradients then wait for. Behind the barrier it is not the same. Of two that are
        near one kernel is what is wanted: of a GELU that is run again and its gradient. Where one follows
        from the other XLA would store what they share.
        """
        operands: dict[BufferId, None] = {}
        tables: list[int] = []
        op = self.lifted.program.ops[op_id]
        follows = self._before(self.current[b] for b in op.inputs)
        for i in self.lifted.bodies[op_id][:-1]:
            if i not in self.config.shared or (made_at := self.made_at.get(self._key(i))) is None:
                continue
            step, sharing = made_at
            if self.step - step <= self.config.reach and not follows >> sharing & 1:
                continue
            stored = [b for b in self.lifted.leaves[i] if b not in self.arguments]
            operands.update(dict.fromkeys(stored))
            if not stored:
                tables.append(i)
        if operands or tables:
            trigger = self._trigger(op_id, set())
            self._barrier(list(operands | ({} if trigger is None else {trigger: None})), tables)

    def _before(self, variables: Iterable[Var]) -> int:
        """The kernels with shared equations that some variables follow from, as bits."""
        return reduce(or_, (self.sharing_before.get(v, 0) for v in variables), 0)

    def _follow(self, made: Sequence[Var], before: int) -> None:
        if before:
            self.sharing_before.update(dict.fromkeys(made, before))

    def _hold_back(self, op_id: OpId) -> None:
        """A barrier before an op that XLA could otherwise run, or merge with its like, at any time."""
        if self.lifted.bodies[op_id][-1] not in self.config.held_back:
            return
        trigger = self._trigger(op_id, set())
        if trigger is not None:
            self._barrier([*dict.fromkeys(self.lifted.program.ops[op_id].inputs), trigger])

    def _key(self, i: int) -> tuple[int, tuple[int, ...]]:
        return i, tuple(self.version[b] for b in self.lifted.leaves[i])

    def _trigger(self, before: OpId, made: set[BufferId]) -> BufferId | None:
        """What `before` waits for anyway: to wait for something else would take XLA the freedom to make one
        kernel of what is recomputed and its gradient. Else the stored value that was run last and is still
        read from `before` on, and that is not ready from the start: to wait for that is not to wait; one that
        is no product if there was room ever since it was made for what waits for it.

        XLA gives what passes a barrier the layout of its shape. It would write many a product transposed, for
        what follows elementwise; that becomes a kernel of its own (TinyLlama on an H200: 15 of 182 ms).
        """
        if (read := self._read_anyway(before, made)) is not None:
            return read
        product = None
        for at, step, b in reversed(self.runs_made):
            if self.run_at[b] != at or b in made or b in self.transposed or b in self.ready:
                continue
            if not self._is_read(b, before):
                continue
            if b not in self.products:
                return b if product is None or self._has_room_since(step) else product
            product = b if product is None else product
        return product

    def _read_anyway(self, before: OpId, made: set[BufferId]) -> BufferId | None:
        """The last that `before` waits for beside what is recomputed for it; None if that may cost a copy."""
        inputs = self.lifted.program.ops[before].inputs
        waits = [b for b in inputs if b not in made and b not in self.ready and self.run_at[b] >= 0]
        last = max(waits, key=lambda b: (self.run_at[b], b), default=None)
        if last in self.transposed or (last in self.products and last not in self.behind):
            return None
        return last

    def _has_room_since(self, step: int) -> bool:
        """True if what runs next would exceed the plan's peak at no step after `step`."""
        live, first = self.live_bytes, self.reached
        op = self.lifted.program.ops[self.steps[first]]
        made = op.workspace_bytes + sum(self.lifted.program.buffers[b].nbytes for b in op.outputs)
        taken = live[first : max(self.step, first + 1)].max() - live[first] + made
        return bool(live[step + 1 : first].max(initial=0) + taken <= live.max())

    def _is_read(self, b: BufferId, before: OpId) -> bool:
        """True if a buffer is read from `before` on; between barriers of one slot: its present copy."""
        if not self.config.free_waits:
            return self.last_reader.get(b, -1) >= before
        readers, runs = self.readers[b], self.runs[b]
        reader, run = bisect_left(readers, self.reached), bisect_left(runs, self.reached)
        return reader < len(readers) and (run == len(runs) or readers[reader] < runs[run])

    def _barrier(
        self, buffers: Sequence[BufferId], tables: Sequence[int] = (), constants: Sequence[int] = ()
    ) -> None:
        """A barrier over stored values, over the results of equations that arguments are enough for, and over
        the constants that equations spread out."""
        buffers = list(dict.fromkeys(buffers))
        made = [self.tables[i] for i in tables]
        operands = [*(self.current[b] for b in buffers), *(v for key in made for v in self.made[key])]
        forms = {self.current[b]: self.reshaped[b] for b in buffers if b in self.reshaped}
        held = [self._append_once(forms[v], [v])[0] if v in forms else v for v in operands]
        held += [self._scalar(self.lifted.jaxpr.eqns[i]) for i in constants]
        results = [compat.fresh_var(v) for v in held]
        self.eqns.append(compat.barrier_eqn(held, results))
        for k, v in enumerate(operands):
            if v in forms:
                shaped = compat.fresh_var(v)
                self.eqns.append(reshape_eqn(results[k], shaped, self.lifted.jaxpr.eqns[forms[v]]))
                results[k] = shaped
        self.constant.update(zip(constants, results[len(operands) :], strict=True))
        self._follow(results, self._before(operands))
        behind = dict(zip(operands, results[: len(operands)], strict=True))
        for b in buffers:
            self.current[b] = behind[self.current[b]]
            self.version[b] += 1
            self.behind.add(b)
        for i, key in zip(tables, made, strict=True):
            self.made[key] = [behind[v] for v in self.made[key]]
            self.made_at[self._key(i)] = self.step, self.n_sharing

    def _scalar(self, eqn: JaxprEqn) -> Var:
        """What an equation spreads out, as a value: a barrier has no literals."""
        scalar = compat.fresh_var(eqn.invars[0])
        self.eqns.append(spread_eqn(eqn.invars[0], scalar, eqn))
        return scalar

    def _run_op(self, op_id: OpId, *, is_recompute: bool = False) -> None:
        body, first = self.lifted.bodies[op_id], len(self.eqns)
        local: dict[Var, Var] = {}
        is_constant = not self.lifted.program.ops[op_id].inputs
        for i in body[:-1]:
            operands = self._operands(i, local, is_constant=is_constant)
            made = self._append_once(i, operands)
            if i in self.config.shared:
                self.made_at.setdefault(self._key(i), (self.step, self.n_sharing))
                self.tables[i] = (i, *compat.variables(operands))
            local.update(zip(self.lifted.jaxpr.eqns[i].outvars, made, strict=True))
        root = body[-1]
        append = self._append if is_recompute else self._append_once
        outvars = append(root, self._operands(root, local, is_constant=is_constant))
        run: list[BufferId] = []
        before = self._before(self.current[b] for b in self.lifted.program.ops[op_id].inputs)
        if not self.config.shared.isdisjoint(body[:-1]):
            before |= 1 << self.n_sharing
            self.n_sharing += 1
        self._follow(outvars, before)
        for v, new in zip(self.lifted.jaxpr.eqns[root].outvars, outvars, strict=True):
            if not isinstance(v, compat.DropVar):
                b = self.lifted.buffer_of[v]
                self.current[b] = self.final[b] = new
                self.version[b] += 1
                self.behind.discard(b)
                self.run_at[b] = len(self.eqns)
                run.append(b)
        step = self.reached if is_recompute else self.step
        self.runs_made += [(len(self.eqns), step, b) for b in sorted(run)]
        if is_recompute:
            self.eqns[first:] = [compat.in_scope(eqn, RECOMPUTE_SCOPE) for eqn in self.eqns[first:]]
        if root in self.config.apart:
            self._barrier(list(self.lifted.program.ops[op_id].outputs))

    def _append_once(self, i: int, operands: list[Atom]) -> list[Var]:
        """Emit equation `i` unless it was emitted with the same operands."""
        return self.made.get((i, *compat.variables(operands))) or self._append(i, operands)

    def _append(self, i: int, operands: list[Atom]) -> list[Var]:
        """Emit equation `i` on some operands; its first emission keeps its own variables."""
        eqn = self.lifted.jaxpr.eqns[i]
        outvars = list(eqn.outvars)
        if i in self.used_original:
            outvars = [v if isinstance(v, compat.DropVar) else compat.fresh_var(v) for v in outvars]
        self.used_original.add(i)
        self.eqns.append(eqn.replace(invars=operands, outvars=outvars))
        self.made[i, *compat.variables(operands)] = outvars
        return outvars

    def _operands(self, i: int, local: dict[Var, Var], *, is_constant: bool) -> list[Atom]:
        """What equation `i` reads: what its own kernel computes, else the current copies, or a constant that
        has passed a barrier."""
        if is_constant and i in self.constant:
            return [self.constant[i]]
        atoms = self.lifted.jaxpr.eqns[i].invars
        return [v if isinstance(v, compat.Literal) else self._read(v, local) for v in atoms]

    def _read(self, v: Var, local: dict[Var, Var]) -> Var:
        return local[v] if v in local else self.current[self.lifted.buffer_of[v]]
