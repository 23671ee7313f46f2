"""How to write one program once more, and what this process knows of that."""

from __future__ import annotations

from dataclasses import dataclass

from coop_jax import tries
from coop_jax.known import Known, Memory, cheapest_first, least_above, least_answered_above
from coop_jax.registry import Choice
from coop_jax.relowering import Plain, Variant, Wish
from coop_jax.replacing import Calls
from passes.jaxpr.compat import BeingLowered
from passes.objective import Objective

MEMORY = Memory()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """How to write one program once more, and what is known of that.

    Attributes:
        program: how to lower it again.
        key: tells programs apart, whatever their budgets.
        alone: the key of the same program without the host memory that this one has; "" if it has none.
        calls: the Python functions that it calls, by number.
    """

    program: BeingLowered
    key: str
    alone: str = ""
    calls: Calls = ()

    def known(self) -> tuple[Known, ...]:
        """All that is known."""
        return MEMORY.of(self.key, self.alone)

    def known_within(self, budget_bytes: int) -> list[Known]:
        """What keeps a budget, cheapest first."""
        return cheapest_first(k for k in self.known() if k.needed_bytes <= budget_bytes)

    def least_above(self, nbytes: int) -> Known | None:
        """What needs the least of all that is known to need more."""
        return least_above(self.known(), nbytes)

    def answered_above(self, nbytes: int) -> int:
        """The least budget above some bytes that was asked for, and kept."""
        return least_answered_above(self.known(), nbytes)

    def counted(self, asked: Wish) -> int | None:
        """XLA's count of a way; None where it was not asked for."""
        return MEMORY.counted(self.key, asked)

    def learn(self, asked: Wish, way: Choice | Variant, counted_bytes: int | None = None) -> None:
        """Remember what keeps its budget, or what would keep a larger one."""
        for found in tries.known_of(asked, way, counted_bytes):
            MEMORY.learn(self.key, found)

    def learn_plain(self, plain: Plain, objective: Objective) -> None:
        """Remember what the program needs without `coop.remat`."""
        MEMORY.learn(self.key, tries.known_of_plain(plain, objective))

    def forget(self, asked: Wish) -> None:
        """Forget a way which turned out to be otherwise."""
        MEMORY.forget(self.key, asked)

    def name(self, least_bytes: int) -> None:
        """Remember the least budget that a refusal named."""
        MEMORY.name(self.key, least_bytes)

    def named_above(self, nbytes: int) -> int | None:
        """What a refusal named before, if it is above some bytes and nothing between is known."""
        named_bytes, least = MEMORY.named(self.key), self.least_above(nbytes)
        if named_bytes is None or named_bytes <= nbytes:
            return None
        return named_bytes if least is None or least.sure_bytes >= named_bytes else None
