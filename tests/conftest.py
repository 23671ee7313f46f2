"""Environment of all tests: CPU by default, and a GPU that is not here.

`pytest --gpu` runs on the machine's own GPU and includes the tests marked `gpu`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--gpu`."""
    parser.addoption("--gpu", action="store_true", help="use this machine's GPU, run tests marked gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform before anything imports jax."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` unless asked for."""
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
