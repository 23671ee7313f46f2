"""What bytes and recomputes in an iteration are weighed by: time, or energy.

Cuts are of integers, so both are in thousandths of what reports say or less: picoseconds and picojoules.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.cost import DeviceModel, scalar_work_ns
from passes.ir import Op
from passes.scalar_work import Work

PICO = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What is least, on a device.

    Attributes:
        least: one of `passes.objective.OBJECTIVES`; energy only of a device whose power is known.
    """

    device: DeviceModel
    least: str = "time"

    @property
    def of_byte(self) -> float:
        """Of a byte that is moved."""
        if self.least == "energy":
            return self.device.memory_picojoules_per_byte
        return PICO * 1e9 / self.device.bytes_per_second

    @property
    def of_launch(self) -> int:
        """Of a kernel, whatever it does."""
        return 0 if self.least == "energy" else PICO * self.device.launch_ns

    def of_op(self, op: Op) -> int:
        """Of an op as a kernel of its own."""
        return op.energy_pj if self.least == "energy" else PICO * op.cost_ns

    def of_flops(self, flops: int) -> int:
        """Of elementwise work inside another kernel; never nothing, so that it is avoided."""
        return 1 + (0 if self.least == "energy" else round(PICO * 1e9 * flops / self.device.vector_flops))

    def of_scalar_work(self, work: Work) -> int:
        """Of what runs one element at a time."""
        return 0 if self.least == "energy" else round(PICO * scalar_work_ns(self.device, work))
