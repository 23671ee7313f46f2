"""Roofline cost of one kernel on one kind of device.

cost = launch + max(flops / peak(dtype), bytes / bandwidth, elements written / rate), in integer nanoseconds.
Costs rank plans; they are estimates, never reported as measured time.
Peaks are the makers' dense figures: NVIDIA's H100, H200, A100 and B200 data sheets; Google Cloud's pages on
TPU v4, v5e, v5p, v6e and TPU7x. A TPU's figures are of one device as JAX counts them: where a chip has two
(v4, TPU7x: its two cores), half of the chip's. The CPU's are by `benchmarks.cpu_model`, as they stand to each
other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from passes.backend import CPU, CUDA, TPU
from passes.link import PCIE4, PCIE5, TPU_V5E, TPU_V6E, Link
from passes.scalar_work import Work

TERA = 10**12
EXPENSIVE_FLOPS = 16
"""Elementwise flops that a transcendental function counts as."""
ASSUMED_ITERATIONS = 10
"""How often a loop is assumed to run that ends when something is reached."""
_TPU_REACHED_RATIO = 0.62


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWeights:
    """What XLA:GPU weighs when it splits a product along its depth (`passes.jaxpr.split_dots`), of no unit.

    Attributes:
        byte: a byte of operands and partial results, beside a flop.
        sum_byte, sum_launch: a byte of the sum of the parts, and the kernel that it is.
    """

    flop: float = 100.0
    byte: float
    sum_byte: float
    sum_launch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What the cost model knows of a device.

    Attributes:
        name: such as "h200" or "cpu".
        platform: the name of its `passes.backend.Backend`.
        kinds: by what its `device_kind` is known, in lower case; the longest that occurs there decides.
        flops_16bit, flops_32bit, flops_64bit: matrix flop/s for operands of that width (32 bit as
            XLA runs f32 dots by default on the device).
        vector_flops: elementwise flop/s.
        elements_per_second: that a kernel of elementwise work writes at most, however small they are; None
            where nothing but bytes and flops counts. On an H100 .85e12: kernels that fill arrays of 8, 16 and
            32 bits reached .85, .84 and .80 (the memory's limit); others by their cores and clock.
        unaligned_ratio: how much longer products of matrices take whose rows are no whole words of 4 bytes,
            which is the least that is copied asynchronously. Three products of GPT's 50257 words in bfloat16
            took 4.3 to 5.5 times the estimate on an H100, all others 1.2.
        bytes_per_second: memory bandwidth.
        link_bytes_per_second: what a device sends to others at a time, one way.
        launch_ns: fixed time of a kernel.
        mapped_bytes_per_second: how fast the system maps a program's temporaries, which it does anew in every
            run; None where they stay mapped.
        kept_bytes: temporaries of no more than that stay mapped.
        host_link: how it is joined to its host's memory; None where that is its own.
        watts: power under full load by the data sheet; 0 where the maker gives none.
        cores: its multiprocessors.
        split: how XLA splits products there; None where it does not.
        memory_picojoules_per_byte: energy of a byte of device memory, HBM2's 3.92 pJ a bit (O'Connor et al.,
            MICRO 2017) unless known better.
        partitioned: True for one of several over which XLA partitions a program.
        in_body: True inside of control flow, where XLA:CPU leaves convolutions in the form they come in.
        scalar_ns: of a unit of each kind of work that runs one element at a time (`passes.scalar_work`).
    """

    name: str
    platform: str = CUDA.name
    kinds: tuple[str, ...] = ()
    flops_16bit: float
    flops_32bit: float
    flops_64bit: float
    vector_flops: float
    elements_per_second: float | None = None
    unaligned_ratio: float = 1.0
    bytes_per_second: float
    link_bytes_per_second: float
    launch_ns: int
    mapped_bytes_per_second: float | None = None
    kept_bytes: int = 0
    host_link: Link | None = PCIE5
    watts: float = 0.0
    cores: int = 1
    split: SplitWeights | None = None
    memory_picojoules_per_byte: float = 8 * 3.92
    partitioned: bool = False
    in_body: bool = False
    scalar_ns: Mapping[str, float] = field(default_factory=dict, hash=False)

    def matrix_flops(self, bits: int) -> float:
        """Matrix flop/s for operands of a width."""
        return {16: self.flops_16bit, 64: self.flops_64bit}.get(bits, self.flops_32bit)

    def picojoules_per_flop(self, bits: int) -> float:
        """Energy of a flop of products: full load without what full memory traffic takes, at their peak."""
        left = self.watts - self.bytes_per_second * self.memory_picojoules_per_byte * 1e-12
        return max(0.0, left) * 1e12 / self.matrix_flops(bits)


