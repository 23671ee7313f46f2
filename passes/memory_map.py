"""Where the bytes of one scheduled program are: every value with its size, place, time and reason.

A `MemoryMap` is plain data, frozen and JSON-able: pictures, tables and pages are drawn from it alone, with
neither XLA nor JAX at hand. `passes.hlo.describe` makes one from a scheduled module.

Invariant: at every step the bytes of all kinds, `PACKING` included, sum to what XLA counts in total, so that
a table or a picture cannot lose any. `PACKING` is what XLA's heap takes beyond the values that are alive.

Arguments, outputs and constants take their room for the whole run, since XLA allocates them before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

from passes.checked import InputError, flag, json_of, listed, mapped, whole, worded

MAP_FORMAT = "coop-map/1"

ARGUMENT, OUTPUT, CONSTANT = "argument", "output", "constant"
KEPT, RECOMPUTED, WORKING, PACKING = "kept", "recomputed", "working", "packing"
# In the order in which they are stacked, from below.
KINDS = (ARGUMENT, OUTPUT, CONSTANT, KEPT, RECOMPUTED, WORKING, PACKING)
FIXED_KINDS = frozenset({ARGUMENT, OUTPUT, CONSTANT})
IN_WORDS = {
    ARGUMENT: "arguments",
    OUTPUT: "outputs",
    CONSTANT: "constants",
    KEPT: "kept for the backward pass",
    RECOMPUTED: "recomputed",
    WORKING: "working memory",
    PACKING: "packing (holes)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value that takes memory from step `start` until before step `stop`.

    Attributes:
        name: of the instruction that makes it, or of the argument.
        op: what makes it, in JAX's words where they are known, such as "dot_general".
        shape: such as "f32[1024,256]".
        nbytes: its room.
        offset: from the start of the temporaries; None for what does not lie there, or is not known.
        kind: one of `KINDS` but `PACKING`.
        source: the user's line, such as "model.py:41"; "" if unknown.
        scope: named scopes and modules around it, such as "encoder/layer_3"; where there are none the
            functions that it comes from, such as "block > attention"; "" if unknown.
        last_use: the instruction that reads it last; "" for what lives to the end.
        evicted: True if the same value is recomputed later.
    """

    name: str
    op: str
    shape: str
    nbytes: int
    start: int
    stop: int
    offset: int | None = None
    kind: str
    source: str = ""
    scope: str = ""
    last_use: str = ""
    evicted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: how many values and bytes go by one label."""

    label: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMap:
    """A scheduled program in memory, on one device.

    Attributes:
        name: of the program.
        platform: "cpu" or "cuda".
        steps: names of the instructions in the order of the schedule; a loop's body is there once.
        values: everything that takes memory.
        argument_bytes, output_bytes, alias_bytes, temp_bytes, total_bytes: XLA's counts (of outputs that lie
            in donated arguments only the argument is among `values`).
        counted: True if these are XLA's own, False if they are predicted from the schedule.
        exact_addresses: True if XLA told the offsets, False if they are predicted.
    """

    name: str
    platform: str
    steps: tuple[str, ...]
    values: tuple[Value, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    total_bytes: int
    counted: bool = True
    exact_addresses: bool = True

    def profile(self) -> dict[str, list[int]]:
        """Bytes at every step by kind; they sum to `total_bytes` at the peak, and to less elsewhere.

        Packing is given at every step as at the peak: the room between what is alive and XLA's heap that no
        value ever fills at the peak.
        """
        n = max(1, len(self.steps))
        by_kind = {kind: self._alive(kind, n) for kind in KINDS if kind != PACKING}
        alive = [sum(at) for at in zip(*by_kind.values(), strict=True)]
        return {**by_kind, PACKING: [self.total_bytes - max(alive)] * n}

    def _alive(self, kind: str, n: int) -> list[int]:
        change = [0] * (n + 1)
        for value in self.values:
            if value.kind == kind and value.start < value.stop:
                change[value.start] += value.nbytes
                change[min(value.stop, n)] -= value.nbytes
        return list(accumulate(change))[:n]

    @property
    def peak_step(self) -> int:
        """The first step at which most bytes are alive."""
        alive = [sum(at) for at in zip(*self.profile().values(), strict=True)]
        return alive.index(max(alive))

    def at(self, step: int) -> list[Value]:
        """What is alive at a step, largest first."""
        alive = [v for v in self.values if v.start <= step < v.stop]
        return sorted(alive, key=lambda v: (-v.nbytes, v.start, v.name))

    def by(self, label: Callable[[Value], str], step: int | None = None) -> list[Row]:
        """Bytes alive at a step under one label each, largest first; they sum to `total_bytes` at the peak.

        Args:
            label: such as `kind_of`, `source_of` or `scope_of`.
            step: None for the peak.
        """
        groups: dict[str, list[int]] = {}
        for value in self.at(self.peak_step if step is None else step):
            groups.setdefault(label(value), []).append(value.nbytes)
        rows = [Row(label=name, count=len(sizes), nbytes=sum(sizes)) for name, sizes in groups.items()]
        rows.sort(key=lambda row: (-row.nbytes, row.label))
        packing = self.profile()[PACKING][0]
        return [*rows, Row(label=IN_WORDS[PACKING], count=0, nbytes=packing)] if packing else rows

    def to_dict(self) -> dict[str, Any]:
        """In JSON types, in the `coop-map/1` format."""
        return {"format": MAP_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> MemoryMap:
        """Read what `to_json` wrote.

        Raises:
            InputError: it is something else, with what is wrong.
        """
        data = json_of(text)
        if not isinstance(data, Mapping) or data.get("format") != MAP_FORMAT:
            raise InputError(f'expected "format": "{MAP_FORMAT}"')
        given = mapped(data, "the map", tuple(f.name for f in fields(cls)))
        sizes = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "total_bytes")
        return cls(
            name=worded(given["name"], "name"),
            platform=worded(given["platform"], "platform"),
            steps=tuple(worded(s, "a step") for s in listed(given["steps"], "steps")),
            values=tuple(_value(v, i) for i, v in enumerate(listed(given["values"], "values"))),
            **{name: whole(given[name], name) for name in sizes},
            counted=flag(given["counted"], "counted"),
            exact_addresses=flag(given["exact_addresses"], "exact_addresses"),
        )


def kind_of(value: Value) -> str:
    """The label of a value's kind."""
    return IN_WORDS[value.kind]


