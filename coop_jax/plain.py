"""A program without a budget, compiled: what everything else is compared with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from coop_jax import aot
from coop_jax.planning import compile_within
from coop_jax.report import Report, report
from passes.backend import BACKENDS
from passes.cost import DEVICES, DeviceModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """A program without a budget: lowered, compiled, and the estimated time of its kernels.

    Attributes:
        lowered, compiled: without a budget.
        device: cost model of the device that it was compiled for.
        within: compiles it within `budget=...`, and with other options of `compile_within`.
    """

    lowered: Lowered
    compiled: Compiled
    device: DeviceModel
    within: Callable[..., Compiled]

    @property
    def memory(self) -> aot.Memory:
        """What XLA says that it needs."""
        return aot.memory(self.compiled)

    @property
    def cost_ns(self) -> int:
        """Estimated time of all kernels."""
        return aot.run_ns(self.compiled, self.device)

    @property
    def pages(self) -> bool:
        """True if values can wait in the host's memory while its kernels run."""
        return BACKENDS[self.device.platform].pages


def compile_plain(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    *,
    device: str | aot.Target | None,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
    kwargs: Mapping[str, Any] | None,
) -> Plain:
    """Compile a function without a budget; arguments are those of `explain`."""
    static, jitted = aot.places(static_argnums, specs), fn
    donate = aot.donated(fn, specs, donate_argnums=donate_argnums, kwargs=kwargs, static_argnums=static)
    if not hasattr(fn, "lower") or donate != aot.donated(fn, specs, kwargs=kwargs, static_argnums=static):
        jitted = jax.jit(fn, donate_argnums=donate, static_argnums=static or None)
    lowered = aot.lower_for(jitted, specs, device=device, kwargs=kwargs, static_argnums=static)
    if device is None:
        where = jax.local_devices()[0]
        model = aot.model_for(where.platform, where.device_kind)
    else:
        model = DEVICES[(device if isinstance(device, aot.Target) else aot.target(device)).name]
    within = functools.partial(
        compile_within, fn, *specs, device=device, donate_argnums=donate, static_argnums=static, kwargs=kwargs
    )
    return Plain(lowered=lowered, compiled=lowered.compile(), device=model, within=within)


def report_beside(compiled: Compiled, plain: Plain) -> Report:
    """The report of a compiled program whose plain form was compiled as well."""
    return dataclasses.replace(
        report(compiled),
        baseline_total_bytes=plain.memory.total_bytes,
        baseline_compiled=True,
        baseline_cost_ns=plain.cost_ns,
        compiled_cost_ns=aot.run_ns(compiled, plain.device),
    )
