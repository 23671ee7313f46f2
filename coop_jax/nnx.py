"""Flax NNX: modules, optimizers and random streams that a function updates in place.

Such an object is a graph: its parts may be shared, and are known by identity. A program takes and returns
arrays, so the graph is taken apart before it and put together inside, and what the function changed in it is
carried out again, as `nnx.jit` and `nnx.remat` do: values, attributes, new parts and sharing. An object that
was left alone is no result of the program.

Flax is never imported here: where nobody imported it, no argument is such an object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from coop_jax.arguments import unchanged
from coop_jax.statics import Same
from passes.jaxpr import compat

compat.hide_frames(__file__)

_TAG = "coop_remat"


def is_node(value: Any) -> bool:
    """True for a module, an optimizer, a variable and whatever else NNX updates in place."""
    nnx = sys.modules.get("flax.nnx")
    kinds = tuple(getattr(nnx, name) for name in ("Variable", "Pytree") if hasattr(nnx, name))
    return isinstance(value, kinds)


def has_nodes(tree: Any) -> bool:
    """True if there is such an object in `tree`."""
    return "flax.nnx" in sys.modules and any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of objects as a function of what `outside` makes of (args, kwargs)."""

    def call(pure_args: Any, pure_kwargs: Any) -> Any:
        nnx = sys.modules["flax.nnx"]
        args, kwargs = nnx.from_tree((pure_args, pure_kwargs), merge_fn=_joined, ctxtag=_TAG, is_inner=True)
        objects = [x for x in jax.tree.leaves((args, kwargs), is_leaf=is_node) if is_node(x)]
        before = [_look(x) for x in objects]
        out = unchanged(function, args, kwargs, is_node)
        changed = [x for x, old in zip(objects, before, strict=True) if _look(x) != old]
        return nnx.to_tree((changed, out), split_fn=_parts, ctxtag=_TAG)

    return call


def outside(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what `inside` made, perhaps compiled, and carry out what it changed in `args` and `kwargs`."""
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_TAG):
        pure_args, pure_kwargs = nnx.to_tree((args, kwargs), split_fn=_parts, ctxtag=_TAG)
        results = call(pure_args, pure_kwargs)
        _, out = nnx.from_tree(results, merge_fn=_joined, ctxtag=_TAG, is_inner=False)
        return out


def _parts(context: Any, path: Any, prefix: Any, node: Any) -> Any:
    """A node as its graph and its arrays, among which a variable's reference stays the same reference."""
    return sys.modules["flax.nnx"].NodeStates.from_split(*context.flatten(node, with_paths=False))


def _joined(context: Any, path: Any, prefix: Any, parts: Any) -> Any:
    return context.unflatten(parts.graphdef, parts.state)


def _look(node: Any) -> Any:
    """The structure of an object and the identity of its arrays."""
    graph, state = sys.modules["flax.nnx"].split(node, graph=True)
    return graph, [Same(leaf) for leaf in jax.tree.leaves(state)]
