"""The memory of any compiled program: one of this process, a file that XLA dumped, or a serialized module.

None of them needs to have been made with `coop.remat`.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from coop_jax import aot, serialized
from coop_jax.addresses import real_assignment
from coop_jax.errors import UnsupportedError
from passes.checked import InputError
from passes.cost import DeviceModel
from passes.hlo import dumps, graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.barriers import drop_barriers
from passes.hlo.describe import Counted, describe
from passes.hlo.lift import lift
from passes.hlo.schema import SchemaError, schema
from passes.hlo.xla_assignment import Assignment, read_assignment
from passes.jaxpr import compat
from passes.memory_map import MAP_FORMAT, MemoryMap
from passes.pinning.executable import read_executable
from passes.pinning.gpu_executable import read_gpu_executable
from passes.pinning.mentions import ThunkError
from passes.planners import PlannerConfig, plan
from passes.simulate import simulate

_CURVE = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
PLATFORMS = ("cpu", "cuda")
_SHORT = reprlib.Repr(maxstring=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """What a budget would cost by recomputing kernels of a program as it is; nothing was compiled for it.

    Attributes:
        budget_bytes: of the whole program.
        overhead_ratio: estimated time of the recompute over that of all kernels.
        found: False if no plan was found.
    """

    budget_bytes: int
    overhead_ratio: float
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """A scheduled module that was read, and what XLA says of it.

    Attributes:
        assigner: its replayed buffer assignment.
        counted: XLA's counts of bytes, where they are known.
        real: XLA's addresses, where they are known.
    """

    assigner: Assigner
    counted: Counted | None = None
    real: Assignment | None = None

    def memory_map(self) -> MemoryMap:
        """The module's memory as data."""
        return describe(self.assigner, counted=self.counted, real=self.real)


def inspect(source: Any, *, platform: str | None = None, module: str | None = None) -> MemoryMap:
    """Where the bytes of a compiled program are, over time and at its peak.

    Args:
        source: what `jax.jit(f).lower(...).compile()` returned; or the path of a folder that XLA dumped to
            (`--xla_dump_to`), of a module in one (`*after_optimizations.txt` or `.hlo.pb`), of a serialized
            executable, or of a map written by `coop`.
        platform: "cpu" or "cuda", where a file's name does not tell.
        module: which module of a folder, by a part of its name; None takes the one that needs most.

    Raises:
        InputError: the file is none of these, or broken.
        UnsupportedError: the program has no memory analysis.
    """
    if not isinstance(source, str | Path):
        return open_compiled(source).memory_map()
    path = Path(source)
    if os.path.isfile(path) and (known := _map_in(path)) is not None:
        return known
    return open_path(path, platform=platform, module=module).memory_map()


def open_compiled(compiled: Compiled) -> Opened:
    """Read a compiled program of this process."""
    compiled = aot.inner_compiled(compiled)
    if not hasattr(compiled, "memory_analysis"):
        raise UnsupportedError(
            f"a {type(compiled).__name__} is no compiled program: give jax.jit(f).lower(*args).compile(), "
            "or a path."
        )
    parsed = proto.parse(aot.final_module(compiled))
    return Opened(
        assigner=_replayed(parsed, serialized.kind_of(compiled)),
        counted=aot.memory(compiled),
        real=real_assignment(compiled, parsed),
    )


def open_path(path: Path, *, platform: str | None = None, module: str | None = None) -> Opened:
    """Read a file or a folder; see `inspect`."""
    if platform is not None and platform not in PLATFORMS:
        raise InputError(f"platform is {platform!r}, expected one of {', '.join(PLATFORMS)}")
    if not os.path.exists(path):
        raise InputError(f"{_SHORT.repr(str(path))} does not exist: give the path of a file or of a folder")
    if not path.is_dir():
        named = dumps.module_of_path(path)
        return _open_file(path, platform or named.platform)
    modules = dumps.dumped_modules(path)
    chosen = [m for m in modules if module is None or module in m.path.name]
    if not chosen:
        raise InputError(f"no module in {path} has {module!r} in its name; there are {_names(modules)}")
    opened = [_open_file(m.path, platform or m.platform) for m in chosen]
    return max(opened, key=lambda o: o.memory_map().total_bytes)


