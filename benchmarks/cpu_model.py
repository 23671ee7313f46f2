"""The figures of the "cpu" cost model (`passes.cost`), measured on this machine.

    python -m benchmarks.cpu_model            # a few seconds; the machine should have nothing else to do

Each figure is the best of several runs of one compiled program that does little else: dots of large
matrices, a long chain of elementwise work on values that stay in the cache, the same chain of exponentials,
additions of large arrays with and without a result of their own, and many small kernels one after the other.
Printed beside what `passes.cost` has. What counts for plans is how they stand to each other, not how fast
the machine is.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

from passes.cost import DEVICES, EXPENSIVE_FLOPS

RUNS = 7
SIDE = 1024
IN_CACHE, IN_MEMORY = 1 << 16, 1 << 26
CHAIN = 64
KERNELS = 400


def best_s(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Seconds of the quickest of `RUNS` runs, compiled before."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return quickest_s(lambda: compiled(*arguments))


def quickest_s(run: Callable[[], jax.Array]) -> float:
    """Seconds of the quickest of `RUNS` runs."""
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def matrix_flops(dtype: str) -> float:
    """Flop/s of a dot of two square matrices."""
    a = jnp.ones((SIDE, SIDE), dtype)
    return 2 * SIDE**3 / best_s(jnp.dot, a, a)


def vector_flops() -> float:
    """Flop/s of multiplications and additions on values that stay in the cache."""

    def chain(x: jax.Array) -> jax.Array:
        for k in range(CHAIN):
            x = x * 0.999 + float(k)
        return x

    x = jnp.ones(IN_CACHE)
    return 2 * CHAIN * repeated(chain, x)


def exponentials() -> float:
    """Exponentials a second on values that stay in the cache."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = jnp.exp(-x)
        return x

    return CHAIN * repeated(chain, jnp.ones(IN_CACHE))


def repeated(step: Callable[[jax.Array], jax.Array], x: jax.Array, times: int = 50) -> float:
    """Elements that a step takes a second, many steps in one program."""
    return x.size * times / best_s(lambda x: lax.fori_loop(0, times, lambda _, x: step(x), x), x)


def memory_figures() -> tuple[float, float]:
    """Bytes a second, read and written, of an addition of large arrays into one of them; and bytes a second
    that the system maps, from what the same takes longer with a result of its own."""
    x, y = jnp.ones(IN_MEMORY), jnp.ones(IN_MEMORY)
    nbytes, fresh_s = x.nbytes, best_s(jnp.add, x, y)
    compiled = jax.jit(jnp.add, donate_argnums=0).lower(x, y).compile()

    def in_place() -> jax.Array:
        nonlocal x
        x = compiled(x, y)
        return x

    in_place_s = quickest_s(in_place)
    return 3 * nbytes / in_place_s, nbytes / max(fresh_s - in_place_s, 1e-9)


def launch_ns() -> float:
    """Time of a kernel that does nothing much: small sorts, which XLA fuses with nothing."""

    def many(x: jax.Array) -> jax.Array:
        for _ in range(KERNELS):
            x = lax.rev(lax.optimization_barrier(x), (0,))
        return x

    return 1e9 * best_s(many, jnp.ones(8)) / KERNELS


def main() -> None:
    """Measure, and print beside the model."""
    model = DEVICES["cpu"]
    vector = vector_flops()
    in_place, mapped = memory_figures()
    rows = {
        "flops_32bit": (matrix_flops("float32"), model.flops_32bit),
        "flops_16bit": (matrix_flops("bfloat16"), model.flops_16bit),
        "vector_flops": (vector, model.vector_flops),
        "flops of an exponential": (vector / exponentials(), EXPENSIVE_FLOPS),
        "bytes_per_second": (in_place, model.bytes_per_second),
        "mapped_bytes_per_second": (mapped, model.mapped_bytes_per_second or math.inf),
        "launch_ns": (launch_ns(), model.launch_ns),
    }
    lines = [f"{os.cpu_count()} cores, jax {jax.__version__}"]
    for name, (measured, modelled) in rows.items():
        ratio = measured / modelled
        lines.append(f"{name:24s} measured {measured:12.4g}   model {modelled:12.4g}   ratio {ratio:5.2f}")
    lines.append(json.dumps({name: measured for name, (measured, _) in rows.items()}))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
