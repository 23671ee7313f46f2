"""A forward and a backward program as one, and one program as two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, ClosedJaxpr, Jaxpr, Var


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

    What makes a result of the forward half is in it wherever a plan has it, and waits for no cotangent there.

    Args:
        n_arguments: how many invars are the forward half's; the others are cotangents.
        n_forward_results: how many results are the forward half's.
    """
    backward_vars, behind = set(jaxpr.invars[n_arguments:]), list[int]()
    for i, eqn in enumerate(jaxpr.eqns):
        if i >= cut or not backward_vars.isdisjoint(compat.variables(eqn.invars)):
            behind.append(i)
            backward_vars.update(eqn.outvars)
    outvars = jaxpr.outvars
    moved, past = _made_behind(jaxpr, behind, outvars[:n_forward_results])
    is_backward = set(behind) - moved
    forward_eqns = [compat.rename_inputs(e, past) for i, e in enumerate(jaxpr.eqns) if i not in is_backward]
    backward_eqns = [e for i, e in enumerate(jaxpr.eqns) if i in is_backward]
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
            outvars=[*(compat.renamed(v, past) for v in outvars[:n_forward_results]), *saved],
        ),
        backward=compat.rebuild(
            jaxpr,
            invars=[*saved, *jaxpr.invars[n_arguments:]],
            eqns=backward_eqns,
            outvars=outvars[n_forward_results:],
        ),
        n_saved=len(saved),
    )


def _made_behind(
    jaxpr: Jaxpr, behind: Sequence[int], results: Sequence[Atom]
) -> tuple[set[int], dict[Var, Atom]]:
    """Which of the equations `behind` make `results`, and what these read there instead of what only waits.

    A barrier says when, and not what: its results are its operands.
    """
    needed, moved, past = set(compat.variables(results)), set[int](), dict[Var, Atom]()
    for i in reversed(behind):
        eqn = jaxpr.eqns[i]
        if eqn.primitive is compat.optimization_barrier_p:
            waits = {v: x for v, x in zip(eqn.outvars, eqn.invars, strict=True) if v in needed}
            past.update(waits)
            needed.update(compat.variables(waits.values()))
        elif not needed.isdisjoint(eqn.outvars):
            moved.add(i)
            needed.update(compat.variables(eqn.invars))
    for v in reversed(past):
        past[v] = compat.renamed(past[v], past)
    return moved, past


def closed_halves(joined: Joined, halves: Split) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Forward and backward half as closed jaxprs; the constants go to the forward half."""
    n_consts = joined.n_consts
    forward = compat.rebuild(
        halves.forward,
        constvars=halves.forward.invars[:n_consts],
        invars=halves.forward.invars[n_consts:],
    )
    return compat.close_jaxpr(forward, joined.consts), compat.close_jaxpr(halves.backward, [])
