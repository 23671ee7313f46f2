"""Training steps as programs without a compiler: kernels with roofline costs, for simulated rows.

The kernels are those that XLA ends up with: a product with what follows it in its epilogue, a normalization
with its statistics, attention as one kernel that saves a row of sums. Weights and their gradients have no
bytes, as arguments and results have none in a lifted program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passes.cost import DEVICES, DeviceModel, kernel_ns, kernel_pj
from passes.ir import Buffer, BufferId, Op, OpId, Program

BF16, F32 = 2, 4


@dataclass(slots=True)
class Kernels:
    """A program in the making; `run` adds a kernel and returns the ids of what it writes."""

    device: DeviceModel
    ops: list[Op] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def run(
        self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], *, flops: int = 0, moved: int = 0
    ) -> tuple[int, ...]:
        """Add a kernel.

        Args:
            reads: buffers; their bytes are moved.
            writes: bytes of each result.
            flops: of products, at 16 bits.
            moved: further bytes, such as of weights and their gradients.
        """
        made = tuple(range(len(self.sizes), len(self.sizes) + len(writes)))
        nbytes = moved + sum(writes) + sum(self.sizes[b] for b in reads)
        self.sizes += writes
        self.ops.append(
            Op(
                id=OpId(len(self.ops)),
                name=name,
                inputs=tuple(map(BufferId, reads)),
                outputs=tuple(map(BufferId, made)),
                cost_ns=kernel_ns(self.device, nbytes=nbytes, matrix_flops=flops, bits=16),
                energy_pj=kernel_pj(self.device, nbytes=nbytes, matrix_flops=flops, bits=16),
            )
        )
        return made

    def gradient(self, reads: tuple[int, ...], flops: int, nbytes: int) -> int:
        """A weight's gradient: a result, which has no bytes here."""
        (made,) = self.run("weight_gradient", reads, (0,), flops=flops, moved=nbytes)
        return made

    def program(self, name: str, outputs: list[int]) -> Program:
        """What has been added."""
        return Program.build(
            name=name,
            ops=tuple(self.ops),
            buffers=tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(self.sizes)),
            outputs=tuple(map(BufferId, outputs)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a transformer's step.

    Attributes:
        flash: whether attention is one kernel that saves no probabilities.
    """

    width: int
    layers: int = 12
    seq: int = 2048
    batch: int = 4
    vocab: int = 32768
    head: int = 128
    flash: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.seq * self.batch

    @property
    def name(self) -> str:
        """Such as "transformer 12 x 4096"."""
        return f"transformer {self.layers} x {self.width}"


def transformer(sizes: Transformer, device: DeviceModel = DEVICES["h200"]) -> Program:
    """Loss and gradients of a decoder with pre-normalization and a GELU."""
    k = Kernels(device)
    (x,) = k.run("embed", (), (BF16 * sizes.tokens * sizes.width,))
    saved = []
    for _ in range(sizes.layers):
        x, kept = _layer(k, sizes, x)
        saved.append(kept)
    grads: list[int] = []
    dx = _head(k, sizes, x, grads)
    for kept in reversed(saved):
        dx = _layer_t(k, sizes, dx, kept, grads)
    return k.program(sizes.name, grads)


def _layer(k: Kernels, s: Transformer, x: int) -> tuple[int, dict[str, int]]:
    n, d = s.tokens, s.width
    row, w = BF16 * n * d, BF16 * d * d
    heads = d // min(s.head, d)
    h, stat = k.run("norm", (x,), (row, 2 * F32 * n))
    (qkv,) = k.run("qkv", (h,), (3 * row,), flops=6 * n * d * d, moved=3 * w)
    kept = {"x": x, "h": h, "stat": stat, "qkv": qkv}
    if s.flash:
        kept["o"], kept["sums"] = k.run("attention", (qkv,), (row, F32 * n * heads), flops=4 * n * s.seq * d)
    else:
        square = BF16 * s.batch * heads * s.seq * s.seq
        (scores,) = k.run("scores", (qkv,), (square,), flops=2 * n * s.seq * d)
        kept["p"], kept["sums"] = k.run("softmax", (scores,), (square, F32 * n * heads))
        (kept["o"],) = k.run("values", (kept["p"], qkv), (row,), flops=2 * n * s.seq * d)
    (x2,) = k.run("project", (kept["o"], x), (row,), flops=2 * n * d * d, moved=w)
    h2, stat2 = k.run("norm", (x2,), (row, 2 * F32 * n))
    (wide,) = k.run("up", (h2,), (4 * row,), flops=8 * n * d * d, moved=4 * w)
    (active,) = k.run("gelu", (wide,), (4 * row,))
    (y,) = k.run("down", (active, x2), (row,), flops=8 * n * d * d, moved=4 * w)
    return y, {**kept, "x2": x2, "h2": h2, "stat2": stat2, "wide": wide, "active": active}


def _head(k: Kernels, s: Transformer, x: int, grads: list[int]) -> int:
    n, d, v = s.tokens, s.width, s.vocab
    (logits,) = k.run("logits", (x,), (BF16 * n * v,), flops=2 * n * d * v, moved=BF16 * d * v)
    (dlogits,) = k.run("loss_t", (logits,), (BF16 * n * v,))
    grads.append(k.gradient((dlogits, x), 2 * n * d * v, BF16 * d * v))
    (dx,) = k.run("logits_t", (dlogits,), (BF16 * n * d,), flops=2 * n * d * v, moved=BF16 * d * v)
    return dx


def _layer_t(k: Kernels, s: Transformer, dx: int, kept: dict[str, int], grads: list[int]) -> int:
    n, d = s.tokens, s.width
    row, w, gemm = BF16 * n * d, BF16 * d * d, 2 * n * d * d
    grads.append(k.gradient((dx, kept["active"]), 4 * gemm, 4 * w))
    (dwide,) = k.run("down_t", (dx, kept["wide"]), (4 * row,), flops=4 * gemm, moved=4 * w)
    grads.append(k.gradient((dwide, kept["h2"]), 4 * gemm, 4 * w))
    (dh2,) = k.run("up_t", (dwide,), (row,), flops=4 * gemm, moved=4 * w)
    (dx2,) = k.run("norm_t", (dh2, kept["x2"], kept["stat2"], dx), (row,))
    grads.append(k.gradient((dx2, kept["o"]), gemm, w))
    (do,) = k.run("project_t", (dx2,), (row,), flops=gemm, moved=w)
    if s.flash:
        reads = (do, kept["qkv"], kept["o"], kept["sums"])
        (dqkv,) = k.run("attention_t", reads, (3 * row,), flops=10 * n * s.seq * d)
    else:
        reads = (do, kept["p"], kept["sums"], kept["qkv"])
        (dscores,) = k.run("scores_t", reads, (k.sizes[kept["p"]],), flops=2 * n * s.seq * d)
        (dqkv,) = k.run("qkv_of", (dscores, do, kept["p"], kept["qkv"]), (3 * row,), flops=6 * n * s.seq * d)
    grads.append(k.gradient((dqkv, kept["h"]), 3 * gemm, 3 * w))
    (dh,) = k.run("qkv_t", (dqkv,), (row,), flops=3 * gemm, moved=3 * w)
    (dx,) = k.run("norm_t", (dh, kept["x"], kept["stat"], dx2), (row,))
    return dx


STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def resnet(depth: int, batch: int, size: int = 224, device: DeviceModel = DEVICES["h200"]) -> Program:
    """Loss and gradients of a ResNet; a normalization with its ReLU is one kernel."""
    k = Kernels(device)
    (x,) = k.run("image", (), (BF16 * batch * 3 * size * size,))
    tape: list[tuple[str, dict[str, int]]] = []
    side = size // 2
    x = _conv(k, tape, x, batch, side, 3, 64, 7)
    side //= 2
    (x,) = k.run("pool", (x,), (BF16 * batch * 64 * side * side,))
    channels = 64
    for stage, blocks in enumerate(STAGES[depth]):
        wide = 64 << stage
        layers = ((wide, 3), (wide, 3)) if depth < 50 else ((wide, 1), (wide, 3), (4 * wide, 1))
        outs = layers[-1][0]
        for block in range(blocks):
            side //= 2 if stage and not block else 1
            y, ins = x, channels
            for made, taps in layers:
                y, ins = _conv(k, tape, y, batch, side, ins, made, taps), made
            short = x if channels == outs else _conv(k, tape, x, batch, side, channels, outs, 1)
            (x,) = k.run("add_relu", (y, short), (BF16 * batch * outs * side * side,))
            tape.append(("add", {"x": y, "short": short, "y": x}))
            channels = outs
    return k.program(f"resnet{depth} b{batch}", _resnet_t(k, tape, x))


def _conv(
    k: Kernels,
    tape: list[tuple[str, dict[str, int]]],
    x: int,
    batch: int,
    side: int,
    ins: int,
    outs: int,
    taps: int,
) -> int:
    """A convolution, then a normalization with a ReLU."""
    n = batch * side * side
    flops, weight = 2 * n * ins * outs * taps * taps, BF16 * ins * outs * taps * taps
    (c,) = k.run("conv", (x,), (BF16 * n * outs,), flops=flops, moved=weight)
    y, stat = k.run("norm_relu", (c,), (BF16 * n * outs, 2 * F32 * outs))
    tape.append(("conv", {"x": x, "c": c, "y": y, "stat": stat, "flops": flops, "weight": weight}))
    return y


def _resnet_t(k: Kernels, tape: list[tuple[str, dict[str, int]]], last: int) -> list[int]:
    """The backward pass: gradients of values meet where a value had two readers."""
    grads: list[int] = []
    (first,) = k.run("loss_t", (last,), (k.sizes[last],))
    pending = {last: first}

    def give(value: int, gradient: int) -> None:
        if value in pending:
            (gradient,) = k.run("add_t", (pending[value], gradient), (k.sizes[value],))
        pending[value] = gradient

    for kind, kept in reversed(tape):
        dy = pending.pop(kept["y"], None)
        if dy is None:  # the pool stands between the first convolution and the rest
            dy = next(iter(pending.values()))
        if kind == "add":
            (d,) = k.run("relu_t", (dy, kept["y"]), (k.sizes[kept["y"]],))
            give(kept["x"], d)
            give(kept["short"], d)
            continue
        (dc,) = k.run("norm_relu_t", (dy, kept["c"], kept["y"], kept["stat"]), (k.sizes[kept["c"]],))
        grads.append(k.gradient((dc, kept["x"]), kept["flops"], kept["weight"]))
        (dx,) = k.run("conv_t", (dc,), (k.sizes[kept["x"]],), flops=kept["flops"], moved=kept["weight"])
        give(kept["x"], dx)
    return grads
