"""XLA's estimated cycles, read from the module that a TPU's program runs, and what a table says of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cycles import program_cycles
from benchmarks.promise import commit
from benchmarks.tpu import Row, verdict
from passes.hlo import proto


def _add(computation: Any, number: int, opcode: str, config: bytes = b"", *called: int) -> None:
    made = computation.instructions.add(id=number, name=f"{opcode}.{number}", opcode=opcode)
    made.shape.element_type = 11
    made.backend_config = config
    made.called_computation_ids.extend(called)
    computation.root_id = number


def _cycles(n: int) -> bytes:
    return b'{"window_config":{"estimated_cycles":"%d"}}' % n


def test_the_body_of_a_loop_counts_as_often_as_it_turns_and_nonsense_does_not_count() -> None:
    module = proto.parse(b"")
    body, test, entry = (module.computations.add(id=n, name=f"c{n}") for n in (1, 2, 3))
    _add(body, 1, "fusion", _cycles(100))
    _add(test, 2, "copy", _cycles(1))
    _add(entry, 3, "fusion", _cycles(7))
    _add(entry, 4, "while", b'{"known_trip_count":{"n":"12"}}', 1, 2)
    _add(entry, 5, "fusion", _cycles(2**63 - 5))
    _add(entry, 6, "fusion")
    module.entry_computation_id = 3
    module.schedule.sequences.add(key=3).value.instruction_ids.extend([3, 4, 5, 6])
    assert program_cycles(module) == 7 + 12 * 101


def test_a_verdict_counts_what_is_refused_dearer_or_not_below_its_rivals() -> None:
    def row(name: str, total: int, cycles: int, budget: int | None = None, *, chip: str = "v5e") -> Row:
        return Row(
            program="gpt",
            chip=chip,
            name=name,
            total_bytes=total,
            cycles=cycles,
            budget_bytes=budget,
            fits=True,
        )

    rivals = [row("plain", 100, 1000), row("dots_saveable", 80, 1100), row("nothing_saveable", 50, 1200)]
    ours = [row("coop", 90, 1020, 100), row("coop", 70, 1123, 80), row("coop", 40, 1300, 40)]
    other = [row("plain", 100, 1000, chip="v6e"), row("coop", 90, 900, 100, chip="v6e")]
    assert verdict([*rivals, *ours, *other]) == (
        "At the bytes of 3 of 4 rivals coop is kept, and for 2 of these it needs no more cycles "
        "(2 % are a tie). Below all rivals of 1 of 2 programs and chips there is a plan."
    )


def test_results_that_are_being_written_are_no_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "benchmarks" / "results" / "tpu.md"
    results.parent.mkdir(parents=True)
    code = tmp_path / "code.py"
    for file in (results, code):
        file.write_text("")
    mine = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*mine, "commit", "-qm", "first")):
        subprocess.run(("git", *words), check=True)
    clean = commit.__wrapped__()
    results.write_text("a row")
    assert commit.__wrapped__() == clean != ""
    code.write_text("pass")
    assert commit.__wrapped__() == f"{clean}+"
