"""The tables of a program's memory: by kind, by source line, by named scope, and its largest values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coop_jax.screen import Block, Heading, Lines, Table, sparkline
from coop_jax.text import format_bytes
from passes.memory_map import PACKING, MemoryMap, Row, Value, kind_of, scope_of, source_of


def memory_blocks(memory: MemoryMap, *, top: int = 8) -> list[Block]:
    """A program's memory, over time and at its peak; every table sums to XLA's total.

    Args:
        top: how many rows a table has; the others are one row.
    """
    step = memory.peak_step
    profile = memory.profile()
    alive = [sum(at) for at in zip(*profile.values(), strict=True)]
    known = "by XLA's count" if memory.counted else "by the addresses of its schedule"
    name = memory.steps[step] if memory.steps else "no step"
    donated = (
        f", {format_bytes(memory.alias_bytes)} of them in donated arguments" if memory.alias_bytes else ""
    )
    lines = [
        f"{memory.name}: peak {format_bytes(memory.total_bytes)} {known}, at step {step + 1} of "
        f"{max(1, len(memory.steps))} ({name})",
        f"temporaries {format_bytes(memory.temp_bytes)}, arguments {format_bytes(memory.argument_bytes)}, "
        f"outputs {format_bytes(memory.output_bytes)}{donated}",
    ]
    if len(alive) > 1:
        lines.append(sparkline(alive, width=96))
    tables = (("by kind", kind_of), ("by source line", source_of), ("by named scope, or function", scope_of))
    blocks: list[Block] = [Lines(lines=tuple(lines))]
    for title, label in tables:
        blocks += [Heading(text=f"at the peak, {title}"), _by(memory, title[3:], label, top)]
    return [*blocks, Heading(text="largest values at the peak"), largest(memory, top)]


def _by(memory: MemoryMap, title: str, label: Callable[[Value], str], top: int) -> Table:
    rows = memory.by(label)
    shown = rows if len(rows) <= top + 1 else rows[:top]
    rest = rows[len(shown) :]
    if rest:
        count, nbytes = sum(r.count for r in rest), sum(r.nbytes for r in rest)
        shown = [*shown, Row(label=f"{len(rest)} more", count=count, nbytes=nbytes)]
    return _rows_table(title, shown, memory.total_bytes)


def _rows_table(title: str, rows: Sequence[Row], total: int) -> Table:
    def cells(label: str, count: str, nbytes: int) -> tuple[str, ...]:
        share = f"{100 * nbytes / total:.1f} %" if total else ""
        return (label, count, str(nbytes), format_bytes(nbytes, exact=False), share)

    made = [cells(row.label, str(row.count) if row.count else "", row.nbytes) for row in rows]
    made.append(cells("total", str(sum(r.count for r in rows)), sum(r.nbytes for r in rows)))
    shares = tuple(row.nbytes / max(1, total) for row in rows)
    return Table(header=(title, "values", "bytes", "", "share"), rows=tuple(made), shares=(*shares, 0.0))


def largest(memory: MemoryMap, top: int) -> Table:
    """The largest values alive at the peak, and why each is there; what is left is one row."""
    alive = memory.at(memory.peak_step)
    rows = [
        (f"{v.op} {v.name}" if v.kind != "argument" else v.name, v.shape, format_bytes(v.nbytes, exact=False),
         place_of(v), kind_of(v))
        for v in alive[:top]
    ]  # fmt: skip
    rest = sum(v.nbytes for v in alive[top:]) + memory.profile()[PACKING][0]
    if rest:
        rows.append((f"{max(0, len(alive) - top)} more", "", format_bytes(rest, exact=False), "", ""))
    return Table(header=("value", "shape", "bytes", "line", "kind"), rows=tuple(rows))


def place_of(value: Value) -> str:
    """A value's source line with the last part of its path."""
    return value.source.rpartition("/")[2]
