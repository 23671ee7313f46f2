"""Scans of higher derivatives, each of which reads stacks of several before it, as pairs of scans.

    A   forward                   stacks a
    B   its gradient, backward    reads a         stacks b
    C   B's derivative, forward   reads a, b      stacks c
    D   the same, backward        reads a, c

What several scans read no pair can give up (`passes.jaxpr.scans.pairs`), so all of it would stay: in the
bytes of `jax.checkpoint` a gradient penalty and a Hessian times a vector by two gradients were refused.
Here A and B stay a pair. C recomputes what it reads, from what A's and B's iterations start with, and
stacks for D what that read of A:

    C   recomputes a and b        stacks a, c     of what A and B carry, and their own operands
    D                             reads a, c

Each scan is in one pair then, which keeps of its stacks what pays. So are scans inside of the two bodies of
a pair, such as layers in steps that are differentiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from passes.cost import DeviceModel
from passes.ir import OpId
from passes.jaxpr import compat
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn, Var
from passes.jaxpr.flops import iterations_of
from passes.jaxpr.lift import lift
from passes.jaxpr.primitives import CONTROL_FLOW, Kind
from passes.jaxpr.purity import eqn_kind
from passes.jaxpr.rewrite import (
    bodies_of,
    defined,
    leading_to,
    renewed,
    run_scan,
    splice,
    with_bodies,
    with_equations,
)
from passes.jaxpr.scans.choice import Choice, in_iterations
from passes.jaxpr.scans.cut import joined_body
from passes.jaxpr.scans.emit import rewrite, with_groups
from passes.jaxpr.scans.pairs import Body, ScanPair, body_of, find_pairs, flat, sources
from passes.outcome import RECOMPUTE_SCOPE, Recomputed, recomputed_op

type Groups = tuple[list[list[JaxprEqn]], dict[Var, Atom]]


@compat.cached_by_jaxpr
def in_pairs(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr with open pairs whose scans read stacks of one other, and of the rest what iterations
    start with, those in bodies of control flow, too; the same object where each reads stacks of one."""
    if (made := _grouped(jaxpr)) is not None:
        groups, rename = made
        eqns = [eqn for group in groups for eqn in group]
        jaxpr = compat.without_dead_code(compat.rebuild(jaxpr, eqns=eqns, rename=rename))
    pairs = find_pairs(jaxpr)
    nested = [choice for pair in pairs if (choice := _nested(pair)) is not None]
    places = {place for pair in pairs for place in (pair.first, pair.second)}
    eqns = [eqn if i in places else _inside(eqn) for i, eqn in enumerate(jaxpr.eqns)]
    jaxpr = with_equations(jaxpr, eqns)
    return rewrite(jaxpr, nested) if nested else jaxpr


def recomputed_in(jaxpr: Jaxpr, device: DeviceModel) -> tuple[Recomputed, ...]:
    """What the scans of an open jaxpr recompute since they are in pairs; costs of all iterations."""
    found: list[Recomputed] = []
    for eqn in jaxpr.eqns:
        for closed in bodies_of(eqn) if eqn.primitive.name in CONTROL_FLOW else ():
            times, body = iterations_of(eqn), flat(closed)
            if any(map(_is_marked, body.eqns)):
                lifted = lift(body, replace(device, in_body=True), as_xla=True)
                own = [op for op, e in enumerate(lifted.bodies) if _is_marked(lifted.jaxpr.eqns[e[-1]])]
                made = [recomputed_op(lifted.program, OpId(op), "jaxpr") for op in own]
                found += [in_iterations(r, times, "a scan") for r in made]
            found += [replace(r, cost_ns=times * r.cost_ns) for r in recomputed_in(body, device)]
    return tuple(found)


def _is_marked(eqn: JaxprEqn) -> bool:
    return compat.is_in_scope(eqn, RECOMPUTE_SCOPE)


def _grouped(jaxpr: Jaxpr) -> Groups | None:
    """For every equation what stands in its place, and the results' new names; None where scans read one."""
    read = sources(jaxpr)
    partners = _partners(read)
    if all(list(found) == [partners.get(i)] for i, found in read.items()):
        return None
    return _Chain(jaxpr, {*read, *(i for found in read.values() for i in found)}, partners).written()


