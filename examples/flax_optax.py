"""A Flax (nnx) model trained with Optax: bytes of the whole step before and after.

    pip install -e '.[examples]' && python -m examples.flax_optax

The step is a function of pytrees: the model's state and the optimizer's go in and come out.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp

from examples.compare import compare, show

LAYERS, WIDTH, ROWS = 8, 64, 2048


def build() -> tuple[Any, Any, Any]:
    """A training step, its state and a batch."""
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(key: jax.Array) -> Block:
        return Block(nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, block: Block) -> jax.Array:
        return block(x)

    graph, params = nnx.split(stacked(jax.random.split(jax.random.key(0), LAYERS)))
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(through(x, nnx.merge(graph, params)) ** 2)

    def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return train_step, (params, optimizer.init(params)), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def main() -> None:
    """Compile plainly and within three budgets, and print what each needs."""
    missing = [name for name in ("flax", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stdout.write(f"This example needs {' and '.join(missing)}: pip install -e '.[examples]'\n")
        return
    show(compare(*build()))


if __name__ == "__main__":
    main()
