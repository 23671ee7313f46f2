"""Budgets below the least that recompute alone reaches, kept with host memory: compiled for absent devices.

    python -m benchmarks.paging_compiled             # writes benchmarks/results/paging_compiled.{json,md}
    python -m benchmarks.paging_compiled --programs mlp --devices v5e

For each program the least budget is asked for, without and with host memory: a budget that nothing can keep
is refused with the least that was found, and a byte less is asked for as long as that is kept. A budget
halfway between is then compiled. Bytes are XLA's own count on both sides, beside what was predicted;
overheads are estimates, and nothing has run. The scheduled module of the result goes through the abstract
machine (`tests/replay.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

import coop_jax as coop
from benchmarks.promise import build
from coop_jax import aot, tpu
from coop_jax.errors import InfeasibleBudgetError, error_from_text
from coop_jax.text import format_table
from examples.models import GPTConfig, MLPConfig, Problem, gpt, mlp, scanned
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.jaxpr import compat
from tests.replay import predicted_addresses, replay

HOST = "1GiB"
PROGRAMS: dict[str, Callable[[], Problem]] = {
    "mlp": lambda: mlp.problem(MLPConfig(layers=8, width=128, batch=2048, classes=16)),
    "gpt": lambda: gpt.problem(GPTConfig(layers=2, width=64, heads=2, seq=64, batch=16, vocab=64)),
    "scanned gpt": lambda: scanned.problem(
        GPTConfig(layers=16, width=64, heads=2, seq=64, batch=16, vocab=64)
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program on one device; bytes are XLA's count unless predicted.

    Attributes:
        plain_bytes: the program without a budget.
        alone_bytes, paged_bytes: the least that was found without and with host memory; a byte less is
            refused.
        alone_ratio, eased_ratio: estimated overhead in `alone_bytes`, without and with host memory.
        budget_bytes: what was asked for.
        total_bytes, predicted_bytes: on the device.
        host_bytes, predicted_host_bytes: on the host.
        overhead_ratio: estimated.
        problems: what the abstract machine found.
    """

    program: str
    device: str
    plain_bytes: int
    alone_bytes: int
    paged_bytes: int
    alone_ratio: float
    eased_ratio: float
    budget_bytes: int
    total_bytes: int
    predicted_bytes: int
    host_bytes: int
    predicted_host_bytes: int
    overhead_ratio: float
    problems: int
    seconds: float


def measure(name: str, device: str) -> Row:
    """One row."""
    begin = time.perf_counter()
    jitted, specs = build(PROGRAMS[name](), "grad", None)
    function = jitted.__wrapped__
    plain = aot.memory(_compiled(function, specs, device))
    nothing = plain.fixed_bytes + 1
    alone, paged = (_least(function, specs, device, nothing, host) for host in (None, HOST))
    alone_ratio, eased_ratio = (
        coop.report(_within(function, specs, device, alone, host)).overhead_ratio for host in (None, HOST)
    )
    budget = max(paged, min((alone + paged) // 2, alone - 1))
    try:
        made = _within(function, specs, device, budget, HOST)
    except Exception as error:  # between two plans: what is called least can be asked for
        _refusal(error)
        budget = paged
        made = _within(function, specs, device, budget, HOST)
    report = coop.report(made)
    return Row(
        program=name,
        device=device,
        plain_bytes=plain.total_bytes,
        alone_bytes=alone,
        paged_bytes=paged,
        alone_ratio=alone_ratio,
        eased_ratio=eased_ratio,
        budget_bytes=budget,
        total_bytes=report.compiled_total_bytes,
        predicted_bytes=report.planned_total_bytes,
        host_bytes=report.host.compiled_bytes,
        predicted_host_bytes=report.host.planned_bytes,
        overhead_ratio=report.overhead_ratio,
        problems=len(_problems(made, device)),
        seconds=time.perf_counter() - begin,
    )


def _compiled(function: Callable[..., Any], specs: Sequence[Any], device: str) -> Any:
    """Compiled for an absent device; a TPU's temporaries stay off the chip, as they do in large programs."""
    options = {"xla_msa_enable": "DISABLED"} if device in tpu.CHIPS else {"xla_gpu_autotune_level": "0"}
    return aot.lower_for(jax.jit(function), specs, device=device).compile(compiler_options=options)


def _within(function: Any, specs: Sequence[Any], device: str, budget: int, host: str | None) -> Any:
    return _compiled(coop.remat(function, budget=budget, host=host), specs, device)


def _least(function: Any, specs: Sequence[Any], device: str, budget: int, host: str | None) -> int:
    """The least budget that is kept when it is asked for; `budget` leaves nothing for temporaries."""
    least = None
    while True:
        try:
            made = _within(function, specs, device, budget, host)
        except Exception as error:
            if least is not None:
                return least
            budget = _refusal(error)
        else:
            least, budget = budget, coop.report(made).compiled_total_bytes - 1


def _refusal(error: Exception) -> int:
    """The least budget that a refusal names."""
    refused = error if isinstance(error, InfeasibleBudgetError) else error_from_text(str(error))
    if not isinstance(refused, InfeasibleBudgetError) or refused.least_bytes is None:
        raise error
    return refused.least_bytes


def _problems(compiled: Any, device: str) -> tuple[str, ...]:
    platform = "tpu" if device in tpu.CHIPS else "cuda"
    view = graph.read(proto.parse(aot.final_module(compiled)))
    assigner = Assigner(view, platform, old_rules=compat.OLD_RULES)
    return replay(view, predicted_addresses(assigner)).problems


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; bytes."""
    fields = [f.name for f in dataclasses.fields(Row)]
    shown = [[_shown(getattr(row, name)) for name in fields] for row in rows]
    return format_table([name.replace("_", " ") for name in fields], shown)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--devices", nargs="*", default=["v5e", "h200"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paging_compiled.json"))
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for device in args.devices:
        for name in args.programs:
            rows.append(measure(name, device))
            sys.stdout.write(table(rows[-1:]) + "\n")
            sys.stdout.flush()
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
            args.out.with_suffix(".md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
