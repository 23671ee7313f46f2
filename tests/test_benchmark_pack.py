"""The packers' benchmark: its rows are checked packings, its table says what the rows say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pack import PACKERS, main


def test_rows_and_the_table_are_written(tmp_path: Path):
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems" / "tight.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\n")
    (tmp_path / "problems" / "wide.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,5\n")
    out = tmp_path / "out" / "pack.json"
    options = ["--problems", str(tmp_path / "problems"), "--capacity", "8", "--generated", "1"]
    main([*options, "--time-limit", "10", "--out", str(out)])
    rows = {(row["problem"], row["packer"]): row for row in json.loads(out.read_text())}
    assert len(rows) == 3 * len(PACKERS)
    assert all(rows["tight", packer]["fits"] is True for packer in PACKERS)
    assert all(rows["wide", packer]["fits"] is False for packer in PACKERS)
    assert rows["wide", "coop pack"]["method"] == "live bytes"
    assert rows["cut 100", "coop pack"]["fits"] is True
    lines = out.with_suffix(".md").read_text().splitlines()
    assert len(lines) == 2 + 3
    assert lines[3].split("|")[4].strip().startswith("no ")
