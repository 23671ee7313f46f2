"""What is found, into a file: the ending of its name says in which form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop_jax.errors import UnsupportedError
from coop_jax.screen import Block, Printable
from passes.memory_map import MemoryMap

PICTURES = (".png", ".svg", ".pdf")
TEXTS = (".html", ".json", ".txt")
ENDINGS = (*PICTURES, *TEXTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Printable):
    """Something with blocks and fields, to be printed or saved."""

    found: tuple[Block, ...]
    fields: Mapping[str, Any]

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        return list(self.found)

    def to_dict(self) -> Mapping[str, Any]:
        """In JSON types."""
        return self.fields


def save(
    shown: Any,
    path: str | Path,
    *,
    maps: Sequence[MemoryMap | None] = (),
    titles: Sequence[str] = (),
    budget_bytes: int | None = None,
    pareto: Any = None,
) -> None:
    """Write something that has `to_dict` and `blocks` to a file.

    Args:
        path: ends in .png, .svg, .pdf, .html, .json or .txt.
        maps: the memory of one program, or before and after; None is left out.
        titles: one for each map.
        budget_bytes: a line in the pictures.
        pareto: the curve for a page, or for a picture where there are no maps.

    Raises:
        UnsupportedError: another ending, a picture of what has no memory and no curve, or without matplotlib.
    """
    path = Path(path)
    drawn = [(m, title) for m, title in zip(maps, titles, strict=False) if m is not None]
    if path.suffix == ".json":
        path.write_text(json.dumps(shown.to_dict(), indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".txt":
        path.write_text(str(shown) + "\n", encoding="utf-8")
    elif path.suffix == ".html":
        from coop_jax.page import page
        from coop_jax.pictures import rival_labels

        text = page(
            shown.blocks(),
            maps=drawn,
            budget_bytes=budget_bytes,
            pareto=None if pareto is None else {**pareto.to_dict(), "labels": rival_labels(pareto)},
        )
        path.write_text(text, encoding="utf-8")
    elif path.suffix in PICTURES and (drawn or pareto is not None):
        from coop_jax import pictures

        if drawn:
            pictures.memory(drawn, path, budget_bytes=budget_bytes)
        else:
            pictures.pareto(pareto, path)
    else:
        endings = ENDINGS if drawn or pareto is not None else TEXTS
        raise UnsupportedError(f"{path.name}: the name must end in one of {', '.join(endings)}")
