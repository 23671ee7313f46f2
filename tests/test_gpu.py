"""On a GPU that is here: what is promised of compiled programs, held against the device and what it computes.

`make gpu` runs these; without a GPU they are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import coop_jax as coop
from benchmarks.offsets import random_arguments
from benchmarks.programs import SampleProgram, corpus
from coop_jax import aot
from coop_jax.errors import BudgetExceededError, InfeasibleBudgetError
from tests import hlo_support as h
from tests import nightly_pages
from tests import test_foreign_kernels as kernels
from tests.judge import compilation_cache

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, ROWS = 8, 512, 8192
SPECS = (
    jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
)


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(checkpoint_name(jax.nn.gelu(x @ w[0]), "h") @ w[1])


def unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
    for one in w:
        x = block(x, one)
    return jnp.mean(x**2)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda x, one: (block(x, one), None), x, w)[0] ** 2)


def compiled(function: Callable[..., Any], specs: Any = SPECS, donate: Any = ()) -> Any:
    """A program for this machine's GPU."""
    return jax.jit(function, donate_argnums=donate).lower(*specs).compile()


def close(found: Any, wanted: Any, tolerance: float = 1e-3) -> None:
    """Equal to within a share of the largest number of each array, for the reductions of other kernels."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = max(1e-6, float(np.abs(right).max(initial=0)))
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * largest)


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """Products of float32 as such: rounded to TF32 they differ with every kernel that computes them."""
    with jax.default_matmul_precision("highest"):
        yield


def test_the_device_is_known() -> None:
    device = jax.devices()[0]
    model = aot.model_for(device.platform, device.device_kind)
    assert any(kind in device.device_kind.lower() for kind in model.kinds), device.device_kind
    assert aot.device_memory_bytes(device)


@pytest.mark.parametrize("loss", [unrolled, scanned])
@pytest.mark.parametrize("ratio", [0.8, 0.6, 0.4])
def test_a_budget_is_kept_by_what_runs(loss: Callable[..., Any], ratio: float) -> None:
    """By XLA's count of a program whose kernels are tuned on the device, with the plain program's numbers."""
    grad = jax.value_and_grad(loss)
    plain = compiled(grad)
    budget = int(ratio * aot.memory(plain).total_bytes)
    limited = compiled(coop.remat(grad, budget=budget))
    report = coop.report(limited)
    assert report.compiled_total_bytes == aot.memory(limited).total_bytes <= budget
    assert report.recomputed
    given = random_arguments(SPECS)
    close(limited(*given), plain(*given))


@pytest.mark.parametrize("program", corpus(), ids=lambda p: p.name)
def test_programs_keep_their_budgets_and_numbers(program: SampleProgram) -> None:
    if " within " in program.name:
        assert compiled(program.fn, program.specs, program.donate)
        return
    plain = compiled(program.fn, program.specs)
    budget = int(0.75 * aot.memory(plain).total_bytes)
    try:
        limited = compiled(coop.remat(program.fn, budget=budget), program.specs)
    except (InfeasibleBudgetError, BudgetExceededError):
        return
    assert aot.memory(limited).total_bytes <= budget
    given = random_arguments(program.specs)
    if "adam" in program.name:  # no second moment is negative, and a root of one near 0 magnifies rounding
        positive = jax.tree.map(lambda x: jnp.maximum(abs(x), jnp.asarray(0.1, x.dtype)), given[0])
        given = (positive, *given[1:])
    if "linear algebra" not in program.name:  # eigenvectors have any sign
        close(limited(*given), plain(*given))


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_what_waits_on_the_host_comes_back_as_it_was(loss: Callable[..., Any]) -> None:
    grad = jax.value_and_grad(loss)
    plain = compiled(grad)
    budget = int(0.8 * aot.memory(plain).total_bytes)
    paged = compiled(coop.remat(grad, budget=budget, host="8GiB", offload="h"))
    report = coop.report(paged)
    assert report.compiled_total_bytes <= budget
    assert report.host is not None
    assert report.host.paged
    given = random_arguments(SPECS)
    first = jax.tree.map(np.asarray, paged(*given))
    close(first, plain(*given))
    for _ in range(10):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(paged(*given)), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_with_random_pages(seed: int) -> None:
    """The bits are those of the program as it is, every time; close, where its own sums are in any order."""
    example = nightly_pages.example_of(seed)
    try:
        plain = compiled(example.fn, example.args)
    except Exception:  # such as forward mode through a `custom_vjp`
        pytest.skip("not for JAX")
    wanted, *others = (h.run(plain, example.args) for _ in range(4))
    repeats = all(a.tobytes() == b.tobytes() for again in others for a, b in zip(again, wanted, strict=True))
    found = h.with_pages(example, "cuda", seed=seed, again=0.1, here=True)
    assert h.predicted(found.prediction) == h.totals(found.compiled)
    for _ in range(10):
        results = h.run(found.compiled, example.args)
        if repeats:
            assert [a.tobytes() for a in results] == [a.tobytes() for a in wanted]
        else:
            close(results, wanted)


def test_moments_on_the_host() -> None:
    """An update that streams Adam's moments through the device gives what one on the device gives."""
    weights = [jnp.full((256, 256), 0.01 * i) for i in range(4)]
    moments = [(jnp.zeros_like(w), jnp.ones_like(w)) for w in weights]

    def update(part: Any, g: Any) -> Any:
        mean, square = 0.9 * part[0] + 0.1 * g, 0.99 * part[1] + 0.01 * g * g
        return (mean, square), mean / jnp.sqrt(square + 1e-8)

    wanted = jax.jit(lambda s, g: jax.tree.map(update, s, g, is_leaf=lambda x: isinstance(x, tuple)))(
        moments, weights
    )
    new, out = jax.jit(lambda s, g: coop.streamed(update, s, g), donate_argnums=0)(
        coop.on_host(moments), weights
    )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(new)} == {"pinned_host"}
    close(new, [state for state, _ in wanted])
    close(out, [step for _, step in wanted])


