"""Environment of all tests: CPU by default, and a GPU that is not here.

`pytest --gpu` runs on the machine's own GPU and includes the tests marked `gpu`; `pytest --optimized`, which
`make nightly` calls, compiles kernels for the CPU as users do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--gpu` and `--optimized`."""
    parser.addoption("--gpu", action="store_true", help="use this machine's GPU, run tests marked gpu")
    parser.addoption("--optimized", action="store_true", help="with LLVM's optimizations of CPU kernels")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform before anything imports jax."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_quick_kernels(config))).strip()


def _quick_kernels(config: pytest.Config) -> tuple[str, ...]:
    """Flags of XLA by which modules, and where their values lie, are the same, in two thirds of the time.

    A GPU that is not here measures nothing, so nothing is tuned; the search for tiles that another pass finds
    again is left out; equal kernels of one process are compiled once (the file is each worker's own, and
    temporary). Kernels for the CPU go without LLVM's optimizations, which come after all that is planned.
    """
    kernels = tempfile.NamedTemporaryFile(prefix="kernels_")  # noqa: SIM115
    config.add_cleanup(kernels.close)
    return (
        *(() if config.getoption("--optimized") else ("--xla_backend_optimization_level=0",)),
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_experimental_enable_tiling_propagation=false",
        f"--xla_gpu_kernel_cache_file={kernels.name}",
    )


# Files whose tests take minutes, the longest first: `make test` gives whole files to its workers in this
# order, so that no long one is left to one worker at the end.
LONGEST = (
    "test_promise", "test_examples", "test_docs", "test_xla_mark", "test_tpu",
    "test_jaxpr_stage", "test_random_programs", "test_paged_budgets", "test_sharded", "test_xla_devices",
    "test_rivals", "test_scan", "test_planners", "test_hlo_heap", "test_as_checkpoint",
    "test_transformations", "test_derivatives", "test_report", "test_explain",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first, then those of many tests; skip the tests marked `gpu` unless asked for."""
    counts = Counter(item.path for item in items)
    rank = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda i: (rank.get(i.path.stem, len(rank)), -counts[i.path], i.path))
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a real GPU: pytest --gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _absent(device: str) -> str:
    """The name of an absent device, for `coop_jax.aot`; skips if its compiler is not installed."""
    from coop_jax import aot
    from coop_jax.errors import UnsupportedError

    try:
        aot.devices(device)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return device


@pytest.fixture(scope="session")
def h200() -> str:
    """The absent GPU."""
    return _absent("h200")


@pytest.fixture(scope="session")
def v5e() -> str:
    """The absent TPU."""
    return _absent("v5e")


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    """What an earlier test met says nothing of this one: which test is earlier depends on the workers."""
    ways = sys.modules.get("coop_jax.ways")
    if ways is not None:
        ways.MEMORY.clear()
