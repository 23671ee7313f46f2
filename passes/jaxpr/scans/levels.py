"""A program with its scans on the levels of a frontier: rewritten and lifted, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.cost import DeviceModel
from passes.jaxpr import compat
from passes.jaxpr.compat import Jaxpr
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.scans.choice import Level
from passes.jaxpr.scans.emit import rewrite
from passes.jaxpr.scans.frontier import frontier, hand_levels, segment_frontier
from passes.jaxpr.scans.parts import between
from passes.jaxpr.straight import lift_as_xla


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewritten:
    """A program with its scans rewritten for one level, and lifted. Compared by identity."""

    level: Level
    program: Jaxpr
    lifted: LiftedJaxpr


class Levels:
    """A program on the levels of a frontier, each rewritten when it is first looked at."""

    def __init__(self, jaxpr: Jaxpr, levels: Sequence[Level], device: DeviceModel) -> None:
        self._jaxpr, self._levels, self._device = jaxpr, levels, device
        self._made: dict[int, Rewritten] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def __getitem__(self, k: int) -> Rewritten:
        if k not in self._made:
            self._made[k] = self._rewritten(self._levels[k])
        return self._made[k]

    def between(self, k: int, share: float) -> Rewritten | None:
        """Level `k` with that share of the iterations on the level above it; None where that is level `k`."""
        level = between(self._levels[k - 1], self._levels[k], share)
        if all(site is lower for site, lower in zip(level, self._levels[k], strict=True)):
            return None
        return self._rewritten(level)

    def _rewritten(self, level: Level) -> Rewritten:
        program = rewrite(self._jaxpr, level) if level else self._jaxpr
        lifted = lift_as_xla(program, self._device)
        return Rewritten(level=level, program=program, lifted=lifted)


@compat.cached_by_jaxpr
def _frontier(jaxpr: Jaxpr, device: DeviceModel, least: str) -> tuple[Level, ...]:
    """The levels of a program's frontier; as it is, if it has none."""
    return tuple(frontier(jaxpr, device, least) or [()])


@compat.cached_by_jaxpr
def on_frontier(jaxpr: Jaxpr, device: DeviceModel, least: str) -> Levels:
    """The program on every level of its frontier."""
    return Levels(jaxpr, _frontier(jaxpr, device, least), device)


@compat.cached_by_jaxpr
def by_hand(jaxpr: Jaxpr, device: DeviceModel) -> Levels:
    """The program with what ready policies keep of its scans."""
    return Levels(jaxpr, hand_levels(jaxpr, device), device)


@compat.cached_by_jaxpr
def in_segments(jaxpr: Jaxpr, device: DeviceModel, least: str) -> Levels:
    """The program on the lowest level of its frontier and those below it; none if there are none."""
    lowest = _frontier(jaxpr, device, least)[-1]
    below = segment_frontier(lowest, device, least)
    return Levels(jaxpr, [lowest, *below] if below else [], device)
