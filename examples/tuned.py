"""The clock decides between the three plans that are expected to be cheapest."""

import jax
import jax.numpy as jnp

import coop_jax as coop


def loss(weights, x):
    """Mean square of what comes out of the last layer."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@jax.jit
@coop.remat(budget=0.8, tune=3)
def train_step(weights, x):
    """One step of gradient descent, the gradient taken inside."""
    value, grads = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


keys = jax.random.split(jax.random.key(0), 9)
weights = [jax.random.normal(k, (256, 256)) / 16 for k in keys[1:]]
x = jax.random.normal(keys[0], (1024, 256))

report = coop.report(train_step.lower(weights, x).compile())
for timed in report.timed:
    mib = timed.total_bytes / 2**20
    print(f"{timed.run_ns / 1e6:.1f} ms in {mib:.1f} MiB, estimated {timed.estimated_ns / 1e6:.1f}")
