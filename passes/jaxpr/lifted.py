"""A jaxpr and the program that it is: what the lift makes, and the emitter walks back."""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir import BufferId, Program
from passes.jaxpr.compat import Jaxpr, Var


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftedJaxpr:
    """A jaxpr and the program that it is, with the way back.

    Attributes:
        program: ops in the order in which they should run; arguments and results have zero bytes.
        jaxpr: the open jaxpr; its barriers hold variables only.
        bodies: for every op the indices of its equations, producers first, its root last.
        leaves: for every equation the buffers that it reads, through virtual values, sorted.
        buffer_of: the buffer of every stored variable.
        var_of: the variable of every buffer.
        as_seen: what XLA makes of it: what is computed twice is computed once, and the parts of a kernel are
            one op; None if that is `program`.
    """

    program: Program
    jaxpr: Jaxpr
    bodies: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[BufferId, ...], ...]
    buffer_of: dict[Var, BufferId]
    var_of: tuple[Var, ...]
    as_seen: LiftedJaxpr | None = None

    @property
    def seen(self) -> Program:
        """What XLA makes of the program, for what it is expected to need."""
        return self.program if self.as_seen is None else self.as_seen.program
