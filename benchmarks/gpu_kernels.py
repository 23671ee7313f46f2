"""What single kernels take on the GPU that is here, beside what the cost model says; and what it can reach.

`benchmarks.gpu` calls this, with `GRAPHS_OFF` in `XLA_FLAGS`: the profiler does not tell kernels apart that
XLA records in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from coop_jax import aot
from coop_jax.text import format_table
from passes.cost import DeviceModel
from passes.hlo import graph, proto
from passes.hlo.cost import instruction_ns, trip_count
from passes.hlo.graph import Computation, Module

STEPS = 3
GRAPHS_OFF = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An instruction of a compiled program.

    Attributes:
        name, kind: of the instruction; its opcode, a custom call's target, or what its fusion holds.
        runs: in a step of the program.
        estimated_ns, measured_ns: of one run; measured is the mean, None if the profiler did not say.
    """

    name: str
    kind: str
    runs: int
    estimated_ns: int
    measured_ns: float | None = None


def measured(found: Sequence[Kernel], run: Callable[[], Any]) -> tuple[list[Kernel], dict[str, float]]:
    """The same with what the profiler says of calls of `run`, which runs the program once.

    Returns:
        The kernels, and the nanoseconds of everything else that was seen in a step.
    """
    total_ns = profile(run)
    seen = [
        dataclasses.replace(
            k, measured_ns=total_ns[k.name] / (STEPS * k.runs) if k.name in total_ns else None
        )
        for k in found
    ]
    names = {k.name for k in found}
    return seen, {name: ns / STEPS for name, ns in total_ns.items() if name not in names}


def profile(run: Callable[[], Any]) -> dict[str, float]:
    """Nanoseconds of every instruction, all streams together, in `STEPS` calls of `run`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        found: dict[str, float] = {}
        for name, nanoseconds in _events(jax.profiler.ProfileData.from_file(str(file))):
            found[name] = found.get(name, 0.0) + nanoseconds
    return found


def _events(data: Any) -> Iterator[tuple[str, float]]:
    """The instruction (the kernel's own name where it is not said) and the time of each event on a GPU."""
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key is not None}
                yield str(stats.get("hlo_op") or event.name), event.duration_ns


def kernels(compiled: Any, device: DeviceModel) -> list[Kernel]:
    """Every instruction of a program that costs something by the model, those of loops included."""
    view = graph.read(proto.parse(aot.final_module(compiled)))
    return list(_kernels(view, view.entry, device, 1))


def _kernels(view: Module, computation: Computation, device: DeviceModel, runs: int) -> Iterator[Kernel]:
    for i in computation.order:
        instruction = computation.by_id[i]
        if instruction.opcode in ("while", "call", "conditional", "async-start"):
            turns = trip_count(view, instruction) if instruction.opcode == "while" else 1
            for c in instruction.called:
                yield from _kernels(view, view.computations[c], device, runs * turns)
            continue
        ns = instruction_ns(view, computation, instruction, device)
        if ns:
            kind = _kind(view, instruction)
            yield Kernel(name=instruction.name, kind=kind, runs=runs, estimated_ns=ns)


def _kind(view: Module, instruction: Any) -> str:
    if instruction.opcode == "custom-call":
        return str(instruction.proto.custom_call_target)
    if instruction.opcode != "fusion":
        return str(instruction.opcode)
    inner = {i.opcode for i in view.computations[instruction.called[0]].by_id.values()}
    for opcode in ("dot", "convolution", "scatter", "reduce-window", "reduce", "transpose", "concatenate"):
        if opcode in inner:
            return f"fusion of {opcode}"
    return "fusion"


def table(found: Sequence[Kernel]) -> str:
    """Markdown: by kind of kernel, measured and estimated milliseconds of a step and their ratio."""
    known = [k for k in found if k.measured_ns is not None]
    rows = []
    for kind in sorted({k.kind for k in known}):
        of_kind = [k for k in known if k.kind == kind]
        measured = 1e-6 * sum(k.runs * (k.measured_ns or 0) for k in of_kind)
        estimated = 1e-6 * sum(k.runs * k.estimated_ns for k in of_kind)
        each = sorted((k.measured_ns or 0) / k.estimated_ns for k in of_kind)
        spread = f"{each[len(each) // 10]:.2f} to {each[len(each) * 9 // 10]:.2f}"
        row = f"{sum(k.runs for k in of_kind)}", f"{measured:.3f}", f"{estimated:.3f}"
        rows.append((kind, *row, f"{measured / estimated:.2f}", spread))
    head = "kernel", "runs", "measured ms", "estimated ms", "ratio", "of single ones, .1 to .9"
    return format_table(head, rows)


def ceilings() -> dict[str, float]:
    """What the device reaches: Tflop/s of products, TB/s of its memory and of the link, us of a launch."""
    key = jax.random.key(0)
    found = {}
    for name, dtype, n in (("bfloat16", jnp.bfloat16, 8192), ("float32", jnp.float32, 8192)):
        x = jax.random.normal(key, (n, n)).astype(dtype)
        found[f"{name} product, Tflop/s"] = 2e-12 * n**3 / _seconds(jax.jit(lambda x: x @ x), x)
    x = jax.random.normal(key, (1 << 29,))
    found["x + 1, TB/s"] = 2e-12 * x.nbytes / _seconds(jax.jit(lambda x: x + 1), x)
    found["sum of x, TB/s"] = 1e-12 * x.nbytes / _seconds(jax.jit(jnp.sum), x)
    y = x[: 1 << 27].reshape(1 << 13, -1)
    found["transpose, TB/s"] = 2e-12 * y.nbytes / _seconds(jax.jit(lambda x: x.T + 0), y)
    found["tanh, Telements/s"] = 1e-12 * y.size / _seconds(jax.jit(lambda x: _times(8, jnp.tanh, x)), y) * 8
    found["to the host, GB/s"] = 1e-9 * y.nbytes / _seconds(jax.jit(to_host), y)
    on_host = jax.block_until_ready(jax.jit(to_host)(y))
    back = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    found["from the host, GB/s"] = 1e-9 * y.nbytes / _seconds(back, on_host)
    small = jnp.ones((128, 128))
    chain = jax.jit(lambda x: _times(256, lambda x: jnp.tanh(x @ x), x))
    found["one of 512 small kernels, us"] = 1e6 * _seconds(chain, small) / 512
    return found


def to_host(x: Any) -> Any:
    """Copied to the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def _times(n: int, function: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(n):
        x = function(x)
    return x


def _seconds(function: Any, *given: Any) -> float:
    compiled = function.lower(*given).compile()
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])
