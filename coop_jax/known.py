"""What was found out about programs in this process: ways to write them, and what each needs and costs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from coop_jax.relowering import PLAIN, Wish
from passes.objective import Price

MOST_PROGRAMS = 256
MOST_KNOWN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One way to write a program, which the enforcing stage found to keep a budget.

    Attributes:
        wish: how to get it again.
        total_bytes: what it needs.
        price: of its kernels, by the objective; None where nobody looked.
        counted: True if XLA counted the bytes, and a prediction does not say so.
    """

    wish: Wish
    total_bytes: int
    price: Price | None = None
    counted: bool = False


class Memory:
    """What is known of programs. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Known, ...]] = OrderedDict()

    def of(self, program: str) -> tuple[Known, ...]:
        """All that is known of a program, by its key."""
        with self._lock:
            return self._known.get(program, ())

    def counted(self, program: str, asked: Wish) -> int | None:
        """XLA's count of one way to write a program; None where it was not asked for."""
        return next((k.total_bytes for k in self.of(program) if k.counted and k.wish == asked), None)

    def learn(self, program: str, found: Known) -> None:
        """Remember one more way; those that another one beats in bytes and in cost are forgotten."""
        with self._lock:
            kept = [k for k in self._known.pop(program, ()) if not _beats(found, k)]
            if not any(_beats(k, found) for k in kept):
                kept.append(found)
            self._known[program] = tuple(kept[-MOST_KNOWN:])
            while len(self._known) > MOST_PROGRAMS:
                self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget every program."""
        with self._lock:
            self._known.clear()


def is_answer(known: Iterable[Known], budget_bytes: int) -> bool:
    """True if this very budget was asked for before, or named by a refusal, or is kept without a plan."""
    return any(k.wish == PLAIN or budget_bytes in (k.wish.budget_bytes, k.total_bytes) for k in known)


def _beats(one: Known, other: Known) -> bool:
    if one.total_bytes > other.total_bytes or (one.counted and not other.counted):
        return False
    return other.price is None or (one.price is not None and one.price <= other.price)
