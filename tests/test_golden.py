"""The README's example as every stage has it: what `COOP_DUMP_TO` writes is what it was.

After a change that is meant to change it: `COOP_GOLDEN=write pytest tests/test_golden.py`, and read the diff.
Estimated times are left out; what they lead to, which values are recomputed, is not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reading import read_plan_text, read_program

from passes.dump import VARIABLE
from passes.ir import Plan, Program
from passes.listing import plan_text
from passes.simulate import simulate

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
FILES = {"0001-jaxpr": ("jaxpr.txt", "program.txt", "plan.txt", "emitted.txt"), "0002-hlo": ("kernels.txt",)}
TIMES = ((r"cost \d+", "cost _"), (r"(?m)^overhead .*$", "overhead _"))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's example writes, in a process of its own: what JAX lowered before has its lines."""
    folder = tmp_path_factory.mktemp("dump")
    environment = {**os.environ, VARIABLE: str(folder), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", "import runpy; runpy.run_path('examples/quickstart.py')"]
    subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def without_times(text: str) -> str:
    for pattern, word in TIMES:
        text = re.sub(pattern, word, text)
    return text


@pytest.mark.parametrize(("folder", "name"), [(f, n) for f, names in FILES.items() for n in names])
def test_every_stage_of_the_readmes_example_is_what_it_was(folder: str, name: str, dumped: Path) -> None:
    found = without_times((dumped / folder / name).read_text(encoding="utf-8"))
    golden = GOLDEN / f"quickstart.{name}"
    if os.environ.get("COOP_GOLDEN") == "write":
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


def test_what_it_wrote_is_read_back(dumped: Path) -> None:
    folder = dumped / "0001-jaxpr"
    program = read_program((folder / "program.txt").read_text(encoding="utf-8"))
    text = (folder / "plan.txt").read_text(encoding="utf-8")
    plan = read_plan_text(text)
    assert program == Program.from_json((folder / "program.json").read_text(encoding="utf-8"))
    assert isinstance(plan, Plan)
    assert len(plan.recomputes()) == 14
    assert simulate(program, plan.steps).peak_bytes == plan.peak_bytes
    assert plan_text(plan, program) == text
