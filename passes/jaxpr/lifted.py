"""A jaxpr and the program that it is: what the lift makes, and the emitter walks back and asks of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from passes.ir import BufferId, OpId, Program
from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, Jaxpr, Var
from passes.jaxpr.primitives import MATRIX, Kind
from passes.jaxpr.purity import eqn_kind

MOVES = frozenset({"slice", "dynamic_slice", "split", "gather", "convert_element_type"})


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


def made_by(
    lifted: LiftedJaxpr, names: Collection[str], but_for: Collection[int] = ()
) -> frozenset[BufferId]:
    """What kernels store whose last equation is of one of some primitives, `but_for` some equations."""
    made = [(op, body[-1]) for op, body in zip(lifted.program.ops, lifted.bodies, strict=True)]
    return frozenset(
        b
        for op, root in made
        if root not in but_for and lifted.jaxpr.eqns[root].primitive.name in names
        for b in op.outputs
    )


def ready_from_the_start(program: Program) -> set[BufferId]:
    """Arguments, what follows from them by moving data alone, and what follows from nothing."""
    ready = set(program.arguments)
    for op in program.ops:
        if not op.inputs or (op.name in MOVES and ready.issuperset(op.inputs)):
            ready.update(op.outputs)
    return ready


def reshaped_for_products(lifted: LiftedJaxpr) -> dict[BufferId, int]:
    """For what elementwise kernels store and products read reshaped: the equation that reshapes it."""
    eqns = lifted.jaxpr.eqns
    made = {
        v
        for body in lifted.bodies
        if eqn_kind(eqns[body[-1]]) is Kind.FUSIBLE
        for v in eqns[body[-1]].outvars
    }
    read = {v for eqn in eqns if eqn.primitive.name in MATRIX for v in compat.variables(eqn.invars)}
    found = {
        eqn.invars[0]: i
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "reshape" and eqn.invars[0] in made and eqn.outvars[0] in read
    }
    return {lifted.buffer_of[v]: i for v, i in found.items() if v not in read}


def spread_constant(lifted: LiftedJaxpr, op: OpId) -> int | None:
    """Of an op that reads nothing, the equation that spreads out a scalar constant, if there is one.

    Run again it has to be written otherwise: XLA merges what is the same, and keeps it from the first time
    on. The zeros that a scan's sums begin with would be there until the scan is run again.
    """
    eqns = lifted.jaxpr.eqns
    body = () if lifted.program.ops[op].inputs else lifted.bodies[op]
    spread = [i for i in body if eqns[i].primitive.name == "broadcast_in_dim"]
    return next((i for i in spread if _is_scalar_constant(eqns[i].invars[0])), None)


def _is_scalar_constant(atom: Atom) -> bool:
    return isinstance(atom, compat.Literal) and not array_of(atom).ndim
