"""Forward and backward of reverse mode, made together, planned as one program and emitted as two parts.

    forward    args -> (*outs, *saved)
    backward   (*args, *saved, *cotangents) -> gradients

Plans are written for equations: in both parts every call is opened and every reference is a value, read at
the part's beginning and written at its end. The backward part takes the arguments for two reasons: its rules
may write into references, and derivatives of it are taken from the arguments (`coop_jax.source`). Where
neither happens the arguments are operands that nothing reads.

Which outs get a cotangent is not known yet when the forward part is made. A function that returns
(scalar, anything), as under `has_aux`, is planned for a cotangent of the scalar alone; any other one
for cotangents of all that can have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from coop_jax import lowering
from coop_jax.apart import forwarded
from coop_jax.config import RematConfig
from coop_jax.errors import UnsupportedError
from coop_jax.lowering import Planned
from coop_jax.source import Needed, Source
from passes.jaxpr import compat
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.quiet import ToldTwiceError, quiet
from passes.jaxpr.rewrite import reads_input, with_results, with_unread_inputs, without_inputs

compat.hide_frames(__file__)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Pair:
    """A forward and a backward part that belong together. Compared by identity.

    Attributes:
        forward: args -> (*outs, *saved that are neither an argument nor an out).
        backward: (*args, *saved, *cotangents) -> (*gradients of the nonzero arguments, *logs).
        saved: for every saved value where it comes from, as an index into (*forward's results, *args).
        references: the arguments that are references and that forward reads or writes. What they held before
            are the last ones of the saved values.
        differentiated: for every argument whether it has a tangent.
        tangents_out: for every out whether it has a tangent.
        cotangents: for every out whether backward takes its cotangent.
        needed: for every argument whether backward's results depend on it.
        logs: the tree of what the backward rules log.
        planned: the plan's outcome.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    saved: tuple[int, ...]
    references: tuple[int, ...]
    differentiated: tuple[bool, ...]
    tangents_out: tuple[bool, ...]
    cotangents: tuple[bool, ...]
    needed: tuple[bool, ...]
    logs: Any
    planned: Planned

    def __repr__(self) -> str:
        return f"Pair({len(self.saved)} saved)"

    def forward_source(self, jaxpr: ClosedJaxpr) -> Source:
        """Of the forward part, if `jaxpr` is what the pair was made of."""
        step = Primal(differentiated=self.differentiated, cotangents=self.cotangents)
        return Source(
            jaxpr=jaxpr,
            steps=(step,) if compat.has_rules(jaxpr) else (),
            operands=tuple(range(len(self.differentiated))),
            n_results=len(self.tangents_out),
            is_forward=True,
        )

    def backward_source(self, jaxpr: ClosedJaxpr) -> Source:
        """Of the backward part, if `jaxpr` is what the pair was made of."""
        n_args, n_refs = len(self.differentiated), len(self.references)
        n_operands = n_args + len(self.saved) + sum(self.cotangents)
        pull = Pullback(
            differentiated=self.differentiated, cotangents=self.cotangents, references=self.references
        )
        rest = range(n_args + len(self.saved) - n_refs, n_operands)
        needed = Needed(operands=(*self.needed, *(True for _ in rest)))
        return Source(
            jaxpr=jaxpr,
            steps=(pull,) if all(self.needed) else (pull, needed),
            operands=(*where(range(n_args), self.needed), *rest),
            n_results=len(self.backward.out_avals),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pullback:
    """Forward and backward at once: (*args, *what references held, *cotangents) -> (*gradients, *logs).

    Attributes:
        differentiated, cotangents, references: as in `Pair`.
    """

    differentiated: tuple[bool, ...]
    cotangents: tuple[bool, ...]
    references: tuple[int, ...] = ()

    def __call__(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """The pullback of `closed`, with all rules of derivatives that are in it."""
        return pull_jaxpr(closed, self)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Primal:
    """The outs where they are computed for a gradient: as the rules of derivatives compute them.

    Attributes:
        differentiated, cotangents: as in `Pair`.
    """

    differentiated: tuple[bool, ...]
    cotangents: tuple[bool, ...]

    def __call__(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """args -> outs, with the rules of derivatives that are in these rules."""
        return _primal_jaxpr(closed, self)


@compat.cached_by_jaxpr
def _primal_jaxpr(jaxpr: ClosedJaxpr, asked: Primal) -> ClosedJaxpr:
    def run(*args: Any) -> list[Any]:
        outs, _, rest = _vjp(jaxpr, asked.differentiated, asked.cotangents, args)
        return _in_order(outs, rest, asked.cotangents)

    return compat.trace(run, jaxpr.in_avals)


def once_more(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` where it is recomputed, to compute anew what it gave: see `passes.jaxpr.quiet`.

    Raises:
        UnsupportedError: what an `io_callback` gave back is needed.
    """
    try:
        return quiet(jaxpr)
    except ToldTwiceError as error:
        raise UnsupportedError(
            f"a derivative of a derivative would make the call of io_callback at {error} once more, and what "
            "it gives back is used. Call it outside of the decorated function."
        ) from None


@compat.cached_by_jaxpr
def pull_jaxpr(jaxpr: ClosedJaxpr, asked: Pullback) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of a pullback and the tree of its logs.

    Forward is run once more: on copies of the references that it uses, with what these held at first.
    """
    jaxpr = once_more(jaxpr)
    n_args, trees = len(asked.differentiated), []

    def pull(*values: Any) -> list[Any]:
        args, rest = list(values[:n_args]), values[n_args:]
        held, cotangents = rest[: len(asked.references)], rest[len(asked.references) :]
        outer = [(args[i], jax.new_ref(x)) for i, x in zip(asked.references, held, strict=True)]
        for i, (_, copy) in zip(asked.references, outer, strict=True):
            args[i] = copy
        pullback = _vjp(jaxpr, asked.differentiated, asked.cotangents, args)[1]
        for ref, copy in outer:
            copy[...] = ref[...]
        gradients, logs = pullback.with_logs(list(cotangents))
        for ref, copy in outer:
            ref[...] = jax.lax.stop_gradient(copy[...])
        leaves, tree = jax.tree.flatten(logs)
        trees.append(tree)
        return [*gradients, *leaves]

    held = [jaxpr.in_avals[i].inner_aval for i in asked.references]
    cotangents = map(compat.cotangent_aval, where(jaxpr.out_avals, asked.cotangents))
    return compat.trace(pull, [*jaxpr.in_avals, *held, *cotangents]), trees[0]


@compat.cached_by_jaxpr
def make_pair(jaxpr: ClosedJaxpr, differentiated: tuple[bool, ...], config: RematConfig) -> Pair:
    """Make, plan and name the parts of reverse mode."""
    tangents_out = _tangents_out(jaxpr, differentiated)
    cotangents = _expected_cotangents(jaxpr, tangents_out)
    halves = _halves(jaxpr, differentiated, cotangents)
    n_firsts = len(jaxpr.out_avals) + len(halves.references)
    if not halves.reads_cotangents(sum(cotangents)):
        tangents_out = _nonzero_tangents(jaxpr, differentiated)
    (forward, backward), planned = lowering.plan_pair(halves.forward, halves.backward, n_firsts, config)
    forward, saved = forwarded(forward, n_firsts)
    n_saved = len(saved)
    if halves.references:
        forward, saved = _forward_on_references(forward, saved, jaxpr, halves)
    return Pair(
        forward=forward,
        backward=_backward_with_arguments(backward, n_saved, jaxpr, halves),
        saved=saved,
        references=halves.used_forward,
        differentiated=differentiated,
        tangents_out=tangents_out,
        cotangents=cotangents,
        needed=halves.needed,
        logs=halves.logs,
        planned=planned,
    )


def _tangents_out(jaxpr: ClosedJaxpr, differentiated: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which outs have a tangent; of several some may be cut off from what is differentiated."""
    possible = tuple(map(compat.has_tangents, jaxpr.out_avals))
    return possible if sum(possible) < 2 else _nonzero_tangents(jaxpr, differentiated)


def _nonzero_tangents(jaxpr: ClosedJaxpr, differentiated: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which outs have a tangent that is not zero, by the rules of forward mode."""
    nonzero = compat.jvp_jaxpr(jaxpr, differentiated)[1]
    return tuple(n and compat.has_tangents(a) for n, a in zip(nonzero, jaxpr.out_avals, strict=True))


def _expected_cotangents(jaxpr: ClosedJaxpr, tangents_out: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which outs will get a cotangent: see this file's head."""
    first = jaxpr.out_avals[0] if jaxpr.out_avals else None
    if first is not None and tangents_out[0] and first.shape == ():
        return (True, *(False for _ in tangents_out[1:]))
    return tangents_out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halves:
    """Both parts as they are planned: calls opened, references as values, their last values as results.

    Attributes:
        forward: args -> (*outs, *last values of references, *residuals).
        backward: (*residuals, *references that it uses, *cotangents) -> (*gradients, *logs, *last values of
            these references).
        references: which arguments are references.
        used_forward, used_backward: which of these forward and backward read or write.
        needed: for every argument whether backward's results depend on it.
        logs: the tree of the logs.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    references: tuple[int, ...]
    used_forward: tuple[int, ...]
    used_backward: tuple[int, ...]
    needed: tuple[bool, ...]
    logs: Any

    def reads_cotangents(self, n: int) -> bool:
        """False if none of the `n` cotangents takes part in a gradient: then all may be zero."""
        jaxpr, _ = compat.open_jaxpr(self.backward)
        last = set(jaxpr.invars[len(jaxpr.invars) - n :])
        read = {v for eqn in jaxpr.eqns for v in compat.variables(eqn.invars)}
        return not last.isdisjoint(read | set(compat.variables(jaxpr.outvars)))


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What tracing the halves finds out.

    Attributes:
        tree: of the pullback's residuals.
        places: for every one of them the index of the argument that it is, if that is a reference.
        inner: for each of the others whether it is a reference that forward has made.
        logs: the tree of the logs.
    """

    tree: Any = None
    places: list[int | None] = field(default_factory=list)
    inner: list[bool] = field(default_factory=list)
    logs: Any = None


def _halves(jaxpr: ClosedJaxpr, differentiated: Sequence[bool], cotangents: Sequence[bool]) -> _Halves:
    n_outs, seen = len(jaxpr.out_avals), _Seen()
    references = tuple(i for i, aval in enumerate(jaxpr.in_avals) if compat.is_ref(aval))

    def forward(*args: Any) -> list[Any]:
        outs, pullback, rest = _vjp(jaxpr, differentiated, cotangents, args)
        leaves, seen.tree = jax.tree.flatten(pullback)
        seen.places = [next((i for i in references if args[i] is leaf), None) for leaf in leaves]
        residuals = [leaf for leaf, place in zip(leaves, seen.places, strict=True) if place is None]
        seen.inner = [compat.is_ref(jax.typeof(x)) for x in residuals]
        return [*_in_order(outs, rest, cotangents), *map(_value, residuals)]

    traced = compat.trace(forward, jaxpr.in_avals)

    def backward(*values: Any) -> list[Any]:
        cut, n_refs = len(seen.inner), len(references)
        pairs = zip(values[:cut], seen.inner, strict=True)
        residuals = iter([jax.new_ref(x) if inner else x for x, inner in pairs])
        outer = dict(zip(references, values[cut : cut + n_refs], strict=True))
        leaves = [next(residuals) if place is None else outer[place] for place in seen.places]
        pullback = jax.tree.unflatten(seen.tree, leaves)
        gradients, logs = pullback.with_logs(list(values[cut + n_refs :]))
        log_leaves, seen.logs = jax.tree.flatten(logs)
        return [*gradients, *log_leaves]

    given = [
        *traced.out_avals[n_outs:],
        *(jaxpr.in_avals[i] for i in references),
        *map(compat.cotangent_aval, where(jaxpr.out_avals, cotangents)),
    ]
    pulled = compat.trace(backward, given)
    first = len(traced.out_avals) - n_outs  # of the references among backward's inputs
    read = compat.needed_inputs(pulled, [True] * len(pulled.out_avals))
    needed = compat.needed_inputs(traced, [*(False for _ in range(n_outs)), *read[:first]])
    unused = [n for n in range(first, first + len(references)) if not reads_input(pulled, n)]
    flat, pulled = inline_calls(traced), inline_calls(pulled)
    last = len(pulled.out_avals) - len(references) - first
    pulled = without_inputs(pulled, unused, [last + n for n in unused])
    cut = len(flat.out_avals) - len(references)
    return _Halves(
        forward=with_results(flat, [*range(n_outs), *range(cut, len(flat.out_avals)), *range(n_outs, cut)]),
        backward=pulled,
        references=references,
        used_forward=tuple(i for i in references if reads_input(traced, i)),
        used_backward=tuple(i for n, i in enumerate(references, first) if n not in unused),
        needed=tuple(n or i in references for i, n in enumerate(needed)),
        logs=seen.logs,
    )


def _vjp(
    jaxpr: ClosedJaxpr, differentiated: Sequence[bool], cotangents: Sequence[bool], args: Sequence[Any]
) -> tuple[list[Any], Any, list[Any]]:
    """Outs that get a cotangent, their pullback, and the other outs."""

    def function(*some: Any) -> tuple[list[Any], list[Any]]:
        given = iter(some)
        values = [next(given) if d else arg for d, arg in zip(differentiated, args, strict=True)]
        outs = compat.evaluate(jaxpr, values)
        return where(outs, cotangents), where(outs, [not ct for ct in cotangents])

    outs, pullback, rest = jax.vjp(function, *where(args, differentiated), has_aux=True)
    return outs, pullback, rest


def _in_order(outs: Sequence[Any], rest: Sequence[Any], cotangents: Sequence[bool]) -> list[Any]:
    """All outs, from those that get a cotangent and the others."""
    first, second = iter(outs), iter(rest)
    return [next(first if ct else second) for ct in cotangents]


def _forward_on_references(
    forward: ClosedJaxpr, saved: Sequence[int], jaxpr: ClosedJaxpr, halves: _Halves
) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """`forward` with references as such, and where saved values and what references held come from."""
    n_outs, used = len(jaxpr.out_avals), halves.used_forward

    def run(*args: Any) -> list[Any]:
        values = [_value(x) for x in args]
        results = compat.evaluate(forward, values)
        last = dict(zip(halves.references, results[n_outs:], strict=False))
        for i in used:
            args[i][...] = last[i]
        available = [*results, *values]
        return [*results[:n_outs], *(available[i] for i in saved), *(values[i] for i in used)]

    return compat.trace(run, jaxpr.in_avals), tuple(range(n_outs, n_outs + len(saved) + len(used)))


def _backward_with_arguments(
    backward: ClosedJaxpr, n_saved: int, jaxpr: ClosedJaxpr, halves: _Halves
) -> ClosedJaxpr:
    """`backward` with all arguments as its first operands, and references as such."""
    refs, n_args, held = halves.used_backward, len(jaxpr.in_avals), halves.used_forward
    if not halves.references:
        return with_unread_inputs(backward, compat.open_jaxpr(jaxpr)[0].invars)

    def run(*values: Any) -> list[Any]:
        args, rest = values[:n_args], values[n_args:]
        saved, cotangents = rest[:n_saved], rest[n_saved + len(held) :]
        results = compat.evaluate(backward, [*saved, *(args[i][...] for i in refs), *cotangents])
        cut = len(results) - len(refs)
        for i, x in zip(refs, results[cut:], strict=True):
            args[i][...] = x
        return results[:cut]

    given, held_avals = backward.in_avals, [jaxpr.in_avals[i].inner_aval for i in held]
    return compat.trace(run, [*jaxpr.in_avals, *given[:n_saved], *held_avals, *given[n_saved + len(refs) :]])


def _value(x: Any) -> Any:
    """What a reference holds; every other value as it is."""
    return x[...] if compat.is_ref(jax.typeof(x)) else x


def where(values: Iterable[Any], keep: Iterable[bool]) -> list[Any]:
    """Those of some values that are to be kept."""
    return [v for v, k in zip(values, keep, strict=True) if k]