def test_the_fastest_of_several_plans_is_kept() -> None:
    report = coop.report(compiled(coop.remat(jax.value_and_grad(unrolled), budget=0.6, tune=2)))
    assert report.timed
    assert all(t.run_ns > 0 for t in report.timed)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_triton_kernels_run_again() -> None:
    layer = partial(kernels.layer, interpret=False)
    plain = compiled(jax.grad(partial(kernels.loss, layer)), kernels.ARGS)
    hand = compiled(jax.grad(partial(kernels.loss, jax.checkpoint(layer))), kernels.ARGS)
    budget = aot.memory(hand).total_bytes
    limited = compiled(coop.remat(jax.grad(partial(kernels.loss, layer)), budget=budget), kernels.ARGS)
    assert aot.memory(limited).total_bytes <= budget
    given = random_arguments(kernels.ARGS)
    close(limited(*given), plain(*given))


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_attention_runs_again(implementation: str) -> None:
    shape = jax.ShapeDtypeStruct((4, 512, 8, 64), jnp.bfloat16)
    specs = (jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16), shape)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            q = (x.reshape(4, 512, 512) @ w).reshape(x.shape)
            x = x + jnp.tanh(
                jax.nn.dot_product_attention(q, q, x, is_causal=True, implementation=implementation)
            )
        return jnp.mean(x.astype(jnp.float32) ** 2)

    grad = jax.value_and_grad(loss)
    plain = compiled(grad, specs)
    budget = int(0.7 * aot.memory(plain).total_bytes)
    limited = compiled(coop.remat(grad, budget=budget), specs)
    assert aot.memory(limited).total_bytes <= budget
    given = random_arguments(specs)
    close(limited(*given), plain(*given), tolerance=0.05)


def test_a_budget_that_nothing_keeps_is_refused_with_one_that_is_kept() -> None:
    grad = jax.value_and_grad(unrolled)
    total_bytes = aot.memory(compiled(grad)).total_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        compiled(coop.remat(grad, budget=int(0.1 * total_bytes)))
    least = refused.value.least_bytes
    assert least is not None
    assert aot.memory(compiled(coop.remat(grad, budget=least))).total_bytes <= least


def test_a_program_from_the_cache_keeps_its_budget(tmp_path: Path) -> None:
    grad = jax.value_and_grad(scanned)
    limited = coop.remat(grad, budget=0.6)
    given = random_arguments(SPECS)
    with compilation_cache(str(tmp_path)):
        first = compiled(limited)(*given)
        jax.clear_caches()
        again = compiled(limited)
        assert aot.memory(again).total_bytes <= coop.report(again).budget_bytes
        close(again(*given), first)
