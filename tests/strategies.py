"""Hypothesis strategies for small programs with every feature of the IR.

Importing this module loads a profile without deadlines and with fixed seeds: tests must not depend on load.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from passes.ir import Buffer, BufferId, Op, OpId, Program
from passes.offsets.packing import Item, Span

settings.register_profile(
    "coop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("coop")


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 7, plain: bool = False, max_bytes: int = 6) -> Program:
    """A program of 1 to `max_ops` ops.

    Args:
        plain: no in-place outputs, effects, deadlines or workspace.
        max_bytes: largest buffer; sizes start at 0.
    """
    sizes: list[int] = [draw(st.integers(0, max_bytes)) for _ in range(draw(st.integers(0, 2)))]
    ops: list[Op] = []
    n_ops = draw(st.integers(1, max_ops))
    for i in range(n_ops):
        count = draw(st.integers(0, min(3, len(sizes))))
        recent = st.integers(max(0, len(sizes) - 4), len(sizes) - 1)
        inputs = [
            draw(recent if draw(st.booleans()) else st.integers(0, len(sizes) - 1)) for _ in range(count)
        ]
        outputs = list(range(len(sizes), len(sizes) + draw(st.sampled_from([1, 1, 1, 2, 0]))))
        sizes += [draw(st.integers(0, max_bytes)) for _ in outputs]
        ops.append(_op(draw, i, n_ops, inputs, outputs, plain))
    chosen = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2)) if sizes else []
    return Program.build(
        name="drawn",
        ops=tuple(ops),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(sizes)),
        outputs=tuple(BufferId(b) for b in chosen),
    )


def _op(draw: st.DrawFn, i: int, n_ops: int, inputs: list[int], outputs: list[int], plain: bool) -> Op:
    """One op; every output is offered at most one input's place, which keeps sharing monotone."""
    pairs = []
    if not plain and inputs:
        pairs = [(o, draw(st.sampled_from(inputs))) for o in outputs if draw(st.integers(0, 2)) == 0]
    rare = not plain and draw(st.integers(0, 4)) == 0
    return Op(
        id=OpId(i),
        inputs=tuple(BufferId(b) for b in inputs),
        outputs=tuple(BufferId(b) for b in outputs),
        cost_ns=draw(st.integers(0, 9)),
        recomputable=not (rare and draw(st.booleans())),
        deadline=draw(st.integers(i, n_ops)) if rare else None,
        may_share=tuple((BufferId(o), BufferId(b)) for o, b in pairs),
        workspace_bytes=0 if plain else draw(st.sampled_from([0, 0, 0, 1, 3])),
    )


@st.composite
def sequences(draw: st.DrawFn, program: Program, max_recomputes: int = 6) -> tuple[OpId, ...]:
    """Any valid sequence of steps: every op in order, with recomputes wherever they are allowed."""
    steps: list[OpId] = []
    left = draw(st.integers(0, max_recomputes))
    for slot in range(len(program.ops) + 1):
        can = [op.id for op in program.ops[:slot] if op.can_recompute(slot)]
        while can and left and draw(st.booleans()):
            steps.append(draw(st.sampled_from(can)))
            left -= 1
        if slot < len(program.ops):
            steps.append(OpId(slot))
    return tuple(steps)


@st.composite
def items_to_pack(draw: st.DrawFn) -> list[Item]:
    """Up to six items with lifetimes, some of two spans that follow each other."""
    items: list[Item] = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 6))
        stop = start + draw(st.integers(1, 5))
        spans = [Span(start=start, stop=stop, nbytes=draw(st.integers(1, 5)))]
        if draw(st.integers(0, 4)) == 0:
            spans.append(
                Span(start=stop, stop=stop + draw(st.integers(1, 3)), nbytes=draw(st.integers(1, 5)))
            )
        items.append(tuple(spans))
    return items


def example() -> Program:
    """The program drawn in `passes.ir`."""
    wires = [((), (0,)), ((0,), (1,)), ((1,), (2,)), ((2,), (3,)), ((1, 3), (4,)), ((0, 4), (5,))]
    return Program.build(
        name="example",
        ops=tuple(
            Op(
                id=OpId(i),
                inputs=tuple(BufferId(b) for b in inputs),
                outputs=tuple(BufferId(b) for b in outputs),
                cost_ns=10,
            )
            for i, (inputs, outputs) in enumerate(wires)
        ),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate((4, 4, 4, 1, 1, 1))),
        outputs=(BufferId(5),),
    )


