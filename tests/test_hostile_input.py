"""What the command refuses: one line on stderr and exit code 2, whatever the planner, never a traceback."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ortools.sat.python import cp_model

from coop_cli import main
from coop_jax.budget import parse_bytes
from coop_jax.errors import BudgetError
from passes.checked import MOST, InputError
from passes.ir import Program
from passes.offsets.packing import Span
from passes.planners.config import PLANNERS
from passes.planners.exact.rectangles import model_of

OPS: list[dict[str, Any]] = [
    {"cost": 10, "inputs": [], "outputs": [0]},
    {"cost": 5, "inputs": [0], "outputs": [1]},
    {"cost": 7, "inputs": [0, 1], "outputs": [2], "may_share": [[2, 1]], "workspace": 3},
]
GOOD: dict[str, Any] = {
    "format": "coop-program/1", "name": "p", "outputs": [2], "ops": OPS, "buffers": [100, 200, 50],
}  # fmt: skip


def changed(**new: Any) -> str:
    """The program with other entries."""
    return json.dumps({**GOOD, **new})


def op(**new: Any) -> str:
    """The program with other entries in its last op."""
    return changed(ops=[*OPS[:2], {**OPS[2], **new}])


def without(key: str) -> str:
    """The program with an entry of its last op left out."""
    return changed(ops=[*OPS[:2], {k: v for k, v in OPS[2].items() if k != key}])


PROGRAMS: dict[str, str | bytes] = {
    "an empty file": "",
    "half a file": changed()[:60],
    "bytes that are no UTF-8": b"\xff\xfe{}",
    "a zero byte": "\0",
    "brackets nested deeply": "[" * 100_000 + "]" * 100_000,
    "objects nested deeply": '{"format":' * 50_000 + "1" + "}" * 50_000,
    "an integer of 5000 digits": changed().replace("200", "9" * 5000),
    "an infinite size": changed().replace("200", "1e400"),
    "NaN": changed(buffers=[math.nan, 1, 1]),
    "Infinity": changed(buffers=[math.inf, 1, 1]),
    "another version": changed(format="coop-program/2"),
    "the format alone": '"coop-program/1"',
    "a list": "[]",
    "null": "null",
    "no ops": json.dumps({"format": "coop-program/1", "buffers": []}),
    "no buffers": json.dumps({"format": "coop-program/1", "ops": []}),
    "ops as a text": changed(ops="abc"),
    "ops as numbers": changed(ops=[1, 2]),
    "buffers as an object": changed(buffers={"0": 1}),
    "outputs as a number": changed(outputs=2),
    "a name that is a number": changed(name=3),
    "a size of 2**63": changed(buffers=[2**63] * 3),
    "a size of 2**53": changed(buffers=[2**53, 1, 1]),
    "sizes of 2**53 together": changed(buffers=[2**52, 2**52, 1]),
    "a size of 1e300": changed(buffers=[1e300, 1, 1]),
    "a negative size": changed(buffers=[-1, 1, 1]),
    "half a byte": changed(buffers=[1.5, 1, 1]),
    "true for a size": changed(buffers=[True, 1, 1]),
    "a text for a size": changed(buffers=["1", 1, 1]),
    "null for a size": changed(buffers=[None, 1, 1]),
    "an output that is not there": changed(outputs=[3]),
    "a negative output": changed(outputs=[-1]),
    "an output of 2**70": changed(outputs=[2**70]),
    "a buffer written twice": op(outputs=[1]),
    "an op that reads what it writes": op(inputs=[2]),
    "an input that is not there": op(inputs=[7]),
    "a negative input": op(inputs=[-1]),
    "true for an input": op(inputs=[True]),
    "an input for inputs": op(inputs=0),
    "a list as an input": op(inputs=[[0]]),
    "a cost of 2**53": op(cost=2**53),
    "costs of 2**53 together": changed(ops=[{**o, "cost": 2**52} for o in OPS]),
    "a negative cost": op(cost=-1),
    "a text for a cost": op(cost="7"),
    "no cost": without("cost"),
    "no inputs": without("inputs"),
    "the text no for a flag": op(recomputable="no"),
    "0 for a flag": op(recomputable=0),
    "null for a flag": op(recomputable=None),
    "a deadline of 2**64": op(deadline=2**64),
    "a negative deadline": op(deadline=-1),
    "a text for a deadline": op(deadline="3"),
    "a negative workspace": op(workspace=-1),
    "a workspace of 2**60": op(workspace=2**60),
    "may_share without pairs": op(may_share=[2, 1]),
    "may_share of three": op(may_share=[[2, 1, 0]]),
    "may_share of others' buffers": op(may_share=[[0, 1]]),
    "a name of an op that is a list": op(name=["x"]),
}
HEAD = "id,lower,upper,size\n"
PROBLEMS: dict[str, str | bytes] = {
    "an empty file": "",
    "blank lines": "\n\n",
    "a zero byte in a number": HEAD + "a,0,1\0,1\n",
    "bytes that are no UTF-8": b"id,lower,upper,size\n\xff,0,1,1\n",
    "a program": json.dumps(GOOD),
    "other separators": "id;lower;upper;size\na;0;1;1\n",
    "no upper": "id,lower,size\na,0,1\n",
    "size twice": "id,lower,upper,size,size\na,0,1,1,2\n",
    "a short row": HEAD + "a,0,1\n",
    "a long row": HEAD + "a,b,0,1,1\n",
    "a field of 200000 letters": HEAD + "d" * 200_000 + ",0,1,1\n",
    "an open quote": HEAD + '"a,0,1,1\n',
    "letters after a quote": HEAD + '"a"x,0,1,1\n',
    "an id twice": HEAD + "a,0,1,1\na,1,2,1\n",
    "a negative size": HEAD + "a,0,1,-1\n",
    "no time": HEAD + "a,1,1,1\n",
    "time that runs back": HEAD + "a,2,1,1\n",
    "half a byte": HEAD + "a,0,1,1.5\n",
    "1e3": HEAD + "a,0,1,1e3\n",
    "nan": HEAD + "a,0,1,nan\n",
    "an empty size": HEAD + "a,0,1,\n",
    "other digits": HEAD + "a,0,1,\uff15\n",
    "underscores": HEAD + "a,0,1,1_000\n",
    "5000 digits": HEAD + f"a,0,1,{'9' * 5000}\n",
    "a time of 2**70": HEAD + f"a,0,{2**70},1\nb,0,1,2\n",
    "a time of -2**53": HEAD + f"a,{-(2**53)},1,1\n",
    "sizes of 2**53 together": HEAD + f"a,0,1,{2**52}\nb,1,2,{2**52}\n",
}
AMOUNTS = (
    "1e9", "\uff10.\uff15", "\u0665", "9" * 5000, "9" * 5000 + "GiB", "1." + "9" * 5000 + " GiB", "-1", "nan",
    "inf", "0x10", "1_000", "", " ", "\n", "99999999999TiB", str(MOST), str(2**64), "50%", "8g", "0.5 B",
)  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str | bytes], str]:
    """Writes a file and returns its path."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "input"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line with which the command refuses."""
    try:
        code = main(argv)
    except SystemExit as ended:  # the parser's own
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("coop")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    return printed.err


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_broken_program_is_refused_with_every_planner(
    what: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    path = written(PROGRAMS[what])
    lines = {refusal(capsys, "solve", path, "--budget", "0.7", "--planner", planner) for planner in PLANNERS}
    assert len(lines) == 1
    assert len(lines.pop()) < 600


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_broken_packing_problem_is_refused(
    what: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    assert len(refusal(capsys, "pack", written(PROBLEMS[what]), "--capacity", "9")) < 600


@pytest.mark.parametrize("amount", AMOUNTS, ids=lambda text: ascii(text)[:20])
def test_a_broken_amount_is_refused(
    amount: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    refusal(capsys, "solve", written(changed()), f"--budget={amount}")
    refusal(capsys, "pack", written(HEAD + "a,0,1,1\n"), f"--capacity={amount}")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e400", "\u0663", "", "x", "1_0", "0", "86401"])
def test_a_broken_time_limit_is_refused(
    seconds: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    for planner in ("auto", "exact"):
        limit = f"--time-limit={seconds}"
        line = refusal(capsys, "solve", written(changed()), "--budget=0.7", "--planner", planner, limit)
        assert "--time-limit is" in line
    refusal(capsys, "pack", written(HEAD), "--capacity=9", f"--time-limit={seconds}")


@pytest.mark.parametrize(
    "argv",
    [
        (), ("solve",), ("pack",), ("other",), ("solve", "FILE"), ("solve", "FILE", "--budget"),
        ("solve", "FILE", "--budget=1.0", "--planner", "a\nb"), ("solve", "FILE", "--budget=1.0", "a\nb"),
        ("solve", "FOLDER", "--budget=1.0"), ("solve", "FOLDER/none\n", "--budget=1.0"),
        ("solve", "a\0b", "--budget=1.0"), ("solve", "FILE", "--budget=1.0", "--out", "a\0b"),
        ("solve", "FILE", "--budget=1.0", "--out", "FOLDER"), ("pack", "FOLDER", "--capacity=9"),
        ("solve", "FILE", "--budget=1.0", "--out", "FOLDER/none/plan"),
        ("solve", "FILE", "--budget=1.0", "--joint"),
    ],
)  # fmt: skip
def test_broken_command_lines_are_refused(
    argv: tuple[str, ...],
    tmp_path: Path,
    written: Callable[[str | bytes], str],
    capsys: pytest.CaptureFixture[str],
):
    path = written(changed())
    refusal(capsys, *(a.replace("FILE", path).replace("FOLDER", str(tmp_path)) for a in argv))


def host_of(planner: str) -> list[str]:
    """The options without which a planner cannot do what it does."""
    return ["--host", "1GiB"] if planner == "delta" else []


@pytest.mark.parametrize("planner", PLANNERS)
def test_programs_without_ops_bytes_or_costs_are_planned(
    planner: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    nothing = {"format": "coop-program/1", "ops": [], "buffers": []}
    free = [{**o, "cost": 0} for o in OPS]
    for program in (nothing, {**nothing, "buffers": [5], "outputs": [0]}, {**GOOD, "buffers": [0] * 3},
                    {**GOOD, "ops": free}):  # fmt: skip
        argv = ["solve", written(json.dumps(program)), "--budget", "1.0", "--planner", planner]
        assert main([*argv, *host_of(planner)]) in (
            0,
            1,
        )  # DTR misses the whole peak where it cannot write over a dying input
        assert "peak after" in capsys.readouterr().out


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_largest_numbers_are_planned(
    planner: str, written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    largest = {**GOOD, "buffers": [2**51, 2**52, MOST - 2**51 - 2**52 - 4]}
    largest["ops"] = [{**o, "cost": 2**51, "deadline": MOST - 1} for o in OPS]
    argv = ["solve", written(json.dumps(largest)), "--planner", planner, "--time-limit", "1"]
    assert main([*argv, "--budget", str(MOST - 1), *host_of(planner)]) == 0
    assert f"peak before  6.00 PiB ({2**51 + 2**52 + 3} B)" in capsys.readouterr().out


def test_files_from_other_systems_are_read(
    written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    crlf = b"\xef\xbb\xbf" + json.dumps(GOOD, indent=1).replace("\n", "\r\n").encode()
    assert main(["solve", written(crlf), "--budget", "1.0"]) == 0
    assert main(["pack", written(b"\xef\xbb\xbfid,lower,upper,size\r\na,0,1,1\r\n"), "--capacity", "1"]) == 0
    assert "1 items" in capsys.readouterr().out


def test_odd_names_are_printed_as_escapes(
    written: Callable[[str | bytes], str], capsys: pytest.CaptureFixture[str]
):
    assert main(["solve", written(changed(name="a\n\ud800\0b")), "--budget", "1.0"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(r"program      a\n\ud800\x00b, 3 ops")


def test_ids_that_need_quotes_come_back_as_they_were(tmp_path: Path):
    ids = ["add.1,f32[8]", 'a "b"', "two\nlines", "two\r\nlines", "", " spaces ", "'", "plain"]
    problem, out = tmp_path / "problem.csv", tmp_path / "out.csv"
    with problem.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("size", "id", "note", "upper", "lower"))
        rows.writerows((k + 1, name, "x,y", k + 2, k) for k, name in enumerate(ids))
    assert main(["pack", str(problem), "--capacity", "100", "--out", str(out)]) == 0
    with out.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == ids
    assert [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in found] == [
        (k, k + 2, k + 1) for k in range(len(ids))
    ]
    assert all(int(row["offset"]) >= 0 for row in found)


def test_times_whose_areas_overflow_are_packed_by_the_solver_too():
    items = [(Span(start=k << 40, stop=(k + 2) << 40, nbytes=(2**40) + k),) for k in range(6)]
    for capacity, expected in ((2**41 + 9, cp_model.OPTIMAL), (2**41 + 8, cp_model.INFEASIBLE)):
        solver = cp_model.CpSolver()
        assert solver.solve(model_of(items, capacity)[0]) == expected


def test_a_mistake_of_ours_is_not_taken_for_bad_input(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str | bytes], str]
):
    def broken(*_: Any) -> None:
        raise ValueError("a planner's own")

    monkeypatch.setattr("coop_jax.cli.validate", broken)
    with pytest.raises(ValueError, match="a planner's own"):
        main(["solve", written(changed()), "--budget", "1.0"])


def test_sizes_of_thousands_of_digits_are_no_budgets():
    for text in ("9" * 5000 + " GiB", "1." + "1" * 5000 + " GiB"):
        with pytest.raises(BudgetError, match="at most 30 digits") as refused:
            parse_bytes(text)
        assert len(str(refused.value)) < 1000


def test_the_limit_is_in_the_message():
    with pytest.raises(
        InputError, match=r"buffers\[0\] is 9007199254740992; .* 2\*\*53 - 1 = 9007199254740991"
    ):
        Program.from_json(changed(buffers=[MOST, 0, 0]))
