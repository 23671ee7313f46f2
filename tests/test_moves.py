"""Moving temporaries: the proof against an interpreter that runs both programs byte by byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.pinning.moves import MoveError, check_moves
from passes.pinning.repack import repack
from passes.pinning.slices import Access, Branch, Call, Loop, Moved, Node, Run, Slice, SliceProgram
from passes.pinning.webs import find_webs

ALIGNMENT = 4
SIZE = 48


def read(n: int) -> Access:
    """Slice `n` is read."""
    return Access(slice=n, reads=True, writes=False)


def write(n: int) -> Access:
    """Slice `n` is written."""
    return Access(slice=n, reads=False, writes=True)


def program(slices: Sequence[tuple[int, int]], *body: Node, nbytes: int = SIZE) -> SliceProgram:
    """A program with slices (offset, nbytes)."""
    found = tuple(Slice(*s) for s in slices)
    return SliceProgram(nbytes=nbytes, alignment=ALIGNMENT, slices=found, body=body)


def run(name: str, *accesses: Access) -> Run:
    """A kernel."""
    return Run(name=name, accesses=accesses)


@dataclass
class _Paths:
    """Runs a program and its moved version on one random path; `differs` if a read saw another write."""

    program: SliceProgram
    moved: Moved
    rng: random.Random
    clock: int = 0
    differs: bool = False
    old: dict[int, object] = field(default_factory=dict)
    new: dict[int, object] = field(default_factory=dict)

    def block(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, Run):
                self.kernel(node.accesses)
            elif isinstance(node, Call):
                self.block(node.body)
            elif isinstance(node, Branch):
                self.kernel(node.index)
                self.block(self.rng.choice(node.branches))
            else:
                self.loop(node)

    def loop(self, node: Loop) -> None:
        for again in [True] * self.rng.randrange(4) + [False]:
            if node.test_runs or self.rng.random() < 0.5:
                self.block(node.test)
                self.kernel(node.flag)
            if again:
                self.block(node.body)

    def kernel(self, accesses: Sequence[Access]) -> None:
        self.clock += 1
        for access in accesses:
            old, offset = self.program.slices[access.slice], self.moved.offsets[access.slice]
            for byte in range(old.nbytes) if access.reads else ():
                written = self.old.get(old.offset + byte)
                self.differs |= written is not None and written != self.new.get(offset + byte)
        for access in accesses:
            old, offset = self.program.slices[access.slice], self.moved.offsets[access.slice]
            for byte in range(old.nbytes) if access.writes else ():
                # What a kernel writes to one old byte is one content, through however many slices.
                content = (self.clock, old.offset + byte)
                self.old[old.offset + byte] = content
                self.new[offset + byte] = content


def paths_differ(moving: SliceProgram, moved: Moved, seeds: int = 25) -> bool:
    """True if a read on one of many random paths gets something else than in the original."""
    for seed in range(seeds):
        paths = _Paths(moving, moved, random.Random(seed))
        paths.block(moving.body)
        if paths.differs:
            return True
    return False


def accepted(moving: SliceProgram, moved: Moved) -> bool:
    """True if the proof goes through."""
    try:
        check_moves(moving, moved)
    except MoveError:
        return False
    return True


@st.composite
def programs(draw: st.DrawFn) -> SliceProgram:
    """Programs over a few places, nested up to two levels; mostly they read what was written."""
    places = draw(
        st.lists(
            st.tuples(st.integers(0, 9).map(lambda n: n * ALIGNMENT), st.integers(1, 12)),
            min_size=2,
            max_size=6,
        )
    )
    slices: list[tuple[int, int]] = []

    def kernel(n: int) -> Run:
        accesses = []
        for _ in range(draw(st.integers(1, 3))):
            slices.append(draw(st.sampled_from(places)))
            kind = draw(st.sampled_from(["r", "w", "w", "rw"]))
            accesses.append(Access(slice=len(slices) - 1, reads="r" in kind, writes="w" in kind))
        return Run(name=f"kernel{n}", accesses=tuple(accesses))

    def flag() -> tuple[Access, ...]:
        slices.append(draw(st.sampled_from(places)))
        return (read(len(slices) - 1),)

    def block(depth: int) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for n in range(draw(st.integers(1, 5 if depth == 2 else 3))):
            kind = draw(
                st.sampled_from(["run", "run", "run", "loop", "branch", "call"] if depth else ["run"])
            )
            if kind == "run":
                nodes.append(kernel(n))
            elif kind == "call":
                nodes.append(Call(name="call", body=block(depth - 1)))
            elif kind == "branch":
                branches = (block(depth - 1), block(depth - 1))
                nodes.append(Branch(name="branch", index=flag(), branches=branches))
            else:
                test, body = block(depth - 1), block(depth - 1)
                runs = draw(st.booleans())
                nodes.append(Loop(name="loop", test=test, flag=flag(), body=body, test_runs=runs))
        return tuple(nodes)

    body = block(2)
    return program(slices, *body, nbytes=max(offset + nbytes for offset, nbytes in slices))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_staying_is_proved(moving: SliceProgram) -> None:
    check_moves(moving, Moved(nbytes=moving.nbytes, offsets=tuple(s.offset for s in moving.slices)))


@settings(max_examples=80, deadline=None)
@given(programs())
def test_repacking_is_proved_and_true(moving: SliceProgram) -> None:
    found = repack(moving)
    check_moves(moving, found.moved)
    assert not paths_differ(moving, found.moved)
    assert found.moved.nbytes >= found.live_bytes


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_what_is_proved_is_true(moving: SliceProgram, data: st.DataObject) -> None:
    """Any other places: of a web, of a single slice, or of everything."""
    found = repack(moving).moved
    offsets = list(found.offsets)
    for _ in range(data.draw(st.integers(1, 3))):
        webs = [w.slices for w in find_webs(moving)] + [(n,) for n in range(len(offsets))]
        distance = ALIGNMENT * data.draw(st.integers(-6, 6))
        for n in data.draw(st.sampled_from(webs)):
            offsets[n] = max(0, offsets[n] + distance)
    moved = Moved(nbytes=10 * SIZE, offsets=tuple(offsets))
    if accepted(moving, moved):
        assert not paths_differ(moving, moved)


def swap_in_a_loop() -> SliceProgram:
    """a = init; loop { b = f(a); a = g(b) }; use a. Two places, and one that is free all the time."""
    return program(
        [(0, 8), (8, 1), (8, 1), (0, 8), (16, 8), (16, 8), (0, 8), (0, 8)],
        run("init", write(0)),
        Loop(
            name="loop", test=(run("test", write(1)),), flag=(read(2),), test_runs=True,
            body=(run("f", read(3), write(4)), run("g", read(5), write(6))),
        ),
        run("use", read(7)),
    )  # fmt: skip


def test_what_a_loop_carries_moves_as_one() -> None:
    webs = {w.slices for w in find_webs(swap_in_a_loop())}
    assert webs == {(0, 3, 6, 7), (1, 2), (4, 5)}


def test_a_carried_value_must_survive_the_loop() -> None:
    moving = swap_in_a_loop()
    check_moves(moving, Moved(nbytes=24, offsets=(16, 8, 8, 16, 0, 0, 16, 16)))
    # The flag of the loop on top of what the next iteration reads.
    with pytest.raises(MoveError, match=r"f reads bytes 0 to 1 .* is lost"):
        check_moves(moving, Moved(nbytes=24, offsets=(0, 0, 0, 0, 16, 16, 0, 0)))
    # Only the first iteration finds its input.
    with pytest.raises(MoveError, match="f reads"):
        check_moves(moving, Moved(nbytes=40, offsets=(0, 8, 8, 0, 16, 16, 24, 24)))


def test_the_test_of_a_counted_loop_may_not_run() -> None:
    counted = Loop(
        name="loop",
        test=(run("test", write(1)),),
        flag=(read(2),),
        body=(run("f", read(3)),),
        test_runs=False,
    )
    moving = program([(0, 8), (0, 8), (8, 1), (0, 8)], run("init", write(0)), counted)
    moved = Moved(nbytes=24, offsets=(16, 0, 8, 0))
    check_moves(replace(moving, body=(moving.body[0], replace(counted, test_runs=True))), moved)
    with pytest.raises(MoveError, match="f reads"):
        check_moves(moving, moved)


def test_both_branches_must_agree() -> None:
    moving = program(
        [(0, 4), (4, 8), (4, 8), (4, 8)],
        Branch(name="if", index=(read(0),), branches=((run("a", write(1)),), (run("b", write(2)),))),
        run("use", read(3)),
    )
    check_moves(moving, Moved(nbytes=12, offsets=(0, 0, 0, 0)))
    with pytest.raises(MoveError, match="use reads"):
        check_moves(moving, Moved(nbytes=24, offsets=(0, 4, 12, 4)))


def test_branches_may_share_addresses() -> None:
    inside = [(8, 8), (8, 8), (16, 8), (16, 8)]
    moving = program(
        [(0, 4), (0, 4), *inside],
        run("index", write(0)),
        Branch(
            name="if", index=(read(1),),
            branches=((run("a", write(2)), run("b", read(3))), (run("c", write(4)), run("d", read(5)))),
        ),
    )  # fmt: skip
    assert repack(moving).moved.nbytes == 8


def test_an_in_place_pair_is_not_split() -> None:
    moving = program([(0, 8), (0, 8), (0, 8)], run("a", write(0)), run("b", read(1), write(2)))
    with pytest.raises(MoveError, match="overlap differently"):
        check_moves(moving, Moved(nbytes=16, offsets=(0, 0, 8)))
    apart = replace(moving, slices=(Slice(0, 8), Slice(0, 8), Slice(8, 8)))
    with pytest.raises(MoveError, match="overlap differently"):
        check_moves(apart, Moved(nbytes=16, offsets=(0, 0, 0)))


@pytest.mark.parametrize(
    ("offsets", "nbytes", "why"),
    [
        ((2,), 16, "alignment"),
        ((12,), 16, "ends at 20 of 16"),
        ((-4,), 16, "ends at 4"),
        ((), 16, "0 offsets"),
    ],
)
def test_places_must_exist(offsets: tuple[int, ...], nbytes: int, why: str) -> None:
    moving = program([(0, 8)], run("a", write(0)))
    with pytest.raises(MoveError, match=why):
        check_moves(moving, Moved(nbytes=nbytes, offsets=offsets))


def test_packing_reaches_what_is_alive() -> None:
    """Three chains whose best fit in XLA's orders leaves a hole."""
    rng = random.Random(3)
    slices: list[tuple[int, int]] = []
    body: list[Node] = []
    top = 0
    alive: list[int] = []
    for n in range(60):
        nbytes = ALIGNMENT * rng.randint(1, 30)
        reads = []
        for _ in range(min(len(alive), rng.randint(0, 2))):
            slices.append(slices[alive.pop(rng.randrange(len(alive)))])
            reads.append(read(len(slices) - 1))
        slices.append((top, nbytes))
        top += nbytes
        alive.append(len(slices) - 1)
        body.append(run(f"op{n}", *reads, write(len(slices) - 1)))
    found = repack(program(slices, *body, nbytes=top))
    assert found.live_bytes <= found.moved.nbytes <= 1.02 * found.live_bytes < top
