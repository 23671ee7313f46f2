"""A planner is a file and a line: whatever is in the registry can be named everywhere."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from strategies import chain

from coop_cli import main
from passes.ir import Plan, Program
from passes.planners import PlannerConfig, plan, search
from passes.registry import PLANNERS, Planner
from passes.validate import validate


def test_a_new_planner_is_a_file_and_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def plan_mine(program: Program, budget_bytes: int, config: PlannerConfig) -> Plan:
        found = search.Search(program, PlannerConfig(planner="cut")).best(budget_bytes)
        return search.Search(program, config).plan(found, budget_bytes)

    file = types.ModuleType("mine")
    file.plan = plan_mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", file)
    monkeypatch.setitem(PLANNERS, "mine", Planner(does="nothing new", entry="mine:plan"))

    made = plan(chain(8), 64, PlannerConfig(planner="mine"))
    validate(chain(8), made)
    assert (made.planner, made.status.found) == ("mine", True)
    path = tmp_path / "chain.json"
    path.write_text(chain(8).to_json())
    assert main(["solve", str(path), "--budget", "64", "--planner", "mine"]) == 0
    with pytest.raises(SystemExit):
        main(["solve", "--help"])
    assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_says_what_it_does_and_where_it_is(name: str):
    planner = PLANNERS[name]
    assert planner.does
    for entry in filter(None, (planner.entry, planner.paged)):
        module, _, function = entry.partition(":")
        __import__(module)
        assert callable(getattr(sys.modules[module], function))


def test_an_unknown_planner_is_refused_with_the_names_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "chain.json"
    path.write_text(chain(8).to_json())
    with pytest.raises(SystemExit):
        main(["solve", str(path), "--budget", "64", "--planner", "best"])
    assert ", ".join(f"'{name}'" for name in PLANNERS) in capsys.readouterr().err
