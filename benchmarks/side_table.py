"""What `side_by_side` measured, as tables and pictures: who loses, and how good the plan's numbers are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.variants import Row
from coop_jax.text import format_bytes, format_table

TIE_RATIO = 1.01
NEAR_LEAST_RATIO = 1.05
COLOURS = {"plain": "black", "hand": "C1", "xla": "C2", "coop": "C0"}
HEADER = (
    "way", "asked", "total", "planned", "off", "cost ms", "change", "planned", "wall x", "CPU x",
    "planning s", "looks", "step x", "note",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows of one program for one target.

    Attributes:
        model, target, source: which, and where it comes from.
        rows: the plain one first; empty if nothing could be compiled.
        failure: why rows are missing; empty if none is.
        command: what was run, and with which versions.
    """

    model: str
    target: str
    source: str
    rows: tuple[Row, ...]
    failure: str = ""
    command: str = ""

    @property
    def name(self) -> str:
        """Such as "gpt2 cpu"."""
        return f"{self.model} {self.target}"

    @property
    def plain(self) -> Row:
        """The program as it is."""
        return self.rows[0]

    def of(self, *kinds: str) -> list[Row]:
        """The rows of these kinds that are there as programs."""
        return [row for row in self.rows if row.kind in kinds and row.total_bytes is not None]

    def change(self, row: Row) -> float | None:
        """A row's cost over the plain program's, less 1."""
        return None if row.cost_ns is None else row.cost_ns / max(self.plain.cost_ns or 0, 1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A rival that coop does not reach in the rival's bytes.

    Attributes:
        rival, coop: the two rows; coop's may be one that was refused, or None if it was not tried.
    """

    rival: Row
    coop: Row | None


def losses(found: Comparison) -> list[Loss]:
    """Where coop is refused or more than 1 % dearer though a rival fits in as many bytes."""
    lost = []
    for rival in found.of("hand", "xla"):
        asked = [r for r in found.rows if r.kind == "coop" and rival.name in r.rivals]
        if (rival.total_bytes or 0) >= (found.plain.total_bytes or 0):
            continue
        if not asked:
            lost.append(Loss(rival=rival, coop=None))
        elif asked[0].cost_ns is None or asked[0].cost_ns > TIE_RATIO * (rival.cost_ns or 0):
            lost.append(Loss(rival=rival, coop=asked[0]))
    return lost


def bytes_off(row: Row) -> float | None:
    """How far the plan's total was from XLA's, as a part of XLA's."""
    if row.planned_bytes is None or row.total_bytes is None:
        return None
    return row.planned_bytes / row.total_bytes - 1


def change_off(found: Comparison, row: Row) -> float | None:
    """How far the plan's change of cost was from that of the final kernels; .01 is a point."""
    change = found.change(row)
    return None if change is None or row.planned_change is None else row.planned_change - change


def compile_ratios(found: Comparison, cpu: bool = False) -> list[float]:
    """Coop's whole compiles over the plain one, but for budgets within 5 % of the least that was kept."""

    def seconds(row: Row) -> float:
        return (row.cpu_s if cpu else row.wall_s) or 0.0

    kept = found.of("coop")
    least = min((row.total_bytes or 0 for row in kept), default=0)
    plain = max(seconds(found.plain), 1e-9)
    return [seconds(r) / plain for r in kept if (r.budget_bytes or 0) > NEAR_LEAST_RATIO * least]


def detail(found: Comparison) -> str:
    """One program's rows as a Markdown table."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.1f} %"

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def size(value: int | None) -> str:
        return "" if value is None else format_bytes(value, exact=False)

    def over(value: float | None, plain: float | None) -> str:
        return "" if value is None or not plain else f"{value / plain:.2f}"

    cells = []
    for row in found.rows:
        asked = size(row.budget_bytes) + (f" ({', '.join(row.rivals)})" if row.rivals else "")
        cells.append(
            (
                row.name.split(" ")[0] if row.kind == "coop" else row.name,
                asked,
                size(row.total_bytes),
                size(row.planned_bytes),
                percent(bytes_off(row)),
                number(None if row.cost_ns is None else row.cost_ns / 1e6, 3),
                percent(found.change(row)),
                percent(row.planned_change),
                over(row.wall_s, found.plain.wall_s),
                over(row.cpu_s, found.plain.cpu_s),
                number(row.planning_s, 1),
                "" if row.looks is None else str(row.looks),
                number(row.step_ratio, 2),
                row.error[:70] + (f" least {size(row.least_bytes)}" if row.least_bytes else ""),
            )
        )
    return format_table(HEADER, cells)


def middle_and_worst(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    """Such as "1.2, 3.4": the median and the largest by absolute value."""
    known = sorted(abs(v) for v in values if v is not None)
    return "" if not known else f"{text(statistics.median(known))}, {text(known[-1])}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """One line for each program and target."""
    header = (
        "program", "plain", "rivals", "coop loses to", "bytes off (median, worst)", "cost off, points",
        "compile x wall", "compile x CPU", "least", "rival's least",
    )  # fmt: skip
    cells = []
    for found in comparisons:
        if not found.rows or found.plain.total_bytes is None:
            why = found.failure or (found.rows[0].error if found.rows else "")
            cells.append((found.name, "", "", why[:70], *[""] * (len(header) - 4)))
            continue
        coop, rivals, most = found.of("coop"), found.of("hand", "xla"), found.plain.total_bytes

        def least(rows: Sequence[Row], most: int = most) -> str:
            return "" if not rows else f"{min(r.total_bytes or 0 for r in rows) / most:.2f}"

        lost = ", ".join(loss.rival.name for loss in losses(found)) or "none"
        cells.append(
            (
                found.name,
                format_bytes(most, exact=False),
                str(len(rivals)),
                lost + (f" ({found.failure})" if found.failure else ""),
                middle_and_worst(map(bytes_off, coop), lambda v: f"{100 * v:.0f} %"),
                middle_and_worst((change_off(found, r) for r in coop), lambda v: f"{100 * v:.1f}"),
                middle_and_worst(compile_ratios(found), lambda v: f"{v:.1f}"),
                middle_and_worst(compile_ratios(found, cpu=True), lambda v: f"{v:.1f}"),
                least(coop),
                least(rivals),
            )
        )
    return format_table(header, cells)


def lost_table(comparisons: Sequence[Comparison]) -> str:
    """Every rival that coop does not reach."""
    header = ("program", "rival", "its total", "its change", "coop in these bytes")
    cells = []
    for found in comparisons:
        for loss in losses(found) if found.rows else ():
            change, ours = found.change(loss.rival), None if loss.coop is None else found.change(loss.coop)
            said = "not tried" if loss.coop is None else loss.coop.error[:60] or "no cost"
            if loss.coop is not None and loss.coop.least_bytes:
                said += f", least {format_bytes(loss.coop.least_bytes, exact=False)}"
            total = format_bytes(loss.rival.total_bytes or 0, exact=False)
            result = said if ours is None else f"{100 * ours:+.1f} %"
            cells.append((found.name, loss.rival.name, total, f"{100 * (change or 0):+.1f} %", result))
    return format_table(header, cells)


def measured_table(comparisons: Sequence[Comparison]) -> str:
    """Measured steps over the plain one, by hand and in the same bytes; "" where none was measured."""
    header = ("program", "in the bytes of", "by hand", "fastest by hand that fits", "coop")
    cells = []
    for found in comparisons:
        hand = [row for row in found.of("hand") if row.step_ratio is not None]
        for row in found.of("coop"):
            fits = [r.step_ratio for r in hand if (r.total_bytes or 0) <= (row.budget_bytes or 0)]
            if row.step_ratio is None or not row.rivals or not fits:
                continue
            same = [f"{r.step_ratio:.2f}" for name in row.rivals for r in hand if r.name == name]
            fastest = min(ratio for ratio in fits if ratio is not None)
            name, rivals = found.name, ", ".join(row.rivals)
            cells.append((name, rivals, ", ".join(same), f"{fastest:.2f}", f"{row.step_ratio:.2f}"))
    return format_table(header, cells) if cells else ""


def document(comparisons: Sequence[Comparison]) -> str:
    """The whole Markdown file."""
    parts = [
        "# Side by side",
        "Bytes are XLA's totals, costs the roofline estimate of the final kernels, changes against the plain "
        'program. "planned" is what the first stage\'s plan expected; "x" is over the plain program in the '
        "same process. Coop loses to a rival where, asked for the rival's bytes, it is refused or more than "
        "1 % dearer. Compile ratios leave out budgets within 5 % of the least.",
        summary(comparisons),
        "## Lost",
        lost_table(comparisons),
    ]
    if measured := measured_table(comparisons):
        parts += [
            "## Measured",
            "Whole steps on this machine's CPU over the plain step: medians of pairs in one process.",
            measured,
        ]
    for found in comparisons:
        parts += [f"## {found.name}", f"{found.source}. `{found.command}`"]
        if found.failure:
            parts.append(found.failure)
        if found.rows:
            parts.append(detail(found))
    return "\n\n".join(parts) + "\n"


def plot(found: Comparison, path: Path) -> bool:
    """Bytes against cost, one picture; False if there is nothing to draw or no matplotlib (extra `plot`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not found.of("plain", "hand", "xla", "coop"):
        return False
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, colour in COLOURS.items():
        rows = found.of(kind)
        if not rows:
            continue
        points = sorted(((r.total_bytes or 0) / 2**20, 100 * (found.change(r) or 0.0)) for r in rows)
        line = "-" if kind == "coop" else "none"
        axes.plot(
            *zip(*points, strict=True), marker="o", linestyle=line, color=colour, label=kind, markersize=4
        )
    axes.set_xlabel("total MiB, XLA's count")
    axes.set_ylabel("cost of the kernels, % over plain")
    axes.set_title(found.name)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    return True
