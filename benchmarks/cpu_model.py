"""The figures of the "cpu" cost model (`passes.cost`), measured on this machine.

    python -m benchmarks.cpu_model            # a few seconds; the machine should have nothing else to do

Each figure is the best of several runs of one compiled program that does little else: dots of large
matrices, a long chain of elementwise work on values that stay in the cache, the same chain of exponentials,
additions of large arrays with and without a result of their own, and many small kernels one after the other.
Then programs of what XLA:CPU does one element at a time (`passes.scalar_work`), in seconds. Printed beside
what `passes.cost` has. What counts for plans is how they stand to each other, not how fast the machine is.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

from passes.cost import DEVICES, EXPENSIVE_FLOPS, scalar_work_ns
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.scalar_work import scalar_work

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


def one_at_a_time() -> dict[str, tuple[float, float]]:
    """For programs of scalar work the seconds that they take, and those that the model has for that work."""
    model, rows = DEVICES["cpu"], {}
    for name, (function, arguments) in _programs().items():
        equations = inline_calls(jax.make_jaxpr(function)(*arguments)).jaxpr.eqns
        modelled_s = 1e-9 * sum(scalar_work_ns(model, scalar_work(eqn)) for eqn in equations)
        rows[name] = best_s(function, *arguments), modelled_s
    return rows


def _programs() -> dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]]:
    def random(*shape: int) -> jax.Array:
        return jax.random.uniform(jax.random.key(0), shape, minval=0.01, maxval=0.99)

    x, rows, image = random(512, 1024), random(256, 1024), random(8, 64, 64, 16)
    square = random(128, 128) + 128 * jnp.eye(128)
    hundred = jnp.stack([square[:32, :32]] * 100)
    functions: dict[str, Callable[..., jax.Array]] = {
        "acos": lax.acos, "asin": lax.asin, "atan2": lambda x: lax.atan2(x, x), "cbrt": lax.cbrt,
        "cos": lax.cos, "digamma": lax.digamma, "pow": lambda x: lax.pow(x, x),
        "rem": lambda x: lax.rem(x, x + 0.5), "sin": lax.sin, "tan": lax.tan,
    }  # fmt: skip
    matrices: dict[str, Callable[..., jax.Array]] = {
        "eigh": lambda a: jnp.linalg.eigh(a)[1], "svd": lambda a: jnp.linalg.svd(a)[0],
        "eig": lambda a: jnp.linalg.eig(a)[1].real, "qr": lambda a: jnp.linalg.qr(a)[0],
        "lu": lambda a: lax.linalg.lu(a)[0], "cholesky": jnp.linalg.cholesky,
        "solve": lambda a: lax.linalg.triangular_solve(a, a, left_side=True, lower=True),
    }  # fmt: skip
    return {
        **{name: (function, (x,)) for name, function in functions.items()},
        "sort": (jnp.sort, (rows,)),
        "sort of integers": (jnp.sort, ((1e6 * rows).astype(jnp.int32),)),
        "top_k": (lambda a: lax.top_k(a, 32)[0], (rows,)),
        "argmax": (lambda a: jnp.argmax(a, -1), (rows,)),
        "maximum in windows": (partial(windows, reducer=lax.max), (image,)),
        "its gradient": (jax.grad(lambda a: windows(a, lax.max).sum()), (image,)),
        "cumsum": (lambda a: jnp.cumsum(a, 1), (rows,)),
        "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 1), (rows,)),
        **{f"{name} of 128 x 128": (function, (square,)) for name, function in matrices.items()},
        **{f"{name} of 100 of 32 x 32": (function, (hundred,)) for name, function in matrices.items()},
        "fft": (lambda a: jnp.fft.fft(a).real, (rows,)),
        "rfft": (lambda a: jnp.fft.rfft(a).real, (rows,)),
        **{
            f"convolution of {rank}-D, {groups} groups": (
                partial(convolution, groups=groups),
                (values, kernel),
            )
            for rank, side in ((1, 4096), (2, 64), (3, 16))
            for groups in ((2, 8, 32) if rank < 3 else (1, 2, 32))
            for values in (random(1, *[side] * rank, 32),)
            for kernel in (random(*[3] * rank, 32 // groups, 32),)
        },
    }


def windows(x: jax.Array, reducer: Callable[..., jax.Array]) -> jax.Array:
    """A reduction in windows of 3 x 3 of (batch, height, width, features)."""
    return lax.reduce_window(x, -jnp.inf, reducer, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def convolution(x: jax.Array, kernel: jax.Array, *, groups: int) -> jax.Array:
    """Of (batch, ..., features) with (..., features of a group, features)."""
    dims = "DHW"[: x.ndim - 2]
    numbers = f"N{dims}C", f"{dims}IO", f"N{dims}C"
    strides = (1,) * len(dims)
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


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
        **one_at_a_time(),
    }
    lines = [f"{os.cpu_count()} cores, jax {jax.__version__}"]
    for name, (measured, modelled) in rows.items():
        ratio = measured / modelled
        lines.append(f"{name:28s} measured {measured:12.4g}   model {modelled:12.4g}   ratio {ratio:5.2f}")
    lines.append(json.dumps({name: measured for name, (measured, _) in rows.items()}))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
