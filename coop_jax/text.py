"""How numbers and tables are printed: the one place for every message, report and benchmark."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(nbytes: int, *, exact: bool = True) -> str:
    """A byte count for people, such as "1.62 GiB (1741234567 B)".

    Args:
        nbytes: any integer.
        exact: also give the exact count, so that it can be pasted back as a budget.
    """
    size, unit = float(abs(nbytes)), 0
    while unit + 1 < len(_UNITS) and size >= 1024:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{nbytes} B"
    sign = "-" if nbytes < 0 else ""
    short = f"{sign}{size:.{2 if size < 100 else 1}f} {_UNITS[unit]}"
    return f"{short} ({nbytes} B)" if exact else short


def printable(text: str) -> str:
    """`text` on one line: what is no character for people is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def format_ns(cost_ns: int) -> str:
    """An estimated time for people: "850 ns", "12.3 us", "4.56 ms", "1.20 s"."""
    for limit, divisor, unit in ((10**3, 1, "ns"), (10**6, 10**3, "us"), (10**9, 10**6, "ms")):
        if cost_ns < limit:
            return f"{cost_ns} ns" if divisor == 1 else f"{cost_ns / divisor:.3g} {unit}"
    return f"{cost_ns / 10**9:.3g} s"


def format_pj(energy_pj: int) -> str:
    """An estimated energy for people: "12.3 uJ", "4.56 mJ", "1.2 J"."""
    for limit, unit in ((10**9, "uJ"), (10**12, "mJ")):
        if energy_pj < limit:
            return f"{energy_pj / limit * 1000:.3g} {unit}"
    return f"{energy_pj / 10**12:.3g} J"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first column is left-aligned, the others right."""
    cells = [list(header), *[list(row) for row in rows]]
    assert all(len(row) == len(header) for row in cells), "every row needs one cell for each column"
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *[line(row) for row in cells[1:]]])
