"""GPUs and TPUs that are not here, and what XLA says of a compiled program.

`devices("h200")` returns devices that programs can be lowered and compiled for, but not run on: XLA
compiles from a description of the GPU (`coop_jax/targets/*.txtpb`), which is all it needs. The CUDA
plugin of jaxlib must be installed; the NVIDIA libraries and a driver need not be. `devices("v5e")` and
`devices("v6e:2x4")` do the same for TPUs (`coop_jax/tpu.py`), with libtpu.

    lowered = lower_for(step, (state, batch), device="h200")
    memory(lowered.compile()).total_bytes
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.stages import Compiled

from coop_jax import on_host, serialized, tpu
from coop_jax.errors import UnsupportedError
from coop_jax.text import format_bytes
from passes.backend import CPU, CUDA, TPU, backend_of
from passes.cost import DEVICES, DeviceModel, mapping_ns
from passes.hlo import graph, proto
from passes.hlo.cost import computation_ns, computation_pj
from passes.hlo.describe import Counted

GPUS = ("h200", "h100", "a100", "b200")
TARGETS = (*GPUS, *tpu.CHIPS)

# What JAX reads the size of its GPU client's pinned pool from, in GiB.
HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_MEMORY_SIZE = re.compile(r"device_memory_size: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU or TPU described well enough to compile for it.

    Attributes:
        name: such as "h200".
        text: XLA's GpuTargetConfigProto in text form; a TPU's topology, such as "v6e:2x4".
        memory_bytes: the device's memory.
        platform: the name of a backend.
    """

    name: str
    text: str
    memory_bytes: int
    platform: str = CUDA.name

    def with_memory(self, nbytes: int) -> Target:
        """The same GPU with `nbytes` of memory: XLA's own rematerialization pass aims at it.

        Raises:
            UnsupportedError: for a TPU, whose memory is what its chip has.
        """
        if not _MEMORY_SIZE.search(self.text):
            raise UnsupportedError(
                f"the memory of a {self.name} cannot be described as another; a compile is limited by "
                'compiler_options={"xla_tpu_max_hbm_size_mib": MIB}.'
            )
        text = _MEMORY_SIZE.sub(f"device_memory_size: {nbytes}", self.text)
        return replace(self, text=text, memory_bytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Counted):
    """What XLA says a compiled program needs on one device."""

    def to_dict(self) -> dict[str, int]:
        """The fields of the device's memory by name."""
        names = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "total_bytes")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        constants = f"+ constants {format_bytes(self.constant_bytes)} " if self.constant_bytes else ""
        return (
            f"total {format_bytes(self.total_bytes)} = arguments {format_bytes(self.argument_bytes)} "
            f"+ outputs {format_bytes(self.output_bytes)} + temporaries {format_bytes(self.temp_bytes)} "
            f"{constants}- donated {format_bytes(self.alias_bytes)}"
        )


def run_ns(compiled: Compiled, device: DeviceModel) -> int:
    """Estimated time of a compiled program: all kernels, by a roofline model of the device, and on a CPU the
    time in which its temporaries are mapped.

    Args:
        compiled: what `lower(...).compile()` returned.
        device: cost model.
    """
    return run_cost(compiled, device)[0]


def run_cost(compiled: Compiled, device: DeviceModel) -> tuple[int, int]:
    """The same, and their estimated energy in picojoules, host copies included; 0 where the power is not
    known."""
    view = graph.read(proto.parse(final_module(compiled)))
    mapped_ns = mapping_ns(device, memory(compiled).temp_bytes)
    return computation_ns(view, view.entry, device) + mapped_ns, computation_pj(view, view.entry, device)


def inner_compiled(given: Any) -> Any:
    """The program that JAX compiled, within what `nnx.jit(f).lower(...).compile()` and Equinox's return."""
    inner = getattr(given, "compiled", None)
    return inner if isinstance(inner, jax.stages.Compiled) else given


def final_module(compiled: Compiled) -> bytes:
    """The HloModuleProto that a compiled program runs, serialized."""
    return bytes(serialized.runtime(compiled).hlo_modules()[0].as_serialized_hlo_module_proto())


