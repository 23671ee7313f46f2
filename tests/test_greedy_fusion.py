"""XLA:CPU's kernels, as they are foreseen: its library's, and its own from the results to the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coop_jax import aot
from passes.cost import DEVICES
from passes.jaxpr import compat
from passes.jaxpr.freedom import emit_config
from passes.jaxpr.inline import inline_calls
from passes.jaxpr.lift import lift_seen
from passes.jaxpr.lifted import LiftedJaxpr
from passes.jaxpr.moved import moved
from passes.jaxpr.order import as_run, run_bytes
from passes.jaxpr.stage import prepare
from passes.simulate import simulate

CPU = DEVICES["cpu"]
WIDE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
ROW = jax.ShapeDtypeStruct((256,), jnp.float32)
EDGES = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
TABLE = jax.ShapeDtypeStruct((32768, 256), jnp.float32)
FEW = jax.ShapeDtypeStruct((64,), jnp.int32)
HALF = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


def seen(fn: Callable[..., Any], *specs: Any) -> LiftedJaxpr:
    return lift_seen(prepare(inline_calls(jax.make_jaxpr(fn)(*specs))).jaxpr, CPU)


def layer_norm(x: Any, w: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(variance + 1e-5)) @ w


def rms_norm(x: Any, w: Any) -> Any:
    return ((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)) @ w) ** 2


def perceptron(x: Any, w: Any, u: Any) -> Any:
    return jax.nn.gelu(x @ w) @ u


def gated(x: Any, w: Any, u: Any) -> Any:
    return jax.nn.silu(x @ w) * (x @ u)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


def transport(cost: Any, f: Any) -> Any:
    for _ in range(4):
        f = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
        f = -jax.nn.logsumexp(f[None, :] - cost, axis=1)
    return f


def summed_in_float32(x: Any, w: Any, u: Any) -> Any:
    h = jnp.tanh(jnp.dot(x, w, preferred_element_type=jnp.float32)).astype(x.dtype)
    return jnp.tanh(jnp.dot(h, u, preferred_element_type=jnp.float32))


def real_times_complex(x: Any, w: Any) -> Any:
    return jnp.abs(x @ (w + 1j * w.T))


def narrowed(x: Any, w: Any) -> Any:
    return jnp.tanh((x @ w).astype(jnp.bfloat16)).astype(jnp.float32)


def messages(x: Any, w: Any, edges: Any) -> Any:
    """Along the edges of a graph: rows that are taken are read where they lie, by what multiplies them."""
    source, target = edges
    return jnp.tanh(jax.ops.segment_sum((x @ w)[source] * 0.5, target, 256))


def looked_up(table: Any, w: Any, rows: Any) -> Any:
    """The gradient is added to the rows that were read: the table is not written whole."""
    return jnp.tanh(table[rows] @ w)


def differences(x: Any, w: Any, edges: Any) -> Any:
    source, target = edges
    return x + jnp.tanh(jax.ops.segment_sum(jnp.sin(x[source] - x[target]), target, 256) @ w)


def rounded(x: Any, w: Any, u: Any) -> Any:
    z = (x @ w) * x
    return jnp.tanh(z @ u) * z + jnp.sin(z) * z


CASES = [
    (layer_norm, WIDE, WIDE),
    (rms_norm, WIDE, WIDE),
    (perceptron, WIDE, WIDE, WIDE),
    (gated, WIDE, WIDE, WIDE),
    (attention, WIDE, WIDE, WIDE),
    (transport, WIDE, ROW),
    (summed_in_float32, HALF, HALF, HALF),
    (real_times_complex, WIDE, WIDE),
    (narrowed, WIDE, WIDE),
    (rounded, HALF, HALF, HALF),
    (messages, WIDE, WIDE, EDGES),
    (differences, WIDE, WIDE, EDGES),
    (looked_up, TABLE, WIDE, FEW),
    (gated, HALF, HALF, HALF),
]


@pytest.mark.parametrize(
    ("fn", "specs"), [(fn, specs) for fn, *specs in CASES], ids=lambda c: getattr(c, "__name__", "")
)
def test_time_of_a_gradient_is_that_of_the_kernels_that_xla_makes(fn: Callable[..., Any], specs: list[Any]):
    gradient = jax.grad(lambda *args: jnp.sum(fn(*args).astype(jnp.float32)))
    made_ns = aot.run_ns(jax.jit(gradient).lower(*specs).compile(), CPU)
    assert seen(gradient, *specs).program.cost_ns == pytest.approx(made_ns, rel=0.05)


def beside_each_other(x: Any, y: Any) -> Any:
    both = jnp.pad(x, ((0, 0), (0, 256))) + jnp.pad(y, ((0, 0), (256, 0)))
    return jnp.exp(both), jnp.sin(both)


def test_what_branches_is_stored_for_several_kernels():
    made_ns = aot.run_ns(jax.jit(beside_each_other).lower(WIDE, WIDE).compile(), CPU)
    program = seen(beside_each_other, WIDE, WIDE).program
    assert [op.name for op in program.ops] == ["pad", "pad", "exp", "sin"]
    assert program.cost_ns == pytest.approx(made_ns, rel=0.05)


def two_ways(x: Any, w: Any, u: Any) -> Any:
    """Two loops that know nothing of each other, as in a bidirectional LSTM."""

    def run(w: Any, reverse: bool) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x, reverse=reverse)[1]

    return run(w, False) * run(u, True)


two_ways_back = jax.grad(lambda *args: jnp.sum(two_ways(*args)))


def branches(x: Any, w: Any) -> Any:
    return [jnp.tanh(jnp.tanh(jnp.tanh(x * k) @ w) @ w)[:8] @ w for k in range(1, 7)]


def branches_in_a_loop(x: Any, w: Any) -> Any:
    def step(x: Any, _: None) -> Any:
        return jnp.concatenate([*branches(x, w), x[48:]]), None

    return jax.lax.scan(step, x, length=4)[0]


STACK = jax.ShapeDtypeStruct((16, 64, 256), jnp.float32)


@pytest.mark.parametrize(
    ("fn", "specs"),
    [(two_ways_back, (STACK, WIDE, WIDE)), (branches, (WIDE, WIDE)), (branches_in_a_loop, (WIDE, WIDE))],
    ids=["loops", "chains", "body"],
)
def test_xla_cpu_runs_first_what_is_ready_first(fn: Callable[..., Any], specs: tuple[Any, ...]):
    lifted = seen(fn, *specs)
    temp_bytes = aot.memory(jax.jit(fn).lower(*specs).compile()).temp_bytes
    in_order, as_it_runs = (simulate(p).peak_bytes for p in (lifted.program, as_run(lifted, CPU)))
    assert as_it_runs == pytest.approx(temp_bytes, rel=0.05)
    assert in_order < 0.85 * temp_bytes


def test_the_enforcing_stage_makes_late_what_xla_cpu_makes_early():
    """Twice the operand is there from the start on; a product of nothing but that is made when it is read."""

    def early(x: Any, w: Any) -> Any:
        z, y = x @ x, w
        for _ in range(3):
            y = jnp.sin(y @ w) @ y
        return z @ y

    lifted = seen(early, WIDE, WIDE)
    before, after = lifted.program, moved(lifted, late=True).program
    assert [before.ops[0].id, after.ops[-2].name] == [0, "dot_general"]
    assert simulate(before).peak_bytes - simulate(after).peak_bytes == WIDE.size * 4


def layers(x: Any, ws: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        for _ in range(8):
            x = jnp.sin(x @ w)
        return x, None

    return jax.lax.scan(layer, x, ws)[0]


def test_a_body_holds_slices_of_stacks_until_they_are_read():
    gradient = jax.grad(lambda x, ws: jnp.sum(layers(x, ws)), argnums=1)
    specs = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct((2, 256, 256), jnp.float32)
    temp_bytes = aot.memory(jax.jit(gradient).lower(*specs).compile()).temp_bytes
    assert run_bytes(seen(gradient, *specs), CPU) == pytest.approx(temp_bytes, rel=0.05)


def dropped(key: Any, x: Any, w: Any) -> Any:
    """Random bits are there from the start, and read at the end, by several kernels."""
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    h = jnp.sin(jnp.sin(x @ w) @ w)
    read = [jnp.where(kept, f(h), h) @ w for f in (jnp.cos, jnp.square, jnp.negative, jnp.abs)]
    return list(map(jnp.sum, read))


def divided(x: Any, w: Any) -> Any:
    """What is divided by a constant is multiplied in each of its readers."""
    h = (x @ w) / 3.0
    return (h + 1.0) @ w, (h * x) @ w


def test_random_bits_are_two_words_until_they_are_read():
    key = jax.eval_shape(lambda: jax.random.key(0))
    spec = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    temp_bytes = aot.memory(jax.jit(dropped).lower(key, spec, spec).compile()).temp_bytes
    assert run_bytes(seen(dropped, key, spec, spec), CPU) == pytest.approx(temp_bytes, rel=0.05)


def test_a_quotient_by_a_constant_is_not_stored():
    spec = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    assert " divide(" not in jax.jit(divided).lower(spec, spec).compile().as_text()
    assert "div" not in [op.name for op in seen(divided, spec, spec).program.ops]


def from_their_maximum(x: Any) -> Any:
    """What library kernels read of a row's maximum, and what loops read."""
    most = jnp.broadcast_to(x.max(-1, keepdims=True), x.shape)
    return jnp.where(x > 0, jnp.exp(x - most), 0.0), jnp.where(x > 1, jnp.sin(x) * most, 0.0)


