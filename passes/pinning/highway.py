"""HighwayHash with 64 bits, the checksum of Riegeli files.

The state is four vectors of four 64-bit lanes. Every 32 bytes are added to it; multiplications of halves and
two shuffles of bytes mix it (Alakuijala, Cox, Wassenberg, "Fast keyed hash/pseudo-random function using SIMD
multiply and permute", 2016; public: google/highwayhash).
"""

from __future__ import annotations

import numpy as np

_PACKET = 32
_MUL0 = np.array([0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64)
_MUL1 = np.array([0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# Where each byte of a pair of lanes comes from; the same in both pairs.
_PAIR = [3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7]
_ZIPPER = np.array([*_PAIR, *(n + 16 for n in _PAIR)])
_FINAL_ROUNDS = 4


def hash64(data: bytes, key: tuple[int, int, int, int]) -> int:
    """The hash of `data`.

    Args:
        key: four 64-bit numbers.

    Complexity: about 10 us for every 32 bytes.
    """
    state = _State(np.array(key, np.uint64))
    whole = len(data) - len(data) % _PACKET
    for lanes in np.frombuffer(data[:whole], "<u8").reshape(-1, 4):
        state.add(lanes)
    if len(data) > whole:
        state.add_rest(data[whole:])
    for _ in range(_FINAL_ROUNDS):
        state.add(_swapped(state.v0)[[2, 3, 0, 1]])
    # Scalars would warn of the overflow that is meant; arrays do not.
    return int((state.v0 + state.v1 + state.mul0 + state.mul1)[0])


class _State:
    def __init__(self, key: np.ndarray) -> None:
        self.mul0, self.mul1 = _MUL0.copy(), _MUL1.copy()
        self.v0, self.v1 = _MUL0 ^ key, _MUL1 ^ _swapped(key)

    def add(self, lanes: np.ndarray) -> None:
        """Mix in 32 bytes."""
        self.v1 += self.mul0 + lanes
        self.mul0 ^= (self.v1 & _LOW) * (self.v0 >> _HALF)
        self.v0 += self.mul1
        self.mul1 ^= (self.v0 & _LOW) * (self.v1 >> _HALF)
        self.v0 += self.v1.view(np.uint8)[_ZIPPER].view(np.uint64)
        self.v1 += self.v0.view(np.uint8)[_ZIPPER].view(np.uint64)

    def add_rest(self, rest: bytes) -> None:
        """Mix in the last, 1 to 31, bytes."""
        size = len(rest)
        self.v0 += np.uint64(size << 32 | size)
        halves = self.v1.view(np.uint32)
        halves[:] = halves << np.uint32(size) | halves >> np.uint32(32 - size)
        packet = bytearray(_PACKET)
        words = size - size % 4
        packet[:words] = rest[:words]
        tail = rest[words:]
        if size & 16:
            packet[28:] = rest[-4:]
        elif tail:
            packet[16:19] = bytes([tail[0], tail[len(tail) >> 1], tail[-1]])
        self.add(np.frombuffer(bytes(packet), "<u8"))


def _swapped(lanes: np.ndarray) -> np.ndarray:
    """Each lane with its halves exchanged."""
    return lanes >> _HALF | lanes << _HALF
