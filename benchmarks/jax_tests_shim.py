"""A pytest plugin: JAX's own tests with `coop.remat` in the place of `jax.checkpoint` and `jax.remat`.

Loaded by `benchmarks.jax_tests`, which says in the environment what to do:

    COOP_JAX_TESTS_MODE     "checkpoint" (JAX's own), "1TiB", "nothing_saveable" or a fraction such as "0.7"
    COOP_JAX_TESTS_ONLY     a JSON file with the ids of the tests to run; without it all with the words
    COOP_JAX_TESTS_RESULTS  where to append one JSON line when a test begins and one when it ends

The words are remat and checkpoint, in a test's name or source. JAX's names are replaced before any test
module is imported; JAX's own use of them inside its library stays as it is.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

import coop_jax as coop

MODE = os.environ["COOP_JAX_TESTS_MODE"]
RESULTS = Path(os.environ["COOP_JAX_TESTS_RESULTS"])
ONLY = os.environ.get("COOP_JAX_TESTS_ONLY")
WORDS = re.compile("remat|checkpoint", re.IGNORECASE)
PLAIN = "checkpoint"
LARGE = "1TiB"
NOTHING = "nothing_saveable"

_calls = 0


def checkpoint(
    fun: Callable[..., Any],
    *,
    prevent_cse: Any = True,
    policy: Callable[..., Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: Any = (),
) -> Callable[..., Any]:
    """`coop.remat` of `fun`, called as `jax.checkpoint` is; `prevent_cse` has no counterpart."""
    global _calls
    del prevent_cse
    _calls += 1
    if policy is None and MODE == NOTHING:
        policy = jax.checkpoint_policies.nothing_saveable
    budget = LARGE if MODE in (LARGE, NOTHING) else float(MODE)
    return coop.remat(
        fun, budget=budget, policy=policy, static_argnums=static_argnums, static_argnames=static_argnames
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the shim in place, before any test module is imported."""
    for path in map(Path, config.args):
        fill_in(ast.parse(path.read_text()))
    if MODE != PLAIN:
        jax.checkpoint = checkpoint
        jax.remat = checkpoint


class _Lenient(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class StandIn(metaclass=_Lenient):
    """In the place of something that this JAX does not have, so that the rest of its test file can run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        return self


def fill_in(tree: ast.Module) -> None:
    """Let a test file of another version be imported: names that this JAX lacks become stand-ins.

    A test that uses one fails, with `jax.checkpoint` as well.
    """
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("jax"):
            continue
        try:
            module = importlib.import_module(str(node.module))
        except ImportError:
            continue
        for alias in node.names:
            try:
                importlib.import_module(f"{node.module}.{alias.name}")
            except ImportError:
                if not hasattr(module, alias.name):
                    setattr(module, alias.name, type(alias.name, (StandIn,), {}))


def identify(item: pytest.Item) -> str:
    """The same id in every folder: file, class and test."""
    return f"{item.path.name}::{'::'.join(item.nodeid.split('::')[1:])}"


def mentions(item: pytest.Item) -> bool:
    """True if a test's name or source has one of the words."""
    if WORDS.search(item.name):
        return True
    function = getattr(item, "function", None)
    try:
        return function is not None and WORDS.search(inspect.getsource(function)) is not None
    except (OSError, TypeError):
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is asked for."""
    only = None if ONLY is None else set(json.loads(Path(ONLY).read_text()))
    chosen = [i for i in items if (mentions(i) if only is None else identify(i) in only)]
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = chosen
    append({"collected": [identify(i) for i in chosen]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say that a test begins, so that one which ends the process is known."""
    global _calls
    _calls = 0
    append({"begin": identify(item)})
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Append the outcome of a test's call, or of a set-up that did not pass."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        append({"end": identify(item), "outcome": report.outcome, "seconds": round(call.duration, 2),
                "decorated": _calls, **what_failed(item, call)})  # fmt: skip
    return report


def what_failed(item: pytest.Item, call: pytest.CallInfo[None]) -> dict[str, str]:
    """The error of a test, where it was raised, and the test's statement that it came from."""
    if call.excinfo is None:
        return {}
    entries = list(call.excinfo.traceback)
    own = [e for e in entries if Path(str(e.path)) == item.path]
    return {
        "error": call.excinfo.typename,
        "message": str(call.excinfo.value),
        "statement": str(own[-1].statement).strip() if own else "",
        "function": own[-1].name if own else "",
        "raised_in": "/".join(Path(str(entries[-1].path)).parts[-2:]),
    }


def append(line: dict[str, Any]) -> None:
    """Add one line to the results."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
