"""Storage that values share: a loop's carry with what it starts from, a result with what it is a view of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from passes.ir import BufferId, Program
from passes.jaxpr import compat
from passes.jaxpr.avals import form_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.primitives import RESHAPES, Kind, kind_of
from passes.liveness import last_readers
from passes.offsets.foreseen import Room

UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter-sub": 2}
"""Kernels that write a part of their first operand, each with which operand holds what they write."""

# Besides elementwise kernels; `name` is a value that is kept as it is (`passes.saved`).
IN_PLACE = frozenset({*UPDATES, "name"})


def written_over(
    outvars: Iterable[Var],
    free: Mapping[Var, BufferId],
    buffer_of: Mapping[Var, BufferId],
    *,
    in_any_layout: bool,
    most: int = 1,
) -> tuple[tuple[BufferId, BufferId], ...]:
    """Pairs (result, operand of its shape and type), of operands that are `free` to be written over.

    Args:
        in_any_layout: whether a result with the dimensions of an operand in another order lies as that does.
        most: how many operands are named for a result.
    """

    def form(v: Var) -> object:
        shape, dtype = form_of(v)
        return tuple(sorted(shape)) if in_any_layout and shape else shape, dtype

    pairs = []
    for v in outvars:
        pairs += [(buffer_of[v], b) for leaf, b in free.items() if form(leaf) == form(v)][:most]
    return tuple(pairs)


def carries_shared(
    scan: JaxprEqn, buffer_of: dict[Var, BufferId], kept: set[Var]
) -> tuple[tuple[BufferId, BufferId], ...]:
    """Pairs (carry after the loop, what it started from), where the latter is not `kept`."""
    n_consts, n_carry = compat.scan_sizes(scan)
    starts = scan.invars[n_consts : n_consts + n_carry]
    return tuple(
        (buffer_of[v], buffer_of[start])
        for v, start in zip(scan.outvars, starts, strict=False)
        if v in buffer_of and compat.is_variable(start) and start in buffer_of and start not in kept
    )


def aliased(
    kernel: JaxprEqn, buffer_of: dict[Var, BufferId], kept: set[Var]
) -> tuple[tuple[BufferId, BufferId], ...]:
    """Pairs (result, operand) of a kernel whose maker lets the one take the place of the other."""
    first = kernel.params["grid_mapping"].num_dynamic_grid_bounds if "grid_mapping" in kernel.params else 0
    return tuple(
        (buffer_of[result], buffer_of[operand])
        for i, k in kernel.params.get("input_output_aliases") or ()
        if compat.is_variable(operand := kernel.invars[first + i])
        and operand not in kept
        and operand in buffer_of
        and (result := kernel.outvars[k]) in buffer_of
    )


def updated_in_place(lifted: LiftedJaxpr, n_consts: int, n_carry: int) -> set[int]:
    """Which of a scan's carries are updates of themselves, elementwise or of a part, as a gradients' sum."""
    last_reader = last_readers(lifted.program)
    updated = set()
    for k, v in enumerate(lifted.jaxpr.outvars[:n_carry]):
        old = lifted.jaxpr.invars[n_consts + k]
        b = compat.of_variable(lifted.buffer_of, v)
        maker = None if b is None else lifted.program.producer[b]
        if maker is None or last_reader.get(lifted.buffer_of[old]) != maker:
            continue
        root = lifted.jaxpr.eqns[lifted.bodies[maker][-1]]
        if kind_of(root.primitive.name) is Kind.FUSIBLE or root.primitive.name in UPDATES:
            updated.add(k)
    return updated


def result_storage(
    results: Iterable[Atom],
    jaxpr: Jaxpr,
    producer: Mapping[Var, int],
    readers: Mapping[Var, Sequence[int]],
) -> set[Var]:
    """Results, and what XLA computes where a result will be: what it is reshaped from, what its loop starts
    from."""
    storage: set[Var] = set()
    for v in compat.variables(results):
        storage.add(v)
        while (i := compat.of_variable(producer, v)) is not None:
            source = _source(jaxpr.eqns[i], v, readers)
            if source is None or not compat.is_variable(source):
                break
            storage.add(v := source)
    return storage


def rooms(lifted: LiftedJaxpr, fresh: Iterable[int], run: Program | None = None) -> tuple[Room, ...]:
    """The storage of some results, that no argument gives, as room for what lives before they are made.

    Args:
        fresh: their positions.
        run: the program with its ops in the order in which they run, if that is another one.
    """
    program = lifted.program if run is None else run
    if not fresh:
        return ()
    jaxpr, readers = lifted.jaxpr, dict[Var, list[int]]()
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in compat.variables(eqn.invars):
            readers.setdefault(v, []).append(i)
    found = []
    for v in dict.fromkeys(compat.variables(jaxpr.outvars[k] for k in fresh)):
        buffers = {
            lifted.buffer_of[w]
            for w in result_storage((v,), jaxpr, producer, readers)
            if w in lifted.buffer_of
        }
        made = [op for b in buffers if (op := program.producer[b]) is not None]
        if made and len(made) == len(buffers):
            found.append(Room(nbytes=compat.aval_nbytes(v.aval), until=min(made)))
    return tuple(found)


def _source(eqn: JaxprEqn, v: Var, readers: Mapping[Var, Sequence[int]]) -> Atom | None:
    """The operand of `eqn` that lies where its result `v` does; None if there is none."""
    if eqn.primitive.name in RESHAPES:
        return eqn.invars[0]
    if eqn.primitive.name == "scan":
        n_consts, n_carry = compat.scan_sizes(eqn)
        if (k := eqn.outvars.index(v)) < n_carry:
            start = eqn.invars[n_consts + k]
            return start if compat.is_variable(start) and len(readers[start]) == 1 else None
    return None
