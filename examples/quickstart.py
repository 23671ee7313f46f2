"""Sixteen layers and their gradients in 20 MiB."""

import jax
import jax.numpy as jnp

import coop_jax as coop


def loss(weights, x):
    """Mean square of what comes out of the last layer."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@jax.jit
@coop.remat(budget="20 MiB")
def train_step(weights, x):
    """One step of gradient candidate, the gradient taken inside."""
    value, grads = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


keys = jax.random.split(jax.random.key(0), 17)
weights = [jax.random.normal(k, (256, 256)) / 16 for k in keys[1:]]
x = jax.random.normal(keys[0], (1024, 256))

compiled = train_step.lower(weights, x).compile()
print(coop.report(compiled))
weights, value = train_step(weights, x)
print(f"loss {value:.6f}")
