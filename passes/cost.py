"""Roofline cost of one kernel on one kind of device.

cost = launch + max(flops / peak(dtype) / efficiency, bytes / bandwidth), in integer nanoseconds.
Costs rank plans; they are estimates, never reported as measured time.
Peaks are the makers' dense figures (NVIDIA H100/H200/A100/B200 data sheets).
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 10**12
EXPENSIVE_FLOPS = 16
"""Elementwise flops that a transcendental function counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What the cost model knows of a device.

    Attributes:
        name: such as "h200" or "cpu".
        flops_16bit, flops_32bit, flops_64bit: matrix flop/s for operands of that width (32 bit as
            XLA runs f32 dots by default on the device).
        vector_flops: elementwise flop/s.
        bytes_per_second: memory bandwidth.
        link_bytes_per_second: what a device sends to others at a time, one way.
        launch_ns: fixed time of a kernel.
    """

    name: str
    flops_16bit: float
    flops_32bit: float
    flops_64bit: float
    vector_flops: float
    bytes_per_second: float
    link_bytes_per_second: float
    launch_ns: int


DEVICES: dict[str, DeviceModel] = {
    d.name: d
    for d in (
        DeviceModel(
            name="h200", flops_16bit=989 * TERA, flops_32bit=494 * TERA, flops_64bit=67 * TERA,
            vector_flops=67 * TERA, bytes_per_second=4.8 * TERA, link_bytes_per_second=0.45 * TERA,
            launch_ns=2000,
        ),
        DeviceModel(
            name="h100", flops_16bit=989 * TERA, flops_32bit=494 * TERA, flops_64bit=67 * TERA,
            vector_flops=67 * TERA, bytes_per_second=3.35 * TERA, link_bytes_per_second=0.45 * TERA,
            launch_ns=2000,
        ),
        DeviceModel(
            name="a100", flops_16bit=312 * TERA, flops_32bit=156 * TERA, flops_64bit=19.5 * TERA,
            vector_flops=19.5 * TERA, bytes_per_second=2.039 * TERA, link_bytes_per_second=0.3 * TERA,
            launch_ns=2500,
        ),
        DeviceModel(
            name="b200", flops_16bit=2250 * TERA, flops_32bit=1125 * TERA, flops_64bit=37 * TERA,
            vector_flops=75 * TERA, bytes_per_second=8.0 * TERA, link_bytes_per_second=0.9 * TERA,
            launch_ns=2000,
        ),
        DeviceModel(
            name="cpu", flops_16bit=0.05 * TERA, flops_32bit=0.1 * TERA, flops_64bit=0.05 * TERA,
            vector_flops=0.04 * TERA, bytes_per_second=0.01 * TERA, link_bytes_per_second=0.01 * TERA,
            launch_ns=1000,
        ),
    )
}  # fmt: skip


def kernel_ns(
    device: DeviceModel, *, nbytes: int, matrix_flops: int = 0, bits: int = 32, vector_flops: int = 0
) -> int:
    """Estimated time of one kernel.

    Args:
        nbytes: bytes read and written.
        matrix_flops: flops of dots and convolutions (2 per multiply-add).
        bits: width of their operands' elements.
        vector_flops: flops of everything else.
    """
    peak = {16: device.flops_16bit, 64: device.flops_64bit}.get(bits, device.flops_32bit)
    compute = matrix_flops / peak + vector_flops / device.vector_flops
    return device.launch_ns + round(1e9 * max(compute, nbytes / device.bytes_per_second))
