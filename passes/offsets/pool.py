"""An address-ordered pool with two ends, and the contiguous windows that could hold a request.

Invariants: blocks are in address order and cover the pool without holes; no two free blocks touch.
Follows Coop (NeurIPS 2023): free blocks count towards a window and cost nothing, pinned ones restart it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FREE = -1


@dataclass(slots=True)
class Block:
    """A range of addresses that belongs to one owner, or to nobody (`FREE`)."""

    offset: int
    nbytes: int
    owner: int


class Pool:
    """Memory of `capacity_bytes` with the first `ground_bytes` taken for good.

    Attributes:
        blocks: all blocks in address order.
    """

    def __init__(self, capacity_bytes: int, ground_bytes: int = 0) -> None:
        self.blocks: list[Block] = []
        if capacity_bytes > ground_bytes:
            self.blocks = [Block(ground_bytes, capacity_bytes - ground_bytes, FREE)]

    def fit(self, nbytes: int, *, from_top: bool) -> int | None:
        """Index of the first free block from one end that holds `nbytes`; None if there is none."""
        order = reversed(range(len(self.blocks))) if from_top else range(len(self.blocks))
        for k in order:
            if self.blocks[k].owner == FREE and self.blocks[k].nbytes >= nbytes:
                return k
        return None

    def take(self, index: int, nbytes: int, owner: int, *, from_top: bool) -> int:
        """Give `nbytes` of the free block at `index` to `owner`; returns the offset."""
        block = self.blocks[index]
        assert block.owner == FREE, f"block at {block.offset} belongs to {block.owner}"
        assert block.nbytes >= nbytes > 0, f"{nbytes} bytes do not fit a block of {block.nbytes}"
        rest = block.nbytes - nbytes
        if from_top:
            taken = Block(block.offset + rest, nbytes, owner)
            block.nbytes = rest
            self.blocks.insert(index + 1, taken)
            if not rest:
                del self.blocks[index]
            return taken.offset
        taken = Block(block.offset, nbytes, owner)
        block.offset += nbytes
        block.nbytes = rest
        self.blocks.insert(index, taken)
        if not rest:
            del self.blocks[index + 1]
        return taken.offset

    def release(self, owner: int) -> None:
        """Free the owner's block and join it with its free neighbours."""
        index = self.index_of(owner)
        self.blocks[index].owner = FREE
        self._join(index)

    def evict(self, low: int, high: int) -> int:
        """Free the blocks `low` to `high` (inclusive); returns the index of the free block there."""
        for block in self.blocks[low : high + 1]:
            block.owner = FREE
        first = self.blocks[low]
        first.nbytes = sum(block.nbytes for block in self.blocks[low : high + 1])
        del self.blocks[low + 1 : high + 1]
        return self._join(low)

    def hand_over(self, owner: int, heir: int, nbytes: int) -> int:
        """Give the start of the owner's block to `heir` in place, the rest back; returns the offset."""
        index = self.index_of(owner)
        block = self.blocks[index]
        assert block.nbytes >= nbytes > 0, f"{nbytes} bytes do not fit {owner}'s {block.nbytes}"
        rest = block.nbytes - nbytes
        block.owner = heir
        block.nbytes = nbytes
        if rest:
            self.blocks.insert(index + 1, Block(block.offset + nbytes, rest, FREE))
            self._join(index + 1)
        return block.offset

    def index_of(self, owner: int) -> int:
        """Index of the owner's block."""
        for k, block in enumerate(self.blocks):
            if block.owner == owner:
                return k
        raise KeyError(f"owner {owner} has no block in the pool")

    def windows(self, nbytes: int, pinned: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Smallest windows of contiguous blocks, none pinned, that hold `nbytes`.

        Yields:
            First and last block index; for every last block the shortest window that ends there.
        """
        low = 0
        held = 0
        for high, block in enumerate(self.blocks):
            if block.owner in pinned:
                low, held = high + 1, 0
                continue
            held += block.nbytes
            while low < high and held - self.blocks[low].nbytes >= nbytes:
                held -= self.blocks[low].nbytes
                low += 1
            if held >= nbytes:
                yield low, high

    def _join(self, index: int) -> int:
        """Merge the free block at `index` with its free neighbours; returns its new index."""
        blocks = self.blocks
        if index + 1 < len(blocks) and blocks[index + 1].owner == FREE:
            blocks[index].nbytes += blocks[index + 1].nbytes
            del blocks[index + 1]
        if index and blocks[index - 1].owner == FREE:
            blocks[index - 1].nbytes += blocks[index].nbytes
            del blocks[index]
            return index - 1
        return index
