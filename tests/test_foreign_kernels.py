"""Kernels of other makers: what may be recomputed, at what cost, in no more bytes than a policy by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from coop_jax import aot, remat, report
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift
from passes.jaxpr.lifted import LiftedJaxpr

N_LAYERS = 6
ARGS = jax.ShapeDtypeStruct((N_LAYERS, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
WIDE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def called(kernel: Callable[..., None], *operands: Any, interpret: bool) -> Any:
    """A Pallas kernel over blocks of 64 rows that writes its result over its first operand."""
    block = pl.BlockSpec((64, 64), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        grid=(operands[0].shape[0] // 64,),
        in_specs=[block] * len(operands),
        out_specs=block,
        input_output_aliases={0: 0},
        interpret=interpret,
    )(*operands)


def gelu_forward(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = x_ref[...] * jax.nn.sigmoid(1.7 * x_ref[...])


def gelu_backward(x_ref: Any, g_ref: Any, y_ref: Any) -> None:
    s = jax.nn.sigmoid(1.7 * x_ref[...])
    y_ref[...] = g_ref[...] * (s + 1.7 * x_ref[...] * s * (1 - s))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Any, interpret: bool) -> Any:
    """A kernel that nobody but its maker can differentiate."""
    return called(gelu_forward, x, interpret=interpret)


gelu.defvjp(
    lambda x, interpret: (gelu(x, interpret), x),
    lambda interpret, x, g: (called(gelu_backward, x, g, interpret=interpret),),
)


def layer(x: Any, w: Any, *, interpret: bool = True) -> tuple[Any, None]:
    return x + gelu(gelu(x @ w, interpret) @ w, interpret), None


def loss(layer: Callable[..., Any], w: Any, x: Any) -> Any:
    return (lax.scan(layer, x, w)[0] ** 2).mean()


def lifted(function: Callable[..., Any], *specs: Any) -> LiftedJaxpr:
    jaxpr, _ = compat.open_jaxpr(inline_calls(jax.make_jaxpr(function)(*specs)))
    return lift(jaxpr, DEVICES["h200"], as_xla=False)


def op(function: Callable[..., Any], *specs: Any, name: str) -> Any:
    (found,) = (op for op in lifted(function, *specs).program.ops if op.name == name)
    return found


def doubled(x: Any, **options: Any) -> Any:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def ffi(x: Any, **options: Any) -> Any:
    return jax.ffi.ffi_call("strange", jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)


def test_a_scan_over_pallas_kernels_keeps_the_bytes_of_a_checkpoint_around_every_layer():
    plain = jax.jit(jax.grad(partial(loss, layer))).lower(*ARGS).compile()
    hand = jax.jit(jax.grad(partial(loss, jax.checkpoint(layer)))).lower(*ARGS).compile()
    budget = aot.memory(hand).total_bytes
    assert budget < 0.7 * aot.memory(plain).total_bytes
    limited = jax.jit(remat(jax.grad(partial(loss, layer)), budget=budget)).lower(*ARGS).compile()
    assert aot.memory(limited).total_bytes <= budget
    assert any("pallas_call" in r.op for r in report(limited).recomputed)
    values = [jax.random.normal(jax.random.key(0), spec.shape) / 8 for spec in ARGS]
    expected = plain(*values)
    np.testing.assert_allclose(limited(*values), expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_triton_kernels_run_again_on_a_gpu(h200: str):
    on_gpu = partial(layer, interpret=False)

    def compiled(function: Callable[..., Any]) -> Any:
        return aot.lower_for(function, ARGS, device=h200).compile()

    def kernels(program: Any) -> int:
        return int(program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"'))

    plain = compiled(jax.grad(partial(loss, on_gpu)))
    hand = compiled(jax.grad(partial(loss, jax.checkpoint(on_gpu))))
    budget = aot.memory(hand).total_bytes
    limited = compiled(remat(jax.grad(partial(loss, on_gpu)), budget=budget))
    assert aot.memory(limited).total_bytes <= budget < aot.memory(plain).total_bytes
    assert kernels(plain) < kernels(limited) <= kernels(hand)


def test_what_declares_no_effect_may_run_again():
    @custom_partitioning
    def parted(x: Any) -> Any:
        return jnp.sin(x) @ x

    parted.def_partition(sharding_rule="i j -> i j", partition=lambda *_: None)
    assert op(doubled, WIDE, name="pallas_call").recomputable
    assert op(ffi, WIDE, name="ffi_call").recomputable
    assert op(parted, WIDE, name="custom_partitioning").recomputable


def test_what_claims_an_effect_or_tells_python_never_runs_again():
    @custom_partitioning
    def telling(x: Any) -> Any:
        return jax.pure_callback(np.sin, WIDE, x)

    telling.def_partition(sharding_rule="i j -> i j", partition=lambda *_: None)
    claimed = partial(ffi, has_side_effect=True)
    assert not op(claimed, WIDE, name="ffi_call").recomputable
    assert not op(telling, WIDE, name="custom_partitioning").recomputable
    tpu = pytest.importorskip("jax.experimental.pallas.tpu")
    sealed = partial(doubled, compiler_params=tpu.CompilerParams(has_side_effects=True))
    assert not op(sealed, WIDE, name="pallas_call").recomputable


def test_a_kernel_that_writes_in_place_takes_the_place_of_what_dies_with_it():
    def written_over(x: Any) -> Any:
        return doubled(x @ x, input_output_aliases={0: 0}) @ x

    kernel = op(written_over, WIDE, name="pallas_call")
    assert kernel.may_share == ((kernel.outputs[0], kernel.inputs[0]),)
    assert op(lambda x: doubled(x, input_output_aliases={0: 0}), WIDE, name="pallas_call").may_share == ()


def test_a_kernel_costs_what_its_maker_says_else_what_its_dots_do():
    def product(x: Any, **options: Any) -> Any:
        def kernel(x_ref: Any, y_ref: Any) -> None:
            y_ref[...] = x_ref[...] @ x_ref[...]

        return pl.pallas_call(kernel, out_shape=WIDE, grid=(1000,), **options)(x)

    h200 = DEVICES["h200"]
    told = pl.CostEstimate(flops=10**12, transcendentals=0, bytes_accessed=10**6)
    said = op(partial(product, cost_estimate=told), WIDE, name="pallas_call").cost_ns
    assert said == h200.launch_ns + round(1e9 * 10**12 / h200.flops_32bit)
    counted = op(product, WIDE, name="pallas_call").cost_ns
    assert counted == h200.launch_ns + round(1e9 * 1000 * 2 * 64**3 / h200.flops_32bit)
