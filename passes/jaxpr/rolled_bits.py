"""What random bits take where JAX makes them in a loop: on CPUs it rolls the rounds of Threefry.

The loop carries two words for every random one, copies both in each round and reads both for each new one.
What reads the bits joins the two words, each reader for itself, so that both are kept till then.
"""

from __future__ import annotations

from passes.backend import BACKENDS
from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import JaxprEqn

# Words for each random one: carried and copied; kept where readers join them; moved in a round by two copies
# and two sums; written first and joined last.
_ALIVE, _KEPT = 4, 2
_ROUNDS, _MOVED, _ONCE = 5, 10, 5
_WORD_BITS = 32


def is_in_words(eqn: JaxprEqn) -> bool:
    """True for random bits that are the two words of Threefry, joined bit by bit."""
    return eqn.primitive.name == "random_bits" and bool(eqn.params["bit_width"] == _WORD_BITS)


def state_bytes(eqn: JaxprEqn, device: DeviceModel, *, joined: bool) -> int:
    """Bytes that making random bits takes besides what is kept of them; 0 for everything else.

    Args:
        joined: whether their two words are joined by a kernel of its own, not by their readers.
    """
    return (_ALIVE - (1 if joined else _KEPT)) * _rolled_bytes(eqn, device)


def word_bytes(eqn: JaxprEqn, device: DeviceModel) -> int:
    """Bytes of the second word where the readers of random bits join them; 0 for everything else."""
    return (_KEPT - 1) * _rolled_bytes(eqn, device)


def moved_bytes(eqn: JaxprEqn, device: DeviceModel) -> int:
    """Bytes that making random bits reads and writes besides writing them; 0 for everything else."""
    return (_ROUNDS * _MOVED + _ONCE - 1) * _rolled_bytes(eqn, device)


def _rolled_bytes(eqn: JaxprEqn, device: DeviceModel) -> int:
    if eqn.primitive.name != "random_bits" or not BACKENDS[device.platform].rolls_random_bits:
        return 0
    is_threefry = "fry" in str(getattr(eqn.invars[0].aval, "dtype", ""))
    return compat.aval_nbytes(eqn.outvars[0].aval) if is_threefry else 0
