"""An Equinox model whose layers are stacked and scanned: bytes of a training step before and after.

pip install -e '.[examples]' && python -m examples.equinox_model
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.compare import compare, show

LAYERS, WIDTH, ROWS = 8, 64, 2048


def build() -> tuple[Any, Any, Any]:
    """A training step, the model's arrays and a batch."""
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            first, second = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=first)
            self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=second)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

    blocks = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), LAYERS))
    arrays, rest = eqx.partition(blocks, eqx.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        def through(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return jax.vmap(eqx.combine(layer, rest))(x), None

        return jnp.mean(lax.scan(through, x, arrays)[0] ** 2)

    def train_step(arrays: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(arrays, x)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, arrays, grads), value

    return train_step, arrays, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def main() -> None:
    """Compile plainly and within three budgets, and print what each needs."""
    if importlib.util.find_spec("equinox") is None:
        sys.stdout.write("This example needs equinox: pip install -e '.[examples]'\n")
        return
    show(compare(*build()))


if __name__ == "__main__":
    main()
