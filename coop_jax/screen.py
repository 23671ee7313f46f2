"""What is shown to people, as blocks, and three ways to write them: plain text, rich, HTML.

Whoever has something to show returns blocks and knows nothing of widths, colours or tags. Text is at most
`WIDTH` columns wide: what is too long loses its middle.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 100
_BAR = 20
_LEAST_FIRST = 16  # columns that the first of a table gets in a narrow terminal
_LEVELS = " ▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans({"█": "#", "…": "~", **{level: "_.-=+*%#"[i] for i, level in enumerate(_LEVELS[1:])}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A line above others."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Text, line by line."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the first column is to the left, the others to the right.

    Attributes:
        header: a name for each column.
        rows: a text for each column.
        shares: a number from 0 to 1 for each row, drawn as a bar behind it; none if empty.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shares: tuple[float, ...] = field(default=())


Block = Heading | Lines | Table


class Printable:
    """What is shown as blocks: as text, and as HTML in a notebook."""

    __slots__ = ()

    def blocks(self) -> list[Block]:
        """What is shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.blocks())

    def _repr_html_(self) -> str:
        return as_html(self.blocks())


def as_text(blocks: Sequence[Block], *, width: int = WIDTH) -> str:
    """Blocks as plain text of at most `width` columns."""
    return "\n".join(line for block in blocks for line in _text_lines(block, width))


def as_plain(text: str, encoding: str | None) -> str:
    """`text` in characters that an encoding has."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(_PLAIN)
        return text.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    return text


def _text_lines(block: Block, width: int) -> list[str]:
    if isinstance(block, Heading):
        return ["", shortened(block.text, width), "-" * min(width, len(block.text))]
    if isinstance(block, Lines):
        return [part for line in block.lines for part in _wrapped(line, width)]
    return _table_lines(block, width)


def _wrapped(line: str, width: int) -> list[str]:
    """A line broken at its spaces; what follows is indented as the line was, and two more."""
    lines, indent = [], " " * (len(line) - len(line.lstrip()) + 2)
    while len(line) > width:
        at = line.rfind(" ", len(indent) + 1, width + 1)
        at = at if at > 0 else width
        lines.append(line[:at])
        line = indent + line[at:].lstrip()
    return [*lines, line]


def _table_lines(table: Table, width: int) -> list[str]:
    bars = (_BAR + 2) if table.shares else 0
    columns = [[name, *(row[i] for row in table.rows)] for i, name in enumerate(table.header)]
    others = [max(map(len, column)) for column in columns[1:]]
    most = width - bars - sum(others) - 2 * len(others)
    first = min(max(map(len, columns[0])), max(12, most))

    def line(row: Sequence[str], bar: str = "") -> str:
        cells = [shortened(row[0], first).ljust(first)]
        cells += [cell.rjust(n) for cell, n in zip(row[1:], others, strict=True)]
        return ("  ".join(cells) + (f"  {bar}" if bar else "")).rstrip()

    shares = table.shares or (0.0,) * len(table.rows)
    rows = [line(row, _bar(share)) for row, share in zip(table.rows, shares, strict=True)]
    return [line(table.header), *rows]


def _bar(share: float) -> str:
    return "█" * max(0, round(_BAR * share)) if share > 0 else ""


def shortened(text: str, width: int) -> str:
    """`text` without its middle, if it is too long; the end says most of a path."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def sparkline(values: Sequence[int], *, width: int) -> str:
    """Values as a line of little columns, the largest of those that share one."""
    top = max([1, *values])
    n = min(width, len(values))
    parts = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    return "".join(_LEVELS[min(8, max(0, round(8 * max(part) / top)))] for part in parts)


def as_html(blocks: Sequence[Block]) -> str:
    """Blocks as a fragment of HTML, for notebooks."""
    return '<div class="coop">' + "".join(map(_html_of, blocks)) + "</div>"


def _html_of(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h4>{html.escape(block.text)}</h4>"
    if isinstance(block, Lines):
        return "".join(f"<div>{html.escape(line)}</div>" for line in block.lines)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in block.header)
    shares = block.shares or (None,) * len(block.rows)
    rows = "".join(_html_row(row, share) for row, share in zip(block.rows, shares, strict=True))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _html_row(row: Sequence[str], share: float | None) -> str:
    cells = "".join(
        f'<td style="text-align:{"right" if i else "left"}">{html.escape(cell)}</td>'
        for i, cell in enumerate(row)
    )
    if share is not None:
        style = f"width:{max(0, 120 * share):.0f}px;height:.8em;background:#0072b2"
        cells += f'<td style="text-align:left"><div style="{style}"></div></td>'
    return f"<tr>{cells}</tr>"


def print_blocks(blocks: Sequence[Block], stream: Any) -> None:
    """Write blocks to a stream: with rich to a terminal where it is installed, else as plain text."""
    if stream.isatty():
        try:
            _print_rich(blocks, stream)
        except ImportError:
            pass
        else:
            return
    stream.write(as_plain(as_text(blocks), stream.encoding) + "\n")


def _rich_widths(table: Table, width: int) -> list[int] | None:
    """That of the first column, which may be shortened, and the least ones of the others, whose headers may
    be broken at spaces: no number is cut. None where they do not fit side by side."""
    columns = [[*name.split(), *(row[i] for row in table.rows)] for i, name in enumerate(table.header)]
    longest, *others = (max(map(len, column), default=0) for column in columns)
    taken = sum(others) + 2 * len(others) + ((_BAR + 2) if table.shares else 0)
    first = min(longest, width - taken)
    return [first, *others] if first >= min(longest, _LEAST_FIRST) else None


def _print_rich(blocks: Sequence[Block], stream: Any) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, width=min(WIDTH, Console(file=stream).width))
    for block in blocks:
        if isinstance(block, Heading):
            console.print(Text(f"\n{block.text}", style="bold"))
        elif isinstance(block, Lines):
            for line in block.lines:
                console.print(Text(line))
        elif (widths := _rich_widths(block, console.width)) is None:
            for line in _table_lines(block, console.width):
                console.print(Text(line), soft_wrap=True)
        else:
            table = RichTable(box=None, pad_edge=False, header_style="dim")
            for i, (name, width) in enumerate(zip(block.header, widths, strict=True)):
                table.add_column(
                    Text(name), justify="right" if i else "left", no_wrap=not i, min_width=width,
                    max_width=None if i else width,
                )  # fmt: skip
            if block.shares:
                table.add_column("", no_wrap=True, style="cyan", min_width=_BAR)
            shares = block.shares or (None,) * len(block.rows)
            for row, share in zip(block.rows, shares, strict=True):
                bar = [] if share is None else [Text(_bar(share))]
                table.add_row(*map(Text, row), *bar)
            console.print(table)
