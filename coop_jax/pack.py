"""`coop pack PROBLEM.csv --capacity N`: static allocation on its own.

The file has the columns id, lower, upper and size: an item of `size` bytes is alive from time `lower` until
before time `upper`. The output file is the same with a column offset.
"""

from __future__ import annotations

import csv
import importlib
import io
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from coop_jax.text import printable
from passes.checked import MOST, InputError, check_total, whole_of
from passes.offsets.packing import Item, Packing, Span, height_bytes, live_bytes

COLUMNS = ("id", "lower", "upper", "size")


def read_items(path: Path) -> tuple[list[str], list[Item]]:
    """Names and items of a file.

    Raises:
        InputError: a column is missing, a value is no integer or too large, an id is there twice; says which.
        OSError: the file cannot be read.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    items: dict[str, Item] = {}
    place: list[int] | None = None
    try:
        for row in filter(None, reader):
            if place is None:
                header, place = row, _places(row)
                continue
            name, item = _item(row, header, place)
            if name in items:
                raise InputError(f"id {reprlib.repr(name)} is there twice")
            items[name] = item
        if place is None:
            raise InputError(f"it is empty; it needs the columns {', '.join(COLUMNS)}")
        check_total(sum(span.nbytes for item in items.values() for span in item), "all sizes")
    except (csv.Error, InputError) as error:
        raise InputError(f"{path}, line {max(reader.line_num, 1)}: {error}") from error
    return list(items), list(items.values())


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, its line ends as they are, without a byte order mark.

    Raises:
        InputError: it is no such text.
        OSError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error


def _places(header: Sequence[str]) -> list[int]:
    """Where the columns are."""
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise InputError(f"there is no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
    twice = [column for column in COLUMNS if header.count(column) > 1]
    if twice:
        raise InputError(f"the column {', '.join(twice)} is there more than once")
    return [header.index(column) for column in COLUMNS]


def _item(row: Sequence[str], header: Sequence[str], place: Sequence[int]) -> tuple[str, Item]:
    if len(row) != len(header):
        raise InputError(f"{len(row)} values for {len(header)} columns")
    name, *texts = (row[k] for k in place)
    start, stop = (whole_of(t, c, least=1 - MOST) for t, c in zip(texts, COLUMNS[1:3], strict=False))
    nbytes = whole_of(texts[2], COLUMNS[3])
    if start >= stop:
        raise InputError(f"{nbytes} bytes from {start} to {stop} mean nothing")
    return name, (Span(start=start, stop=stop, nbytes=nbytes),)


def pack_file(path: Path, capacity_bytes: int, time_limit_s: float, out: Path | None) -> tuple[str, bool]:
    """Pack a file's items; returns a summary and whether they fit."""
    names, items = read_items(path)
    made: Packing = importlib.import_module("passes.planners.exact.rectangles").pack(
        items, capacity_bytes, time_limit_s
    )
    if out is not None and made.fits:
        with out.open("w", encoding="utf-8", newline="") as file:
            _write(file, names, items, made.offsets)
    peak = f"{height_bytes(items, made.offsets)} B" if made.fits else "none"
    known = {True: "fits", False: "proved not to fit", None: "unknown: no packing found, none excluded"}
    rows = [
        ("problem", f"{printable(path.name)}, {len(items)} items"),
        ("capacity", f"{capacity_bytes} B"),
        ("live bound", f"{live_bytes(items)} B"),
        ("peak", peak),
        ("status", known[made.fits] + (f" ({made.method})" if made.method else "")),
        ("milliseconds", f"{1000 * made.seconds:.1f}"),
    ]
    return "".join(f"{name:<12} {value}\n" for name, value in rows), bool(made.fits)


def _write(file: TextIO, names: Sequence[str], items: Sequence[Item], offsets: Sequence[int]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*COLUMNS, "offset"))
    for name, (span,), offset in zip(names, items, offsets, strict=True):
        writer.writerow((name, span.start, span.stop, span.nbytes, offset))
