"""A forward and a backward program as one, and one program as two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr, Jaxpr, JaxprEqn


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Two programs as one.

    Attributes:
        jaxpr: open, without constvars: (consts, args, cotangents) -> (outs, gradients).
        consts: values of the first inputs.
        n_arguments: how many inputs follow them before the cotangents.
        n_forward_eqns: how many equations, the first ones, are the forward program's.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    n_arguments: int
    n_forward_eqns: int

    @property
    def n_consts(self) -> int:
        """How many inputs are constants."""
        return len(self.consts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A joint program in two halves.

    Attributes:
        forward: arguments -> (results of the forward half, saved values).
        backward: (saved values, cotangents) -> results of the backward half.
        n_saved: how many values pass from one to the other.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    n_saved: int


def join(forward: ClosedJaxpr, backward: ClosedJaxpr, n_outs: int) -> Joined:
    """Both as one program.

    Args:
        forward: closed jaxpr, args -> (*outs, *residuals).
        backward: closed jaxpr, (*residuals, *cotangents) -> gradients.
        n_outs: how many of forward's results are outs.
    """
    first, first_consts = compat.open_jaxpr(forward)
    second, second_consts = compat.open_jaxpr(backward)
    residuals = first.outvars[n_outs:]
    rename = dict(zip(second.invars[: len(residuals)], residuals, strict=True))
    cotangents = second.invars[len(residuals) :]
    eqns = [*first.eqns, *(compat.rename_inputs(eqn, rename) for eqn in second.eqns)]
    gradients = [compat.renamed(v, rename) for v in second.outvars]
    constvars = [*first.constvars, *second.constvars]
    jaxpr = compat.rebuild(
        first,
        eqns=eqns,
        outvars=[*first.outvars[:n_outs], *gradients],
        invars=[*constvars, *first.invars, *cotangents],
        constvars=[],
    )
    return Joined(
        jaxpr=jaxpr,
        consts=[*first_consts, *second_consts],
        n_arguments=len(first.invars),
        n_forward_eqns=len(first.eqns),
    )


def split(jaxpr: Jaxpr, cut: int, *, n_arguments: int, n_forward_results: int) -> Split:
    """The first `cut` equations of an open jaxpr without constvars that need no cotangent, and the others.

    Args:
        n_arguments: how many invars are the forward half's; the others are cotangents.
        n_forward_results: how many results are the forward half's.
    """
    forward_eqns: list[JaxprEqn] = []
    backward_eqns: list[JaxprEqn] = []
    backward_vars = set(jaxpr.invars[n_arguments:])
    for i, eqn in enumerate(jaxpr.eqns):
        if i < cut and backward_vars.isdisjoint(compat.variables(eqn.invars)):
            forward_eqns.append(eqn)
        else:
            backward_eqns.append(eqn)
            backward_vars.update(eqn.outvars)
    outvars = jaxpr.outvars
    ready = dict.fromkeys(jaxpr.invars[:n_arguments])
    for eqn in forward_eqns:
        ready.update(dict.fromkeys(eqn.outvars))
    used = dict.fromkeys(v for eqn in backward_eqns for v in eqn.invars if compat.is_variable(v))
    used.update(dict.fromkeys(v for v in outvars[n_forward_results:] if compat.is_variable(v)))
    saved = [v for v in used if v in ready]
    return Split(
        forward=compat.rebuild(
            jaxpr,
            invars=jaxpr.invars[:n_arguments],
            eqns=forward_eqns,
            outvars=[*outvars[:n_forward_results], *saved],
        ),
        backward=compat.rebuild(
            jaxpr,
            invars=[*saved, *jaxpr.invars[n_arguments:]],
            eqns=backward_eqns,
            outvars=outvars[n_forward_results:],
        ),
        n_saved=len(saved),
    )


def closed_halves(joined: Joined, halves: Split) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Forward and backward half as closed jaxprs; the constants go to the forward half."""
    n_consts = joined.n_consts
    forward = compat.rebuild(
        halves.forward,
        constvars=halves.forward.invars[:n_consts],
        invars=halves.forward.invars[n_consts:],
    )
    return compat.close_jaxpr(forward, joined.consts), compat.close_jaxpr(halves.backward, [])
