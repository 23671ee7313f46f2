"""What a user would write without a budget: `jax.checkpoint` around a program's natural blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from coop_jax import nnx
from passes.jaxpr import compat
from passes.jaxpr.blocks import find_blocks, under_policies
from passes.jaxpr.compat import ClosedJaxpr
from passes.jaxpr.inline import inline_calls


def natural_rivals(
    fn: Callable[..., Any],
    specs: Sequence[Any],
    *,
    static_argnums: Sequence[int] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Callable[..., Any]]:
    """A function with its natural blocks under policies of `jax.checkpoint` (see `passes.jaxpr.blocks`).

    Args:
        fn: a whole step, with its gradient taken inside.
        specs, static_argnums, kwargs: its arguments, as for `coop.pareto`.

    Returns:
        By what they are called, functions of the same arguments. None where the program repeats nothing, is
        not differentiated, has effects, or takes other things than arrays, such as modules.
    """
    if not _are_arrays(specs, static_argnums, kwargs):
        return {}
    made = jax.make_jaxpr(fn, static_argnums=tuple(static_argnums), return_shape=True)
    traced, shapes = made(*specs, **(kwargs or {}))
    closed, tree = inline_calls(traced), jax.tree.structure(shapes)
    jaxpr, consts = compat.open_jaxpr(closed)
    blocks = find_blocks(jaxpr)
    if not blocks or jaxpr.effects:
        return {}
    return {
        f"{blocks}: {name}": _function(compat.close_jaxpr(rewritten, consts), tree, static_argnums)
        for name, rewritten in under_policies(jaxpr).items()
    }


def _are_arrays(
    specs: Sequence[Any], static_argnums: Sequence[int], kwargs: Mapping[str, Any] | None
) -> bool:
    dynamic = [a for i, a in enumerate(specs) if i not in static_argnums]
    leaves = jax.tree.leaves((dynamic, dict(kwargs or {})))
    plain = all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves)
    return plain and not nnx.has_nodes((dynamic, kwargs))


def _function(closed: ClosedJaxpr, tree: Any, static_argnums: Sequence[int]) -> Callable[..., Any]:
    static = frozenset(static_argnums)

    def rival(*args: Any, **kwargs: Any) -> Any:
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        return jax.tree.unflatten(tree, compat.evaluate(closed, jax.tree.leaves((dynamic, kwargs))))

    return rival
