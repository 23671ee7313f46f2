"""Stacks that a scan fills and other scans read, kept in the host's memory: what a user forced there.

The last thing that is done to a program. Each iteration of the first scan sends its slice to the host, each
iteration of a scan that reads the stack brings one back: XLA runs both beside the iteration's kernels, and
the stack takes no room on the device.

    carry, stack       = scan(f, c0, xs)       f's slice: device_put(slice, host)
    carry, grads       = scan(b, c1, stack)    b's slice: device_put(slice, device), at its beginning

Not done: stacks that anything else reads, or that pass from a program that was differentiated to its
gradient's; those stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from passes.jaxpr import compat
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.jaxpr.rewrite import bodies_of, splice, with_bodies
from passes.jaxpr.values import names_in
from passes.outcome import Paged
from passes.saved import OFFLOADED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """A stack to be moved: the scan that fills it, which of its results, and the scans that read it."""

    maker: int
    result: int
    readers: tuple[int, ...]


def with_host_stacks(closed: Any) -> tuple[Any, tuple[Paged, ...]]:
    """A program whose marked stacks are on the host, and those stacks; the same object if there are none.

    Args:
        closed: after it was planned, calls inlined.
    """
    jaxpr, consts = compat.open_jaxpr(closed)
    if OFFLOADED not in names_in(jaxpr):
        return closed, ()
    eqns, paged = list(jaxpr.eqns), []
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name in CONTROL_FLOW:
            found = [with_host_stacks(body) for body in bodies_of(eqn)]
            eqns[i] = with_bodies(eqn, [body for body, _ in found])
            paged += [p for _, inside in found for p in inside]
    for stack in _stacks(eqns, jaxpr.outvars):
        paged.append(_move(eqns, stack))
    if not paged:
        return closed, ()
    return compat.close_jaxpr(compat.rebuild(jaxpr, eqns=eqns, outvars=jaxpr.outvars), consts), tuple(paged)


def _stacks(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[_Stack]:
    """Marked stacks that only other scans read, slice by slice."""
    readers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in filter(compat.is_variable, eqn.invars):
            readers.setdefault(v, []).append(i)
    found = []
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan":
            continue
        n_carry = compat.scan_sizes(eqn)[1]
        marked = _marked(compat.open_jaxpr(bodies_of(eqn)[0])[0])
        for k, (inner, outer) in enumerate(zip(_body(eqn).outvars, eqn.outvars, strict=True)):
            own = tuple(dict.fromkeys(readers.get(outer, ())))
            if k < n_carry or inner not in marked or not own or outer in outvars:
                continue
            if all(_is_sliced(eqns[r], outer) for r in own):
                found.append(_Stack(maker=i, result=k, readers=own))
    return found


def _body(scan: Any) -> Any:
    return compat.open_jaxpr(bodies_of(scan)[0])[0]


def _marked(jaxpr: Any) -> set[Any]:
    """Values that a user forced to the host."""
    return {v for eqn in jaxpr.eqns if compat.checkpoint_name_of(eqn) == OFFLOADED for v in eqn.outvars}


def _is_sliced(eqn: Any, stack: Any) -> bool:
    """True if an equation is a scan that reads a stack slice by slice, and no other way."""
    if eqn.primitive.name != "scan":
        return False
    whole = eqn.invars[: sum(compat.scan_sizes(eqn))]
    return not any(v is stack for v in whole)


def _move(eqns: list[Any], stack: _Stack) -> Paged:
    """Move one stack to the host, in place."""
    maker = eqns[stack.maker]
    body = _body(maker)
    inner, old = body.outvars[stack.result], maker.outvars[stack.result]
    like = next(e for e in body.eqns if inner in e.outvars)
    put, (sent,) = _put([inner], jax.memory.Space.Host, like)
    outvars = [sent if k == stack.result else v for k, v in enumerate(body.outvars)]
    written = compat.rebuild(body, eqns=[*body.eqns, *put], outvars=outvars)
    _, (new,) = _put([old], jax.memory.Space.Host, maker)
    results = [new if k == stack.result else v for k, v in enumerate(maker.outvars)]
    eqns[stack.maker] = _with_body(maker, written).replace(outvars=results)
    for reader in stack.readers:
        eqns[reader] = _reading(eqns[reader], old, new, sent)
    return Paged(
        op=like.primitive.name if compat.checkpoint_name_of(like) is None else "scan's stack",
        source=compat.source_line(like),
        nbytes=compat.aval_nbytes(old.aval),
        times=len(stack.readers),
        stage="jaxpr",
    )


def _reading(scan: Any, old: Any, new: Any, like_slice: Any) -> Any:
    """A scan that brings slices of the stack `new` back, where it read those of `old`."""
    body = _body(scan)
    invars, eqns, rename = list(body.invars), [], {}
    for k, v in enumerate(scan.invars):
        if v is old:
            invars[k] = compat.fresh_var(like_slice)
            put, (back,) = _put([invars[k]], jax.memory.Space.Device, scan)
            eqns += put
            rename[body.invars[k]] = back
    eqns += [compat.rename_inputs(eqn, rename) for eqn in body.eqns]
    outvars = [compat.renamed(v, rename) for v in body.outvars]
    written = compat.rebuild(body, eqns=eqns, outvars=outvars, invars=invars)
    return _with_body(scan, written).replace(invars=[new if v is old else v for v in scan.invars])


def _with_body(scan: Any, body: Any) -> Any:
    _, consts = compat.open_jaxpr(bodies_of(scan)[0])
    return with_bodies(scan, [compat.close_jaxpr(body, consts)])


def _put(values: Sequence[Any], space: Any, like: Any) -> tuple[list[Any], list[Any]]:
    """Equations that copy values to a memory, and the variables of the copies."""
    return splice(lambda given: [jax.device_put(v, space, may_alias=False) for v in given], values, like)


def offloaded_bytes(jaxpr: Any, iterations: int = 1) -> int:
    """Bytes of all marked values of an open jaxpr, those in scans once for every iteration."""
    total = sum(iterations * compat.aval_nbytes(v.aval) for v in sorted(_marked(jaxpr), key=str))
    for eqn in jaxpr.eqns:
        inner_iterations = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        total += sum(
            offloaded_bytes(inner, iterations * inner_iterations) for inner in compat.inner_jaxprs(eqn)
        )
    return total


def uses_host(jaxpr: Any) -> bool:
    """True if an open jaxpr, or what is inside its equations, moves something between memories."""
    return any(
        any(isinstance(d, jax.memory.Space) for d in eqn.params.get("devices", ()))
        or any(uses_host(inner) for inner in compat.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
