"""Arrays that wait in the host's memory from step to step, such as an optimizer's moments."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

PINNED = "pinned_host"


def on_host(tree: Any) -> Any:
    """Put arrays into the host's pinned memory, or say of shapes and dtypes that they will be there.

    As arguments of a program they take no memory of the device but while it works on them: bring each to the
    device just before it is needed, `jax.device_put(m, jax.memory.Space.Device)`, send the new value back
    with `on_host`, and donate the old one. In the program it is a copy beside the kernels.

        state = coop.on_host(adam_moments(weights))                  # arrays
        specs = coop.on_host(jax.eval_shape(adam_moments, weights))  # for `coop.plan(..., device="h200")`

    Args:
        tree: a pytree of arrays (inside a program, too), scalars or structs of `jax.ShapeDtypeStruct`.

    Returns:
        The same tree with the same numbers. How arrays are split over devices stays as it is.
    """
    return jax.tree.map(_placed, tree)


def _placed(leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, jax.memory.Space.Host)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_described(leaf.sharding))
    array = leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)
    return jax.device_put(array, array.sharding.with_memory_kind(PINNED))


def among(mesh: Mesh, sharding: Any) -> NamedSharding | None:
    """What `on_host` said of shapes, for the devices of a mesh; None if it said nothing."""
    if getattr(sharding, "memory_kind", None) != PINNED:
        return None
    spec = getattr(sharding, "spec", PartitionSpec())
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=PINNED)


def here(specs: Any) -> Any:
    """Specs for the default device of this process, where `on_host` did not say which."""

    def place(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)

    first = SingleDeviceSharding(jax.devices()[0]).with_memory_kind(PINNED)
    return jax.tree.map(place, specs)


def _described(sharding: Any) -> NamedSharding:
    """Over no devices in particular: JAX does not know the memories of a GPU that is not here."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=PINNED)
    mesh = AbstractMesh((1,), ("devices",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=PINNED)