def target(name: str) -> Target:
    """The shipped description of a GPU or TPU.

    Args:
        name: one of `TARGETS`, in any case; a TPU's with the shape of a slice of it, such as "v6e:2x4".

    Raises:
        UnsupportedError: another name.
    """
    if not isinstance(name, str):
        raise UnsupportedError(
            f"device is a {type(name).__name__}: give the name of one, such as 'h200', or None for the "
            "default device of this process."
        )
    chip = tpu.split(name)
    if chip is not None:
        memory_bytes = tpu.CHIPS[chip[0]].memory_bytes
        return Target(name=chip[0], text=name.lower(), memory_bytes=memory_bytes, platform=TPU.name)
    if name.lower() not in GPUS:
        raise UnsupportedError(
            f"device {name!r} is not known; there are {', '.join(TARGETS)}, and slices such as v6e:2x4. None "
            "means the default device of this process."
        )
    text = resources.files("coop_jax").joinpath(f"targets/{name.lower()}.txtpb").read_text()
    size = _MEMORY_SIZE.search(text)
    assert size is not None, f"targets/{name}.txtpb has no device_memory_size"
    return Target(name=name.lower(), text=text, memory_bytes=int(size[1]))


def devices(device: str | Target, *, count: int = 1) -> tuple[jax.Device, ...]:
    """Devices that are not here, to compile for.

    Args:
        device: a name as in `target`, or a target.
        count: how many GPUs are connected in one host; of a TPU's slice there are as many as its shape says.

    Raises:
        UnsupportedError: an unknown name, or no CUDA plugin or libtpu to compile with.
    """
    return _devices(device if isinstance(device, Target) else target(device), count)


@functools.lru_cache(maxsize=32)
def _devices(described: Target, count: int) -> tuple[jax.Device, ...]:
    return _MAKERS[described.platform](described, count)


def _absent_gpus(described: Target, count: int) -> tuple[jax.Device, ...]:
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=described.text, topology=f"1x1x{count}"
        )
    except NotImplementedError as error:
        raise UnsupportedError(_no_plugin_text(described.name)) from error
    return tuple(topology.devices)


_MAKERS: dict[str, Callable[[Target, int], tuple[jax.Device, ...]]] = {
    CUDA.name: _absent_gpus,
    TPU.name: lambda described, count: tpu.absent_devices(described.text),
}


def plugin_command(version: str) -> str:
    """What installs jaxlib's CUDA plugin of a version."""
    return f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"


def _no_plugin_text(name: str) -> str:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return (
            f"compiling for an absent {name} needs jaxlib's CUDA plugin (130 MB, no NVIDIA libraries):\n"
            f"  {plugin_command(jax.__version__)}"
        )
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return (
        f"jaxlib's CUDA plugin is installed, but did not start: it cannot compile for an absent {name}. "
        "On a machine without a GPU set JAX_PLATFORMS=cpu in the environment before jax is imported "
        f"(it is {platforms!r})."
    )


