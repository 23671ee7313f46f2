"""The link between a device and its host, or its storage: how long copies take each way, in what energy.

A copy takes `latency_ns` and its bytes at the link's rate, alone: copies in one direction follow each other,
both directions are independent. The rates are of large copies from and to pinned memory.

pcie3, pcie4, pcie5   16 lanes: 15.75, 31.5 and 63 GB/s each way by the PCI-SIG's base specifications (8, 16
                      and 32 GT/s, 128b/130b); packets take a part of it, and 12, 25 and 55 GB/s are what
                      NVIDIA's bandwidthTest and nvbandwidth show on V100, A100 and H100 cards (NVIDIA's
                      own account of nvbandwidth, 2025: 55.6).
c2c                   NVLink-C2C of GH200: 900 GB/s in both directions together (NVIDIA's data sheet).
tpu-v5e, tpu-v6e      1.5e10 bytes/s for each chip ("How to Scale Your Model", Google DeepMind 2025, ch. 2,
                      whose third question is about a v6e).
sd-mcu, sd-rpi, ssd-tx2
                      the storage that POET pages small devices to: an SD card of a microcontroller (MKR1000,
                      nRF52840), one of a Raspberry Pi, the drive of a Jetson TX2; rates, latencies and powers
                      as its authors measured them (Patil et al., ICML 2022, and their code).

Energy of the others is of the bytes on the way and in both memories: about 6 pJ a bit for a PCIe lane's two
ends (about 1.3 for C2C, NVIDIA's GH200 white paper) and 15 pJ a bit for DDR memory (O'Connor et al., MICRO
2017). Orders of magnitude: they rank plans.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIGA = 10**9
_PCIE_PJ, _C2C_PJ = 8 * (6 + 15), 8 * 16.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's link to its host.

    Attributes:
        name: such as "pcie5".
        to_host_bytes_per_second, from_host_bytes_per_second: rates of large copies, each way.
        latency_ns: fixed time of a copy.
        picojoules_per_byte: energy of a byte that crosses, both memories included.
    """

    name: str = ""
    to_host_bytes_per_second: float
    from_host_bytes_per_second: float
    latency_ns: int = 0
    picojoules_per_byte: float = _PCIE_PJ

    def __post_init__(self) -> None:
        if min(self.to_host_bytes_per_second, self.from_host_bytes_per_second) <= 0 or self.latency_ns < 0:
            raise ValueError(
                f"link {self.name!r} carries {self.to_host_bytes_per_second} and "
                f"{self.from_host_bytes_per_second} bytes/s after {self.latency_ns} ns: "
                f"rates must be above 0, the latency not below"
            )

    def to_host_ns(self, nbytes: int) -> int:
        """Time of a copy to the host, alone on the link."""
        return self.latency_ns + round(nbytes * 1e9 / self.to_host_bytes_per_second)

    def from_host_ns(self, nbytes: int) -> int:
        """Time of a copy from the host, alone on the link."""
        return self.latency_ns + round(nbytes * 1e9 / self.from_host_bytes_per_second)


def _even(name: str, giga: float, latency_ns: int, picojoules: float = _PCIE_PJ) -> Link:
    return Link(
        name=name,
        to_host_bytes_per_second=giga * _GIGA,
        from_host_bytes_per_second=giga * _GIGA,
        latency_ns=latency_ns,
        picojoules_per_byte=picojoules,
    )


PCIE3 = _even("pcie3", 12, 10_000)
PCIE4 = _even("pcie4", 25, 10_000)
PCIE5 = _even("pcie5", 55, 10_000)
C2C = _even("c2c", 450, 5_000, _C2C_PJ)
TPU_V5E = _even("tpu-v5e", 15, 10_000)
TPU_V6E = _even("tpu-v6e", 15, 10_000)


def _storage(name: str, write_mega: float, read_mega: float, write_us: float, watts: float) -> Link:
    """Storage in MB/s; a byte takes the power while it is written, and while it is read: half of both."""
    write, read = write_mega * 1e6, read_mega * 1e6
    return Link(
        name=name,
        to_host_bytes_per_second=write,
        from_host_bytes_per_second=read,
        latency_ns=round(write_us * 1e3),
        picojoules_per_byte=1e12 * watts * (1 / write + 1 / read) / 2,
    )


SD_MCU = _storage("sd-mcu", 4.44, 4.61651, 113, 0.1 * 3.3)
SD_RPI = _storage("sd-rpi", 24.5, 45.5, 18.5314, 0.03 * 5)
SSD_TX2 = _storage("ssd-tx2", 94.37, 108.5, 2396, 0.309)

LINKS: dict[str, Link] = {
    link.name: link for link in (PCIE3, PCIE4, PCIE5, C2C, TPU_V5E, TPU_V6E, SD_MCU, SD_RPI, SSD_TX2)
}
