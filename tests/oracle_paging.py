"""The least time of a tiny program with recomputes and pages, by shortest path over all that can be where.

A state is the next op, what is on the device, on its way to the host, on the host and on its way back, with
the time that each queue still needs. It shares nothing with the planners, the simulators or the validator.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from passes.ir import Op, Program
from passes.link import Link

Due = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class State:
    """Where everything is; times are from now on.

    Attributes:
        slot: the op that runs first next.
        device: copies that are there to stay or to die.
        leaving: copies that are still on the device, and when they will have arrived on the host.
        host: copies there; the device may have them again, too.
        arriving: copies that take bytes on the device already, and when they will be there.
        out_ns, in_ns: when each queue is free.
    """

    slot: int
    device: tuple[int, ...] = ()
    leaving: Due = ()
    host: tuple[int, ...] = ()
    arriving: Due = ()
    out_ns: int = 0
    in_ns: int = 0


def later(state: State, ns: int) -> State:
    """The state after some time."""

    def past(due: Due) -> Due:
        return tuple((b, max(0, t - ns)) for b, t in due)

    return replace(
        state, leaving=past(state.leaving), arriving=past(state.arriving),
        out_ns=max(0, state.out_ns - ns), in_ns=max(0, state.in_ns - ns),
    )  # fmt: skip


def subsets(items: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """All subsets."""
    pool = list(items)
    for count in range(len(pool) + 1):
        yield from itertools.combinations(pool, count)


class Search:
    """One program, budgets and link."""

    def __init__(self, program: Program, budget_bytes: int, host_bytes: int, link: Link) -> None:
        self.program, self.link = program, link
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.nbytes = [b.nbytes for b in program.buffers]
        self.arguments = frozenset(program.arguments)
        self.outputs = [b for b in program.outputs if b not in self.arguments]

    def least_ns(self, limit_ns: int) -> int | None:
        """Time of the quickest plan within both budgets; None if there is none of at most `limit_ns`."""
        start = State(0)
        best = {start: 0}
        queue = [(0, start)]
        final: int | None = None
        while queue:
            clock, state = heapq.heappop(queue)
            if best[state] != clock:
                continue
            if final is not None and clock >= final:
                return final
            end = self._end_ns(state)
            if end is not None and (final is None or clock + end < final):
                final = clock + end
            for after, ns, _ in self._steps(state):
                if clock + ns <= limit_ns and clock + ns < best.get(after, clock + ns + 1):
                    best[after] = clock + ns
                    heapq.heappush(queue, (clock + ns, after))
        return final

    def _end_ns(self, state: State) -> int | None:
        """How long the last copies take, if the program is done then."""
        there = {*state.device, *(b for b, _ in state.leaving)}
        due = dict(state.arriving)
        if state.slot < len(self.program.ops) or not self._host_fits(state):
            return None
        if not all(b in there or b in due for b in self.outputs):
            return None
        return max((due[b] for b in self.outputs if b not in there), default=0)

    def _host_fits(self, state: State) -> bool:
        on_host = {*state.host, *(b for b, _ in state.leaving), *(b for b, _ in state.arriving)}
        return sum(self.nbytes[b] for b in on_host) <= self.host_bytes

    def least_pj(self, limit_ns: int) -> int | None:
        """Energy of the most frugal plan within both budgets and `limit_ns`; None if there is none."""
        quickest: dict[State, int] = {}
        queue = [(0, 0, State(0), False)]
        while queue:
            spent, clock, state, done = heapq.heappop(queue)
            if done:
                return spent
            if quickest.get(state, clock + 1) <= clock:
                continue
            quickest[state] = clock
            end = self._end_ns(state)
            if end is not None and clock + end <= limit_ns:
                heapq.heappush(queue, (spent, clock, state, True))
            for after, ns, pj in self._steps(state):
                if clock + ns <= limit_ns:
                    heapq.heappush(queue, (spent + pj, clock + ns, after, False))
        return None

    def _steps(self, state: State) -> Iterator[tuple[State, int, int]]:
        """What a moment and the step after it can come to, with its time and its energy."""
        if not self._host_fits(state):
            return
        for freed, wait_ns in self._freed(state):
            for started in self._started(freed):
                for back, more_ns in self._back(started):
                    for op in self.program.ops[: back.slot + 1]:
                        if op.id == back.slot or op.can_recompute(back.slot):
                            for after, ns in self._runs(back, op):
                                sent = {b for b, _ in after.leaving} - {b for b, _ in back.leaving}
                                came = {b for b, _ in started.arriving} - {b for b, _ in freed.arriving}
                                moved = sum(self.nbytes[b] for b in (*sent, *came))
                                pj = op.energy_pj + round(self.link.picojoules_per_byte * moved)
                                yield after, wait_ns + more_ns + ns, pj

    def _freed(self, state: State) -> Iterator[tuple[State, int]]:
        """Copies that the program waits for until they are on the host; their bytes are free."""
        due = dict(state.leaving)
        for gone in subsets([*due, *(b for b in state.device if b in state.host)]):
            wait_ns = max((due.get(b, 0) for b in gone), default=0)
            now = later(state, wait_ns)
            yield (
                replace(
                    now,
                    device=tuple(b for b in now.device if b not in gone),
                    leaving=tuple(d for d in now.leaving if d[0] not in gone),
                    host=tuple(sorted({*now.host, *gone})),
                ),
                wait_ns,
            )

    def _started(self, state: State) -> Iterator[State]:
        """Copies that begin to come back, in any order."""
        busy = {*state.device, *(b for b, _ in state.leaving), *(b for b, _ in state.arriving)}
        for some in subsets(b for b in state.host if b not in busy):
            for order in itertools.permutations(some):
                free_ns, arriving = state.in_ns, list(state.arriving)
                for b in order:
                    free_ns += self.link.from_host_ns(self.nbytes[b])
                    arriving.append((b, free_ns))
                yield replace(state, arriving=tuple(sorted(arriving)), in_ns=free_ns)

    def _back(self, state: State) -> Iterator[tuple[State, int]]:
        """Copies that the program waits for until they are back, with or without their copy on the host."""
        due = dict(state.arriving)
        for back in subsets(due):
            wait_ns = max((due[b] for b in back), default=0)
            now = later(state, wait_ns)
            for forgotten in subsets(back):
                yield (
                    replace(
                        now,
                        device=tuple(sorted({*now.device, *back})),
                        arriving=tuple(d for d in now.arriving if d[0] not in back),
                        host=tuple(b for b in now.host if b not in forgotten),
                    ),
                    wait_ns,
                )

    def _runs(self, state: State, op: Op) -> Iterator[tuple[State, int]]:
        """A run of an op, and what is kept, dropped and sent after it."""
        leaving, arriving = {b for b, _ in state.leaving}, {b for b, _ in state.arriving}
        readable = {*state.device, *leaving, *self.arguments}
        made = tuple(dict.fromkeys(op.outputs))
        if not set(op.inputs) <= readable or {*leaving, *arriving, *state.host} & set(made):
            return
        there = {*state.device, *leaving, *arriving, *made}
        total = sum(self.nbytes[b] for b in {*there, *self.arguments}) + op.workspace_bytes
        for sent in subsets(b for b in made if self.nbytes[b] and self._is_read(b, state.slot)):
            for kept in subsets(
                b for b in {*state.device, *made} - set(sent) if self._is_read(b, max(state.slot, op.id + 1))
            ):
                saved, taken = 0, []
                for out, inp in op.may_share:
                    dies = inp in state.device and inp not in kept and inp not in taken
                    if dies:
                        saved += min(self.nbytes[out], self.nbytes[inp])
                        taken.append(inp)
                useless = op.id < state.slot and not {*kept, *sent} & set(made)
                if total - saved <= self.budget_bytes and not useless:
                    yield self._after(state, op, sent, kept), op.cost_ns

    def _is_read(self, buffer: int, slot: int) -> bool:
        """Whether an op that may still run reads a buffer, or it is an output."""
        readers = (op for op in self.program.ops if buffer in op.inputs)
        return buffer in self.outputs or any(op.id >= slot or op.recomputable for op in readers)

    def _after(self, state: State, op: Op, sent: tuple[int, ...], kept: tuple[int, ...]) -> State:
        now = later(state, op.cost_ns)
        free_ns, leaving = now.out_ns, list(now.leaving)
        for b in sorted(sent):
            free_ns += self.link.to_host_ns(self.nbytes[b])
            leaving.append((b, free_ns))
        dropped = set(now.device) - set(kept)
        return replace(
            now,
            slot=max(now.slot, op.id + 1),
            device=tuple(sorted(kept)),
            leaving=tuple(sorted(leaving)),
            host=tuple(b for b in now.host if b not in dropped),
            out_ns=free_ns,
        )


def least_ns(
    program: Program, budget_bytes: int, host_bytes: int, link: Link, limit_ns: int = 1 << 62
) -> int | None:
    """Time of the quickest plan with pages within both budgets; None if none takes at most `limit_ns`."""
    return Search(program, budget_bytes, host_bytes, link).least_ns(limit_ns)
