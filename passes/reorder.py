"""Run what frees memory as soon as it can be, and what takes it as late as it may.

XLA's schedulers hide latencies; a parameter's update may come at the end of the program, and the gradient
waits for it all the while; the zeros in which a loop will add up may be made at its beginning. Two moves
never hurt. An op that frees a value and takes next to nothing, since it writes over an argument or into a
result, goes to just behind the last other reader of the value, and what little it needs besides, such as a
learning rate, comes with it. So does one that takes nothing though others will read the value: of the two
moments that a gradient goes into neither frees it alone. And so may one that leaves less than it frees: of
attention's weights, once they were multiplied, a small product is left. An op that frees nothing, since all
that it reads is there anyway until its result is read, goes to just before that. Every kernel stays as it is.

Such an op may be the last of several that run one after the other. XLA:GPU splits a matrix product along its
depth: the parts of a weight's gradient take more than the product's operands, XLA's schedulers leave it to
the end, and all operands wait. With the update that adds the parts up and writes over the weight it frees
them, and takes nothing. What it takes in between must be there: no more than what is alive at some time from
its new place to the old one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from passes.ir import BufferId, Op, OpId, Program
from passes.simulate import simulate

# What is taken over what is freed: less than the largest alignment's loss on values of a megabyte.
NEXT_TO_NOTHING = 1 / 64
# What moved in any program of `benchmarks.side_by_side` came with nine others; most of what is given up for
# its bytes would bring hundreds along.
MOST_TOGETHER = 32


class Reorder:
    """The order of a program's ops while they are moved.

    Attributes:
        needs: for every op those that must run before it.
        overwriters: for every op those that must run after it; its deadline alone if not given.
        most_left: how much what is hoisted may leave of what it frees, as a share.
        order: op ids.
        place: of every op in `order`.
        moved: True once something was moved.
        live_bytes: at every op in the first order; what is hoisted over others only makes it less there.
    """

    def __init__(
        self, program: Program, movable: list[bool], needs: Sequence[Collection[OpId]],
        overwriters: Sequence[Collection[OpId]] | None = None, most_left: float = NEXT_TO_NOTHING,
    ) -> None:  # fmt: skip
        self.program = program
        self.most_left = most_left
        self.movable = movable
        self.needs = needs
        self.needed_by: dict[OpId, list[OpId]] = {}
        for op, before in zip(program.ops, needs, strict=True):
            for other in before:
                self.needed_by.setdefault(other, []).append(op.id)
        self.order = list(program.order)
        self.place = list(range(len(program.ops)))
        self.moved = False
        self.readers: dict[BufferId, list[OpId]] = {}
        deadlines = [() if op.deadline is None else (OpId(op.deadline),) for op in program.ops]
        self.overwriters = deadlines if overwriters is None else overwriters
        self.overwritten_by: dict[OpId, list[OpId]] = {}
        for op in program.ops:
            for b in dict.fromkeys(op.inputs):
                self.readers.setdefault(b, []).append(op.id)
            for other in self.overwriters[op.id]:
                self.overwritten_by.setdefault(other, []).append(op.id)
        self.kept = {*program.outputs, *program.arguments}
        self.live_bytes = simulate(program, self.order).live_bytes

    def run(self) -> None:
        """Both moves."""
        self.hoist()
        self.sink()

    def hoist(self) -> None:
        """Run early what frees, from the first op on."""
        for op in self.program.ops:
            freed = self._freed(op)
            if freed is not None and self.movable[op.id]:
                self._hoist(op.id, freed)

    def sink(self) -> None:
        """Run late what frees nothing, from the last op on."""
        for op in reversed(self.program.ops):
            if self.movable[op.id] and any(self._nbytes(b) for b in op.outputs):
                self._sink(op)

    def _freed(self, op: Op) -> BufferId | None:
        """The largest buffer that nobody reads after an op; if the op takes nothing, that it reads."""
        buffers, takes = self.program.buffers, op.workspace_bytes + self._bytes_of(op.outputs)
        freed = [
            b
            for b in dict.fromkeys(op.inputs)
            if b not in self.kept
            and buffers[b].nbytes
            and (not takes or max(self.readers[b], key=self.place.__getitem__) == op.id)
        ]
        return max(freed, key=lambda b: (buffers[b].nbytes, b), default=None)

    def _hoist(self, op: OpId, freed: BufferId) -> None:
        next_to_nothing = NEXT_TO_NOTHING * self._nbytes(freed)
        target = self._behind_what_stays(op, self._ready(freed, op), next_to_nothing)
        if self.place[op] == target + 1:
            return
        group = self._with_late_producers((), {op}, target)
        most_left = self.most_left * self._nbytes(freed)
        while group is not None and self._bytes_of(left := self._left_by(group)) > most_left:
            readers = {r for b in left for r in self.readers.get(b, ())}.difference(group)
            may_follow = (
                len(readers) == 1 and self.kept.isdisjoint(left) and all(self.movable[r] for r in readers)
            )
            group = self._with_late_producers(group, readers, target) if may_follow else None
        if group is None:
            return
        overwritten = {r for g in group for r in self.overwritten_by.get(g, ())}.difference(group)
        target = max([target, *(self.place[r] for r in overwritten)])
        first = [g for g in group if self.place[g] <= self.place[op]]
        if self.place[group[0]] <= target or self.place[op] <= target + len(first):
            return
        taken = self._taken_by(group)
        if taken <= next_to_nothing or taken <= self._room(target, self.place[op]):
            self._move(group, target)

    def _behind_what_stays(self, op: OpId, target: int, next_to_nothing: float) -> int:
        """A place, or behind what an op needs that stays where it is: what others read, too, and takes
        something, such as the cotangent that a weight's gradient is made of with a value that it frees."""
        ops = self.program.ops

        def stays(producer: OpId) -> bool:
            read = [b for b in ops[producer].outputs if any(r != op for r in self.readers.get(b, ()))]
            return not self.movable[producer] or self._bytes_of(read) > next_to_nothing

        later = ((self.place[producer], producer) for producer in self.needs[op])
        return max([target, *(place for place, producer in later if place > target and stays(producer))])

    def _room(self, target: int, place: int) -> int:
        """By how much less is alive at a place than at some time from there to a later one."""
        passed = self.live_bytes[self.order[target : place + 1]]
        return int(passed.max() - passed[0])

    def _left_by(self, group: Collection[OpId]) -> list[BufferId]:
        """What ops make that others read, or that is kept."""
        together = set(group)
        made = [b for op in group for b in self.program.ops[op].outputs]
        return [b for b in made if b in self.kept or not together.issuperset(self.readers.get(b, ()))]

    def _taken_by(self, group: Sequence[OpId]) -> int:
        """The most that ops, one after the other, take at any time."""
        ops, left = self.program.ops, self._left_by(group)
        made: list[BufferId] = []
        taken = 0
        for k, op in enumerate(group):
            needed = {*left, *(b for g in group[k:] for b in ops[g].inputs)}
            made = [*(b for b in made if b in needed), *ops[op].outputs]
            taken = max(taken, self._bytes_of(made) + ops[op].workspace_bytes)
        return taken

    def _sink(self, op: Op) -> None:
        waiting = [self.place[r] for r in self.needed_by.get(op.id, ())]
        if not waiting or self.kept.intersection(op.outputs):
            return
        first = min(waiting)
        first = min([first, *(self.place[other] for other in self.overwriters[op.id])])
        place = self.place[op.id]
        if first > place + 1 and all(self._is_there_until(first, b, op.id) for b in dict.fromkeys(op.inputs)):
            self._order(place, [*self.order[place + 1 : first], op.id])

    def _is_there_until(self, place: int, buffer: BufferId, but_for: OpId) -> bool:
        """True for a buffer that has its bytes at a place whether or not one of its readers is there."""
        if buffer in self.kept or not self._nbytes(buffer):
            return True
        return any(self.place[r] >= place for r in self.readers[buffer] if r != but_for)

    def _nbytes(self, buffer: BufferId) -> int:
        return self.program.buffers[buffer].nbytes

    def _bytes_of(self, buffers: Iterable[BufferId]) -> int:
        return sum(map(self._nbytes, buffers))

    def _ready(self, buffer: BufferId, op: OpId) -> int:
        """The last place before an op at which a buffer is made, or read."""
        producer = self.program.producer[buffer]
        others = [place for r in self.readers[buffer] if (place := self.place[r]) < self.place[op]]
        return max([-1 if producer is None else self.place[producer], *others])

    def _with_late_producers(
        self, group: Collection[OpId], ops: Collection[OpId], target: int
    ) -> list[OpId] | None:
        """A group, and ops with what must move with them to come right behind a place; None if one of them
        may not, or if there are too many."""
        found, work = {*group, *ops}, list(ops)
        while work:
            for producer in self.needs[work.pop()]:
                if self.place[producer] <= target or producer in found:
                    continue
                if not self.movable[producer] or len(found) >= MOST_TOGETHER:
                    return None
                found.add(producer)
                work.append(producer)
        return sorted(found, key=self.place.__getitem__)

    def _move(self, group: list[OpId], target: int) -> None:
        """Put ops, which come later, right behind a place."""
        chosen, first, last = set(group), target + 1, self.place[group[-1]]
        self._order(first, [*group, *(op for op in self.order[first:last] if op not in chosen)])

    def _order(self, first: int, order: list[OpId]) -> None:
        """Give the ops from a place on a new order among themselves."""
        self.moved = True
        self.order[first : first + len(order)] = order
        for place, op in enumerate(order, first):
            self.place[op] = place
