"""The planners' benchmark: its rows are checked plans, its table says what the rows say."""

from __future__ import annotations

import json
from pathlib import Path

from strategies import small_gpt

from benchmarks.planners import cell, main


def test_rows_and_tables_are_written(tmp_path: Path):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "gpt.json").write_text(small_gpt(1).to_json())
    out = tmp_path / "out" / "planners.json"
    options = ["--graphs", str(tmp_path / "graphs"), "--only", "auto,exact,dtr", "--budgets", "0.8,0.05"]
    main([*options, "--time-limit", "20", "--out", str(out)])
    everything = json.loads(out.read_text())
    rows = {(row["planner"], row["budget_ratio"]): row for row in everything if not row["least"]}
    least = {row["planner"]: row for row in everything if row["least"]}
    assert len(rows) == 6
    assert least.keys() == {"auto", "dtr"}
    assert least["auto"]["within"]
    assert least["auto"]["budget_ratio"] <= least["dtr"]["budget_ratio"]
    exact, dtr = rows["exact", 0.8], rows["dtr", 0.8]
    assert exact["within"]
    assert exact["status"] == "optimal"
    assert exact["pool_bytes"] <= exact["budget_bytes"]
    assert exact["overhead_ratio"] <= min(rows["auto", 0.8]["overhead_ratio"], dtr["overhead_ratio"])
    lines = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("| exact ")]
    assert f"{100 * exact['overhead_ratio']:.2f}=" in lines[0]
    assert "none" in lines[0]


def test_a_cell_without_a_row_is_empty():
    assert cell(None) == ""