def _nested(pair: ScanPair) -> Choice | None:
    """A pair with the scans inside of both its bodies in pairs, and all of the first that the second reads
    kept; None where they are."""
    made = _grouped(joined_body(pair, passed=False))
    if made is None:
        return None
    pair = with_groups(pair, *made)
    read = pair.consumer.jaxpr
    wanted = {*compat.variables(v for eqn in read.eqns for v in eqn.invars), *compat.variables(read.outvars)}
    kept = tuple(v for v in defined(pair.producer.jaxpr) if v in wanted)
    return Choice(pair=pair, kept=kept, stacked_bytes=0, recomputed=())


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    """Control flow with what its bodies hold in pairs."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return eqn
    bodies = []
    for closed in bodies_of(eqn):
        body = flat(closed)
        paired = in_pairs(body)
        bodies.append(closed if paired is body else compat.close_jaxpr(paired, []))
    return with_bodies(eqn, bodies)


def _partners(read: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """For scans the one whose stacks they go on reading: of those that are in no pair yet, the one that they
    read most of.

    Args:
        read: for scans, in order, those before them with the bytes that they read of their stacks.
    """
    partners: dict[int, int] = {}
    for second, found in read.items():
        paired = {*partners, *partners.values()}
        free = [first for first in found if first not in paired]
        if free:
            partners[second] = max(free, key=lambda first: (found[first], first))
    return partners


class _Chain:
    """Scans that read each other's stacks, and one iteration of them all as one straight-line program.

    Attributes:
        bodies: by place; the variables in which one reads stacks of another are that one's.
        partners: second -> first.
        owner: for variables of an iteration the scan that takes or makes them.
        operand: for those that are no more than operands of a scan what they are in the program.
        whole: those that are the same in every iteration.
        eqns, maker: of the iteration, and which of them makes a variable; what must not run again, and what
            is carried, nothing makes.
        recomputed: for every scan what it recomputes.
        slices: for every scan what it reads besides its own, of whose stacks; None for operands.
        added: for every scan what else it stacks.
    """

    def __init__(self, jaxpr: Jaxpr, places: Iterable[int], partners: Mapping[int, int]) -> None:
        self.jaxpr = jaxpr
        self.partners = partners
        self.bodies: dict[int, Body] = {}
        self.owner: dict[Var, int] = {}
        self.operand: dict[Var, Atom] = {}
        self.whole: set[Var] = set()
        self.eqns: list[JaxprEqn] = []
        self.maker: dict[Var, int] = {}
        self.recomputed: dict[int, list[JaxprEqn]] = {}
        self.slices: dict[int, dict[Var, int | None]] = {}
        self.added: dict[int, dict[Var, None]] = {}
        stacked: dict[Var, Var] = {}
        for place in sorted(places):
            self._join(place, stacked)
        for place in self.bodies:
            self._arrange(place)

    def _join(self, place: int, stacked: dict[Var, Var]) -> None:
        """A scan's body behind those that are there.

        Args:
            stacked: what is in an iteration of theirs for their stacks; receives those of this one.
        """
        body = body_of(self.jaxpr.eqns[place])
        known: dict[Var, Atom] = {}
        for v, operand in zip(body.x_vars, body.xs, strict=True):
            if compat.is_variable(operand) and operand in stacked:
                known[v] = stacked[operand]
        self.bodies[place] = body = replace(body, jaxpr=renewed(body.jaxpr, known))
        for stack, y in zip(body.ys, body.y_vars, strict=True):
            if compat.is_variable(y) and not isinstance(stack, compat.DropVar):
                stacked[stack] = y
        self._own(place)

    def _own(self, place: int) -> None:
        """Note what a scan takes and makes."""
        body = self.bodies[place]
        for k, (v, operand) in enumerate(zip(body.jaxpr.invars, body.eqn.invars, strict=True)):
            if v in self.owner:  # it reads another one's
                continue
            self.owner[v] = place
            if k < body.n_consts:
                self.whole.add(v)
            if not body.n_consts <= k < body.n_consts + body.n_carry:
                self.operand[v] = operand
        for eqn in body.jaxpr.eqns:
            self.owner |= dict.fromkeys(eqn.outvars, place)
            if eqn_kind(eqn) is not Kind.OPAQUE:
                self.maker |= dict.fromkeys(eqn.outvars, len(self.eqns))
            self.eqns.append(eqn)
        self.recomputed[place], self.slices[place], self.added[place] = [], {}, {}

    def _read(self, place: int) -> list[Var]:
        """What a scan reads of the others."""
        return [v for v in dict.fromkeys(self.bodies[place].x_vars) if self.owner[v] != place]

    def _arrange(self, place: int) -> None:
        """Where a scan has from what it reads of others."""
        first = self.partners.get(place)
        if first is not None:
            through = [v for v in self._read(place) if self._passes(v, first)]
            self.slices[place] |= dict.fromkeys(through, first)
            self._recompute(place, [v for v in self._read(place) if v not in self.slices[place]])
            return
        second = next((s for s, f in self.partners.items() if f == place), None)
        passed = [] if second is None else [v for v in self._read(second) if self._passes(v, place)]
        missing = [v for v in passed if self.owner[v] != place]
        self._recompute(place, [*self._read(place), *missing])
        self.added[place] |= dict.fromkeys(missing)

    def _passes(self, v: Var, first: int) -> bool:
        """True if the second scan of a pair has a variable of the first, which recomputes it if need be."""
        return self.owner[v] == first or (self.owner[v] < first and v in self.maker)

    def _recompute(self, place: int, wanted: list[Var]) -> None:
        eqns = [self.eqns[i] for i in leading_to(wanted, self.eqns, self.maker.get)]
        made = {v for eqn in eqns for v in eqn.outvars}
        self.recomputed[place] += eqns
        for v in compat.variables([*wanted, *(v for eqn in eqns for v in eqn.invars)]):
            if v in self.operand:
                self.slices[place][v] = None
            elif v not in made:
                self.slices[place][v] = self.owner[v]
                self.added[self.owner[v]][v] = None

    def written(self) -> Groups:
        """For every equation what stands in its place, and the results' new names."""
        rename: dict[Var, Atom] = {}
        stacks: dict[int, dict[Var, Atom]] = {}
        groups: list[list[JaxprEqn]] = []
        for place, old in enumerate(self.jaxpr.eqns):
            eqn = compat.rename_inputs(old, rename)
            if place not in self.bodies:
                groups.append([eqn])
                continue
            eqns, results = self._scan(place, eqn, stacks, rename)
            groups.append(eqns)
            names = zip(old.outvars, results, strict=False)
            rename |= {v: atom for v, atom in names if not isinstance(v, compat.DropVar)}
            body = self.bodies[place]
            made = zip([*body.y_vars, *self.added[place]], results[body.n_carry :], strict=True)
            stacks[place] = {v: atom for v, atom in made if compat.is_variable(v)}
        return groups, rename

    def _scan(
        self, place: int, eqn: JaxprEqn, stacks: Mapping[int, Mapping[Var, Atom]], rename: Mapping[Var, Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        """One scan anew; its results, what else it stacks last."""
        body, read = self.bodies[place], self.slices[place]
        n_fixed = body.n_consts + body.n_carry
        own = zip(body.x_vars, eqn.invars[n_fixed:], strict=True)
        slices = {v: atom for v, atom in own if v not in read}
        whole: dict[Var, Atom] = {}
        for v, source in read.items():
            atom = compat.renamed(self.operand[v], rename) if source is None else stacks[source][v]
            (whole if v in self.whole else slices)[v] = atom
        variables = body.jaxpr.invars
        invars = [*whole, *variables[:n_fixed], *slices]
        new = compat.rebuild(
            body.jaxpr,
            eqns=[*(compat.in_scope(e, RECOMPUTE_SCOPE) for e in self.recomputed[place]), *body.jaxpr.eqns],
            invars=invars,
            outvars=[*body.jaxpr.outvars, *self.added[place]],
            constvars=[],
        )
        atoms = [*whole.values(), *eqn.invars[:n_fixed], *slices.values()]
        n_consts = len(whole) + body.n_consts
        return splice(lambda values: run_scan(eqn, new, values, n_consts, body.n_carry), atoms, eqn)
