"""Which values of a program constraints are about: what is kept, what is dropped before the backward pass.

A value and its views (reshape, transpose, `checkpoint_name`) are one value here, named after the equation
that makes it. So `checkpoint_name(tanh(x), "h")` speaks of the result of tanh, whichever of the two the
backward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.primitives import CONTROL_FLOW, Kind, kind_of
from passes.jaxpr.purity import eqn_kind
from passes.reach import reached
from passes.saved import OFFLOADED, is_saved

Policy = Callable[..., Any]


class ConstraintUnsupported(Exception):
    """A constraint that cannot be kept, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a user asked about single values.

    Attributes:
        save: names of values that are never recomputed.
        recompute: names of values that are not kept across to the backward pass, nor is what is computed
            elementwise from them.
        policy: as `jax.checkpoint` takes it: True for what is as in `save` if the backward pass needs it,
            False for what is as in `recompute`, offload for what is as in `offload`; None asks for nothing.
        offload: names of values that are never recomputed, and wait in the host's memory.
    """

    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    policy: Policy | None = None
    offload: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{key}={names}"
            for key, names in (("save", self.save), ("recompute", self.recompute), ("offload", self.offload))
            if names
        ]
        if self.policy is not None:
            name = getattr(self.policy, "__qualname__", type(self.policy).__name__)
            parts.append(f"policy={name.replace('<locals>.', '')}")
        return ", ".join(parts)


def names_in(jaxpr: Jaxpr) -> set[str]:
    """All names that `checkpoint_name` gives in an open jaxpr and inside its equations."""
    names = {name for eqn in jaxpr.eqns if (name := compat.checkpoint_name_of(eqn)) is not None}
    return names.union(*(names_in(inner) for eqn in jaxpr.eqns for inner in compat.inner_jaxprs(eqn)))


def keeps_marked(jaxpr: Jaxpr) -> bool:
    """True if a value of an open jaxpr, or inside its equations, is marked as kept (`passes.saved`)."""
    return any(map(is_saved, names_in(jaxpr)))


class Values:
    """The values of straight-line equations.

    Args:
        eqns: the equations, calls inlined.
        backward: for every equation whether it belongs to a backward pass.
        constraints: what was asked.
        passed: variables that pass to a backward pass which is not among `eqns`.
        kept: what is kept, too.
        policies: for every equation the policy that is asked about it, loops and branches, too, or None;
            without them all others are under the policy of `constraints`.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        backward: Sequence[bool],
        constraints: Constraints,
        passed: Sequence[Atom] = (),
        kept: Collection[Var] = (),
        policies: Sequence[Policy | None] = (),
    ) -> None:
        self.place = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self._eqns = eqns
        self._backward = backward
        read = [v for eqn, b in zip(eqns, backward, strict=True) if b for v in eqn.invars]
        # Values that are alive across, under the name of the value that they are views of.
        self._crossing = {self.base(v) for v in (*read, *passed) if self._is_forward(v)}
        self.saved: set[Var] = {self.base(v) for v in kept}
        self.offloaded: set[Var] = set()
        self.dropped: set[Var] = set()
        self._take_names(constraints)
        self._take_checkpoints(passed)
        wanted = self._take_policies(policies or [self._policy_of(eqn, constraints) for eqn in eqns])
        self.dropped -= self.saved | wanted
        self._drop_what_follows()
        needed = self._needed()
        self.saved |= {v for v in needed & wanted if self._producer(v) is not None}
        self.offloaded &= self.saved
        self.dropped &= needed
        self._check_recomputable()

    def base(self, v: Var) -> Var:
        """The value that `v` is a view of, perhaps itself."""
        while (i := self.place.get(v)) is not None:
            eqn = self._eqns[i]
            if not _is_view(eqn) or not compat.is_variable(eqn.invars[0]):
                break
            v = eqn.invars[0]
        return v

    def is_dropped(self, v: Atom) -> bool:
        """True for a variable of the forward pass that must not be kept for the backward pass."""
        return self._is_forward(v) and self.base(v) in self.dropped

    def _is_offloaded(self, v: Atom) -> bool:
        return self._is_forward(v) and self.base(v) in self.offloaded

    def _is_forward(self, v: Atom) -> TypeGuard[Var]:
        return compat.is_variable(v) and v in self.place and not self._backward[self.place[v]]

    def _producer(self, base: Var) -> JaxprEqn | None:
        i = self.place.get(base)
        return None if i is None else self._eqns[i]

    def _take_names(self, constraints: Constraints) -> None:
        for eqn, backward in zip(self._eqns, self._backward, strict=True):
            name = compat.checkpoint_name_of(eqn)
            if name is None or self._producer(base := self.base(eqn.outvars[0])) is None:
                continue
            if is_saved(name) or name in (*constraints.save, *constraints.offload):
                self.saved.add(base)
                if name == OFFLOADED or name in constraints.offload:
                    self.offloaded.add(base)
            elif name in constraints.recompute and not backward:
                self.dropped.add(base)

    def _take_checkpoints(self, passed: Sequence[Atom]) -> None:
        """What the policy of a `jax.checkpoint` inside the program saved."""
        held = [v for e in self._eqns if kind_of(e.primitive.name) is Kind.BARRIER for v in e.invars]
        for v in (*held, *passed):
            if self._is_forward(v) and compat.is_full_precision(self._eqns[self.place[v]]):
                base = self.base(v)
                if self._producer(base) is not None:
                    self.saved.add(base)

    @staticmethod
    def _policy_of(eqn: JaxprEqn, constraints: Constraints) -> Policy | None:
        return None if eqn.primitive.name in CONTROL_FLOW else constraints.policy

    def _take_policies(self, policies: Sequence[Policy | None]) -> set[Var]:
        """Drop what policies do not save; what they save. What is saved in one form is so in every."""
        wanted: set[Var] = set()
        for eqn, backward, policy in zip(self._eqns, self._backward, policies, strict=True):
            if backward or policy is None:
                continue
            saves = compat.policy_saves(policy, eqn)
            if saves is None:
                self.offloaded.update(map(self.base, eqn.outvars))
            if saves is None or saves:
                wanted.update(map(self.base, eqn.outvars))
            elif eqn_kind(eqn) is not Kind.OPAQUE:
                self.dropped.update(v for v in eqn.outvars if self.base(v) is v)
        return wanted

    def _drop_what_follows(self) -> None:
        """What is computed elementwise from dropped values, or from what waits on the host, would be kept on
        the device in their stead."""
        if not self.dropped and not self.offloaded:
            return
        for eqn, backward in zip(self._eqns, self._backward, strict=True):
            left = any(self.is_dropped(v) or self._is_offloaded(v) for v in eqn.invars)
            if left and kind_of(eqn.primitive.name) is Kind.FUSIBLE and not backward:
                self.dropped |= {v for v in eqn.outvars if v in self._crossing} - self.saved

    def _needed(self) -> set[Var]:
        """What crosses, and what dropped values that cross are computed from."""

        def inputs(v: Var) -> list[Var]:
            read = self._eqns[self.place[v]].invars if v in self.dropped else ()
            return [self.base(u) for u in read if self._is_forward(u)]

        return reached(self._crossing, inputs)

    def _check_recomputable(self) -> None:
        for v in sorted(self.dropped, key=self.place.__getitem__):
            eqn = self._eqns[self.place[v]]
            if eqn_kind(eqn) is Kind.OPAQUE:
                raise ConstraintUnsupported(
                    f"recompute: {eqn.primitive.name} at {compat.source_line(eqn)} cannot be recomputed. "
                    "Leave its name out, or name a value that is computed from it."
                )


def _is_view(eqn: JaxprEqn) -> bool:
    if is_saved(compat.checkpoint_name_of(eqn)):
        return False
    return kind_of(eqn.primitive.name) is Kind.VIEW or compat.is_full_precision(eqn)
