"""What a report says of the temporaries' addresses: where XLA put them, and what their packing costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from coop_jax import serialized
from coop_jax.addresses import address_view
from coop_jax.pinning import PinOutcome, outcome_of
from coop_jax.record import Record
from coop_jax.text import format_bytes
from passes.backend import BACKENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """The temporaries' addresses. Where XLA moves values after it called back here, the last five are None.

    Attributes:
        predicted_temp_bytes: what the enforcing stage counted on; None where it was not asked.
        compiled_temp_bytes: what XLA counted.
        pinned: whether `coop.pin` moved them.
        pin_reason: why it did not, if it was asked to.
        buffers: temporaries that XLA assigned; None where it does not tell.
        equal: how many of them lie where they were predicted.
        live_temp_bytes: the most temporaries alive at once: no packing needs less.
        packed_temp_bytes: the best packing that was found for the same live ranges.
        saved_temp_bytes: how much `coop.pin` took off.
    """

    predicted_temp_bytes: int | None
    compiled_temp_bytes: int
    pinned: bool
    pin_reason: str | None
    buffers: int | None = None
    equal: int | None = None
    live_temp_bytes: int | None = None
    packed_temp_bytes: int | None = None
    saved_temp_bytes: int | None = None

    @classmethod
    def of(cls, compiled: Compiled, record: Record, temp_bytes: int) -> Offsets:
        """The addresses of a compiled program, whose temporaries take `temp_bytes` by XLA's count."""
        pinned = outcome_of(compiled)
        return cls(
            predicted_temp_bytes=None if record.hlo is None else record.hlo.planned_temp_bytes,
            compiled_temp_bytes=temp_bytes,
            pinned=pinned is not None and pinned.pinned,
            pin_reason=_pin_reason(record, pinned),
            **_packing(compiled, pinned),
        )

    def to_dict(self) -> dict[str, Any]:
        """All that is known."""
        fields = dataclasses.asdict(self)
        return fields if self.live_temp_bytes is not None else dict(list(fields.items())[:4])

    def __str__(self) -> str:
        """One line about where the temporaries lie and what their packing costs."""
        temp_bytes = self.compiled_temp_bytes
        if self.live_temp_bytes is None or self.packed_temp_bytes is None:
            return "addresses: not known; XLA moves values after it called back here"
        over = f"{format_bytes(max(0, temp_bytes - self.live_temp_bytes))} over what is alive at once"
        if self.pinned:
            return f"addresses: pinned, {format_bytes(self.saved_temp_bytes or 0)} saved; {over}"
        where = f"{self.equal} of {self.buffers} temporaries where predicted; "
        text = f"addresses: {where if self.buffers is not None else ''}packing takes {over}"
        if temp_bytes > self.packed_temp_bytes:
            more = format_bytes(temp_bytes - self.packed_temp_bytes)
            text += f", {more} more than the best that was found"
        return f"{text}; not pinned: {self.pin_reason}" if self.pin_reason else text


def _packing(compiled: Compiled, pinned: PinOutcome | None) -> dict[str, int | None]:
    """The fields of `Offsets` about packing; none where it is not known."""
    if pinned is not None and pinned.pinned:
        # The proof reads every place from the bytes that were loaded.
        return {
            "buffers": pinned.buffers, "equal": pinned.buffers, "live_temp_bytes": pinned.live_bytes,
            "packed_temp_bytes": pinned.temp_bytes,
            "saved_temp_bytes": pinned.temp_bytes_before - pinned.temp_bytes,
        }  # fmt: skip
    if not BACKENDS[serialized.kind_of(compiled)].runs_as_scheduled:
        return {}
    view = address_view(compiled)
    return {
        "buffers": view.buffers, "equal": view.equal, "live_temp_bytes": view.live_bytes,
        "packed_temp_bytes": view.packed_bytes, "saved_temp_bytes": 0,
    }  # fmt: skip


def _pin_reason(record: Record, pinned: PinOutcome | None) -> str | None:
    """Why a program that was asked to be pinned is not."""
    if pinned is None:
        return "jax.jit compiles without it; give the program to coop.pin" if record.pin else None
    return None if pinned.pinned else pinned.reason
