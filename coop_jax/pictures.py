"""Pictures of a program's memory and of what budgets cost, as PNG, SVG or PDF; 800 x 500 points.

Colours are Okabe and Ito's, which colour-blind people can tell apart; what matters most has a hatching, too,
and so survives a printer without colours. Needs matplotlib: `pip install coop-jax[plot]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coop_jax.errors import UnsupportedError
from coop_jax.points import Points
from coop_jax.text import format_bytes
from passes.memory_map import (
    ARGUMENT,
    CONSTANT,
    FIXED_KINDS,
    IN_WORDS,
    KEPT,
    KINDS,
    OUTPUT,
    PACKING,
    RECOMPUTED,
    WORKING,
    MemoryMap,
)

COLORS = {
    ARGUMENT: "#999999",
    OUTPUT: "#56b4e9",
    CONSTANT: "#cc79a7",
    KEPT: "#e69f00",
    RECOMPUTED: "#009e73",
    WORKING: "#0072b2",
}
BUDGET_COLOR = EVICTED_COLOR = "#d55e00"
HATCHES = {KEPT: "////", RECOMPUTED: "xxxx"}
_SIZE_INCHES = (8.0, 5.0)
# Rivals nearer than this, of the width and of the height of the curve, share a label.
_NEAR_RATIO = 0.06
_DPI = 100
# With fewer values than this each has an edge; the edges of more would hide them.
_FEW = 150
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Colours of what is not data."""

    paper: str
    ink: str
    hole: str


_LOOKS = {
    "light": _Look(paper="#ffffff", ink="#222222", hole="#eeeeee"),
    "dark": _Look(paper="#1b1e23", ink="#e6e6e6", hole="#33373d"),
}


def memory(
    maps: Sequence[tuple[MemoryMap, str]],
    path: str | Path,
    *,
    budget_bytes: int | None = None,
    theme: Theme = "light",
) -> None:
    """Draw programs side by side: above their bytes over time by kind, below where their temporaries lie.

    Args:
        maps: a program and its title, or several, such as before and after; all on one scale.
        path: of the picture; its ending says the format.
        budget_bytes: drawn as a line.
        theme: "light" or "dark".

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure, look = _figure(theme), _LOOKS[theme]
    axes = figure.subplots(2, len(maps), sharey="row", squeeze=False)
    most = max(max(m.total_bytes for m, _ in maps), budget_bytes or 0)
    top = max(max(m.temp_bytes for m, _ in maps), 1)
    for n, (memory_map, title) in enumerate(maps):
        over_time, addresses = axes[0][n], axes[1][n]
        _over_time(over_time, memory_map, most, budget_bytes, look)
        over_time.set_title(f"{title}: {format_bytes(memory_map.total_bytes, exact=False)}", fontsize=9)
        over_time.tick_params(labelbottom=False)
        _addresses(addresses, memory_map, top, look)
        addresses.set_xlabel("step of the schedule")
        if n == 0:
            over_time.set_ylabel(f"all bytes, {_unit(most)[1]}")
            addresses.set_ylabel(f"address, {_unit(top)[1]}")
    _legend(figure, [m for m, _ in maps], budget_bytes, look)
    _write(figure, path, look)


def pareto(curve: Points, path: str | Path, *, theme: Theme = "light") -> None:
    """Draw what budgets cost: the curve, its bound, the least budget as a wall, and rivals.

    Args:
        curve: what `coop.pareto` returned.
        path: of the picture; its ending says the format.
        theme: "light" or "dark".

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure, look = _figure(theme), _LOOKS[theme]
    axes = figure.subplots()
    scale, unit = _unit(curve.plain_bytes)
    met = [p for p in curve.points if p.overhead_ratio is not None]
    refused = [p for p in curve.points if p.overhead_ratio is None]
    xs = [p.budget_bytes / scale for p in met]
    axes.plot(
        xs, [100 * (p.overhead_ratio or 0) for p in met], "o-", color=COLORS[WORKING], label="coop, compiled"
    )
    bound = [(x, 100 * p.lower_bound_ratio) for x, p in zip(xs, met, strict=True) if p.lower_bound_ratio > 0]
    if bound:
        axes.plot(
            *zip(*bound, strict=True),
            ":",
            color=look.ink,
            label="bound on the plan's recompute, before XLA fuses",
        )
    axes.plot([curve.plain_bytes / scale], [0], "s", color=look.ink, label="without a budget")
    for n, rival in enumerate(curve.rivals, 1):
        at = (rival.total_bytes / scale, 100 * rival.overhead_ratio)
        axes.plot(*at, "D", color=COLORS[KEPT], label=f"{n}: {rival.name}")
    for nbytes, ratio, words in rival_labels(curve):
        axes.annotate(
            words, (nbytes / scale, 100 * ratio), xytext=(6, 4), textcoords="offset points", fontsize=8,
            color=look.ink,
        )  # fmt: skip
    if curve.least_bytes is not None:
        least = curve.least_bytes / scale
        axes.axvspan(0, least, color=BUDGET_COLOR, alpha=0.15, hatch="//", linewidth=0)
        axes.axvline(
            least, color=BUDGET_COLOR, label=f"least found: {format_bytes(curve.least_bytes, exact=False)}"
        )
    for n, over in enumerate(refused):
        axes.plot(
            [over.budget_bytes / scale], [0], "x", color=BUDGET_COLOR, label="refused" if n == 0 else None
        )
    everything = [
        curve.plain_bytes,
        *(p.budget_bytes for p in curve.points),
        *(r.total_bytes for r in curve.rivals),
    ]
    axes.set_xlim(0, 1.08 * max(everything) / scale)
    axes.margins(y=0.15)
    axes.set_xlabel(f"budget, {unit} (XLA's count of the whole program)")
    axes.set_ylabel("kernels' time over the plain program's, %\n(estimated)")
    axes.set_title(f"what a budget costs on {curve.device_name}", fontsize=10)
    _plain_axes(axes, look)
    columns = 2 if curve.rivals else 3
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False, labelcolor=look.ink)
    _write(figure, path, look)


