"""An interatomic potential whose forces are trained, with its layers in a `lax.scan`.

Forces are a gradient with respect to positions, so the gradient of their error is one of a gradient: four
scans, of which the last read what two or three before them computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models.layers import dense, dense_weights, keys_of, matrix
from benchmarks.models.model import Blocks, Model, Net

CUTOFF = 5.0


def softplus(x: jax.Array) -> jax.Array:
    """Shifted, so that 0 stays 0."""
    return jax.nn.softplus(x) - jnp.log(2.0)


def filters(w: dict[str, Any], distances: jax.Array, radials: int) -> jax.Array:
    """What a layer multiplies the values of neighbours with: [edges, width]."""
    centers = jnp.linspace(0.0, CUTOFF, radials)
    basis = jnp.exp(-((distances[:, None] - centers) ** 2) * radials / CUTOFF)
    smooth = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(distances, CUTOFF) / CUTOFF) + 1.0)
    return dense(w["filter_out"], softplus(dense(w["filter_in"], basis))) * smooth[:, None]


def net(blocks: Blocks, *, layers: int, width: int, radials: int, atoms: int, neighbors: int) -> Net:
    """The model; its blocks are the interactions."""

    def init(key: jax.Array) -> dict[str, Any]:
        keys = keys_of(key)

        def one() -> dict[str, Any]:
            return {
                "filter_in": dense_weights(next(keys), radials, width),
                "filter_out": dense_weights(next(keys), width, width),
                **{name: dense_weights(next(keys), width, width) for name in ("inner", "outer", "last")},
            }

        return {
            "embed": matrix(next(keys), 100, width),
            "layers": jax.tree.map(lambda *ws: jnp.stack(ws), *(one() for _ in range(layers))),
            "head": dense_weights(next(keys), width, 1),
        }

    def batch_of(key: jax.Array) -> dict[str, Any]:
        places, kinds, edges, forces = jax.random.split(key, 4)
        return {
            "positions": 2.0 * jax.random.normal(places, (atoms, 3)),
            "kinds": jax.random.randint(kinds, (atoms,), 0, 100),
            "source": jax.random.randint(edges, (atoms * neighbors,), 0, atoms),
            "target": jnp.repeat(jnp.arange(atoms), neighbors),
            "energy": jnp.zeros(()),
            "forces": jax.random.normal(forces, (atoms, 3)),
        }

    def energy(positions: jax.Array, params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        source, target = data["source"], data["target"]
        apart = positions[source] - positions[target]
        distances = jnp.sqrt((apart**2).sum(-1) + 1e-6)

        def interaction(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
            messages = dense(w["inner"], x)[source] * filters(w, distances, radials)
            summed = jax.ops.segment_sum(messages, target, atoms)
            return x + dense(w["last"], softplus(dense(w["outer"], summed))), None

        x, _ = lax.scan(blocks.wrap(interaction), params["embed"][data["kinds"]], params["layers"])
        return dense(params["head"], softplus(x)).sum()

    def loss(params: dict[str, Any], data: dict[str, Any]) -> jax.Array:
        value, slope = jax.value_and_grad(energy)(data["positions"], params, data)
        return ((value - data["energy"]) / atoms) ** 2 + ((slope + data["forces"]) ** 2).mean()

    return Net(init=init, batch=batch_of, loss=loss)


MODELS = (
    Model(
        name="schnet",
        source="written here, after Schütt et al. 2017; energies and forces are trained",
        net=net,
        sizes={
            "cpu": {"layers": 4, "width": 64, "radials": 32, "atoms": 384, "neighbors": 16},
            "h200": {"layers": 6, "width": 256, "radials": 200, "atoms": 8192, "neighbors": 40},
        },
    ),
)
