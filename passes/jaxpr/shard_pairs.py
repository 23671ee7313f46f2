"""A pair of `shard_map`s that must stay two: its joint plan is written in two halves.

What the halves pass on leaves the first as arrays that are laid side by side over the devices, as JAX passes
residuals on. The first one's own operands are given to the second as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from passes.jaxpr import compat
from passes.jaxpr.avals import array_of
from passes.jaxpr.compat import Atom, Jaxpr, JaxprEqn
from passes.jaxpr.halves import Split
from passes.jaxpr.rewrite import splice

_Spec: Any = PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One body of two `shard_map`s.

    Attributes:
        body: open; (first's operands, those of the second at `places`) -> (first's results that are `kept`,
            second's results).
        n_passed: how many operands the second has inside.
    """

    body: Jaxpr
    kept: tuple[int, ...]
    places: tuple[int, ...]
    n_passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where the first of two `shard_map`s stands, and the body of both."""

    place: int
    joint: Joint


def write_pair(jaxpr: Jaxpr, second: int, pair: Pair, halves: Split) -> Jaxpr:
    """An open jaxpr with the pair written as `halves` of its joint body."""
    eqns, joint = jaxpr.eqns, pair.joint
    head, tail = eqns[pair.place], eqns[second]
    arguments = {v: k for k, v in enumerate(halves.forward.invars)}
    saved = halves.backward.invars[: halves.n_saved]
    passed = [k for k, v in enumerate(halves.forward.outvars[len(joint.kept) :]) if v not in arguments]
    specs = {k: _spec(head, saved[k].aval) for k in passed}
    wide = {k for k in passed if not array_of(saved[k]).shape and specs[k] != _Spec()}
    forward = compat.close_jaxpr(halves.forward, [])
    backward = compat.close_jaxpr(halves.backward, [])

    def run_forward(*values: Any) -> tuple[Any, ...]:
        forward_results = compat.evaluate(forward, values)
        rest = forward_results[len(joint.kept) :]
        return *forward_results[: len(joint.kept)], *(
            rest[k].reshape(1) if k in wide else rest[k] for k in passed
        )

    def run_backward(*values: Any) -> tuple[Any, ...]:
        given = [x.reshape(()) if k in wide else x for k, x in enumerate(values[: halves.n_saved])]
        return tuple(compat.evaluate(backward, [*given, *values[halves.n_saved :]]))

    kept_specs = [head.params["out_specs"][k] for k in joint.kept]
    out_specs = (*kept_specs, *specs.values())
    first, forward_results = _mapped(run_forward, head, head.invars, head.params["in_specs"], out_specs)
    rename = {head.outvars[k]: v for k, v in zip(joint.kept, forward_results, strict=False)}
    made = dict(zip(passed, forward_results[len(joint.kept) :], strict=True))
    place = [compat.of_variable(arguments, v) for v in halves.forward.outvars[len(joint.kept) :]]
    operands = [made[k] if i is None else head.invars[i] for k, i in enumerate(place)]
    in_specs = [specs[k] if i is None else head.params["in_specs"][i] for k, i in enumerate(place)]
    operands += [compat.renamed(tail.invars[k], rename) for k in joint.places]
    in_specs += [tail.params["in_specs"][k] for k in joint.places]
    between = [compat.rename_inputs(eqn, rename) for eqn in eqns[pair.place + 1 : second]]
    last, results = _mapped(run_backward, tail, operands, in_specs, tail.params["out_specs"])
    rename.update(zip(tail.outvars, results, strict=True))
    after = [compat.rename_inputs(eqn, rename) for eqn in eqns[second + 1 :]]
    return compat.rebuild(jaxpr, eqns=[*eqns[: pair.place], *first, *between, *last, *after], rename=rename)


def _mapped(
    run: Callable[..., Any],
    like: JaxprEqn,
    operands: Sequence[Atom],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations and results of `run` on every device, over the mesh of the `shard_map` that is `like`."""
    mapped = jax.shard_map(
        run,
        mesh=like.params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=set(like.params["newly_manual_axes"]),
        check_vma=like.params["check_vma"],
    )
    return splice(lambda values: mapped(*values), operands, like)


def _spec(eqn: JaxprEqn, aval: Any) -> Any:
    """How one device's values lie side by side: over all axes on which they differ, as far as is known."""
    varying = getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    axes = varying if eqn.params["check_vma"] else eqn.params["newly_manual_axes"]
    names = tuple(name for name in eqn.params["mesh"].axis_names if name in axes)
    return _Spec(names) if names else _Spec()
