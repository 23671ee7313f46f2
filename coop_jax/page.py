"""One HTML file with everything about a program's memory: no server, nothing downloaded.

The page (`page.html`) draws on a canvas what it finds in one block of JSON; texts stand there once each.
`#q=words` behind the file's name searches, `#value=N` (and `&map=M`) shows one value.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from coop_jax.pictures import COLORS, HATCHES
from coop_jax.screen import Block, as_html
from passes.memory_map import IN_WORDS, PACKING, MemoryMap, why

_KINDS = tuple(COLORS)


def page(
    blocks: Sequence[Block],
    *,
    maps: Sequence[tuple[MemoryMap, str]] = (),
    budget_bytes: int | None = None,
    pareto: Mapping[str, Any] | None = None,
) -> str:
    """The page as text.

    Args:
        blocks: tables below the pictures.
        maps: programs and their titles, such as before and after.
        budget_bytes: a line in the pictures.
        pareto: what `coop.pareto` returned, in JSON types, and `labels`: of its rivals.
    """
    data = {
        "kinds": [
            {"label": IN_WORDS[kind], "color": COLORS[kind], "hatch": HATCHES.get(kind, "")}
            for kind in _KINDS
        ],
        "maps": [_map(memory_map, title) for memory_map, title in maps],
        "budget": budget_bytes,
        "pareto": pareto,
    }
    title = html.escape(maps[0][0].name if maps else "what a budget costs")
    template = resources.files("coop_jax").joinpath("page.html").read_text(encoding="utf-8")
    # In a script "</" would end it, and "<!--" would open a comment.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = template.replace("__TITLE__", title).split("__TABLES__")
    return parts[0] + as_html(blocks) + parts[1].replace("__DATA__", text)


def _map(memory_map: MemoryMap, title: str) -> dict[str, Any]:
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    values = [
        [place(v.name), place(v.op), place(v.shape), v.nbytes, v.start, v.stop,
         -1 if v.offset is None else v.offset, _KINDS.index(v.kind),
         place(v.source), place(v.scope), place(why(v)), int(v.evicted)]
        for v in memory_map.values
    ]  # fmt: skip
    profile = memory_map.profile()
    return {
        "title": title,
        "steps": max(1, len(memory_map.steps)),
        "total": memory_map.total_bytes,
        "temp": memory_map.temp_bytes,
        "peak": memory_map.peak_step,
        "profile": [profile[kind] if any(profile[kind]) else None for kind in _KINDS if kind != PACKING],
        "strings": list(places),
        "values": values,
    }
