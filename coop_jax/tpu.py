"""TPUs that are not here: what they are called, how much memory they have, and devices to compile for.

libtpu, as it comes from the package index, compiles for every TPU on any x86 machine. A name is a chip
("v5e": one device of it) or a slice with its shape ("v6e:2x4": eight).
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

from jax.experimental import topologies

from coop_jax.errors import UnsupportedError

GIB = 1 << 30
# What libtpu asks of a machine with TPUs, answered for one without; several processes may compile at once.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Before JAX 0.12 without the name of the error, CompileTimeHbmOom.
_OUT_OF_MEMORY = re.compile(r"Ran out of memory on HBM.*?temporaries \((\d+(?:\.\d+)?)([KMG]?)\)", re.DOTALL)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SHAPE = re.compile(r"\d+(x\d+){1,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of TPU.

    Attributes:
        memory_bytes: what XLA lets a program have of one device's memory, by its own refusals.
        shape: of the smallest slice.
    """

    memory_bytes: int
    shape: str


CHIPS = {
    "v4": Chip(memory_bytes=int(15.25 * GIB), shape="1x1x1"),
    "v5e": Chip(memory_bytes=int(15.75 * GIB), shape="1x1"),
    "v5p": Chip(memory_bytes=int(95.73 * GIB), shape="1x1x1"),
    "v6e": Chip(memory_bytes=int(31.24 * GIB), shape="1x1"),
    "tpu7x": Chip(memory_bytes=int(94.74 * GIB), shape="1x1x1"),
}


def split(name: str) -> tuple[str, str] | None:
    """The chip and the shape of a slice, "" where only the chip is named; None for no TPU's name."""
    chip, colon, shape = name.lower().partition(":")
    if chip not in CHIPS or (colon and not _SHAPE.fullmatch(shape)):
        return None
    return chip, shape


def bytes_out_of_memory(message: str) -> int | None:
    """What a program needs that XLA refused for its memory, from its message; None if that is not why.

    XLA writes three digits, such as `(25.38G)`.
    """
    stated = _OUT_OF_MEMORY.search(message)
    return None if stated is None else int(float(stated[1]) * _UNITS[stated[2]])


def absent_devices(topology: str) -> tuple[Any, ...]:
    """The devices of a slice that is not here; only one where no shape is given.

    Args:
        topology: such as "v5e" or "v6e:2x4".

    Raises:
        UnsupportedError: libtpu is not installed, or knows no such slice.
    """
    parts = split(topology)
    assert parts is not None, f"{topology} names no TPU"
    if importlib.util.find_spec("libtpu") is None:
        raise UnsupportedError(
            f"compiling for an absent TPU ({topology}) needs libtpu (214 MB; x86 Linux only):\n"
            "  pip install --no-deps libtpu"
        )
    chip, shape = parts
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bounds = {} if shape else {"chips_per_host_bounds": (1, 1, 1)}
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip}:{shape or CHIPS[chip].shape}", **bounds
        )
    except Exception as error:  # libtpu answers with whatever its parsers raise
        raise UnsupportedError(f"libtpu cannot compile for {topology}: {error}") from error
    return tuple(described.devices) if shape else tuple(described.devices[:1])
