"""Where the temporaries of a U-Net's gradient lie, as XLA puts them and pinned; a picture if a path is given.

python -m examples.addresses [picture.svg]
"""

import sys

import jax
import jax.numpy as jnp
from jax import lax

import coop_jax as coop
from coop_jax.addresses import address_view


def conv(x, w, stride=1):
    """A convolution that keeps the size of its input, or halves it."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def loss(weights, x):
    """Mean square of what a small U-Net changes in an image."""
    high = jax.nn.relu(conv(x, weights["in"]))
    low = jax.nn.relu(conv(high, weights["down"], stride=2))
    low = jax.nn.relu(conv(low, weights["middle"]))
    up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
    return jnp.mean((conv(jnp.concatenate([high, up], -1), weights["out"]) - x) ** 2)


def main():
    """Compile, pin, and show both."""
    sizes = {"in": (3, 3, 4, 16), "down": (3, 3, 16, 32), "middle": (3, 3, 32, 32), "out": (3, 3, 48, 4)}
    weights = {name: jnp.ones(size) / 100 for name, size in sizes.items()}
    x = jnp.ones((8, 64, 64, 4))
    compiled = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile()
    pinned = coop.pin(compiled)
    for title, program in (("XLA's addresses", compiled), ("pinned", pinned)):
        view = address_view(program)
        print(f"{title}: {view.temp_bytes} B of temporaries, {view.live_bytes} B in use at once")
    print(
        "same bits:",
        all(map(jnp.array_equal, *map(jax.tree.leaves, (compiled(weights, x), pinned(weights, x))))),
    )
    if len(sys.argv) > 1:
        coop.draw(pinned, sys.argv[1], before=compiled)


if __name__ == "__main__":
    main()
