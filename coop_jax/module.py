"""Read and mark the MLIR module that a lowering rule writes into: what is known of the whole program.

Does not look at the program's equations; shapes of its arguments and results, donation and devices are
all there is before the rules of the other equations have run.
"""

# mypy: disable-error-code="attr-defined,misc"

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.stages import Lowered, Traced
from jaxlib.mlir import ir

from passes.backend import BACKENDS
from passes.jaxpr.compat import ClosedJaxpr

POINTER_BYTES = 8
_MEMORY_KIND = "mhlo.memory_kind"
_HOST_KINDS = ("pinned_host", "unpinned_host")
_ALIAS, _DONOR = "tf.aliasing_output", "jax.buffer_donor"
_ATTRIBUTES = "mhlo.frontend_attributes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What the module that is being lowered says about the whole program.

    Attributes:
        argument_nbytes, output_nbytes: bytes of each argument and result of the program.
        argument_on_host, output_on_host: whether each is in the host's memory. An argument is where the
            result is that takes its place: JAX does not know what memories an absent GPU has.
        argument_parts, output_parts: into how many parts each is split over the devices; what says nothing is
            split as an argument of its type that does, the finest, else not: moments as their parameters.
        finest_parts: into how many parts a value is split that is split as all arguments together are.
        aliased: for every argument the result that may take its place, None where there is none.
        num_devices: over how many devices the program is partitioned.
        platforms: such as ("cuda",); more than one only when exporting.
        device: a device that the program is compiled for; None if not known.
    """

    argument_nbytes: tuple[int, ...]
    output_nbytes: tuple[int, ...]
    argument_on_host: tuple[bool, ...]
    output_on_host: tuple[bool, ...]
    argument_parts: tuple[int, ...]
    output_parts: tuple[int, ...]
    finest_parts: int
    aliased: tuple[int | None, ...]
    num_devices: int
    platforms: tuple[str, ...]
    device: Any

    @property
    def device_argument_nbytes(self) -> tuple[int, ...]:
        """Bytes of each argument on the device."""
        return self._on_device(self.argument_nbytes, self.argument_on_host)

    @property
    def device_output_nbytes(self) -> tuple[int, ...]:
        """Bytes of each result on the device."""
        return self._on_device(self.output_nbytes, self.output_on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes of arguments and results in the host's memory, donated storage counted once."""
        arguments = [n for n, away in zip(self.argument_nbytes, self.argument_on_host, strict=True) if away]
        taken = {self.aliased[i] for i in self.donated}
        results = enumerate(zip(self.output_nbytes, self.output_on_host, strict=True))
        return sum(arguments) + sum(n for k, (n, away) in results if away and k not in taken)

    @property
    def has_host_memory(self) -> bool:
        """True if the host's memory is another than the device's."""
        return all(p in BACKENDS and BACKENDS[p].pages for p in self.platforms)

    def _on_device(self, nbytes: Sequence[int], on_host: Sequence[bool]) -> tuple[int, ...]:
        return tuple(0 if h and self.has_host_memory else n for n, h in zip(nbytes, on_host, strict=True))

    @property
    def table_bytes(self) -> int:
        """The table of addresses that XLA keeps with several results."""
        n = len(self.output_nbytes)
        return POINTER_BYTES * n if n > 1 else 0

    @property
    def donated(self) -> tuple[int, ...]:
        """Indices of the arguments whose place a result may take."""
        return tuple(i for i, alias in enumerate(self.aliased) if alias is not None)


