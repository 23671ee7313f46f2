"""A wide GPT's step within shares of its bytes, by recompute alone and with host memory: compiled, not run.

    python -m benchmarks.paging_wide --device h100      # writes benchmarks/results/paging_wide_h100.md

Its products take as long as what they keep takes to the host and back, so that a good plan pages as much as
the link carries unseen, and recomputes the rest. Costs are estimates of the final kernels, with what copies
are waited for, over those of the plain step; bytes are XLA's count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import coop_jax as coop
from benchmarks import models
from benchmarks.models import lower, program
from benchmarks.promise import commit
from coop_jax import aot
from coop_jax.text import format_bytes, format_table
from passes.cost import DEVICES

SIZES = {"layers": 4, "width": 8192, "heads": 32, "seq": 1024, "batch": 16, "vocab": 32000}
SHARES = (0.65, 0.6, 0.55, 0.5)
HOST = "60GiB"


def rows(device: str) -> Iterator[tuple[str, ...]]:
    """The table's rows, the plain step's first."""
    model = dataclasses.replace(models.find("gpt3_2.7b"), sizes={device: {**SIZES, "dtype": "bfloat16"}})
    plain = lower(program(model, device), device).compile()
    plain_bytes, plain_ns = aot.memory(plain).total_bytes, aot.run_ns(plain, DEVICES[device])
    yield "plain", "", format_bytes(plain_bytes, exact=False), "", "1.000", ""
    for share in SHARES:
        for host in (None, HOST):
            begin = time.perf_counter()
            around = coop.remat(budget=int(share * plain_bytes), host=host)
            compiled = lower(program(model, device, around=around), device).compile()
            seconds = time.perf_counter() - begin
            memory, ns = aot.memory(compiled), aot.run_ns(compiled, DEVICES[device])
            on_host = format_bytes(memory.host_bytes, exact=False) if host else ""
            total = format_bytes(memory.total_bytes, exact=False)
            yield f"{share:g} of plain", host or "", total, on_host, f"{ns / plain_ns:.3f}", f"{seconds:.0f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h100", choices=("a100", "h100", "h200", "b200"))
    device = parser.parse_args().device
    head = "budget", "host memory", "XLA's total", "on the host", "estimated, of plain", "compile s"
    words = f"# A GPT's step of width {SIZES['width']}, compiled for {device} at {commit()}\n\n"
    text = words + format_table(head, list(rows(device)))
    sys.stdout.write(text + "\n")
    Path(f"benchmarks/results/paging_wide_{device}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
