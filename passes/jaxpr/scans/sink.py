"""Move what is small outside a scan and large inside it into the scan's body.

JAX computes what does not change from one iteration to the next once, outside: a scalar that is broadcast to
the shape of an activation becomes an array that is alive through the whole loop. Inside the body the
broadcast is part of the kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import flat_body
from passes.jaxpr.primitives import INSIDE, kind_of
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import (
    bodies_of,
    body_consts,
    carried_inputs,
    renewed,
    run_scan,
    splice,
    when_needed,
)

# By how much a value must be larger than what it is made of.
GROWTH = 8


@compat.cached_by_jaxpr
def sink_into_scans(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr whose scans' constants are made in their bodies where they come from much less."""
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    rename: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        moved = _moved(jaxpr, eqn, producer) if eqn.primitive.name == "scan" else []
        if not moved:
            eqns.append(compat.rename_inputs(eqn, rename))
            continue
        new, results = with_moved(eqn, moved, rename)
        eqns += new
        rename.update(zip(eqn.outvars, results, strict=True))
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns, rename=rename)) if rename else jaxpr


def _moved(jaxpr: Jaxpr, scan: JaxprEqn, producer: dict[Var, int]) -> list[JaxprEqn]:
    """Equations to recompute in the body, in order: those of large constants that come from little."""
    n_consts, _ = compat.scan_sizes(scan)
    if any(compat.is_ref(v.aval) for v in scan.invars):
        return []
    chains: set[int] = set()
    for v in scan.invars[:n_consts]:
        if compat.is_variable(v):
            chains |= _chain(jaxpr, v, producer)
    return [jaxpr.eqns[i] for i in sorted(chains)]


def _chain(jaxpr: Jaxpr, v: Atom, producer: dict[Var, int]) -> set[int]:
    """The equations that make `v` from inputs of an eighth of its bytes at most; none if there are none."""
    chain: set[int] = set()
    limit = compat.aval_nbytes(v.aval) // GROWTH
    pending = [v]
    while pending:
        u = pending.pop()
        if u is not v and compat.aval_nbytes(u.aval) <= limit:
            continue
        i = compat.of_variable(producer, u)
        if i is None or has_effect(jaxpr.eqns[i]) or kind_of(jaxpr.eqns[i].primitive.name) not in INSIDE:
            return set()
        if i not in chain:
            chain.add(i)
            pending.extend(x for x in jaxpr.eqns[i].invars if compat.is_variable(x))
    return chain if limit else set()


def with_moved(
    loop: JaxprEqn, moved: Sequence[JaxprEqn], rename: Mapping[Var, Atom], tie: int | None = None
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations and results of a `scan` or `while` with `moved` made in its body, where it is needed.

    Args:
        rename: what the loop's operands, and those of `moved`, are called now.
        tie: place of a carried value among the body's inputs; `moved` waits for it in every iteration.
    """
    first, end = body_consts(loop)
    (closed,) = bodies_of(loop)
    body = renewed(flat_body(closed))
    operands, variables = loop.invars[first:end], body.invars[: end - first]
    made = {v for eqn in moved for v in eqn.outvars}
    outside = dict.fromkeys(x for eqn in moved for x in eqn.invars if compat.is_variable(x) and x not in made)
    inside = {x: compat.fresh_var(x) for x in outside}
    known, held, eqns = _tied(body, inside, tie)
    replaced = {
        variable: v
        for v, variable in zip(operands, variables, strict=True)
        if compat.is_variable(v) and v in made
    }
    for variable, v in replaced.items():
        known.setdefault(v, variable)
    sunk = _renamed_eqns(moved, known)
    held |= {variable: known[v] for variable, v in replaced.items() if known[v] is not variable}
    kept = [k for k, variable in enumerate(variables) if variable not in replaced]
    new = compat.rebuild(
        body,
        eqns=[*eqns, *when_needed(sunk, [compat.rename_inputs(eqn, held) for eqn in body.eqns])],
        invars=[*inside.values(), *(variables[k] for k in kept), *body.invars[end - first :]],
        constvars=[],
        rename=held,
    )
    atoms = [*loop.invars[:first], *outside, *(operands[k] for k in kept), *loop.invars[end:]]
    atoms = [compat.renamed(v, rename) for v in atoms]
    count = len(inside) + len(kept)
    if loop.primitive.name == "while":
        params = {**loop.params, "body_jaxpr": compat.close_jaxpr(new, []), "body_nconsts": count}
        return [loop.replace(invars=atoms, params=params)], list(loop.outvars)
    n_carry = len(carried_inputs(loop))
    return splice(lambda values: run_scan(loop, new, values, count, n_carry), atoms, loop)


def _tied(
    body: Jaxpr, inside: Mapping[Var, Var], tie: int | None
) -> tuple[dict[Var, Var], dict[Var, Atom], list[JaxprEqn]]:
    """What is read inside by its names outside, what the carried value is called behind a barrier, and the
    barrier."""
    if tie is None:
        return dict(inside), {}, []
    operands = [*inside.values(), body.invars[tie]]
    results = [compat.fresh_var(v) for v in operands]
    known = dict(zip(inside, results, strict=False))
    return known, {body.invars[tie]: results[-1]}, [compat.barrier_eqn(operands, results)]


def _renamed_eqns(eqns: Sequence[JaxprEqn], known: dict[Var, Var]) -> list[JaxprEqn]:
    """Copies of `eqns` with other variables; `known` gives some of them and receives the others."""
    copies = []
    for eqn in eqns:
        invars = [compat.renamed(v, known) for v in eqn.invars]
        for v in eqn.outvars:
            if not isinstance(v, compat.DropVar):
                known.setdefault(v, compat.fresh_var(v))
        outvars = [v if isinstance(v, compat.DropVar) else known[v] for v in eqn.outvars]
        copies.append(eqn.replace(invars=invars, outvars=outvars))
    return copies