def module_facts(ctx: Any) -> ModuleFacts:
    """Read the module that the lowering rule with `ctx` writes into."""
    module = ctx.module_context
    main = next(
        op for op in module.module.body.operations
        if op.operation.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )  # fmt: skip
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    axis = module.axis_context
    devices = getattr(axis, "device_assignment", None)
    if devices is None:
        # An absent GPU's backend is known to the module alone; `get_backend` would look for a present one.
        backend = module.backend or _present_backend(module)
        devices = () if backend is None else backend.devices()
    text = _mesh_text(module.module, [ir.DictAttr(a) for a in (*main.arg_attrs, *main.result_attrs)])
    arguments = [_axes(ir.DictAttr(a)) for a in main.arg_attrs]
    outputs = [_axes(ir.DictAttr(a)) for a in main.result_attrs]
    axis_sizes = {axis: int(n) for axis, n in re.findall(r'"([^"]+)"=(\d+)', text)}
    argument_parts, output_parts = _parts(axis_sizes, arguments, outputs, kind)
    every_axis = {axis for axes in arguments for names in axes or () for axis in names}
    output_on_host = tuple(map(_is_on_host, main.result_attrs))
    argument_nbytes, output_nbytes = (
        tuple(map(_type_nbytes, types)) for types in (kind.inputs, kind.results)
    )
    aliased = _aliased(
        main.arg_attrs,
        [n // p for n, p in zip(argument_nbytes, argument_parts, strict=True)],
        [
            None if away else n // p
            for n, p, away in zip(output_nbytes, output_parts, output_on_host, strict=True)
        ],
    )
    argument_on_host = tuple(
        _is_on_host(a) or (alias is not None and output_on_host[alias])
        for a, alias in zip(main.arg_attrs, aliased, strict=True)
    )
    return ModuleFacts(
        argument_nbytes=argument_nbytes,
        output_nbytes=output_nbytes,
        argument_on_host=argument_on_host,
        output_on_host=output_on_host,
        argument_parts=argument_parts,
        output_parts=output_parts,
        finest_parts=math.prod(axis_sizes.get(axis, 1) for axis in every_axis),
        aliased=aliased,
        num_devices=int(getattr(axis, "num_devices", 0) or getattr(getattr(axis, "mesh", None), "size", 1)),
        platforms=tuple(module.platforms),
        device=devices[0] if len(devices) else None,
    )


def _aliased(
    attributes: Sequence[Any], argument_nbytes: Sequence[int], output_nbytes: Sequence[int | None]
) -> tuple[int | None, ...]:
    """For every argument the result that may take its place.

    Where JAX does not know how XLA will split the results it only says which arguments are given away: XLA
    gives the place of each to a result of as many bytes.

    Args:
        argument_nbytes, output_nbytes: bytes on one device; None for a result that is in the host's memory.
    """
    given = [ir.DictAttr(a) for a in attributes]
    said = [ir.IntegerAttr(a[_ALIAS]).value if _ALIAS in a else None for a in given]
    free = {n: deque[int]() for n in output_nbytes}
    for k, n in enumerate(output_nbytes):
        if n is not None and k not in said:
            free[n].append(k)
    for i, n in enumerate(argument_nbytes):
        if said[i] is None and _DONOR in given[i] and free.get(n):
            said[i] = free[n].popleft()
    return tuple(said)


def _mesh_text(module: Any, attributes: Sequence[Any]) -> str:
    """All that says what meshes there are: operations of the module, or the shardings themselves."""
    meshes = [str(op) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return " ".join([*meshes, *(str(a["sdy.sharding"]) for a in attributes if "sdy.sharding" in a)])


def _axes(attributes: Any) -> tuple[tuple[str, ...], ...] | None:
    """For every dimension the axes that it is split over; None for a value that says nothing."""
    if "sdy.sharding" not in attributes:
        return None
    dimensions = re.search(r"\[(\{.*?\})\]", str(attributes["sdy.sharding"]))
    named = re.findall(r"\{(.*?)\}", "" if dimensions is None else dimensions[1])
    return tuple(tuple(re.findall(r'"([^"]+)"', dimension)) for dimension in named)


def _parts(
    sizes: Mapping[str, int], arguments: Sequence[Any], outputs: Sequence[Any], kind: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Into how many parts arguments and results are split; XLA decides of those that say nothing."""

    def parts(axes: Sequence[tuple[str, ...]]) -> int:
        return math.prod(sizes.get(name, 1) for names in axes for name in names)

    like: dict[str, int] = {}
    for axes, t in zip(arguments, kind.inputs, strict=True):
        if axes is not None:
            like[str(t)] = max(parts(axes), like.get(str(t), 1))

    def found(axes: Sequence[tuple[str, ...]] | None, t: Any) -> int:
        return like.get(str(t), 1) if axes is None else parts(axes)

    return tuple(map(found, arguments, kind.inputs)), tuple(map(found, outputs, kind.results))


def _is_on_host(attributes: Any) -> bool:
    """True for an argument or result in the host's memory."""
    attrs = ir.DictAttr(attributes)
    if _MEMORY_KIND not in attrs:
        return False
    return str(ir.StringAttr(attrs[_MEMORY_KIND]).value) in _HOST_KINDS


def _present_backend(module: Any) -> Any:
    """The backend of the module's platform; None where it is not here or not one platform."""
    try:
        return module.get_backend(optional=True)
    except RuntimeError:
        return None


def _type_nbytes(kind: Any) -> int:
    """Bytes of a ranked tensor type; zero for tokens and unranked or dynamic types."""
    text = str(kind)
    match = re.fullmatch(r"tensor<((?:\d+x)*)(complex<)?[a-z]+(\d+)[^x]*>", text)
    if match is None:
        return 0
    size = math.prod(int(d) for d in match[1].split("x") if d)
    return size * max(1, int(match[3]) // 8) * (2 if match[2] else 1)


def is_for_export(ctx: Any) -> bool:
    """True if the module that is being lowered will be exported (`jax.export`), not compiled here."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def platforms_of(lowered: Lowered) -> tuple[str, ...]:
    """The platforms that a lowered program is for, such as ("cuda",)."""
    return tuple(lowered._lowering._platforms)


def python_calls(ctx: Any) -> list[Any]:
    """The Python functions that the module that is being lowered calls, by number; grows until that ends."""
    calls: list[Any] = ctx.module_context.host_callbacks
    return calls


def python_calls_of(lowered: Lowered) -> list[Any]:
    """The Python functions that a lowered program calls, by number."""
    return list(lowered._lowering.compile_args["host_callbacks"])


def with_own_module(lowered: Lowered) -> Lowered:
    """A lowered program with a module of its own: JAX remembers what it lowered, and what it made of it."""
    own, lowering = copy.copy(lowered), copy.copy(lowered._lowering)
    whole = lowering._hlo.operation
    lowering._hlo = ir.Module.parse(whole.get_asm(binary=True, enable_debug_info=True), whole.context)
    lowering._executable = None
    own._lowering = lowering
    return own


def with_jaxpr(traced: Traced, jaxpr: ClosedJaxpr) -> Traced:
    """A traced program with another jaxpr that takes and returns the same."""
    own = copy.copy(traced)
    own._params = {**traced._params, "jaxpr": jaxpr}
    return own


def module_attributes(ctx: Any) -> dict[str, str]:
    """The frontend attributes of the module that is being lowered."""
    return attributes_of(ctx.module_context.module)


def attributes_of(stablehlo: Any) -> dict[str, str]:
    """The frontend attributes of a StableHLO module."""
    attributes = stablehlo.operation.attributes
    if _ATTRIBUTES not in attributes:
        return {}
    attributes_here = ir.DictAttr(attributes[_ATTRIBUTES])
    return {item.name: ir.StringAttr(item.attr).value for item in attributes_here}


def set_module_attributes(stablehlo: Any, entries: Mapping[str, str]) -> None:
    """Add frontend attributes to a StableHLO module; they reach XLA's callback."""
    merged = {**attributes_of(stablehlo), **entries}
    with stablehlo.context:
        stablehlo.operation.attributes[_ATTRIBUTES] = ir.DictAttr.get(
            {name: ir.StringAttr.get(text) for name, text in sorted(merged.items())}
        )


def drop_attributes(stablehlo: Any, names: Iterable[str]) -> None:
    """Take frontend attributes from a StableHLO module."""
    left = {name: text for name, text in attributes_of(stablehlo).items() if name not in names}
    if _ATTRIBUTES in stablehlo.operation.attributes:
        del stablehlo.operation.attributes[_ATTRIBUTES]
        set_module_attributes(stablehlo, left)


def digest(stablehlo: Any) -> str:
    """Equal for two StableHLO modules that are the same, names and source lines included."""
    return hashlib.sha256(stablehlo.operation.get_asm(binary=True, enable_debug_info=True)).hexdigest()


def module_name(ctx: Any) -> str:
    """The name of the module that is being lowered, such as "jit_step"."""
    return str(ir.StringAttr(ctx.module_context.module.operation.attributes["sym_name"]).value)


def keep_memory_moves(ctx: Any) -> None:
    """Let moves between memories in a program that is being lowered reach XLA.

    JAX drops them where the program that it was given has none; ours is written only now.
    """
    ctx.module_context.all_default_mem_kind = False