def chain(layers: int, nbytes: int = 8, cost_ns: int = 10) -> Program:
    """`layers` layers and their transposes, each of which reads its layer's input; the loss in between."""
    ops: list[Op] = []
    sizes: list[int] = []

    def add(inputs: tuple[int, ...]) -> int:
        sizes.append(nbytes)
        wires = tuple(BufferId(b) for b in inputs)
        ops.append(Op(id=OpId(len(ops)), inputs=wires, outputs=(BufferId(len(sizes) - 1),), cost_ns=cost_ns))
        return len(sizes) - 1

    values = [add(())]
    for _ in range(layers):
        values.append(add((values[-1],)))
    gradient = add((values[-1],))
    for value in reversed(values[:-1]):
        gradient = add((value, gradient))
    return Program.build(
        name=f"chain{layers}",
        ops=tuple(ops),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(sizes)),
        outputs=(BufferId(gradient),),
    )


class Builder:
    """Adds ops one by one; `op` returns the ids of the outputs."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.sizes: list[int] = []

    def op(self, inputs: tuple[int, ...], sizes: tuple[int, ...], cost_ns: int) -> tuple[int, ...]:
        outputs = tuple(range(len(self.sizes), len(self.sizes) + len(sizes)))
        self.sizes += sizes
        wires = (tuple(BufferId(b) for b in ids) for ids in (inputs, outputs))
        self.ops.append(Op(id=OpId(len(self.ops)), inputs=next(wires), outputs=next(wires), cost_ns=cost_ns))
        return outputs

    def build(self, name: str, outputs: tuple[int, ...]) -> Program:
        return Program.build(
            name=name,
            ops=tuple(self.ops),
            buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(self.sizes)),
            outputs=tuple(BufferId(b) for b in outputs),
        )


def random_program(generator: random.Random, n_ops: int) -> Program:
    """A plain program whose ops read one to three of the latest values and of the first ones."""
    builder = Builder()
    for i in range(n_ops):
        inputs = tuple(generator.randrange(i) for _ in range(min(i, generator.randint(1, 3))))
        builder.op(inputs, (generator.randint(1, 9),), generator.randint(1, 9))
    return builder.build("random", (n_ops - 1,))


def small_gpt(layers: int, unit: int = 64) -> Program:
    """The kernels of a transformer's training step: norms with statistics, attention, a gated loss."""
    b = Builder()
    (x,) = b.op((), (unit,), 30)
    saved = []
    for _ in range(layers):
        h, mean, scale = b.op((x,), (unit, 1, 1), 60)
        (qkv,) = b.op((h,), (3 * unit,), 350)
        (scores,) = b.op((qkv,), (8 * unit,), 400)
        probabilities, row = b.op((scores,), (8 * unit, 2), 300)
        (x2,) = b.op((probabilities, qkv, x), (unit,), 560)
        (wide,) = b.op((x2,), (4 * unit,), 470)
        (active,) = b.op((wide,), (4 * unit,), 120)
        saved.append((x, mean, scale, h, qkv, probabilities, row, x2, wide, active))
        (x,) = b.op((active, x2), (unit,), 470)
    (logits,) = b.op((x,), (20 * unit,), 4000)
    (dx,) = b.op((logits, x), (unit,), 4000)
    outputs = []
    for x, mean, scale, h, qkv, probabilities, row, x2, wide, active in reversed(saved):
        (dwide,) = b.op((dx, wide), (4 * unit,), 590)
        outputs += b.op((dx, active, dwide, x2), (unit // 8,), 940)
        (dx2,) = b.op((dwide, x2, dx), (unit,), 560)
        (dscores,) = b.op((dx2, probabilities, row, qkv), (8 * unit,), 800)
        (dqkv,) = b.op((dscores, dx2, probabilities, qkv), (3 * unit,), 900)
        outputs += b.op((dqkv, h), (unit // 8,), 350)
        (dx,) = b.op((dqkv, x, mean, scale, dx2), (unit,), 440)
    return b.build(f"gpt{layers}", tuple(outputs))


def in_place(read_again: bool) -> Program:
    """The second op may write over the first one's output, which a third may read, too."""

    def op(i: int, inputs: tuple[int, ...]) -> Op:
        wires = tuple(BufferId(b) for b in inputs)
        share = ((BufferId(i), wires[0]),) if i == 1 else ()
        return Op(id=OpId(i), inputs=wires, outputs=(BufferId(i),), cost_ns=1, may_share=share)

    return Program.build(
        name="in place",
        ops=(op(0, ()), op(1, (0,)), op(2, (1, 0) if read_again else (1,))),
        buffers=tuple(Buffer(id=BufferId(i), nbytes=4) for i in range(3)),
        outputs=(BufferId(2),),
    )
