"""The heap that is foreseen of a program that XLA has not scheduled yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from passes.backend import BACKENDS, CPU, TPU
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.offsets.foreseen import Room, holes_bytes, in_results_bytes
from passes.simulate import simulate

KIB = 1 << 10


def program(reads: Sequence[tuple[int, ...]], kib: Sequence[int], outputs: Sequence[int]) -> Program:
    """Ops in a row that each make one buffer of so many KiB."""
    return Program.build(
        name="test",
        ops=tuple(
            Op(id=OpId(i), inputs=tuple(map(BufferId, read)), outputs=(BufferId(i),), cost_ns=1)
            for i, read in enumerate(reads)
        ),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=n * KIB) for i, n in enumerate(kib)),
        outputs=tuple(map(BufferId, outputs)),
    )


def holes(made: Program, backend: str = CPU.name) -> int:
    timeline = simulate(made)
    return holes_bytes(made, timeline, BACKENDS[backend])


def test_a_chain_has_no_holes():
    assert holes(program([(), (0,), (1,), (2,)], [64, 64, 64, 64], [3])) == 0


def test_values_that_are_kept_lie_above_the_large_ones_that_come_and_go_meanwhile():
    # 0 is kept past 1 (large) and 3; 4 past 3 and 6 (large): it fits neither below nor beside 0.
    made = program([(), (), (1,), (2,), (3,), (0, 4), (5,), (4, 6)], [30, 150, 1, 100, 25, 1, 140, 1], [7])
    timeline = simulate(made)
    assert timeline.peak_bytes == 181 * KIB
    # Placed longest first they end at 196 KiB, largest first at 205; XLA takes the smaller.
    assert holes(made) == (196 - 181) * KIB


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_scratch_memory_is_in_the_heap(backend: str):
    one = program([(), (0,)], [64, 64], [1])
    ops = (one.ops[0], Op(id=OpId(1), inputs=(BufferId(0),), outputs=(BufferId(1),), cost_ns=1,
                          workspace_bytes=512 * KIB))  # fmt: skip
    made = Program.build(name="scratch", ops=ops, buffers=one.buffers, outputs=one.outputs)
    assert holes(made, backend) == 0


def test_what_fits_in_the_storage_of_results_is_there_until_these_are_made():
    # 0 and 1 wait for 4, which makes a result; 2 is too large for it, and 3 is read when it is made.
    made = program([(), (), (0, 1), (2,), (0, 1, 3)], [40, 24, 100, 8, 0], [4])
    timeline = simulate(made)
    assert timeline.peak_bytes == 172 * KIB

    def saved(*rooms: tuple[int, int]) -> int:
        found = [Room(nbytes=kib * KIB, until=until) for kib, until in rooms]
        return in_results_bytes(made, timeline, found)

    assert saved() == 0
    assert saved((100, 4)) == (172 - 72) * KIB, "the largest comes first"
    assert saved((64, 4)) == 0, "what is alive until the result is made is not there"
    assert saved((64, 5)) == 40 * KIB, "one at a time"
    assert saved((64, 5), (32, 5)) == 64 * KIB
    assert saved((64, 5), (4, 5)) == 40 * KIB, "what is larger goes nowhere"


def test_what_is_written_over_in_the_storage_of_a_result_is_there_once():
    made = program([(), (0,), (1,)], [40, 40, 0], [2])
    first, update, last = made.ops
    update = replace(update, may_share=((BufferId(1), BufferId(0)),), workspace_bytes=100 * KIB)
    made = replace(made, ops=(first, update, last))
    timeline = simulate(made)
    assert timeline.peak_bytes == 140 * KIB
    assert in_results_bytes(made, timeline, [Room(nbytes=64 * KIB, until=3)]) == 40 * KIB


def test_a_branch_has_its_peak_before_its_results_are_there():
    made = program([(), (0,)], [40, 0], [1])

    def saved(name: str) -> int:
        one, other = made.ops
        cond = replace(made, ops=(replace(one, name=name, workspace_bytes=100 * KIB), other))
        return in_results_bytes(cond, simulate(cond), [Room(nbytes=64 * KIB, until=2)])

    assert saved("cond") == 0
    assert saved("scan") == 40 * KIB


def test_a_program_without_temporaries_has_none():
    assert holes(program([()], [0], [0])) == 0


def test_a_heap_in_the_order_of_time_has_holes_of_its_own():
    made = program([(), (), (1,), (2,), (3,), (0, 4), (5,), (4, 6)], [30, 150, 1, 100, 25, 1, 140, 1], [7])
    assert holes(made) != holes(made, TPU.name)
