"""`coop pack PROBLEM.csv --capacity N`: static allocation on its own.

The file has the columns id, lower, upper and size: an item of `size` bytes is alive from time `lower` until
before time `upper`. The output file is the same with a column offset.
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Sequence
from pathlib import Path

from passes.offsets.packing import Item, Packing, Span, height_bytes, live_bytes

COLUMNS = ("id", "lower", "upper", "size")


def read_items(path: Path) -> tuple[list[str], list[Item]]:
    """Names and items of a file.

    Raises:
        ValueError: a column is missing or a value is no integer; says which.
    """
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
    names, items = [], []
    for line, row in enumerate(reader, start=2):
        try:
            start, stop, nbytes = (int(row[column]) for column in COLUMNS[1:])
        except (TypeError, ValueError):
            raise ValueError(f"{path}, line {line}: lower, upper and size must be integers") from None
        if nbytes < 0 or start >= stop:
            raise ValueError(f"{path}, line {line}: {nbytes} bytes from {start} to {stop} mean nothing")
        names.append(str(row["id"]))
        items.append((Span(start=start, stop=stop, nbytes=nbytes),))
    return names, items


def pack_file(path: Path, capacity_bytes: int, time_limit_s: float, out: Path | None) -> tuple[str, bool]:
    """Pack a file's items; returns a summary and whether they fit."""
    names, items = read_items(path)
    made: Packing = importlib.import_module("passes.planners.exact.packing").pack(
        items, capacity_bytes, time_limit_s
    )
    if out is not None and made.fits:
        out.write_text(_rows(names, items, made.offsets), encoding="utf-8")
    peak = f"{height_bytes(items, made.offsets)} B" if made.fits else "none"
    known = {True: "fits", False: "proved not to fit", None: "unknown: no packing found, none excluded"}
    rows = [
        ("problem", f"{path.name}, {len(items)} items"),
        ("capacity", f"{capacity_bytes} B"),
        ("live bound", f"{live_bytes(items)} B"),
        ("peak", peak),
        ("status", known[made.fits] + (f" ({made.method})" if made.method else "")),
        ("milliseconds", f"{1000 * made.seconds:.1f}"),
    ]
    return "".join(f"{name:<12} {value}\n" for name, value in rows), bool(made.fits)


def _rows(names: Sequence[str], items: Sequence[Item], offsets: Sequence[int]) -> str:
    lines = [",".join((*COLUMNS, "offset"))]
    for name, (span,), offset in zip(names, items, offsets, strict=True):
        lines.append(f"{name},{span.start},{span.stop},{span.nbytes},{offset}")
    return "\n".join(lines) + "\n"
