"""What frees memory runs early, what takes it late: no more bytes, the same numbers, nothing overwritten."""

from __future__ import annotations

from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from passes.hlo import proto
from passes.hlo.called import ordered
from passes.hlo.emit import emit
from passes.hlo.reorder import _least_first, depth_first, reordered
from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.reorder import Reorder
from passes.simulate import simulate


def _program(*ops: dict[str, Any], nbytes: list[int], outputs: tuple[int, ...]) -> Program:
    return Program.build(
        name="drawn",
        ops=tuple(Op(id=OpId(k), cost_ns=1, **op) for k, op in enumerate(ops)),
        buffers=tuple(Buffer(id=BufferId(k), nbytes=n) for k, n in enumerate(nbytes)),
        outputs=tuple(BufferId(b) for b in outputs),
    )


def _order(program: Program, movable: list[bool] | None = None, **config: float) -> list[int]:
    made_by = [[p for b in op.inputs if (p := program.producer[b]) is not None] for op in program.ops]
    work = Reorder(program, movable or [True] * len(program.ops), made_by, **config)
    work.run()
    before = simulate(program)
    assert simulate(program, work.order).peak_bytes <= before.peak_bytes
    return [int(op) for op in work.order]


# 0 gradient, 1 and 2 other work, 3 learning rate, 4 update: (gradient, rate, parameter) -> parameter
UPDATE = (
    {"inputs": (), "outputs": (0,)},
    {"inputs": (5,), "outputs": (1,)},
    {"inputs": (1,), "outputs": (2,)},
    {"inputs": (), "outputs": (3,)},
    {"inputs": (0, 3, 5), "outputs": (4,)},
)
SIZES = [100, 50, 50, 1, 0, 0]


GRADIENT_STAYS = [False, True, True, True, True]


def test_an_update_runs_behind_its_gradient_and_brings_its_rate_along() -> None:
    program = _program(*UPDATE, nbytes=SIZES, outputs=(2, 4))
    assert _order(program, GRADIENT_STAYS) == [0, 3, 4, 1, 2]


def test_both_of_two_updates_run_behind_the_gradient_that_they_read() -> None:
    """Adam adds a gradient to two moments: neither frees it alone."""
    moments = [{"inputs": (0, 6), "outputs": (7,)}, {"inputs": (0, 8), "outputs": (9,)}]
    program = _program(*UPDATE[:4], *moments, nbytes=[*SIZES, 0, 0, 0, 0], outputs=(2, 7, 9))
    assert _order(program, [False, *[True] * 5]) == [0, 4, 5, 1, 2, 3]


def test_what_frees_two_runs_behind_the_later_of_them() -> None:
    """Of a discriminator's weights, the gradients of both of its passes, added up in their update."""
    gradients = [{"inputs": (6,), "outputs": (0,)}, {"inputs": (6,), "outputs": (1,)}]
    others = [{"inputs": (6,), "outputs": (2,)}, {"inputs": (2,), "outputs": (3,)}]
    update = {"inputs": (0, 1, 6), "outputs": (4,)}
    program = _program(*gradients, *others, update, nbytes=[100, 100, 50, 50, 0, 0, 0], outputs=(3, 4))
    assert _order(program, [False] * 4 + [True]) == [0, 1, 4, 2, 3]


def test_nothing_overwrites_what_others_still_read() -> None:
    ops = [dict(op) for op in UPDATE]
    ops[1]["deadline"] = 4  # it reads the parameter that the update overwrites
    program = _program(*ops, nbytes=SIZES, outputs=(2, 4))
    assert _order(program, GRADIENT_STAYS) == [0, 3, 1, 4, 2]


def test_what_takes_more_than_it_frees_stays() -> None:
    program = _program(*UPDATE, nbytes=[100, 50, 50, 1, 100, 0], outputs=(2, 4))
    assert _order(program, GRADIENT_STAYS) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("most_left", "taken_bytes", "order"),
    [(0.9, 0, [0, 3, 1, 2, 4]), (0.9, 120, [0, 1, 2, 3, 4]), (1 / 64, 0, [0, 1, 2, 3, 4])],
)
def test_what_leaves_less_than_it_frees_runs_early_if_that_finds_room(
    most_left: float, taken_bytes: int, order: list[int]
) -> None:
    ops = (
        {"inputs": (), "outputs": (0,), "workspace_bytes": taken_bytes},
        {"inputs": (), "outputs": (1,)},
        {"inputs": (1,), "outputs": (2,)},
        {"inputs": (0,), "outputs": (3,)},
        {"inputs": (2, 3), "outputs": (4,)},
    )
    program = _program(*ops, nbytes=[100, 60, 50, 80, 0], outputs=(4,))
    assert _order(program, [False, False, False, True, False], most_left=most_left) == order


