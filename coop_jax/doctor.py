"""What is installed, what works here, and what is missing: `coop doctor`.

Every check that can be made is made by doing it: a small program is compiled within a budget, here and for a
GPU that is not here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import jax
import jax.numpy as jnp

from coop_jax import aot, mark
from coop_jax.inspecting import inspect
from coop_jax.remat import remat
from coop_jax.screen import Block, Lines

_OLDEST, _NEWEST = (0, 11, 2), (0, 13)
_SPEC = jax.ShapeDtypeStruct((128, 128), jnp.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it.
        good: False if it is missing, or does not work.
        found: what was found.
        cure: the line that installs or mends it; "" if there is nothing to do.
        optional: True if `coop` does without it.
    """

    name: str
    good: bool
    found: str
    cure: str = ""
    optional: bool = False


def examine() -> tuple[Check, ...]:
    """All checks, a few seconds of compiling included."""
    return (
        Check(name="python", good=True, found=platform.python_version()),
        _jax(),
        _same_version(),
        _package("libtpu", "pip install --no-deps libtpu  (214 MB, for TPUs; Linux on x86)", optional=True),
        _package("ortools", "pip install ortools"),
        _package("protobuf", "pip install protobuf"),
        _package("matplotlib", "pip install 'coop-jax[plot]'", optional=True),
        _package("rich", "pip install 'coop-jax[rich]'", optional=True),
        _tried("a budget is enforced here", _enforced),
        _tried("XLA tells its addresses", _addresses),
        _tried("compiles for an absent h200", _absent, optional=True),
    )


def _jax() -> Check:
    version = jax.__version_info__
    good = _OLDEST <= version < _NEWEST
    cure = "" if good else "pip install 'jax>=0.11.2,<0.13'"
    devices = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    return Check(name="jax", good=good, found=f"{jax.__version__} on {devices}", cure=cure)


def _same_version() -> Check:
    """JAX's CUDA plugin must be of jaxlib's version; a newer one fails in ways that name neither."""
    try:
        plugin = metadata.version("jax-cuda13-plugin")
    except metadata.PackageNotFoundError:
        cure = aot.plugin_command(jax.__version__)
        return Check(name="CUDA plugin", good=False, found="not installed", cure=cure, optional=True)
    jaxlib = metadata.version("jaxlib")
    good = plugin.split(".")[:3] == jaxlib.split(".")[:3]
    cure = "" if good else aot.plugin_command(jaxlib)
    return Check(name="CUDA plugin", good=good, found=f"{plugin}, jaxlib {jaxlib}", cure=cure)


def _package(name: str, cure: str, *, optional: bool = False) -> Check:
    try:
        return Check(name=name, good=True, found=metadata.version(name), optional=optional)
    except metadata.PackageNotFoundError:
        return Check(name=name, good=False, found="not installed", cure=cure, optional=optional)


def _tried(name: str, attempt: Callable[[], str], *, optional: bool = False) -> Check:
    try:
        return Check(name=name, good=True, found=attempt(), optional=optional)
    except Exception as error:  # whatever fails is what is reported
        lines = str(error).strip().split("\n")
        text = f"{type(error).__name__}: {' '.join(lines[0].split())[:200]}"
        cure = next((line.strip() for line in lines if line.strip().startswith("pip install")), "")
        if not cure and not os.environ.get("JAX_PLATFORMS"):
            cure = "set JAX_PLATFORMS=cpu"
        return Check(name=name, good=False, found=text, cure=cure, optional=optional)


def _chain(x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jnp.tanh(x @ x)
    return x.sum()


def _enforced() -> str:
    compiled = jax.jit(remat(jax.grad(_chain), budget=0.8)).lower(_SPEC).compile()
    record = mark.record_of(compiled)
    assert record is not None, "XLA did not call back"
    assert record.hlo is not None, "XLA did not call back"
    total = aot.memory(compiled).total_bytes
    assert total <= record.budget_bytes, "over budget"
    return f"asked for {record.budget_bytes} B, XLA counts {total} B"


def _addresses() -> str:
    inspected = inspect(jax.jit(jax.grad(_chain)).lower(_SPEC).compile())
    assert inspected.exact_addresses, "XLA does not tell where it put the temporaries"
    return f"{sum(v.offset is not None for v in inspected.values)} values"


def _absent() -> str:
    compiled = aot.lower_for(jax.grad(_chain), (_SPEC,), device="h200").compile()
    return f"{aot.memory(compiled).total_bytes} B"


def blocks(checks: Sequence[Check]) -> list[Block]:
    """For `coop_jax.screen`."""
    wide = max(len(check.name) for check in checks)
    rows = tuple(f"{check.name:{wide}}  {_word(check):8}  {check.found}" for check in checks)
    cures = tuple(f"{c.name}: {c.cure}" for c in checks if not c.good and c.cure)
    return [Lines(lines=(*rows, "", "what to do:", *cures) if cures else rows)]


def _word(check: Check) -> str:
    if check.good:
        return "ok"
    return "optional" if check.optional else "MISSING"
