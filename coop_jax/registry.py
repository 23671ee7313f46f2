"""What this process knows of programs that were marked, by the ids of their records: the one such place.

XLA's callback gets the bytes of a module and nothing else, so what was known when the program was lowered
waits here for it, and what it found waits here for the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from coop_jax.record import FACTS, RECORD, TRIAL, Record, read_attributes, record_of_mark
from passes.outcome import StageOutcome

# How many programs are remembered: what the enforcing stage did to them, and how to ask for them again.
MOST_RECORDS = 1024
MOST_ALTERNATIVES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A program that was compiled to look at it.

    Attributes:
        outcome: what the enforcing stage said; `budget_bytes` is that of the trial.
        module: the scheduled module that it returned.
        scheduled: the one that it was given.
    """

    outcome: StageOutcome
    module: bytes
    scheduled: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to make of a program that the enforcing stage has seen.

    Attributes:
        record: with what was done by both stages.
        module: the scheduled module that XLA should go on with; None for the one that is there.
    """

    record: Record
    module: bytes | None = None


class Alternatives(Protocol):
    """Other ways to write a program; see `coop_jax.alternatives`."""

    def choose(self, record: Record, outcome: StageOutcome, module: bytes) -> Choice:
        """What to take, when the enforcing stage has said `outcome` of the scheduled `module`."""


class PinMode(Enum):
    """Whether `coop_jax.pinning` compiles a program, to pack its temporaries anew after that."""

    NONE = "XLA's packing stays, and is checked"
    KEEP = "what pinning makes of the program as it is will be checked"
    CHECK_AFTER = "what pinning makes of it, after the enforcing stage, will be checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileState:
    """What is known of one program.

    Attributes:
        record: what was asked of it, and what the stages did.
        alternatives: how else it could be written; they keep the user's function alive.
        pin: whether it is compiled to be pinned just now.
        short_bytes: by how much less than its budget it is held, since XLA needed more than was promised.
        trial: what it turned out to be, if it was compiled to look at it.
    """

    record: Record
    alternatives: Alternatives | None = None
    pin: PinMode = PinMode.NONE
    short_bytes: int = 0
    trial: Trial | None = None


class Registry:
    """States by the ids of their records. Thread-safe, bounded: what was changed first is forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[str, CompileState] = OrderedDict()
        self._platforms: set[str] = set()
        self._hooked = False

    def of(self, record: Record) -> CompileState:
        """What is known of the program with this record, which may be nothing more."""
        with self._lock:
            return self._states.get(record.id) or CompileState(record=record)

    def record(self, record_id: str) -> Record | None:
        """The record with this id; None if it is not remembered."""
        with self._lock:
            state = self._states.get(record_id)
            return None if state is None else state.record

    def update(self, record: Record, /, **changes: Any) -> None:
        """Remember some attributes of the state of the program with this record, and leave the others.

        Args:
            record: which program; it is remembered itself only if it is new or among the `changes`.
        """
        with self._lock:
            state = self._states.pop(record.id, None) or CompileState(record=record)
            self._states[record.id] = dataclasses.replace(state, **changes)
            if len(self._states) > MOST_RECORDS:
                self._states.popitem(last=False)
            if "alternatives" in changes:
                self._forget_alternatives()

    def _forget_alternatives(self) -> None:
        """Keep those of the programs that changed last."""
        offering = [k for k, state in self._states.items() if state.alternatives is not None]
        for record_id in offering[:-MOST_ALTERNATIVES]:
            self._states[record_id] = dataclasses.replace(self._states[record_id], alternatives=None)

    def forget(self, record: Record) -> CompileState:
        """What was known of a program until now."""
        with self._lock:
            return self._states.pop(record.id, None) or CompileState(record=record)

    @contextlib.contextmanager
    def pinned(self, record: Record, mode: PinMode) -> Iterator[None]:
        """In it the program with this record is compiled to be pinned."""
        self.update(record, pin=mode)
        try:
            yield
        finally:
            self.update(record, pin=PinMode.NONE)

    def first_use(self, platform: str) -> tuple[bool, bool]:
        """(this platform needs the callback, the process needs the hooks); says yes once each."""
        with self._lock:
            answer = (platform not in self._platforms, not self._hooked)
            self._platforms.add(platform)
            self._hooked = True
            return answer


REGISTRY = Registry()


def record_from(attributes: Mapping[str, str]) -> Record:
    """The record of a marked module: as it is remembered, else as its mark tells it."""
    return REGISTRY.record(attributes[RECORD]) or record_of_mark(attributes)


def record_of_module(data: bytes) -> Record | None:
    """The record of a serialized module; None if it has no mark, or is only looked at."""
    if RECORD.encode() not in data:
        return None
    attributes = read_attributes(data)
    return record_from(attributes) if FACTS in attributes and TRIAL not in attributes else None
