"""What was found out about programs in this process: ways to write them, and what each needs and costs."""

from __future__ import annotations

import dataclasses
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
        total_bytes: what it was foreseen to need.
        price: of its kernels, by the objective; None where nobody looked.
        counted_bytes: what XLA counted, where it was compiled to the end.
    """

    wish: Wish
    total_bytes: int
    price: Price | None = None
    counted_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """What it needs, as far as is known."""
        return self.total_bytes if self.counted_bytes is None else self.counted_bytes

    @property
    def sure_bytes(self) -> int:
        """What it needs by every count: another process may know the prediction alone."""
        return max(self.total_bytes, self.needed_bytes)


class Memory:
    """What is known of programs. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Known, ...]] = OrderedDict()
        self._named: dict[str, int] = {}

    def of(self, program: str, alone: str = "") -> tuple[Known, ...]:
        """All that is known of a program, by its key, and of the same `alone`, without host memory."""
        with self._lock:
            known, without = self._known.get(program, ()), self._known.get(alone, ())
        asked = [k.wish for k in known]
        ways = (dataclasses.replace(k, wish=dataclasses.replace(k.wish, alone=True)) for k in without)
        return (*known, *(k for k in ways if not k.wish.plain and k.wish not in asked))

    def counted(self, program: str, asked: Wish) -> int | None:
        """XLA's count of one way to write a program; None where it was not asked for."""
        return next((k.counted_bytes for k in self.of(program) if k.wish == asked), None)

    def learn(self, program: str, found: Known) -> None:
        """Remember one more way; those that another one beats in bytes and in cost are forgotten.

        What XLA counted of a way stays known.
        """
        counted_bytes = self.counted(program, found.wish)
        if found.counted_bytes is None and counted_bytes is not None:
            found = dataclasses.replace(found, counted_bytes=counted_bytes)
        with self._lock:
            known = self._known.pop(program, ())
            if found.counted_bytes is not None:
                known = tuple(k for k in known if k.wish != found.wish)
            kept = [k for k in known if not _beats(found, k)]
            if not any(_beats(k, found) for k in kept):
                kept.append(found)
            self._known[program] = tuple(kept[-MOST_KNOWN:])
            while len(self._known) > MOST_PROGRAMS:
                self._known.popitem(last=False)

    def name(self, program: str, least_bytes: int) -> None:
        """Remember the least budget that a refusal named, which is met, and was refused in what is less."""
        with self._lock:
            self._named[program] = least_bytes
            while len(self._named) > MOST_PROGRAMS:
                del self._named[next(iter(self._named))]

    def named(self, program: str) -> int | None:
        """The least budget that the last refusal named; None if there was none."""
        with self._lock:
            return self._named.get(program)

    def forget(self, program: str, asked: Wish) -> None:
        """Forget one way to write a program, which turned out to be otherwise."""
        with self._lock:
            kept = [k for k in self._known.get(program, ()) if k.wish != asked]
            if program in self._known:
                self._known[program] = tuple(kept)
            self._named.pop(program, None)  # it may have been that one

    def clear(self) -> None:
        """Forget every program."""
        with self._lock:
            self._known.clear()
            self._named.clear()


def cheapest_first(known: Iterable[Known]) -> list[Known]:
    """By price, where it is known, and then by bytes."""
    return sorted(known, key=lambda k: (k.price is None, k.price or (), k.needed_bytes))


def least_above(known: Iterable[Known], budget_bytes: int) -> Known | None:
    """What needs the least of all that needs more than a budget."""
    larger = (k for k in known if k.sure_bytes > budget_bytes)
    return min(larger, key=lambda k: k.sure_bytes, default=None)


def least_answered_above(known: Iterable[Known], budget_bytes: int) -> int:
    """The least budget above another one that was asked for, and that what came of it keeps."""
    asked = (k.wish.budget_bytes for k in known if k.sure_bytes <= k.wish.budget_bytes)
    return min((b for b in asked if b > budget_bytes), default=PLAIN.budget_bytes)


def is_answer(known: Iterable[Known], budget_bytes: int) -> bool:
    """True if this very budget was asked for before, or named by a refusal, or is kept without a plan."""
    return any(k.wish == PLAIN or budget_bytes in (k.wish.budget_bytes, k.sure_bytes) for k in known)


def _beats(one: Known, other: Known) -> bool:
    if one.needed_bytes > other.needed_bytes or one.sure_bytes > other.sure_bytes:
        return False
    return other.price is None or (one.price is not None and one.price <= other.price)
