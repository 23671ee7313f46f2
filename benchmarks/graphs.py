"""Graphs to plan, in the manner of those that Checkmate and Moccasin published: for whoever has not got them.

    python -m benchmarks.graphs --out graphs                   # coop-program/1 files
    python -m benchmarks.planners --graphs graphs

Training graphs of convolutional networks (ResNet-50, He 2016; VGG-16, Simonyan 2015; U-Net, Ronneberger
2015): one op a layer, then for each layer from the last to the first the op that makes its gradients, from
the gradients of what it made and from what it read. Bytes are the layers' in float32, costs their flops, a
gradient's twice the layer's. Random layered graphs as in Moccasin's evaluation: layers of a few ops that read
the layer before them, some read further back. The published files differ: theirs have profiled costs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

from passes.ir import Buffer, BufferId, Op, OpId, Program

FLOAT = 4
FLOPS_PER_UNIT = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a layer makes: its number, and its shape without the batch."""

    layer: int
    side: int
    channels: int


@dataclass(slots=True, kw_only=True)
class Network:
    """A convolutional network as it is written down, layer by layer.

    Attributes:
        batch: images in a batch.
        reads: for each layer the layers that it reads.
        nbytes: of what each makes.
        costs: of each, in units of ten million flops.
        names: for people.
    """

    batch: int
    reads: list[tuple[int, ...]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def layer(self, name: str, read: tuple[Image, ...], side: int, channels: int, flops: int) -> Image:
        """Add a layer; `flops` are those of one element of its result."""
        elements = self.batch * side * side * channels
        self.reads.append(tuple(image.layer for image in read))
        self.nbytes.append(FLOAT * elements)
        self.costs.append(1 + elements * flops // FLOPS_PER_UNIT)
        self.names.append(name)
        return Image(layer=len(self.names) - 1, side=side, channels=channels)

    def data(self, side: int) -> Image:
        """The images that go in."""
        return self.layer("data", (), side, 3, 0)

    def conv(self, x: Image, channels: int, kernel: int = 3, stride: int = 1) -> Image:
        """A convolution, and the normalization and threshold after it."""
        side = -(-x.side // stride)
        made = self.layer("conv", (x,), side, channels, 2 * kernel * kernel * x.channels)
        return self.layer("relu", (self.layer("norm", (made,), side, channels, 8),), side, channels, 1)

    def pool(self, x: Image, by: int = 2) -> Image:
        """A maximum over squares."""
        return self.layer("pool", (x,), x.side // by, x.channels, by * by)

    def program(self, name: str) -> Program:
        """The network, then its gradients."""
        n = len(self.names)
        nbytes, ops = list(self.nbytes), list[Op]()
        arriving: list[list[int]] = [[] for _ in range(n)]
        for i in range(n):
            ops.append(_op(i, self.names[i], self.reads[i], (i,), self.costs[i]))
        for i in reversed(range(n)):
            made = []
            for j in self.reads[i]:
                nbytes.append(self.nbytes[j])
                arriving[j].append(len(nbytes) - 1)
                made.append(len(nbytes) - 1)
            nbytes.append(0)
            inputs = (*arriving[i], *self.reads[i], i)
            ops.append(
                _op(
                    len(ops), f"{self.names[i]} gradient", inputs, (*made, len(nbytes) - 1), 2 * self.costs[i]
                )
            )
        return _program(name, ops, nbytes, (len(nbytes) - 1,))


def _op(i: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], cost: int) -> Op:
    return Op(
        id=OpId(i), name=name, inputs=tuple(map(BufferId, inputs)), outputs=tuple(map(BufferId, outputs)),
        cost_ns=cost,
    )  # fmt: skip


def _program(name: str, ops: list[Op], nbytes: list[int], outputs: tuple[int, ...]) -> Program:
    buffers = tuple(Buffer(id=BufferId(i), nbytes=n) for i, n in enumerate(nbytes))
    return Program.build(name=name, ops=tuple(ops), buffers=buffers, outputs=tuple(map(BufferId, outputs)))


def resnet50(batch: int = 256) -> Program:
    """ResNet-50 on images of 224 x 224."""
    net = Network(batch=batch)
    x = net.pool(net.conv(net.data(224), 64, kernel=7, stride=2))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            inner = net.conv(net.conv(net.conv(x, width, 1, stride), width), 4 * width, 1)
            short = x if block else net.conv(x, 4 * width, 1, stride)
            x = net.layer("add", (inner, short), inner.side, inner.channels, 1)
    net.layer("loss", (x,), 1, 1000, 2 * x.channels)
    return net.program(f"resnet50_b{batch}_generated")


def vgg16(batch: int = 256) -> Program:
    """VGG-16 on images of 224 x 224."""
    net = Network(batch=batch)
    x = net.data(224)
    for channels, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            x = net.conv(x, channels)
        x = net.pool(x)
    net.layer("loss", (x,), 1, 1000, 2 * 4096)
    return net.program(f"vgg16_b{batch}_generated")


def unet(batch: int = 32) -> Program:
    """A U-Net on images of 256 x 256."""
    net = Network(batch=batch)
    x, across = net.data(256), list[Image]()
    for stage in range(4):
        x = net.conv(net.conv(x, 64 << stage), 64 << stage)
        across.append(x)
        x = net.pool(x)
    x = net.conv(net.conv(x, 1024), 1024)
    for stage in reversed(range(4)):
        up = net.layer("up", (x,), 2 * x.side, 64 << stage, 2 * 4 * x.channels)
        both = net.layer("concatenate", (across[stage], up), up.side, 128 << stage, 1)
        x = net.conv(net.conv(both, 64 << stage), 64 << stage)
    net.layer("loss", (x,), x.side, 2, 2 * x.channels)
    return net.program(f"unet_b{batch}_generated")


def random_layered(n_ops: int = 100, seed: int = 0) -> Program:
    """Layers of two to six ops; each reads one to three of the layer before, one in four an earlier op."""
    chance = random.Random(seed)
    before, layer, ops, nbytes = list[int](), list[int](), list[Op](), list[int]()
    read: set[int] = set()
    width = 0
    for i in range(n_ops):
        if len(layer) == width:
            before, layer, width = layer, [], chance.randint(2, 6)
        inputs = set(chance.sample(before, min(len(before), chance.randint(1, 3))))
        if i and chance.random() < 0.25:
            inputs.add(chance.randrange(i))
        read |= inputs
        ops.append(_op(i, f"op{i}", tuple(sorted(inputs)), (i,), chance.randint(1, 1000)))
        nbytes.append(10 * chance.randint(1, 600))
        layer.append(i)
    ends = tuple(i for i in range(n_ops) if i not in read)
    return _program(f"random_layered_{n_ops}_generated", ops, nbytes, ends)


GRAPHS = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "unet": unet,
    "random_layered_100": lambda: random_layered(100),
    "random_layered_250": lambda: random_layered(250),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="write generated graphs as coop-program/1 files")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for make in GRAPHS.values():
        program = make()
        (folder / f"{program.name}.json").write_text(program.to_json() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
