"""An update of arrays that wait in the host's memory, one part of them on the device at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from coop_jax.errors import ArgumentError
from coop_jax.on_host import on_host


def streamed(update: Callable[..., tuple[Any, Any]], state: Any, *trees: Any) -> tuple[Any, Any]:
    """Update state in the host's memory part by part: on the device there are only a few parts at once.

    For every leaf of the first of `trees` (a layer's gradient) there is a part of `state` (its moments). A
    part comes to the device when that leaf is there and the part before it has left. The last leaves come
    first, as gradients of the last layers do.

        def adam(moments, gradient, weight):
            ...
            return (m, v), weight - rate * m / (jnp.sqrt(v) + eps)

        moments, weights = coop.streamed(adam, moments, gradients, weights)

    Args:
        update: a function `(part, *leaves) -> (new part, result)`, in arrays on the device.
        state: the tree of the first of `trees`, with any pytree of arrays in the place of each leaf; see
            `coop.on_host`.
        trees: pytrees of arrays, all of one structure.

    Returns:
        The new state, on the host, and the results in the structure of `trees`. The numbers are those of
        `update` applied to every part.

    Raises:
        ArgumentError: there is no tree, or one has another structure than the first.
    """
    if not trees:
        raise ArgumentError(
            "coop.streamed takes trees after the state: a part of it is for a leaf of the first."
        )
    structure: Any = jax.tree.structure(trees[0])
    parts, *others = (_up_to(structure, tree, n) for n, tree in enumerate((state, *trees)))
    leaves = list(zip(*others, strict=True))
    results: list[Any] = [None] * len(leaves)
    before: int | None = None
    for i in reversed(range(len(leaves))):
        if before is None:
            first, part = lax.optimization_barrier((leaves[i][0], parts[i]))
        else:
            first, part, parts[before] = lax.optimization_barrier((leaves[i][0], parts[i], parts[before]))
        here = jax.device_put(part, jax.memory.Space.Device)
        new, results[i] = update(here, first, *leaves[i][1:])
        parts[i], before = on_host(new), i
    return structure.unflatten(parts), structure.unflatten(results)


def _up_to(structure: Any, tree: Any, n: int) -> list[Any]:
    try:
        leaves: list[Any] = structure.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        name = f"tree {n}" if n else "the state"
        raise ArgumentError(
            f"coop.streamed: {name} has another structure than the first tree, which is {structure}."
        ) from error
    return leaves