def rival_labels(curve: Points) -> list[tuple[int, float, str]]:
    """Where the numbers of a curve's rivals stand: bytes, overhead, and the numbers of all that are near."""
    rivals = curve.rivals
    costs = [0.0, *(r.overhead_ratio for r in rivals), *(p.overhead_ratio or 0.0 for p in curve.points)]
    wide = _NEAR_RATIO * max([curve.plain_bytes, *(r.total_bytes for r in rivals)])
    high = _NEAR_RATIO * (max(costs) - min(costs))
    groups: list[list[int]] = []
    for n, rival in enumerate(rivals):
        for group in groups:
            first = rivals[group[0]]
            near = abs(rival.total_bytes - first.total_bytes) <= wide
            if near and abs(rival.overhead_ratio - first.overhead_ratio) <= high:
                group.append(n)
                break
        else:
            groups.append([n])
    return [
        (rivals[g[0]].total_bytes, rivals[g[0]].overhead_ratio, ", ".join(str(n + 1) for n in g))
        for g in groups
    ]


def _figure(theme: Theme) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("pictures need matplotlib: pip install coop-jax[plot]") from error
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained", facecolor=_LOOKS[theme].paper)
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Any, path: str | Path, look: _Look) -> None:
    from matplotlib import rc_context

    with rc_context({"hatch.linewidth": 0.5, "svg.hashsalt": "coop", "svg.fonttype": "none"}):
        figure.savefig(path, facecolor=look.paper)


def _plain_axes(axes: Any, look: _Look) -> None:
    axes.set_facecolor(look.paper)
    axes.tick_params(colors=look.ink, labelsize=8)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(look.ink)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(look.ink)


def _over_time(axes: Any, memory_map: MemoryMap, most: int, budget_bytes: int | None, look: _Look) -> None:
    _plain_axes(axes, look)
    scale, _ = _unit(most)
    profile = memory_map.profile()
    steps = list(range(len(profile[ARGUMENT]) + 1))
    below = [0.0] * len(steps)
    for kind in KINDS:
        if kind == PACKING or not any(profile[kind]):
            continue
        values = [n / scale for n in profile[kind]]
        above = [b + v for b, v in zip(below, [*values, values[-1]], strict=True)]
        axes.fill_between(
            steps, below, above, step="post", facecolor=COLORS[kind], hatch=HATCHES.get(kind),
            edgecolor=look.paper, linewidth=0,
        )  # fmt: skip
        below = above
    axes.axhline(memory_map.total_bytes / scale, color=look.ink, linewidth=0.9)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / scale, color=BUDGET_COLOR, linewidth=1.4, linestyle="--")
    axes.set_xlim(0, max(1, len(steps) - 1))
    axes.set_ylim(0, 1.06 * most / scale)


def _addresses(axes: Any, memory_map: MemoryMap, top: int, look: _Look) -> None:
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Rectangle

    _plain_axes(axes, look)
    scale, _ = _unit(top)
    last = max(1, len(memory_map.steps))
    axes.add_patch(Rectangle((0, 0), last, memory_map.temp_bytes / scale, facecolor=look.hole, linewidth=0))
    placed = [v for v in memory_map.values if v.offset is not None and v.kind not in FIXED_KINDS]
    for kind in (WORKING, KEPT, RECOMPUTED):
        boxes = [
            Rectangle((v.start, (v.offset or 0) / scale), max(v.stop - v.start, 0.2), v.nbytes / scale)
            for v in placed
            if v.kind == kind
        ]
        axes.add_collection(
            PatchCollection(
                boxes,
                facecolor=COLORS[kind],
                edgecolor=look.paper,
                linewidth=0.3 if len(placed) < _FEW else 0,
                hatch=HATCHES.get(kind),
            )
        )
    ends = [
        [(v.stop, (v.offset or 0) / scale), (v.stop, ((v.offset or 0) + v.nbytes) / scale)]
        for v in placed
        if v.evicted
    ]
    axes.add_collection(LineCollection(ends, colors=EVICTED_COLOR, linewidths=1.6))
    axes.axhline(memory_map.temp_bytes / scale, color=look.ink, linewidth=0.9)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.06 * top / scale)


def _legend(figure: Any, maps: Sequence[MemoryMap], budget_bytes: int | None, look: _Look) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {v.kind for m in maps for v in m.values if v.nbytes >= 0.001 * m.total_bytes}
    handles: list[Any] = [
        Patch(facecolor=COLORS[kind], edgecolor=look.paper, hatch=HATCHES.get(kind), label=IN_WORDS[kind])
        for kind in KINDS
        if kind in shown
    ]
    handles.append(Patch(facecolor=look.hole, label="hole"))
    if any(v.evicted for m in maps for v in m.values):
        handles.append(
            Line2D([], [], color=EVICTED_COLOR, linewidth=1.6, label="evicted here, recomputed later")
        )
    handles.append(Line2D([], [], color=look.ink, linewidth=0.9, label="XLA's count"))
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes, exact=False)}"
        handles.append(Line2D([], [], color=BUDGET_COLOR, linewidth=1.4, linestyle="--", label=label))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False, labelcolor=look.ink
    )


def _unit(nbytes: int) -> tuple[int, str]:
    return next((scale, name) for scale, name in _UNITS if nbytes >= scale or scale == 1)
