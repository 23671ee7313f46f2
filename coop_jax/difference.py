"""What changed between two reports: `coop.difference`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coop_jax.report import Report
from coop_jax.screen import Block, Heading, Lines, Printable, Table
from coop_jax.text import format_bytes, format_ns
from passes.checked import InputError

_SHOWN = 12
_BYTES = (
    ("budget", "budget_bytes"),
    ("planned", "planned_total_bytes"),
    ("compiled, XLA's count", "compiled_total_bytes"),
    ("  arguments", "argument_bytes"),
    ("  outputs", "output_bytes"),
    ("  temporaries", "temp_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Printable):
    """Two reports, side by side.

    Attributes:
        before, after: the fields of each report by name, as `Report.to_dict` gives them.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def blocks(self) -> list[Block]:
        """For `coop_jax.screen`."""
        rows = [self._row(name, int(self.before[key]), int(self.after[key])) for name, key in _BYTES]
        old, new = self._recomputed(self.before), self._recomputed(self.after)
        changed = [(key, old.get(key, (0, 0)), new.get(key, (0, 0))) for key in sorted({*old, *new})]
        changed = [(key, was, now) for key, was, now in changed if was != now]
        changed.sort(key=lambda entry: -abs(entry[2][1] - entry[1][1]))
        table = Table(
            header=("recomputed", "times before", "after", "bytes changed"),
            rows=tuple(
                (key, str(was[0]), str(now[0]), _signed(now[1] - was[1]))
                for key, was, now in changed[:_SHOWN]
            ),
        )
        more = (f"and {len(changed) - _SHOWN} more",) if len(changed) > _SHOWN else ()
        overheads = " -> ".join(f"{100 * r['overhead_ratio']:.2f} %" for r in (self.before, self.after))
        kernels = [r.get("compiled_cost_ns") for r in (self.before, self.after)]
        lines = [f"recompute: {overheads} by estimate"]
        if all(kernels):
            lines.append(
                "all kernels: " + " -> ".join(format_ns(int(n)) for n in kernels if n) + " by estimate"
            )
        blocks: list[Block] = [
            Heading(text="what changed"),
            Table(header=("", "before", "after", "change"), rows=tuple(rows)),
            Lines(lines=tuple(lines)),
        ]
        return [*blocks, table, Lines(lines=more)] if changed else blocks

    @staticmethod
    def _row(name: str, before: int, after: int) -> tuple[str, str, str, str]:
        return (
            name,
            format_bytes(before, exact=False),
            format_bytes(after, exact=False),
            _signed(after - before),
        )

    @staticmethod
    def _recomputed(fields: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Times and bytes by op and line."""
        by_line: dict[str, tuple[int, int]] = {}
        for item in fields["recomputed"]:
            place = item["source"].partition(" (")[0].rpartition("/")[2]
            key = f"{item['op']} at {place}" if place else item["op"]
            times, nbytes = by_line.get(key, (0, 0))
            by_line[key] = (times + 1, nbytes + item["nbytes"])
        return by_line

    def to_dict(self) -> dict[str, Any]:
        """Both reports, in JSON types."""
        return dataclasses.asdict(self)


def _signed(nbytes: int) -> str:
    return ("+" if nbytes > 0 else "") + format_bytes(nbytes, exact=False)


def difference(before: Report | Mapping[str, Any], after: Report | Mapping[str, Any]) -> Difference:
    """What changed from one report to another.

    Args:
        before, after: reports, or what their `to_dict` gave (such as a file's JSON).

    Raises:
        InputError: one is neither.
    """
    for given in (before, after):
        if not isinstance(given, Report) and not (isinstance(given, Mapping) and "budget_bytes" in given):
            raise InputError(f"a {type(given).__name__} is no report: give what coop.report returns.")
    fields = [r.to_dict() if isinstance(r, Report) else r for r in (before, after)]
    return Difference(before=fields[0], after=fields[1])