def test_what_may_not_move_holds_its_readers() -> None:
    program = _program(*UPDATE, nbytes=SIZES, outputs=(2, 4))
    assert _order(program, [False, True, True, False, True]) == [0, 1, 2, 3, 4]


# 0 a cotangent, 1 its other reader, 2 other work, 3 a gradient in parts, 4 the update that adds them up
IN_PARTS = (
    {"inputs": (), "outputs": (0,)},
    {"inputs": (0,), "outputs": (1,)},
    {"inputs": (1,), "outputs": (2,)},
    {"inputs": (0,), "outputs": (3,)},
    {"inputs": (3, 5), "outputs": (4,)},
)


def test_a_gradient_runs_behind_the_cotangent_that_others_read_too() -> None:
    """What it frees was made long before: it goes no earlier than the cotangent, which stays."""
    ops = (
        {"inputs": (), "outputs": (0,)},
        {"inputs": (0,), "outputs": (1,)},
        {"inputs": (1,), "outputs": (2,)},
        {"inputs": (2,), "outputs": (3,)},
        {"inputs": (0, 2, 5), "outputs": (4,)},
    )
    program = _program(*ops, nbytes=[100, 50, 50, 50, 0, 0], outputs=(3, 4))
    assert _order(program) == [0, 1, 2, 4, 3]


@pytest.mark.parametrize(("other_bytes", "order"), [(300, [0, 1, 3, 4, 2]), (40, [0, 1, 2, 3, 4])])
def test_a_gradient_in_parts_comes_early_with_its_update_if_its_parts_find_room(
    other_bytes: int, order: list[int]
) -> None:
    program = _program(*IN_PARTS, nbytes=[100, 50, other_bytes, 250, 0, 0], outputs=(2, 4))
    assert _order(program) == order


def test_a_gradient_in_parts_stays_if_what_adds_them_up_must() -> None:
    program = _program(*IN_PARTS, nbytes=[100, 50, 300, 250, 0, 0], outputs=(2, 4))
    assert _order(program, [True, True, True, True, False]) == [0, 1, 2, 3, 4]


def test_a_gradient_that_others_read_stays() -> None:
    ops = [*IN_PARTS, {"inputs": (3,), "outputs": (6,)}]
    program = _program(*ops, nbytes=[100, 50, 300, 250, 0, 0, 1], outputs=(2, 4, 6))
    assert _order(program) == [0, 1, 2, 3, 4, 5]


# 0 zeros for the loop at 3, 1 and 2 other work, 3 the loop; 4 reads the argument that 2 overwrites.
ZEROS = (
    {"inputs": (), "outputs": (0,)},
    {"inputs": (5,), "outputs": (1,)},
    {"inputs": (1,), "outputs": (2,)},
    {"inputs": (0, 2), "outputs": (3,)},
    {"inputs": (3,), "outputs": (4,)},
)
ZERO_SIZES = [100, 50, 50, 20, 10, 0]


def test_zeros_are_made_just_before_they_are_read() -> None:
    program = _program(*ZEROS, nbytes=ZERO_SIZES, outputs=(4,))
    assert _order(program) == [1, 2, 0, 3, 4]


def test_a_value_whose_operand_would_have_to_wait_stays() -> None:
    ops = [dict(op) for op in ZEROS]
    ops[2] = {"inputs": (5,), "outputs": (2,)}
    ops[3] = {"inputs": (1, 0, 2), "outputs": (3,)}
    ops[1] = {"inputs": (0,), "outputs": (1,)}
    program = _program(*ops, nbytes=[100, 150, 50, 20, 10, 0], outputs=(4,))
    assert _order(program).index(1) == 2, "its operand is read by the loop, too: it waits anyway"
    ops[3] = {"inputs": (1, 2), "outputs": (3,)}
    program = _program(*ops, nbytes=[100, 150, 50, 20, 10, 0], outputs=(4,))
    assert _order(program)[:2] == [0, 1]


def test_what_reads_an_argument_stays_before_what_overwrites_it() -> None:
    ops = [dict(op) for op in ZEROS]
    ops[0] = {"inputs": (5,), "outputs": (0,), "deadline": 2}
    program = _program(*ops, nbytes=ZERO_SIZES, outputs=(4,))
    assert _order(program) == [1, 0, 2, 3, 4]


@pytest.mark.parametrize(
    ("overwriters", "order"), [((2,), [0, 3, 4, 1, 2]), ((2, 4), [0, 3, 1, 4, 2])], ids=["one", "both"]
)
def test_an_op_runs_before_all_that_overwrites_what_it_reads(
    overwriters: tuple[int, ...], order: list[int]
) -> None:
    """A norm reads its scale and its bias, and both are updated: one was overwritten before it was read."""
    program = _program(*UPDATE, nbytes=SIZES, outputs=(2, 4))
    producers = [[program.producer[b] for b in op.inputs] for op in program.ops]
    needs = [[p for p in found if p is not None] for found in producers]
    work = Reorder(program, GRADIENT_STAYS, needs, [(), tuple(map(OpId, overwriters)), (), (), ()])
    work.run()
    assert work.order == order


