"""The address space of a program as a picture: address over time, one rectangle for each temporary.

Needs matplotlib, which is an optional extra: `pip install coop-jax[plot]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coop_jax.addresses import AddressView
from coop_jax.errors import UnsupportedError
from coop_jax.text import format_bytes

_MIB = 1 << 20
_WIDTH, _HEIGHT = 6.4, 4.8


def plot_addresses(views: Sequence[AddressView], titles: Sequence[str], path: str | Path) -> None:
    """Draw address views side by side, on one scale, into a file.

    Args:
        views: such as a program's before and after; see `coop_jax.addresses`.
        titles: one for each.
        path: of the picture; its ending says the format.

    Raises:
        UnsupportedError: matplotlib is not installed, or a view holds no addresses.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("pictures need matplotlib: pip install coop-jax[plot]") from error
    if any(value.offset is None for view in views for value in view.values):
        raise UnsupportedError("this view holds no addresses: XLA did not tell where it put the temporaries.")
    figure = Figure(figsize=(_WIDTH * len(views), _HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    top = max(view.temp_bytes for view in views)
    for n, (view, title) in enumerate(zip(views, titles, strict=True)):
        axes = figure.add_subplot(1, len(views), n + 1)
        _draw(axes, view, top)
        axes.set_title(f"{title}: {format_bytes(view.temp_bytes)}")
    figure.savefig(path)


def _draw(axes: Any, view: AddressView, top: int) -> None:
    from matplotlib.patches import Rectangle

    steps = 1 + max((value.end for value in view.values), default=0)
    for n, value in enumerate(view.values):
        assert value.offset is not None, "views without addresses are refused"
        axes.add_patch(
            Rectangle(
                (value.start, value.offset / _MIB), value.end - value.start + 1, value.nbytes / _MIB,
                facecolor=f"C{n % 10}", edgecolor="white", linewidth=0.3,
            )
        )  # fmt: skip
    axes.axhline(view.temp_bytes / _MIB, color="black", linewidth=0.8)
    axes.axhline(view.live_bytes / _MIB, color="black", linewidth=0.8, linestyle="dotted")
    axes.set_xlim(0, steps)
    axes.set_ylim(0, 1.05 * top / _MIB)
    axes.set_xlabel("step of the schedule")
    axes.set_ylabel("address in MiB")
