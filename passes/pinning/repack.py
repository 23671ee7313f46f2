"""New places for the temporaries of an executable: its webs, packed as tightly as can be found."""

from __future__ import annotations

from dataclasses import dataclass

from passes.offsets.tight import live_bound, pack_tight
from passes.offsets.xla_heap import Interval
from passes.pinning.slices import Moved, SliceProgram
from passes.pinning.webs import Web, find_webs


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """A packing of a program's webs.

    Attributes:
        moved: where every slice goes; slices that nobody uses stay at the bottom.
        live_bytes: no packing of these webs is smaller.
        webs: what moves together.
    """

    moved: Moved
    live_bytes: int
    webs: tuple[Web, ...]


def repack(program: SliceProgram) -> Repacked:
    """Pack the temporaries of `program` anew."""
    webs = find_webs(program)
    intervals = [i for n, web in enumerate(webs) for i in _intervals(n, web, program.alignment)]
    layout = pack_tight(intervals, program.alignment)
    offsets = [s.offset % program.alignment for s in program.slices]
    used = 0
    for n, web in enumerate(webs):
        base = web.offset - web.offset % program.alignment
        for k in web.slices:
            offsets[k] = layout.offsets[n] + program.slices[k].offset - base
            used = max(used, offsets[k] + program.slices[k].nbytes)
    placed = {k for web in webs for k in web.slices}
    size = max([used, *(offsets[k] + s.nbytes for k, s in enumerate(program.slices) if k not in placed)])
    return Repacked(
        moved=Moved(nbytes=size, offsets=tuple(offsets)),
        live_bytes=live_bound(intervals, program.alignment),
        webs=webs,
    )


def _intervals(n: int, web: Web, alignment: int) -> list[Interval]:
    nbytes = web.nbytes + web.offset % alignment
    return [
        Interval(key=n, nbytes=nbytes, start=first, end=last, group=n, leads=k == 0)
        for k, (first, last) in enumerate(web.lives)
    ]
