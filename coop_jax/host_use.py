"""What a compiled program keeps in the host's memory: the part of a report about paging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coop_jax.record import UNLIMITED_BYTES, Record
from coop_jax.screen import Table
from coop_jax.text import format_bytes, format_ns
from passes.backend import Backend
from passes.outcome import Paged

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The host's memory that a program was given, and what it makes of it. All bytes are per device.

    Attributes:
        budget_bytes: what may wait there, at most `limit_bytes`; 0 for no paging.
        limit_bytes: what JAX can use of the host's memory (the pinned pool of its GPU client); None for all.
        planned_bytes: predicted bytes there.
        compiled_bytes: XLA's count: arguments + outputs + temporaries - aliased.
        waiting_ns: estimated time that kernels stand still for the link.
        paged: what waits there.
        is_possible: False where nothing can be paged, as on a CPU.
        is_forced: True if `offload` names what is to wait there.
    """

    budget_bytes: int = 0
    limit_bytes: int | None = None
    planned_bytes: int = 0
    compiled_bytes: int = 0
    waiting_ns: int = 0
    paged: tuple[Paged, ...] = ()
    is_possible: bool = True
    is_forced: bool = False

    @classmethod
    def of(
        cls, record: Record, compiled_bytes: int, backend: Backend | None, limit_bytes: int | None
    ) -> HostUse:
        """What a program's record says, beside XLA's count."""
        return cls(
            budget_bytes=record.host_budget_bytes,
            limit_bytes=limit_bytes,
            planned_bytes=0 if record.hlo is None else record.hlo.host_bytes,
            compiled_bytes=compiled_bytes,
            waiting_ns=0 if record.hlo is None else record.hlo.waiting_ns,
            paged=tuple(p for stage in record.stages for p in stage.paged),
            is_possible=backend is not None and backend.pages,
            is_forced="offload=" in record.constraints,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostUse:
        """What `to_dict` was called on."""
        return cls(**{**data, "paged": tuple(Paged(**p) for p in data["paged"])})

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in JSON types."""
        return {**dataclasses.asdict(self), "paged": [dataclasses.asdict(p) for p in self.paged]}

    def lines(self) -> list[str]:
        """A sentence or two; none if no host memory was asked for and none is used."""
        if not self.budget_bytes and not self.compiled_bytes:
            return []
        limited = 0 < self.budget_bytes < UNLIMITED_BYTES
        given = f" of {format_bytes(self.budget_bytes)}" if limited else ""
        sentences = [
            f"on the host: {format_bytes(self.compiled_bytes)}{given} by XLA's count, "
            f"planned {format_bytes(self.planned_bytes)}"
        ]
        if self.budget_bytes and self.budget_bytes == self.limit_bytes:
            sentences[0] += " (the budget there is the pinned pool of JAX's GPU client)"
        if self.paged:
            nbytes = sum(p.nbytes for p in self.paged)
            sentences.append(
                f"paged: {len(self.paged)} values, {format_bytes(nbytes)}; waiting for the link: "
                f"estimated {format_ns(self.waiting_ns)}"
            )
        elif self.budget_bytes and not self.is_possible:
            sentences.append("paged: nothing, since this platform has no copies that run beside kernels")
        elif self.budget_bytes and self.is_forced:
            sentences.append(
                "paged: nothing: what `offload` names is used at once, or in one turn of a loop or a branch, "
                "from which nothing is sent"
            )
        elif self.budget_bytes:
            sentences.append("paged: nothing, that is cheapest here")
        return sentences

    def table(self) -> Table | None:
        """One row for each op and source line, largest bytes first."""
        if not self.paged:
            return None
        groups: dict[str, list[Paged]] = {}
        for item in self.paged:
            groups.setdefault(f"{item.op} at {item.source}" if item.source else item.op, []).append(item)
        ordered = sorted(groups.items(), key=lambda entry: -sum(p.nbytes for p in entry[1]))
        rows = [_row(what, items) for what, items in ordered[:_SHOWN]]
        if rest := [p for _, items in ordered[_SHOWN:] for p in items]:
            rows.append(_row(f"{len(ordered) - _SHOWN} more", rest))
        return Table(header=("on the host", "values", "bytes", "brought back", "stage"), rows=tuple(rows))


def _row(what: str, items: Sequence[Paged]) -> tuple[str, str, str, str, str]:
    nbytes = format_bytes(sum(p.nbytes for p in items), exact=False)
    stages = ", ".join(sorted({p.stage for p in items}))
    return (what, str(len(items)), nbytes, f"{sum(p.times for p in items)} times", stages)
