"""Marks: written into a program when it is lowered, read from what was lowered or compiled.

A program that contains a decorated function carries a mark (`coop_jax.record`). A program that is loaded from
the compilation cache in another process is recognised by it; it tells all but what the enforcing stage did
(XLA drops attributes that the callback adds).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from coop_jax import module, serialized
from coop_jax.callback import install, tried
from coop_jax.record import FACTS, RECORD, TRIAL, Record, marked
from coop_jax.registry import REGISTRY, Alternatives, Trial, record_from, record_of_module
from passes.backend import BACKENDS
from passes.ir import Status
from passes.jaxpr import compat

_TRIALS = itertools.count(1)


def write(ctx: Any, record: Record, digest: str, alternatives: Alternatives | None = None) -> Record:
    """Mark the program that is being lowered; the smallest budget in a program wins.

    Args:
        ctx: the context of a lowering rule.
        record: what is known so far.
        digest: tells the program apart, and the part of it that `record` is about.
        alternatives: how else the program could be written.

    Returns:
        The program's record, with its id.
    """
    for platform in module.module_facts(ctx).platforms:
        if platform in BACKENDS:
            install(platform)
    present = module.module_attributes(ctx)
    if FACTS in present and record_from(present).budget_bytes <= record.budget_bytes:
        return record_from(present)
    record, attributes = marked(record, name=module.module_name(ctx), digest=digest)
    REGISTRY.update(record, record=record)
    if alternatives is not None:
        REGISTRY.update(record, alternatives=alternatives)
    module.set_module_attributes(ctx.module_context.module, attributes)
    return record


def look(lowered: Lowered, record: Record, scheduled: MutableMapping[str, bytes]) -> Trial | None:
    """Compile a lowered program as far as XLA's schedule, before code is generated, to look at it.

    Args:
        lowered: a `jax.stages.Lowered`, which is of no use afterwards.
        record: the budget of the trial, planner and cost model.
        scheduled: compressed, what XLA made of programs that were looked at, with the same devices and
            options; it grows.

    Returns:
        What the enforcing stage made of it; None if XLA failed before it was asked.
    """
    stablehlo, (platform, *others) = lowered.compiler_ir("stablehlo"), module.platforms_of(lowered)
    module.drop_attributes(stablehlo, (RECORD, FACTS))
    unmarked = module.digest(stablehlo)
    if unmarked in scheduled and not others:
        return tried(zlib.decompress(scheduled[unmarked]), record, platform)
    name = f"trial-{next(_TRIALS)}"
    record = _mark(lowered, record, name, {TRIAL: name})
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        lowered.compile(compiler_options=compat.compiler_options())
    trial = REGISTRY.forget(record).trial
    if trial is not None:
        scheduled[unmarked] = zlib.compress(trial.scheduled, level=1)
    return trial


def compile_alone(lowered: Lowered, record: Record) -> Compiled:
    """Compile a lowered program within a record's budget, without looking at other plans."""
    record = _mark(lowered, record, "alone", {})
    try:
        return lowered.compile(compiler_options=compat.compiler_options())
    finally:
        REGISTRY.forget(record)


def _mark(lowered: Lowered, record: Record, name: str, more: Mapping[str, str]) -> Record:
    for platform in module.platforms_of(lowered):
        install(platform)
    record, attributes = marked(record, name=name, digest="")
    module.set_module_attributes(lowered.compiler_ir("stablehlo"), {**attributes, **more})
    return record


def record_of_lowered(lowered: Lowered) -> Record | None:
    """The record of a program that is lowered but not compiled; None if it holds no decorated function."""
    attributes = module.attributes_of(lowered.compiler_ir("stablehlo"))
    return record_from(attributes) if FACTS in attributes else None


def record_of(compiled: Compiled) -> Record | None:
    """The record of a compiled program (`jax.stages.Compiled`); None if it holds no decorated function."""
    modules = serialized.runtime(compiled).hlo_modules()
    record = record_of_module(modules[0].as_serialized_hlo_module_proto()) if modules else None
    if record is None or record.hlo is None or record.hlo.status.found:
        return record
    # It was left to the check and passed it.
    return dataclasses.replace(record, hlo=dataclasses.replace(record.hlo, status=Status.FEASIBLE))
