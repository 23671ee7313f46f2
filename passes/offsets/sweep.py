"""Time cut into sections in which the same items are alive: the tables that the exact packer searches over.

Items are numbered by the first section in which they are alive. Every table has one more item at the end,
which is never left to place: the padding of rows of unequal length points at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from passes.liveness import BoolArray, IntArray
from passes.offsets.packing import Item

NONE_LEFT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sections:
    """One problem; n items, the padding included, S sections.

    Attributes:
        index: of every number the item's place in the sequence of items.
        held: bytes of every item in every section, shape (n, S).
        alive: where they are not 0, shape (n, S), 32-bit floats to multiply with.
        size: the most bytes that an item holds, shape (n,).
        first, last: the first and the last section of every item.
        time: how long every item is alive.
        lift: how far above item i's offset item j must lie, shape (n, n); very negative if they never meet.
        rows: for every item its sections.
        crowd, load: the items of every section and their bytes in it, shape (S, most alive at once).
        near, rise: the items that every item meets and how far above their offsets it must lie.
    """

    index: IntArray
    held: IntArray
    alive: npt.NDArray[np.float32]
    size: IntArray
    first: IntArray
    last: IntArray
    time: IntArray
    lift: IntArray
    rows: tuple[IntArray, ...]
    crowd: IntArray
    load: IntArray
    near: IntArray
    rise: IntArray

    @classmethod
    def of(cls, items: Sequence[Item]) -> Sections:
        """The tables of some items; those that hold nothing have no section."""
        held = _held(items)
        index = np.argsort((held > 0).argmax(axis=0), kind="stable")
        held = np.append(held[:, index], np.zeros((len(held), 1), dtype=np.int64), axis=1).T
        alive = held > 0
        lives = [sum(span.stop - span.start for span in items[i]) for i in index.tolist()]
        lift = _lift(held)
        crowd = _padded(alive.T)
        near = _padded(lift > 0)
        return cls(
            index=index,
            held=held,
            alive=alive.astype(np.float32),
            size=held.max(axis=1, initial=0),
            first=alive.argmax(axis=1),
            last=alive.shape[1] - 1 - alive[:, ::-1].argmax(axis=1),
            time=np.asarray([*lives, 0], dtype=np.int64),
            lift=lift,
            rows=tuple(np.flatnonzero(row) for row in alive),
            crowd=crowd,
            load=np.take_along_axis(held.T, crowd, axis=1),
            near=near,
            rise=np.maximum(np.take_along_axis(lift.T, near, axis=1), 0),
        )


def _held(items: Sequence[Item]) -> IntArray:
    """Bytes of every item at every time at which one begins, without times that another one includes.

    The shape is (sections, items); there is one section if nothing is ever alive.
    """
    times = sorted({span.start for item in items for span in item if span.start < span.stop})
    held = np.zeros((len(times), len(items)), dtype=np.int64)
    at = np.asarray(times, dtype=np.int64)
    for i, item in enumerate(items):
        for span in item:
            alive = (span.start <= at) & (at < span.stop)
            held[alive, i] = np.maximum(held[alive, i], span.nbytes)
    kept = [k for k in range(len(times)) if k + 1 == len(times) or (held[k] > held[k + 1]).any()]
    return held[kept] if kept else np.zeros((1, len(items)), dtype=np.int64)


def _lift(held: IntArray) -> IntArray:
    """How far above one item another must lie, from what they hold, shape (items, sections)."""
    alive = held > 0
    meet = alive.astype(np.float32) @ alive.T.astype(np.float32) > 0
    size = held.max(axis=1, initial=0)
    lift = np.where(meet, size[:, None], -NONE_LEFT)
    for i in np.flatnonzero((alive & (held < size[:, None])).any(axis=1)).tolist():
        lift[i] = np.where(meet[i], (held[i] * alive).max(axis=1), -NONE_LEFT)
    np.fill_diagonal(lift, -NONE_LEFT)
    # What stands on the padding lies as high as that: nowhere.
    lift[-1] = 0
    return lift


def _padded(chosen: BoolArray) -> IntArray:
    """The columns that are chosen in every row, padded with the last column."""
    counts = chosen.sum(axis=1)
    columns = np.full((len(chosen), int(counts.max(initial=1))), chosen.shape[1] - 1, dtype=np.int64)
    columns[np.arange(columns.shape[1]) < counts[:, None]] = np.nonzero(chosen)[1]
    return columns