def maps_huge_pages(
    setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """True if Linux maps large allocations in pages of 2 MiB: always, or where the C library asks for it."""
    said = setting.read_text() if setting.exists() else ""
    asks = "glibc.malloc.hugetlb=1" in environ.get("GLIBC_TUNABLES", "")
    return "[always]" in said or ("[madvise]" in said and asks)


# By `benchmarks.cpu_model`, as they stand to the other figures of the "cpu" model.
_XLA_CPU_NS = {
    "acos": 39.0, "asin": 42.0, "atan2": 15.6, "cbrt": 23.0, "cosine": 11.0, "power": 8.3, "remainder": 6.9,
    "sine": 10.0, "tan": 25.0,
    "comparison": 21.0, "comparison of integers": 5.0, "largest": 1.6,
    "reduction of pairs": 5.0, "window": 1.2, "window of a line": 0.45,
    "eigh": 75.0, "svd": 125.0, "eig": 380.0, "qr": 16.0, "lu": 9.5, "cholesky": 7.0, "solve": 10.0,
    "butterfly": 0.5,
    "group of lines": 56.0, "patch of lines": 0.5, "group of planes": 19.0, "patch of planes": 2.8,
    "volume": 450.0, "patch of volumes": 3.7, "row of volumes": 9.6, "patch of dilated volumes": 28.0,
    "multiply-add": 0.8,
}  # fmt: skip


_AMPERE = SplitWeights(byte=0.0666955, sum_byte=467.815, sum_launch=5.65307e7)
_HOPPER = SplitWeights(byte=0.194136, sum_byte=193.1384, sum_launch=4.36e7)
_BLACKWELL = SplitWeights(byte=0.0848863, sum_byte=189.711, sum_launch=1.21563e8)


def _tpu(name: str, *kinds: str, flops: float, vector: float, bandwidth: float, link: float) -> DeviceModel:
    """A TPU, in Tflop/s and TB/s; XLA multiplies f32 matrices in one pass of bf16 by default there.

    By XLA's own estimated cycles (`benchmarks.cycles`) kernels of a Llama reach 54 to 77 % of the data
    sheet's bandwidth on a v5e, those of small programs 45, and the least takes 1824 cycles at 1.5 GHz.
    """
    return DeviceModel(
        name=name, platform=TPU.name, kinds=kinds, flops_16bit=flops * TERA, flops_32bit=flops * TERA,
        flops_64bit=flops / 32 * TERA, vector_flops=vector * TERA,
        bytes_per_second=_TPU_REACHED_RATIO * bandwidth * TERA, link_bytes_per_second=link * TERA,
        launch_ns=1200, host_link=TPU_V6E if kinds[0] in ("tpu v6 lite", "tpu7x") else TPU_V5E,
    )  # fmt: skip


DEVICES: dict[str, DeviceModel] = {
    d.name: d
    for d in (
        DeviceModel(
            name="h200", kinds=("h200",), watts=700,
            flops_16bit=989 * TERA, flops_32bit=494 * TERA, flops_64bit=67 * TERA,
            vector_flops=67 * TERA, bytes_per_second=4.8 * TERA, link_bytes_per_second=0.45 * TERA,
            elements_per_second=0.85 * TERA, unaligned_ratio=4.0,
            launch_ns=2000, cores=132, split=_HOPPER,
        ),
        DeviceModel(
            name="h100", kinds=("h100",), watts=700,
            flops_16bit=989 * TERA, flops_32bit=494 * TERA, flops_64bit=67 * TERA,
            vector_flops=67 * TERA, bytes_per_second=3.35 * TERA, link_bytes_per_second=0.45 * TERA,
            elements_per_second=0.85 * TERA, unaligned_ratio=4.0,
            launch_ns=2000, cores=132, split=_HOPPER,
        ),
        DeviceModel(
            name="a100", kinds=("a100",), watts=400,
            flops_16bit=312 * TERA, flops_32bit=156 * TERA, flops_64bit=19.5 * TERA,
            vector_flops=19.5 * TERA, bytes_per_second=2.039 * TERA, link_bytes_per_second=0.3 * TERA,
            elements_per_second=0.5 * TERA, unaligned_ratio=4.0,
            launch_ns=2500, cores=108, split=_AMPERE, host_link=PCIE4,
        ),
        DeviceModel(
            name="b200", kinds=("b200",), watts=1000,
            flops_16bit=2250 * TERA, flops_32bit=1125 * TERA, flops_64bit=37 * TERA,
            vector_flops=75 * TERA, bytes_per_second=8.0 * TERA, link_bytes_per_second=0.9 * TERA,
            elements_per_second=0.95 * TERA, unaligned_ratio=4.0,
            launch_ns=2000, cores=148, split=_BLACKWELL,
        ),
        DeviceModel(
            name="cpu", platform=CPU.name,
            flops_16bit=0.05 * TERA, flops_32bit=0.1 * TERA, flops_64bit=0.05 * TERA,
            vector_flops=0.04 * TERA, bytes_per_second=0.01 * TERA, link_bytes_per_second=0.01 * TERA,
            launch_ns=1000, host_link=None,
            mapped_bytes_per_second=(0.005 if maps_huge_pages() else 0.001) * TERA,
            kept_bytes=(32 << 20) - (1 << 16), scalar_ns=_XLA_CPU_NS,
        ),
        _tpu("v4", "tpu v4", flops=137.5, vector=4.3, bandwidth=0.614, link=0.075),
        _tpu("v5e", "tpu v5 lite", "tpu v5e", flops=197, vector=6.1, bandwidth=0.819, link=0.1),
        _tpu("v5p", "tpu v5", "tpu v5p", flops=459, vector=14.3, bandwidth=2.765, link=0.3),
        _tpu("v6e", "tpu v6 lite", "tpu v6e", flops=918, vector=7.2, bandwidth=1.64, link=0.224),
        _tpu("tpu7x", "tpu7x", flops=1153.5, vector=7.2, bandwidth=3.69, link=0.3),
    )
}  # fmt: skip


def kernel_ns(
    device: DeviceModel,
    *,
    nbytes: int,
    matrix_flops: int = 0,
    unaligned_flops: int = 0,
    bits: int = 32,
    vector_flops: int = 0,
    scalar_ns: float = 0.0,
    elements: int = 0,
) -> int:
    """Estimated time of one kernel.

    Args:
        nbytes: bytes read and written.
        matrix_flops: flops of dots and convolutions (2 per multiply-add).
        unaligned_flops: those of `matrix_flops` in products whose rows are no whole words.
        bits: width of their operands' elements.
        vector_flops: flops of everything else.
        scalar_ns: of what runs one element at a time, see `scalar_work_ns`.
        elements: that a kernel of elementwise work writes; 0 for other kernels.
    """
    slow_flops = (device.unaligned_ratio - 1) * unaligned_flops
    compute = (matrix_flops + slow_flops) / device.matrix_flops(bits) + vector_flops / device.vector_flops
    other_ns = round(max(1e9 * compute + scalar_ns, 1e9 * nbytes / device.bytes_per_second))
    return device.launch_ns + max(other_ns, writing_ns(device, elements))


def scalar_work_ns(device: DeviceModel, work: Work) -> float:
    """Estimated time of what runs one element at a time."""
    return sum(device.scalar_ns.get(kind, 0.0) * units for kind, units in work.items())


def writing_ns(device: DeviceModel, elements: int) -> int:
    """Estimated time that a kernel of elementwise work takes at least, its launch apart."""
    return round(1e9 * elements / device.elements_per_second) if device.elements_per_second else 0


def is_unaligned(row: int, bits: int) -> bool:
    """True for rows of several elements that are no whole words of 4 bytes."""
    return row > 1 and bool(row * bits % 32)


def mapping_ns(device: DeviceModel, temp_bytes: int) -> int:
    """Estimated time in which a program's temporaries are mapped in each run.

    XLA:CPU allocates them together. The GNU C library returns an allocation of more than 32 MiB to the system
    when it is freed; mapped anew it takes a page fault for every 4 KiB, a GPT-2's 99 MiB .43 of its step.
    """
    if device.mapped_bytes_per_second is None or temp_bytes <= device.kept_bytes:
        return 0
    return round(1e9 * temp_bytes / device.mapped_bytes_per_second)


def kernel_pj(device: DeviceModel, *, nbytes: int, matrix_flops: int = 0, bits: int = 32) -> int:
    """Estimated energy of one kernel in picojoules, of its bytes and products; 0 if the device's is unknown.

    It ranks plans, as `kernel_ns` does, and is never reported as measured.
    """
    if not device.watts:
        return 0
    products = matrix_flops * device.picojoules_per_flop(bits)
    return round(nbytes * device.memory_picojoules_per_byte + products)
