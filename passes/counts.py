"""The check: what XLA counts of a compiled program, held against what it was given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Bytes of a program: what it may take, or what it takes.

    Attributes:
        total: on the device: arguments + results - aliased + temporaries.
        host: in the host's memory; 0 where it may take nothing there, or all that the user sends there.
    """

    total: int
    host: int = 0


class Fixed:
    """A program's arguments and results, of which no plan takes anything away."""

    __slots__ = ()
    argument_bytes: int
    output_bytes: int
    alias_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Arguments and results, donated storage counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes


class Verdict(Enum):
    """What the check says."""

    KEPT = "within its budget"
    OVER = "over its budget"
    OVER_ON_HOST = "over its budget of the host's memory"


def check(budget: MemoryBytes, counted: MemoryBytes) -> Verdict:
    """Hold XLA's count of a program against its budget."""
    if counted.host > budget.host > 0:
        return Verdict.OVER_ON_HOST
    return Verdict.KEPT if counted.total <= budget.total else Verdict.OVER
