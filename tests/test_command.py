"""The `coop` command as a user runs it: what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import coop_cli
from coop_cli import main
from coop_jax import commands, doctor, inspect
from coop_jax.screen import Table, as_text, print_blocks

SCRIPT = """
import jax, jax.numpy as jnp

def params():
    return [jnp.zeros((64, 64))] * 6

def loss(ws, x, wrap=lambda f: f):
    layer = wrap(lambda x, w: jnp.tanh(x @ w))
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)

def step(ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads)], value

def by_hand(ws, x):
    return step(ws, x)

def broken(ws, x):
    raise ValueError("not today")
"""
MOST_HELP_SECONDS = 0.3


@pytest.fixture
def target(tmp_path: Path) -> list[str]:
    path = tmp_path / "training.py"
    path.write_text(SCRIPT)
    return [f"{path}:step", "--spec", "params", "--spec", "f32[512,64]"]


def test_help_is_quick_because_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, coop_cli\n"
        "try: coop_cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'ortools', 'google', 'coop_jax', 'passes'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    clean = {**os.environ, "PYTHONSTARTUP": ""}
    begin = [time.process_time(), os.times().children_user + os.times().children_system]
    subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, env=clean)
    used = os.times().children_user + os.times().children_system - begin[1]
    assert used < MOST_HELP_SECONDS


def test_devices_that_are_written_twice_are_the_same() -> None:
    from coop_jax.aot import TARGETS
    from coop_jax.tpu import CHIPS

    assert coop_cli.DEVICES == TARGETS
    assert {name for name in TARGETS if coop_cli.SLICE.fullmatch(f"{name}:2x4")} == set(CHIPS)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_compiled(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *target, "--budget", "1GiB", "--out", str(tmp_path / "none" / "report.json")])
    assert "there is no folder" in capsys.readouterr().err


def test_a_slice_of_tpus_is_a_device_and_nonsense_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert coop_cli._device("v6e:2x4") == "v6e:2x4"
    with pytest.raises(SystemExit):
        main(["plan", "train.py:step", "--budget", "1GiB", "--device", "v6e:two"])
    assert "'v6e:two' is not one of h200," in capsys.readouterr().err


def test_explain_prints_tables_and_writes_a_page(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.html"
    assert main(["explain", *target, "--quick", "--top", "3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "kept for the backward pass" in text
    assert "training.py" in text
    assert "donate_argnums=0" in text
    assert max(map(len, text.split("\n"))) <= 100
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["explain", *target, "--quick", "--json", "--donate", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["donations"] == []


def test_plan_then_report_then_what_changed(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert main(["plan", *target, "--budget", "1GiB", "--out", str(first)]) == 0
    assert "of budget" in capsys.readouterr().out
    assert main(["plan", *target, "--budget", "0.75", "--out", str(second), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["compiled_total_bytes"] <= planned["budget_bytes"]
    assert main(["report", str(second)]) == 0
    assert "compiled, XLA's count" in capsys.readouterr().out
    assert main(["report", str(first), str(second)]) == 0
    assert "what changed" in capsys.readouterr().out
    assert main(["show", str(second)]) == 0
    assert "compiled, XLA's count" in capsys.readouterr().out
    for given in ([str(second)], [str(first), str(second)]):
        assert main(["report", *given, "--out", str(tmp_path / "x.png")]) == 2
        assert "must end in one of .html, .json, .txt" in capsys.readouterr().err
    wrong = {
        "budget_bytes": "x", "seconds": [], "compiled_total_bytes": None, "whole": 1, "overhead_ratio": True,
        "recomputed": [{**planned["recomputed"][0], "nbytes": "y"}],
    }  # fmt: skip
    for name, value in [*wrong.items(), ("budget_bytes", 0)]:
        (broken := tmp_path / "c.json").write_text(json.dumps({**planned, name: value}))
        assert main(["report", str(first), str(broken)]) == 2
        said = capsys.readouterr().err
        assert "is no report of this version: " in said
        assert said.count("\n") == 1


def test_what_a_program_prints_leaves_the_json_alone(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training.py").write_text(
        "print('hello')\n" + SCRIPT.replace("    value, grads", "    print('traced')\n    value, grads")
    )
    assert main(["plan", *target, "--budget", "1GiB", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["budget_bytes"] == 2**30
    assert "hello\n" in captured.err
    assert "traced\n" in captured.err


def test_what_a_stage_did_is_shown(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COOP_DUMP_TO", str(tmp_path / "dump"))
    assert main(["plan", *target, "--budget", "0.75"]) == 0
    capsys.readouterr()
    (outcome, *_) = sorted((tmp_path / "dump").glob("*/outcome.json"))
    assert main(["show", str(outcome)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(outcome.read_text())
    monkeypatch.setenv("COOP_DUMP_TO", str(outcome))
    assert main(["plan", *target, "--budget", "0.74"]) == 2
    assert "COOP_DUMP_TO" in capsys.readouterr().err


def test_an_interrupted_command_ends_without_a_trace(
    target: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "explain", interrupted)
    assert main(["explain", *target]) == 130
    assert capsys.readouterr().err == "coop explain: interrupted\n"


@pytest.mark.parametrize("how", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
def test_what_is_shown_is_in_the_characters_of_the_terminal(
    how: dict[str, str], target: list[str], tmp_path: Path
) -> None:
    memory = tmp_path / "map.json"
    assert main(["plan", *target, "--budget", "0.75", "--out", str(tmp_path / "r.json")]) == 0
    explained = inspect(compiled_example())
    memory.write_text(explained.to_json())
    for path in (memory, tmp_path / "r.json"):
        run = subprocess.run(
            [sys.executable, "-m", "coop_jax", "show", str(path)],
            env={**os.environ, **how}, capture_output=True, check=True,
        )  # fmt: skip
        assert run.stdout.decode(how["PYTHONIOENCODING"])


def compiled_example() -> jax.stages.Compiled:
    x = jnp.ones((64, 64))
    return jax.jit(jax.grad(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x).sum())).lower(x).compile()


TABLE = Table(
    header=("", "compiled", "overhead", "plan's recompute at least"),
    rows=(
        ("budget 2.50 MiB", "2.50 MiB", "+27.1 %", "20.1 %"),
        ("4 blocks: dots_with_no_batch_dims_saveable", "3.50 MiB", "+3.2 %", ""),
    ),
)


@pytest.mark.parametrize("width", [40, 50, 80, 100])
def test_no_number_is_cut_in_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="needs rich: pip install -e '.[rich]'")

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    print_blocks([TABLE], terminal := Terminal())
    shown = terminal.getvalue()
    for cell in ("2.50 MiB", "3.50 MiB", "+27.1 %", "+3.2 %", "20.1 %", "compiled", "recompute"):
        assert cell in shown
    assert width < 50 or all(len(line) <= width for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\n"))


def test_an_impossible_budget_is_told_in_full_with_exit_code_1(
    target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *target, "--budget", "1000"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("coop plan: no plan")
    assert "What would help" in said


def test_pareto_compares_with_another_function(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "curve.json"
    assert main(["pareto", *target, "--budgets", "2", "--rival", "by_hand", "--out", str(out)]) == 0
    assert "by_hand" in capsys.readouterr().out
    assert json.loads(out.read_text())["rivals"][0]["name"] == "by_hand"


def test_programs_and_plans_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strategies import example

    program, plan = tmp_path / "program.json", tmp_path / "plan.json"
    program.write_text(example().to_json())
    assert main(["solve", str(program), "--budget", "12", "--out", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "coop-plan/1"
    assert main(["show", str(program)]) == 0
    assert capsys.readouterr().out == str(example())
    assert main(["show", str(plan), "--program", str(program)]) == 0
    assert "| *" in capsys.readouterr().out


def test_the_doctor_finds_this_place_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = [doctor.Check(**fields) for fields in json.loads(capsys.readouterr().out)]
    assert {check.name for check in checks} >= {"jax", "CUDA plugin", "ortools", "a budget is enforced here"}
    missing = doctor.Check(name="rich", good=False, found="not installed", cure="pip install rich")
    text = as_text(doctor.blocks([*checks, missing]))
    assert "rich: pip install rich" in text
    assert max(map(len, text.split("\n"))) <= 100
    (line,) = (line for line in text.split("\n") if line.startswith("rich") and "MISSING" in line)
    assert line.index("MISSING") == text.split("\n")[0].index("ok")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training.py"], "names no function"),
        (["explain", "{dir}/training.py:nothing"], "has no 'nothing'"),
        (["explain", "{dir}/missing.py:step"], "does not exist"),
        (["explain", "{dir}/training.py:step", "--spec", "f32[9"], "write a shape"),
        (["explain", "{dir}/training.py:step", "--spec", "f32[3 4]"], "write a shape"),
        (["explain", "{dir}/training.py:step"], "could not be compiled: TypeError"),
        (["explain", "{dir}/training.py:broken", "--spec", "params", "--spec", "f32[8,64]"], "not today"),
        (["explain", "{dir}/training.py:step", "--out", "x.doc"], "must end in one of"),
        (["explain", "{dir}/training.py:step", "--donate", "7"], "--donate is 7"),
        (["explain", "{dir}/training.py:step", "--top", "0"], "--top is 0"),
        (["pareto", "{dir}/training.py:step", "--budgets", "0"], "--budgets is 0"),
        (["pareto", "{dir}/training.py:step", "--no-rivals", "--rival", "by_hand"], "give one"),
        (["plan", "{dir}/training.py:step", "--budget", "8g"], "Accepted are"),
        (["plan", "{dir}/training.py:step", "--budget", ".5", "--planner", "delta"], "`coop solve`"),
        (["report", "{dir}/training.py"], "not JSON"),
        (["report", "{dir}/empty.json"], "is no report"),
        (["show", "{dir}/empty.json"], "is none of"),
        (["show", "{dir}/nowhere.json"], "nowhere.json"),
        (["inspect", "{dir}"], "xla_dump_to"),
        (["inspect", "{dir}/training.py"], "neither"),
        (["inspect", "{dir}/empty.json"], "no map"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training.py").write_text(SCRIPT)
    (tmp_path / "empty.json").write_text("{}")
    given = [a.replace("{dir}", str(tmp_path)) for a in arguments]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"coop {arguments[0]}: ")
    assert said in captured.err


def test_a_dump_is_inspected_from_the_command_line(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax
    import jax.numpy as jnp

    from coop_jax import aot

    folder = tmp_path / "dump"
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = jax.jit(jax.grad(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x).sum())).lower(spec)
    compiled = program.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
    assert main(["inspect", str(folder), "--out", str(tmp_path / "map.json")]) == 0
    text = capsys.readouterr().out
    assert str(aot.memory(compiled).temp_bytes) in text
    assert "simulated" in text
    assert main(["inspect", str(folder), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["temp_bytes"] == aot.memory(compiled).temp_bytes
