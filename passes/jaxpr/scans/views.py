"""Let scans stack what is read of them: a cast or reshaped stack is a stack of cast or reshaped slices.

    ys = scan(f)                         zs = scan(f, then view on each slice)
    zs = view(ys)              ->
    scan(b, zs)                          scan(b, zs)

Both scans are a pair afterwards (`passes.jaxpr.scans.pairs`), and of two stacks one is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.inline import flat_body
from passes.jaxpr.purity import has_effect
from passes.jaxpr.rewrite import renewed, run_scan, splice
from passes.saved import is_saved

Slicewise = Callable[[Any], Any]

# Elementwise in their only operand, with parameters that hold for a slice as they are.
ELEMENTWISE = frozenset({"convert_element_type", "reduce_precision", "copy", "neg", "name"})


@compat.cached_by_jaxpr
def view_inside_scans(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr, calls inlined, whose scans make the views of their stacks that later scans slice."""
    producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    wanted: dict[int, dict[Var, list[JaxprEqn]]] = {}
    for eqn in jaxpr.eqns:
        for v in _sliced(eqn):
            chain = _chain(jaxpr, v, producer)
            if chain:
                wanted.setdefault(producer[compat.variables(chain[0].invars)[0]], {})[v] = chain
    if not wanted:
        return jaxpr
    rename: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i not in wanted:
            eqns.append(compat.rename_inputs(eqn, rename))
            continue
        new, results = _with_views(compat.rename_inputs(eqn, rename), eqn.outvars, list(wanted[i].values()))
        eqns += new
        rename.update(zip([*eqn.outvars, *wanted[i]], results, strict=True))
    return compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns, rename=rename))


def _sliced(eqn: JaxprEqn) -> list[Var]:
    """The variables that a scan reads slice by slice."""
    if eqn.primitive.name != "scan":
        return []
    return [v for v in eqn.invars[sum(compat.scan_sizes(eqn)) :] if compat.is_variable(v)]


def _chain(jaxpr: Jaxpr, v: Atom, producer: Mapping[Var, int]) -> list[JaxprEqn]:
    """The equations from a scan's stack to `v`, in order; none if it is something else, or a stack itself."""
    chain: list[JaxprEqn] = []
    while (i := compat.of_variable(producer, v)) is not None:
        eqn = jaxpr.eqns[i]
        if eqn.primitive.name == "scan":
            plain = not has_effect(eqn) and not any(compat.is_ref(u.aval) for u in eqn.invars)
            return chain[::-1] if plain and v in eqn.outvars[compat.scan_sizes(eqn)[1] :] else []
        if on_slice(eqn) is None:
            return []
        chain.append(eqn)
        v = eqn.invars[0]
    return []


def on_slice(eqn: JaxprEqn) -> Slicewise | None:
    """What an equation does to each slice of its operand's first axis; None if slices do not stay apart."""
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.invars) != 1 or not compat.is_variable(eqn.invars[0]) or not array_of(eqn.invars[0]).ndim:
        return None
    source, target = array_of(eqn.invars[0]), array_of(eqn.outvars[0])
    if is_saved(compat.checkpoint_name_of(eqn)):
        return None
    if name in ELEMENTWISE:
        return lambda x: eqn.primitive.bind(x, **params)
    if name == "transpose" and params["permutation"][0] == 0:
        return lambda x: jax.lax.transpose(x, [axis - 1 for axis in params["permutation"][1:]])
    same_rows = target.shape[:1] == source.shape[:1] and target.size == source.size
    # None of these changes the order of elements in memory, if sizes are equal and axes are not reordered.
    axes = params.get("broadcast_dimensions", ()) if name == "broadcast_in_dim" else ()
    in_order = list(axes) == sorted(axes) and not (name == "reshape" and params["dimensions"])
    if name in ("reshape", "squeeze", "broadcast_in_dim") and same_rows and in_order:
        return lambda x: jax.lax.reshape(x, target.shape[1:])
    return None


def _with_views(
    scan: JaxprEqn, stacks: Sequence[Var], chains: list[list[JaxprEqn]]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations of `scan` with the end of each chain as further stacks, and all its results."""
    n_consts, n_carry = compat.scan_sizes(scan)
    body = renewed(flat_body(scan.params["jaxpr"]))
    closed = compat.close_jaxpr(body, [])
    places = [list(stacks).index(compat.variables(chain[0].invars)[0]) for chain in chains]

    def iteration(values: list[Any]) -> list[Any]:
        results = list(compat.evaluate(closed, values))
        for place, chain in zip(places, chains, strict=True):
            x = results[place]
            for eqn in chain:
                step = on_slice(eqn)
                assert step is not None, "a chain holds nothing else"
                x = step(x)
            results.append(x)
        return results

    eqns, outvars = splice(iteration, body.invars, scan)
    new = compat.rebuild(body, eqns=eqns, outvars=outvars)
    return splice(lambda values: run_scan(scan, new, values, n_consts, n_carry), scan.invars, scan)
