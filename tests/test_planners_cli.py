"""`coop solve`: its summary, its exit codes and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import chain, example, small_gpt

from coop_cli import main
from coop_jax.cli import parse_budget


@pytest.fixture
def program_path(tmp_path: Path) -> Path:
    path = tmp_path / "program.json"
    path.write_text(small_gpt(3).to_json())
    return path


@pytest.mark.parametrize("planner", ["auto", "window", "cut", "exact", "dtr"])
def test_solve_prints_a_summary_and_writes_the_plan(
    program_path: Path, planner: str, capsys: pytest.CaptureFixture[str]
):
    out = program_path.with_name("plan.json")
    code = main(["solve", str(program_path), "--budget", "0.7", "--planner", planner, "--out", str(out)])
    assert code == 0
    text = capsys.readouterr().out
    names = ["program", "budget", "peak before", "peak after", "placed heap", "overhead", "lower bound"]
    assert [line[:12].strip() for line in text.splitlines()][:7] == names
    assert f"planner      {planner}" in text
    plan = json.loads(out.read_text())
    assert plan["format"] == "coop-plan/1"
    assert plan["peak_bytes"] <= plan["budget_bytes"]


def test_joint_is_for_the_exact_mode(program_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["solve", str(program_path), "--budget", "0.7", "--joint"]) == 2
    assert "--joint is for --planner exact" in capsys.readouterr().err


def test_the_strong_bound_is_above_the_cut_bound(tmp_path: Path):
    path, out = tmp_path / "program.json", tmp_path / "plan.json"
    path.write_text(chain(12).to_json())
    ratios = []
    for bound in ("cut", "strong"):
        assert main(["solve", str(path), "--budget", "0.25", "--bound", bound, "--out", str(out)]) == 0
        ratios.append(json.loads(out.read_text())["lower_bound_ratio"])
    assert ratios[0] < ratios[1]


def test_no_plan_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.json"
    path.write_text(example().to_json())
    assert main(["solve", str(path), "--budget", "2"]) == 1
    assert "infeasible (proved)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("1.5", "a fraction of the live peak must be in (0, 1]"),
        ("0.0", "a fraction of the live peak must be in (0, 1]"),
        ("8g", "8g"),
        ("0", "0"),
        ("nan", "nan"),
    ],
)
def test_bad_budgets_are_exit_code_2(
    program_path: Path, budget: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["solve", str(program_path), "--budget", budget]) == 2
    error = capsys.readouterr().err
    assert error.startswith("coop solve: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": "coop-program/1"}', '{"format": "coop-program/1", "ops": [[]]}',
        '{"format": "coop-program/1", "ops": [], "buffers": [1e999]}',
        '{"format": "coop-program/1", "ops": [], "buffers": 3}',
    ],
)  # fmt: skip
def test_broken_programs_are_exit_code_2(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.json"
    path.write_text(text)
    assert main(["solve", str(path), "--budget", "0.5"]) == 2
    error = capsys.readouterr().err
    assert f"{path} is not a program" in error
    assert error.count("\n") == 1


def test_a_missing_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["solve", str(tmp_path / "none.json"), "--budget", "0.5"]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_a_bad_time_limit_is_exit_code_2(
    program_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["solve", str(program_path), "--budget", "0.5", "--time-limit", seconds]) == 2
    assert "--time-limit is" in capsys.readouterr().err


def test_budgets_are_bytes_or_fractions():
    assert parse_budget("0.5", 1000) == 500
    assert parse_budget("1.0", 1000) == 1000
    assert parse_budget("1", 1000) == 1
    assert parse_budget("1 KiB", 1000) == 1024


def test_the_package_runs_as_a_module(program_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "coop_jax",
            "solve",
            str(program_path),
            "--budget",
            "0.8",
            "--time-limit",
            "0.1",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert "overhead" in done.stdout


@pytest.mark.parametrize("planner", ["auto", "delta"])
def test_solve_sends_values_to_the_host(program_path: Path, planner: str, capsys: pytest.CaptureFixture[str]):
    out = program_path.with_name("plan.json")
    options = ["--host", "1MiB", "--link", "0.5", "--planner", planner, "--out", str(out)]
    assert main(["solve", str(program_path), "--budget", "0.6", *options]) == 0
    assert "pages        " in capsys.readouterr().out
    plan = json.loads(out.read_text())
    assert plan["peak_bytes"] <= plan["budget_bytes"]
    assert plan["host"]["budget_bytes"] == 1 << 20
    assert main(["show", str(out), "--program", str(program_path)]) == 0
    shown = capsys.readouterr().out
    assert "paged, peak on the host" in shown
    assert ("\n0 paged" in shown) == (planner == "delta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planner", "delta"], "say how much it may take there with --host"),
        (["--host", "1MiB", "--link", "string"], "--link is 'string'; give GB/s, or one of pcie3"),
        (["--host", "1MiB", "--joint", "--planner", "exact"], "leave out --host"),
        (["--host", "0"], "--host is"),
        (["--objective", "energy"], 'no op of the program has "energy"'),
        (["--objective", "energy", "--planner", "dtr"], "--planner dtr knows time only"),
        (["--max-overhead", "0.1"], "--max-overhead is for --objective energy"),
        (["--objective", "energy", "--max-overhead", "much"], "--max-overhead is 'much'"),
    ],
)
def test_what_is_wrong_with_a_host_is_said(
    program_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["solve", str(program_path), "--budget", "0.6", *options]) == 2
    assert message in capsys.readouterr().err


def test_solve_looks_for_the_least_energy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.json"
    data = json.loads(small_gpt(2).to_json())
    for op in data["ops"]:
        op["energy"] = 1000 - min(999, op["cost"])
    path.write_text(json.dumps(data))
    options = ["--objective", "energy", "--max-overhead", "0.5"]
    assert main(["solve", str(path), "--budget", "0.7", *options]) == 0
    assert " pJ\n" in capsys.readouterr().out


def test_what_is_too_slow_is_not_said_to_be_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is kept; it is the limit of time that nothing keeps."""
    program = json.loads(chain(6).to_json())
    for op in program["ops"]:
        op["energy"] = 5
    (path := tmp_path / "program.json").write_text(json.dumps(program))
    asked = ["solve", str(path), "--budget", "0.7", "--objective", "energy"]
    assert main([*asked, "--max-overhead", "0"]) == 1
    said = capsys.readouterr().out
    assert "no plan found within the limit of time; the one shown is the quickest" in said
    assert main(asked) == 0
    assert "feasible" in capsys.readouterr().out