def places(argnums: int | Sequence[int], specs: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of arguments as `jax.jit` reads them: one or several, from the end if negative."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    return tuple(sorted({n + len(specs) if -len(specs) <= n < 0 else n for n in numbers}))


def sharded_specs(specs: Any, device: Any, *, static_argnums: Sequence[int] = ()) -> Any:
    """Shapes and dtypes of `specs`, placed on one device or on each of several.

    What has a `NamedSharding` keeps it, and the rest is placed on each device of its mesh, in the memory that
    `coop.on_host` gave it.

    Args:
        specs: pytree of arrays, scalars or `jax.ShapeDtypeStruct`s; a tuple of arguments if
            `static_argnums` is given.
        device: a jax device, such as one of `devices("h200")`, or several.
        static_argnums: which of the arguments are passed on as they are.
    """
    where = list(device) if isinstance(device, Sequence) else [device]
    given = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    meshes = [s.mesh for s in given if s is not None and _is_placed(s)]
    mesh = meshes[0] if meshes else jax.sharding.Mesh(where, ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(leaf: Any) -> Any:
        given = getattr(leaf, "sharding", None)
        if _is_placed(given):
            return leaf
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        weak = bool(getattr(aval, "weak_type", False))
        placed = on_host.among(mesh, given) or sharding
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=placed, weak_type=weak)

    if not static_argnums:
        return jax.tree.map(place, specs)
    static = places(static_argnums, specs)
    return tuple(s if i in static else jax.tree.map(place, s) for i, s in enumerate(specs))


def _is_placed(sharding: Any) -> bool:
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    return is_named and not isinstance(sharding.mesh, jax.sharding.AbstractMesh)


def lower_for(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    *,
    device: str | Target | None = None,
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Lower a function for a device that need not be here.

    Args:
        fn: a function, which is put under `jax.jit`, or the result of `jax.jit`.
        specs: the positional arguments, as arrays or `jax.ShapeDtypeStruct`s.
        device: as in `devices`; None means the default device of this process.
        kwargs: the keyword arguments.
        static_argnums: static positional arguments (name them in a jit of your own, too).

    Returns:
        What `jax.jit(fn).lower` returns; call `.compile()` on it.

    Raises:
        UnsupportedError: the function calls Python, and the device is not here.
    """
    static = places(static_argnums, specs)
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn, static_argnums=static or None)
    if device is None:
        return jitted.lower(*on_host.here(tuple(specs)), **on_host.here(dict(kwargs or {})))
    where = devices(device)
    placed = sharded_specs(tuple(specs), where, static_argnums=static)
    with _told_to_kernels(where[0]):
        try:
            return jitted.lower(*placed, **sharded_specs(dict(kwargs or {}), where))
        except RuntimeError as error:
            if not str(error).startswith("Unknown backend"):
                raise
            raise UnsupportedError(
                "this program calls back into Python (jax.pure_callback, jax.debug.print, the checks of "
                "Equinox), which JAX lowers only for a device that is here. Leave that out for an absent "
                "device; Equinox does with EQX_ON_ERROR=nan in the environment."
            ) from error


def donated(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> tuple[int, ...]:
    """Places of the arguments that are donated: by `donate_argnums`, or by `fn`, if `jax.jit` made that."""
    asked = {*places(donate_argnums, specs)}
    if not isinstance(fn, jax.stages.Wrapped) or not hasattr(fn, "trace"):
        return tuple(sorted(asked))
    static = places(static_argnums, specs)
    dynamic = [n for n in range(len(specs)) if n not in static]
    given = [jax.tree.leaves(info) for info in fn.trace(*specs, **(kwargs or {})).args_info[0]]
    own = {n for n, leaves in zip(dynamic, given, strict=True) if any(leaf.donated for leaf in leaves)}
    return tuple(sorted(asked | own))


def _told_to_kernels(device: Any) -> Any:
    """A context in which Pallas, which writes its kernels when they are lowered, finds an absent device.

    The mesh has no axes, so it is none to anything else.
    """
    like = jax.sharding.Mesh(np.array([device]), ("device",)).abstract_mesh
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=like.abstract_device)
    )


def memory(compiled: Compiled) -> Memory:
    """What XLA's memory analysis of a compiled program says, per device.

    Raises:
        UnsupportedError: the platform gives no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise UnsupportedError(
            "this platform's compiler gives no memory analysis, so no budget can be checked."
        )
    fixed_bytes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    backend = backend_of(serialized.platform_of(compiled))
    is_rest = backend is not None and backend.temps_are_the_rest
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.total_allocation_bytes - fixed_bytes if is_rest else stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        total_bytes=stats.total_allocation_bytes,
        host_bytes=host_bytes(stats),
    )


def host_bytes(stats: Any) -> int:
    """Arguments + results + temporaries - aliased in the host's memory, by XLA's `CompiledMemoryStats`."""
    held = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes
    return int(held + stats.host_temp_size_in_bytes - stats.host_alias_size_in_bytes)


def model_for(platform: str, device_kind: str) -> DeviceModel:
    """The cost model of a device; an unknown one costs as its backend says, and without one as a CPU.

    Args:
        platform: such as "gpu", "cuda", "tpu" or "cpu".
        device_kind: such as "NVIDIA H200" or "TPU v5 lite".
    """
    kind = device_kind.lower()
    known = [(len(k), d) for d in DEVICES.values() for k in d.kinds if k in kind]
    if known:
        return max(known, key=lambda pair: pair[0])[1]
    return DEVICES[(backend_of(platform) or CPU).default_device]


def host_limit_bytes(platform: str) -> int | None:
    """The host's memory that JAX can copy to and from a device of a platform; None if all of it.

    On a GPU it is the pinned pool of JAX's client, 64 GiB unless the environment says otherwise.
    """
    backend = backend_of(platform)
    if backend is None or backend.host_pool_bytes is None:
        return None
    asked = os.environ.get(HOST_POOL, "")
    return int(asked) << 30 if asked.isdigit() else backend.host_pool_bytes


def device_memory_bytes(device: jax.Device) -> int | None:
    """The memory of a device, here or absent; None if nobody knows.

    Args:
        device: a jax device. A CPU's memory is the machine's.
    """
    backend = backend_of(device.platform)
    if backend is not None and backend.has_machines_memory:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:
        stats = None
    if stats:
        return int(stats["bytes_limit"]) if "bytes_limit" in stats else None
    kind = device.device_kind.lower()
    name = model_for(device.platform, kind).name
    is_known = any(k in kind for k in DEVICES[name].kinds)
    return target(name).memory_bytes if is_known else None