def source_of(value: Value) -> str:
    """The label of a value's source line: an argument is its own."""
    if value.kind == ARGUMENT:
        return IN_WORDS[ARGUMENT]
    return value.source or "(unknown line)"


def scope_of(value: Value) -> str:
    """The label of a value's named scope."""
    if value.kind == ARGUMENT:
        return IN_WORDS[ARGUMENT]
    return value.scope or "(unknown scope)"


def why(value: Value) -> str:
    """Why a value is there, in a sentence."""
    read = f"read last by {value.last_use}" if value.last_use else "it lives to the end"
    reasons = {
        ARGUMENT: "an argument: it is there for the whole run",
        OUTPUT: "a result: its room is taken for the whole run",
        CONSTANT: "a constant of the program",
        KEPT: f"made in the forward pass and kept for the backward pass; {read}",
        RECOMPUTED: f"recomputed instead of kept; {read}",
        WORKING: f"an intermediate value; {read}",
    }
    return reasons[value.kind] + ("; it is recomputed later" if value.evicted else "")


def _value(data: object, i: int) -> Value:
    what = f"values[{i}]"
    given = mapped(data, what, tuple(f.name for f in fields(Value)))
    if given["kind"] not in KINDS[:-1]:
        raise InputError(f"kind of {what} is none of {', '.join(KINDS[:-1])}")
    texts = ("name", "op", "shape", "kind", "source", "scope", "last_use")
    read: dict[str, Any] = {name: worded(given[name], f"{name} of {what}") for name in texts}
    read |= {name: whole(given[name], f"{name} of {what}") for name in ("nbytes", "start", "stop")}
    return Value(
        **read,
        offset=None if given["offset"] is None else whole(given["offset"], f"offset of {what}"),
        evicted=flag(given["evicted"], f"evicted of {what}"),
    )
