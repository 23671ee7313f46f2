"""What was done to a program so that it needs less memory, in one value that can be asked and compared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scans(Enum):
    """How a program's scans were rewritten before it was planned; the value is what people read."""

    NONE = ""
    LEVELS = "scan"
    SEGMENTS = "scan segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a stage came to its program. As text: its parts joined by "+", such as "scan segments+bodies+auto".

    Attributes:
        scans: how scans, or what is inside of control flow, were rewritten.
        bodies: True if bodies of control flow were planned.
        on_host: True if stacks of scans wait in the host's memory.
        recompute: the planner whose plan runs beside them, or ready policies that blocks are under; None if
            none does.
    """

    scans: Scans = Scans.NONE
    bodies: bool = False
    on_host: bool = False
    recompute: str | None = None

    def __str__(self) -> str:
        parts = (self.scans.value, "bodies" * self.bodies, "host" * self.on_host, self.recompute or "")
        return "+".join(filter(None, parts)) or "none"

    @classmethod
    def of_text(cls, text: str) -> Recipe:
        """The recipe that prints as `text`."""
        parts = [] if text == "none" else text.split("+")
        scans = Scans(parts.pop(0)) if parts and parts[0] in Scans else Scans.NONE
        bodies = parts[:1] == ["bodies"]
        on_host = parts[bodies : bodies + 1] == ["host"]
        rest = "+".join(parts[bodies + on_host :])
        return cls(scans=scans, bodies=bodies, on_host=on_host, recompute=rest or None)