def _names(modules: list[dumps.DumpedModule]) -> str:
    names = [m.name for m in modules]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _map_in(path: Path) -> MemoryMap | None:
    with path.open("rb") as file:
        if file.read(1) != b"{":
            return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if MAP_FORMAT not in text[:100]:
        raise InputError(f"{path} starts as JSON does, and is no map ({MAP_FORMAT})")
    return MemoryMap.from_json(text)


def _open_file(path: Path, platform: str | None) -> Opened:
    data = path.read_bytes()
    try:
        if data.startswith(b"HloModule"):
            return _open_text(path, data, platform)
        return next(_open_bytes(data, platform))
    except StopIteration:
        raise InputError(
            f"{path} is neither a module of XLA's, as text or serialized, nor an executable"
        ) from None
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def _open_text(path: Path, data: bytes, platform: str | None) -> Opened:
    module = proto.parse(compat.hlo_of_text(data.decode(errors="replace")))
    told = dumps.assignment_text_of(path)
    real = None if told is None else dumps.read_assignment_text(told)
    return Opened(assigner=_replayed(module, platform or _platform_of(module)), real=real)


def _open_bytes(data: bytes, platform: str | None) -> Iterator[Opened]:
    """Every way in which the bytes can be read, the likeliest first."""
    try:
        module, assignment = dumps.read_proto(data)
    except InputError:
        yield from _open_executable(data)
        return
    where = platform or _platform_of(module)
    real = None
    with suppress(SchemaError, FileNotFoundError):
        if assignment:
            real = read_assignment(assignment, module, schema(serialized.proto_library(where)))
    yield Opened(assigner=_replayed(module, where), real=real)


def _open_executable(data: bytes) -> Iterator[Opened]:
    for platform, read in (("cpu", read_executable), ("cuda", read_gpu_executable)):
        try:
            executable = read(data, schema(serialized.proto_library(platform)))
            module = executable.module()
        except (ThunkError, SchemaError, ValueError, FileNotFoundError, KeyError, IndexError):
            continue
        if module.computations:
            yield Opened(assigner=_replayed(module, platform))


def _platform_of(module: Any) -> str:
    """A GPU's module is known by the backend's notes on its kernels, or by their kinds."""
    marks = ("fusion_backend_config", "cublas", "triton", "operation_queue_id", "reification_cost")
    texts = (i.backend_config for c in module.computations for i in c.instructions)
    return "cuda" if any(mark.encode() in text for text in texts for mark in marks) else "cpu"


def _replayed(module: Any, platform: str) -> Assigner:
    """The buffer assignment of a parsed module, replayed; its barriers are taken out, in place."""
    drop_barriers(module)
    return Assigner(graph.read(module), platform, old_rules=compat.OLD_RULES)


def simulated_curve(opened: Opened, device: DeviceModel) -> tuple[SimulatedPoint, ...]:
    """What budgets would cost by recomputing the program's own kernels, by simulation."""
    assigner = opened.assigner
    lifted = lift(assigner.module, device, assigner.backend.name, assigner=assigner)
    peak = simulate(lifted.program).peak_bytes
    total = opened.memory_map().total_bytes
    points = []
    for ratio in _CURVE:
        budget_bytes = int(ratio * total)
        room_bytes = budget_bytes - (total - peak)
        made = plan(lifted.program, room_bytes, PlannerConfig(quick=True)) if room_bytes > 0 else None
        found, overhead_ratio = (made.status.found, made.overhead_ratio) if made else (False, 0.0)
        points.append(SimulatedPoint(budget_bytes=budget_bytes, overhead_ratio=overhead_ratio, found=found))
    return tuple(points)
