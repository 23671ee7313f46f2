"""Stacks that a scan fills and other scans read, kept in the host's memory.

The last thing that is done to a program. Each iteration of the first scan sends its slice to the host, each
iteration of a scan that reads the stack brings one back: XLA runs both beside the iteration's kernels, and
the stack takes no room on the device.

    carry, stack       = scan(f, c0, xs)       f's slice: device_put(slice, host)
    carry, grads       = scan(b, c1, stack)    b's slice: device_put(slice, device), at its beginning

Which stacks are moved is a user's choice (values that are marked) or the planner's
(`passes.jaxpr.scans.host_choice`). Not done: stacks that anything else reads, or that pass from a program
that was differentiated to its gradient's; those stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import iterations_of
from passes.jaxpr.primitives import CONTROL_FLOW
from passes.jaxpr.purity import is_on_host
from passes.jaxpr.rewrite import bodies_of, readers_of, splice, with_bodies
from passes.jaxpr.values import names_in
from passes.outcome import Paged
from passes.saved import OFFLOADED

Key = tuple[int, ...]
"""Where a stack is made: equation and body of the control flow around it, its scan's place, which result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack that can wait on the host.

    Attributes:
        key: tells the stacks of a program apart.
        maker, readers: the scan that fills it, and those that read it; equations.
        result: which of its maker's results it is.
        forced: True if a user sends it to the host.
        iterations: how often the loops around it are known to run.
    """

    key: Key
    maker: JaxprEqn
    readers: tuple[JaxprEqn, ...]
    result: int
    forced: bool
    iterations: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stack."""
        return compat.aval_nbytes(self.maker.outvars[self.result].aval)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stack by the places of the equations around it."""

    stack: Stack
    maker: int
    readers: tuple[int, ...]


def stacks_of(jaxpr: Jaxpr) -> list[Stack]:
    """The stacks of an open jaxpr that can wait on the host, those in bodies of its control flow, too."""
    stacks: list[Stack] = []

    def note(stack: Stack) -> bool:
        stacks.append(stack)
        return False

    _moved(jaxpr, note, (), 1)
    return stacks


def with_stacks_on_host(jaxpr: Jaxpr, chosen: Collection[Key]) -> tuple[Jaxpr, tuple[Paged, ...]]:
    """An open jaxpr with some of its stacks on the host, and what the report says of them."""
    return _moved(jaxpr, lambda stack: stack.key in chosen, (), 1)


def with_host_stacks(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Paged, ...]]:
    """A program whose marked stacks are on the host, and those stacks; the same object if there are none.

    Args:
        closed: after it was planned, calls inlined.
    """
    jaxpr, consts = compat.open_jaxpr(closed)
    if OFFLOADED not in names_in(jaxpr):
        return closed, ()
    moved, paged = _moved(jaxpr, lambda stack: stack.forced, (), 1)
    return (compat.close_jaxpr(moved, consts), paged) if paged else (closed, ())


def _moved(
    jaxpr: Jaxpr, is_chosen: Callable[[Stack], bool], at: Key, iterations: int
) -> tuple[Jaxpr, tuple[Paged, ...]]:
    """An open jaxpr with the chosen stacks on the host; the same object if there are none."""
    eqns, paged = list(jaxpr.eqns), list[Paged]()
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in CONTROL_FLOW:
            inner_iterations = iterations * iterations_of(eqn)
            bodies, inside = [], list[Paged]()
            for k, body in enumerate(bodies_of(eqn)):
                opened, consts = compat.open_jaxpr(body)
                written, inner_paged = _moved(opened, is_chosen, (*at, i, k), inner_iterations)
                bodies.append(compat.close_jaxpr(written, consts) if inner_paged else body)
                inside += inner_paged
            if inside:
                eqns[i] = with_bodies(eqn, bodies)
                paged += inside
    for place in _places(eqns, jaxpr.outvars, at, iterations):
        if is_chosen(place.stack):
            paged.append(_move(eqns, place))
    if not paged:
        return jaxpr, ()
    return compat.rebuild(jaxpr, eqns=eqns, outvars=jaxpr.outvars), tuple(paged)


def _places(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], at: Key, iterations: int) -> list[_Place]:
    """Stacks that only scans read, slice by slice."""
    readers, places = readers_of(eqns), []
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan":
            continue
        n_carry = compat.scan_sizes(eqn)[1]
        body = _body(eqn)
        marked = _marked_slices(body)
        for k, (inner, outer) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
            own = tuple(dict.fromkeys(readers.get(outer, ())))
            if k < n_carry or not own or outer in outvars or not _can_move(inner):
                continue
            if all(_is_sliced(eqns[r], outer) for r in own):
                stack = Stack(
                    key=(*at, i, k), maker=eqn, readers=tuple(eqns[r] for r in own), result=k,
                    forced=inner in marked, iterations=iterations,
                )  # fmt: skip
                places.append(_Place(stack=stack, maker=i, readers=own))
    return places


def _can_move(slice_: Atom) -> bool:
    """True for a slice that is an array on the device; a number is not worth a copy."""
    is_array = compat.is_variable(slice_) and bool(getattr(slice_.aval, "shape", ()))
    return is_array and not is_on_host(slice_.aval)


def _body(scan: JaxprEqn) -> Jaxpr:
    return compat.open_jaxpr(bodies_of(scan)[0])[0]


def _marked(jaxpr: Jaxpr) -> set[Var]:
    """Values that a user forced to the host."""
    return {v for eqn in jaxpr.eqns if compat.checkpoint_name_of(eqn) == OFFLOADED for v in eqn.outvars}


def _marked_slices(body: Jaxpr) -> set[Var]:
    """Values of a body that a user forced to the host, and stacks of such values that its own scans make."""
    marked = _marked(body)
    for eqn in body.eqns:
        if eqn.primitive.name == "scan":
            inner = _body(eqn)
            slices = _marked_slices(inner)
            marked |= {v for v, slice_ in zip(eqn.outvars, inner.outvars, strict=True) if slice_ in slices}
    return marked


def _is_sliced(eqn: JaxprEqn, stack: Atom) -> bool:
    """True if an equation is a scan that reads a stack slice by slice, and no other way."""
    if eqn.primitive.name != "scan":
        return False
    whole = eqn.invars[: sum(compat.scan_sizes(eqn))]
    return not any(v is stack for v in whole)


def _move(eqns: list[JaxprEqn], place: _Place) -> Paged:
    """Move one stack to the host, in place."""
    maker, result = eqns[place.maker], place.stack.result
    body = _body(maker)
    inner, old = body.outvars[result], maker.outvars[result]
    like = next((e for e in body.eqns if inner in e.outvars), maker)
    put, (sent,) = _put([inner], jax.memory.Space.Host, like)
    outvars = [sent if k == result else v for k, v in enumerate(body.outvars)]
    written = compat.rebuild(body, eqns=[*body.eqns, *put], outvars=outvars)
    _, (new,) = _put([old], jax.memory.Space.Host, maker)
    results = [new if k == result else v for k, v in enumerate(maker.outvars)]
    eqns[place.maker] = _with_body(maker, written).replace(outvars=compat.variables(results))
    for reader in place.readers:
        eqns[reader] = _reading(eqns[reader], old, new, sent)
    is_named = like is maker or compat.checkpoint_name_of(like) is not None
    return Paged(
        op="scan's stack" if is_named else f"scan's stack of {like.primitive.name}",
        source=compat.source_line(like),
        nbytes=compat.aval_nbytes(old.aval),
        times=len(place.readers),
        stage="jaxpr",
    )


def _reading(scan: JaxprEqn, old: Atom, new: Atom, like_slice: Atom) -> JaxprEqn:
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
    new_invars = [new if v is old else v for v in scan.invars]
    return compat.replaced(_with_body(scan, written), invars=new_invars)


def _with_body(scan: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    _, consts = compat.open_jaxpr(bodies_of(scan)[0])
    return with_bodies(scan, [compat.close_jaxpr(body, consts)])


def _put(values: Sequence[Atom], space: Any, like: JaxprEqn) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that copy values to a memory, and the variables of the copies."""
    return splice(lambda given: [jax.device_put(v, space, may_alias=False) for v in given], values, like)


def offloaded_bytes(jaxpr: Jaxpr, iterations: int = 1) -> int:
    """Bytes of all marked values of an open jaxpr, those in scans once for every iteration."""
    total = sum(iterations * compat.aval_nbytes(v.aval) for v in sorted(_marked(jaxpr), key=str))
    for eqn in jaxpr.eqns:
        inner_iterations = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        total += sum(
            offloaded_bytes(inner, iterations * inner_iterations) for inner in compat.inner_jaxprs(eqn)
        )
    return total


def uses_host(jaxpr: Jaxpr) -> bool:
    """True if an open jaxpr, or what is inside its equations, moves something between memories."""
    return any(
        any(isinstance(d, jax.memory.Space) for d in eqn.params.get("devices", ()))
        or any(uses_host(inner) for inner in compat.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
