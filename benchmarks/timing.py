"""Step times of two compiled programs, run in turn on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRatio:
    """One pair of neighbouring runs: the second program's time over the first's.

    Attributes:
        wall_ratio: of wall time.
        cpu_ratio: of this process's CPU time, which other programs on the machine disturb less.
    """

    wall_ratio: float
    cpu_ratio: float


def filled(specs: Any) -> Any:
    """Arrays of these shapes: small positive numbers, zeros where integers are asked for.

    To compile what makes a model's own initial values takes as long as to compile its step.
    """
    rng = np.random.default_rng(0)

    def fill(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(spec.dtype, jnp.integer):
            return jnp.asarray(np.zeros(spec.shape, spec.dtype))
        return jnp.asarray(np.abs(0.05 * rng.standard_normal(spec.shape, np.float32)).astype(spec.dtype))

    return jax.tree.map(fill, specs)


def timed(compiled: Any, state: Any, batch: Any) -> tuple[Any, float, float]:
    """Run one step to its end: (new state, wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    state, loss = compiled(state, batch)
    jax.block_until_ready((state, loss))
    return state, time.perf_counter() - wall, time.process_time() - cpu


def paired(
    first: Any, second: Any, arguments: Callable[[], tuple[Any, Any]], runs: int, *, warm: int = 2
) -> list[PairRatio]:
    """Ratios of the second program's step to the first's, the order swapped every time.

    Args:
        first, second: compiled steps, (state, batch) -> (state, loss), the state donated.
        arguments: makes a state and a batch; each program gets its own.
        runs: pairs that count.
        warm: pairs before them that do not.
    """
    given = [arguments() for _ in range(2)]
    states, batches = [g[0] for g in given], [g[1] for g in given]
    wall, cpu = [0.0, 0.0], [0.0, 0.0]
    ratios = []
    for i in range(runs + warm):
        for which in (0, 1) if i % 2 else (1, 0):
            states[which], wall[which], cpu[which] = timed(
                (first, second)[which], states[which], batches[which]
            )
        ratios.append(PairRatio(wall_ratio=wall[1] / wall[0], cpu_ratio=cpu[1] / max(cpu[0], 1e-9)))
    return ratios[warm:]