def test_what_is_spread_out_is_not_what_a_library_kernel_stores():
    made_ns = aot.run_ns(jax.jit(from_their_maximum).lower(WIDE).compile(), CPU)
    program = seen(from_their_maximum, WIDE).program
    stored = WIDE.size * 4 if compat.OLD_RULES else 256 * 4  # the library's kernel spread it before JAX 0.12
    assert sorted(buffer.nbytes for buffer in program.buffers if buffer.nbytes) == [stored]
    assert program.cost_ns == pytest.approx(made_ns, rel=0.05)


def masked(x: Any, y: Any) -> Any:
    """Two attentions with a mask that each of them makes."""

    def one(x: Any) -> Any:
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (256, 256), k) for k in range(2))
        return jax.nn.softmax(x + jnp.where(rows < columns, -1e30, 0.0)) @ x

    return one(x), one(jnp.sin(y))


def test_constants_that_are_written_twice_are_made_once():
    names = [eqn.primitive.name for eqn in seen(masked, WIDE, WIDE).jaxpr.eqns]
    assert (names.count("iota"), names.count("lt")) == (2, 1)


def test_an_erfc_for_several_kernels_is_kept_whole():
    def read_twice(x: Any, w: Any) -> Any:
        y = jax.scipy.special.erfc(x @ w)
        return jnp.where(x > 0, y, 1.0), jnp.cumsum(y * x)

    lifted = seen(read_twice, WIDE, WIDE)
    erfc = {i for i, eqn in enumerate(lifted.jaxpr.eqns) if eqn.primitive.name == "erfc"}
    assert erfc <= {body[-1] for body in lifted.bodies}
    assert emit_config(lifted, lifted, CPU).apart == erfc, "XLA would store its exponential and two quotients"