def test_a_barrier_holds_what_it_waits_for() -> None:
    """The loop reads the zeros behind a barrier that waits for op 1, and op 2 only what came with them."""
    program = _program(*ZEROS, nbytes=ZERO_SIZES, outputs=(4,))
    needs: list[list[OpId]] = [[], [OpId(0)], [OpId(1)], [OpId(0), OpId(2)], [OpId(3)]]
    work = Reorder(program, [True] * 5, needs)
    work.run()
    assert work.order == [0, 1, 2, 3, 4]


def _deferred(params: Any, x: Any) -> Any:
    """A step whose updates come last."""

    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    grads = jax.grad(loss)(params)
    grads = jax.lax.optimization_barrier(grads)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def _branches(params: Any, x: Any) -> Any:
    """Four images, each through layers of its own copy: XLA:CPU runs the copies side by side."""

    def layers(x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w) * x
        return x @ params[0]

    return [layers(x * k) for k in range(1, 5)]


EXAMPLES = [
    h.example("gpt", "donated"),
    h.example("lstm", "donated"),
    h.example("scan", "donated"),
    h.Example(name="deferred", fn=_deferred, args=((h.spec(64, 64),) * 6, h.spec(32, 64)), donate=(0,)),
    h.Example(name="branches", fn=_branches, args=((h.spec(64, 64),) * 4, h.spec(512, 64))),
]


def _compiled(example: h.Example, platform: str, better: Any = reordered) -> tuple[Any, int]:
    """The example with its ops in a better order, and how many ops moved."""
    moved: list[int] = []

    def transform(data: bytes) -> bytes:
        before = h.lifted(data, platform)
        order = better(before)
        moved.append(0 if order is None else sum(op != k for k, op in enumerate(order)))
        if order is None:
            return data
        module = emit(before, order).proto
        after = h.predict(module, platform)
        peak = simulate(before.program).peak_bytes
        assert after.temp_bytes <= 1.05 * max(peak, before.prediction.temp_bytes)
        return proto.serialize(module)

    return h.compile_with(example, transform, platform), moved[0]


@pytest.mark.parametrize(("better", "moves"), [(reordered, "deferred"), (depth_first, "branches")])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_reordered_programs_give_the_same_bits(example: h.Example, better: Any, moves: str) -> None:
    args = h.data_for(example)
    _, plain = h.scheduled(example)
    compiled, moved = _compiled(example, "cpu", better)
    assert moved or example.name != moves
    h.replayed(compiled)
    for a, b in zip(h.run(plain, args), h.run(compiled, args), strict=True):
        np.testing.assert_array_max_ulp(a, b, maxulp=2)


def test_branches_one_after_the_other_take_less() -> None:
    example = EXAMPLES[-1]
    plain = h.scheduled(example)[1].memory_analysis().temp_size_in_bytes
    compiled, _ = _compiled(example, "cpu", depth_first)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * plain


def test_branches_in_a_loop_run_one_after_the_other() -> None:
    def scanned(params: Any, xs: Any) -> Any:
        return jax.lax.map(lambda x: _branches(params, x), xs)

    example = h.Example(name="scanned", fn=scanned, args=((h.spec(64, 64),) * 4, h.spec(3, 512, 64)))
    args = h.data_for(example)
    _, plain = h.scheduled(example)

    def transform(data: bytes) -> bytes:
        return proto.serialize(ordered(h.lifted(data), h.MODEL["cpu"]).module.proto)

    compiled = h.compile_with(example, transform)
    before, after = (c.memory_analysis().temp_size_in_bytes for c in (plain, compiled))
    assert after < 0.3 * before
    h.replayed(compiled)
    for a, b in zip(h.run(plain, args), h.run(compiled, args), strict=True):
        np.testing.assert_array_max_ulp(a, b, maxulp=2)


def test_gradients_of_one_branch_come_before_the_other_branch() -> None:
    """Ops 0 and 1 are one branch, 2 and 3 another, which reads the first; their gradients take turns."""
    needs = [[], [0], [1], [2], [1], [3], [0, 1], [2, 3]]
    order = _least_first([frozenset(map(OpId, before)) for before in needs])
    assert order == (0, 1, 4, 6, 2, 3, 5, 7)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_reordered_programs_are_read_before_they_are_overwritten_on_h200(
    h200: str, example: h.Example
) -> None:
    h.replayed(_compiled(example, "cuda")[0])
