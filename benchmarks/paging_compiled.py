"""Budgets below the least that recompute alone reaches, kept with host memory: compiled for absent devices.

    python -m benchmarks.paging_compiled             # writes benchmarks/results/paging_compiled.{json,md}
    python -m benchmarks.paging_compiled --programs "mlp step" --devices v5e     # the other rows stay

Gradients of two GPTs, and a whole training step of an MLP: AdamW, its gradients clipped by their global norm,
parameters and moments donated. The gradient of a chain alone would show nothing, since it is recomputed down
to the same working set that pages need. In the step every gradient waits for the norm of all of them; to make
one again is to go backward again.

For each program the least budget is asked for, without and with host memory: a budget that nothing can keep
is refused with the least that was found, and a byte less than what is made of it takes is asked for as long
as that is kept. The least with host memory is then compiled. Bytes are XLA's own count on both sides, beside
what was predicted; overheads are estimates, and nothing has run. Every row says the commit of its code. The
scheduled module of the result goes through the abstract machine (`tests/replay.py`).
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
import optax

import coop_jax as coop
from benchmarks.promise import commit
from coop_jax import aot, tpu
from coop_jax.errors import InfeasibleBudgetError, error_from_text
from coop_jax.text import format_table
from examples.models import GPTConfig, MLPConfig, Problem, gpt, mlp, scanned
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.jaxpr import compat
from tests.replay import predicted_addresses, replay

HOST = "1GiB"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program to compile.

    Attributes:
        function: undecorated.
        specs: the shapes of its arguments.
        donated: which of them are.
    """

    function: Callable[..., Any]
    specs: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def gradient(problem: Problem) -> Case:
    """Loss and gradient."""
    return Case(function=jax.value_and_grad(problem.loss), specs=problem.specs())


def clipped_step(problem: Problem) -> Case:
    """A whole step with AdamW, its gradients clipped by their global norm; parameters and moments donated."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def step(state: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(problem.loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params, batch = problem.specs()
    return Case(function=step, specs=((params, jax.eval_shape(optimizer.init, params)), batch), donated=(0,))


SMALL = {"width": 64, "heads": 2, "seq": 64, "batch": 16, "vocab": 64}
PROGRAMS: dict[str, Callable[[], Case]] = {
    "mlp step": lambda: clipped_step(mlp.problem(MLPConfig(layers=8, width=512, batch=512, classes=16))),
    "gpt": lambda: gradient(gpt.problem(GPTConfig(layers=2, **SMALL))),
    "scanned gpt": lambda: gradient(scanned.problem(GPTConfig(layers=16, **SMALL))),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program on one device; bytes are XLA's count unless predicted.

    Attributes:
        plain_bytes: the program without a budget.
        alone_bytes, paged_bytes: the least that was found without and with host memory; a byte less than
            what is made of it takes is refused.
        alone_ratio, eased_ratio: estimated overhead in `alone_bytes`, without and with host memory.
        total_bytes, predicted_bytes: on the device, of what is made of `paged_bytes`.
        host_bytes, predicted_host_bytes: on the host.
        overhead_ratio: estimated.
        problems: what the abstract machine found.
        seconds: of this process's CPU time.
        commit: of the code.
    """

    program: str
    device: str
    plain_bytes: int
    alone_bytes: int
    paged_bytes: int
    alone_ratio: float
    eased_ratio: float
    total_bytes: int
    predicted_bytes: int
    host_bytes: int
    predicted_host_bytes: int
    overhead_ratio: float
    problems: int
    seconds: float
    commit: str


def measure(name: str, device: str) -> Row:
    """One row."""
    begin = time.process_time()
    case = PROGRAMS[name]()
    plain = aot.memory(_compiled(case, case.function, device))
    nothing = plain.fixed_bytes + 1
    alone, paged = (_least(case, device, nothing, host) for host in (None, HOST))
    alone_ratio, eased_ratio = (
        coop.report(_within(case, device, alone, host)).overhead_ratio for host in (None, HOST)
    )
    made = _within(case, device, paged, HOST)
    report = coop.report(made)
    return Row(
        program=name,
        device=device,
        plain_bytes=plain.total_bytes,
        alone_bytes=alone,
        paged_bytes=paged,
        alone_ratio=alone_ratio,
        eased_ratio=eased_ratio,
        total_bytes=report.compiled_total_bytes,
        predicted_bytes=report.planned_total_bytes,
        host_bytes=report.host.compiled_bytes,
        predicted_host_bytes=report.host.planned_bytes,
        overhead_ratio=report.overhead_ratio,
        problems=len(_problems(made, device)),
        seconds=time.process_time() - begin,
        commit=commit(),
    )


def _compiled(case: Case, function: Callable[..., Any], device: str) -> Any:
    """Compiled for an absent device; a TPU's temporaries stay off the chip, as they do in large programs."""
    options = {"xla_msa_enable": "DISABLED"} if device in tpu.CHIPS else {"xla_gpu_autotune_level": "0"}
    jitted = jax.jit(function, donate_argnums=case.donated)
    return aot.lower_for(jitted, case.specs, device=device).compile(compiler_options=options)


def _within(case: Case, device: str, budget: int, host: str | None) -> Any:
    return _compiled(case, coop.remat(case.function, budget=budget, host=host), device)


def _least(case: Case, device: str, budget: int, host: str | None) -> int:
    """The least budget that is kept when it is asked for; `budget` leaves nothing for temporaries."""
    least = None
    while True:
        try:
            made = _within(case, device, budget, host)
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


HEAD = """Compiled for devices that are not here, not run; `python -m benchmarks.paging_compiled`. Bytes are
XLA's count unless predicted. "Alone" and "paged" are the least that is kept without and with host memory: a
byte less than what is made of it takes ("total") is refused (found, not proved). "Eased" is the overhead with
host memory in the bytes of "alone".
Overheads are as reports have them, estimated in part before XLA made kernels of the plan.
Seconds of CPU time.

"""


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; bytes."""
    fields = [f.name for f in dataclasses.fields(Row)]
    shown = [[_shown(getattr(row, name)) for name in fields] for row in rows]
    return format_table([name.replace("_", " ") for name in fields], shown)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def kept(out: Path) -> dict[tuple[str, str], Row]:
    """The rows of a file by program and device."""
    rows = [Row(**fields) for fields in json.loads(out.read_text())] if out.exists() else []
    return {(row.program, row.device): row for row in rows}


def write(rows: Sequence[Row], out: Path) -> None:
    """Both files, in the order of devices and programs."""
    names = list(PROGRAMS)
    rows = sorted(rows, key=lambda row: (row.device, names.index(row.program)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    out.with_suffix(".md").write_text(HEAD + table(rows) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--devices", nargs="*", default=["v5e", "h200"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paging_compiled.json"))
    args = parser.parse_args(argv)
    commit()  # remembered: files may change while this runs
    for device in args.devices:
        for name in args.programs:
            row = measure(name, device)
            sys.stdout.write(table([row]) + "\n")
            sys.stdout.flush()
            write(list((kept(args.out) | {(name, device): row}).values()), args.out)


if __name__ == "__main__":
    main()
