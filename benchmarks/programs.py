"""A corpus for sweeps: many kinds of kernels and control flow, small enough to compile by the dozen.

Every program is a function and the shapes of its arguments. Training steps are donated where it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import coop_jax as coop
from examples.models import (
    ConvConfig,
    GPTConfig,
    LSTMConfig,
    MLPConfig,
    Problem,
    adam_init,
    adam_step,
    convnet,
    gpt,
    lstm,
    mlp,
    sgd_step,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleProgram:
    """A function, the shapes of its arguments, and which of them are donated."""

    name: str
    fn: Callable[..., Any]
    specs: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def spec(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument's shape."""
    return jax.ShapeDtypeStruct(dims, dtype)


def problems() -> dict[str, Problem]:
    """The example models, small."""
    return {
        "gpt": gpt.problem(GPTConfig(layers=3, width=64, heads=4, seq=64, batch=4, vocab=128)),
        "mlp": mlp.problem(MLPConfig(layers=6, width=64, batch=512)),
        "conv": convnet.problem(ConvConfig(stages=2, depth=2, channels=8, image=16, batch=8)),
        "lstm": lstm.problem(LSTMConfig(steps=6, width=32, batch=64)),
    }


def _of_problems() -> list[SampleProgram]:
    found = []
    for name, problem in problems().items():
        params, batch = problem.specs()
        state = jax.eval_shape(adam_init, params)
        found += [
            SampleProgram(name=f"{name} forward", fn=problem.loss, specs=(params, batch)),
            SampleProgram(name=f"{name} grad", fn=jax.value_and_grad(problem.loss), specs=(params, batch)),
            SampleProgram(
                name=f"{name} sgd, donated", fn=sgd_step(problem.loss), specs=(params, batch), donate=(0,)
            ),
            SampleProgram(
                name=f"{name} adam, donated", fn=adam_step(problem.loss), specs=(state, batch), donate=(0,)
            ),
        ]
    return found


def _deep() -> list[SampleProgram]:
    """More than 500 temporaries."""
    problem = gpt.problem(GPTConfig(layers=10, width=64, heads=4, seq=64, batch=4, vocab=128))
    return [SampleProgram(name="deep gpt grad", fn=jax.value_and_grad(problem.loss), specs=problem.specs())]


def _enforced() -> list[SampleProgram]:
    found = []
    for name, problem in problems().items():
        params, batch = problem.specs()
        state = jax.eval_shape(adam_init, params)
        for budget in (0.85, 0.7):
            step = coop.remat(adam_step(problem.loss), budget=budget)
            found.append(
                SampleProgram(name=f"{name} within {budget}", fn=step, specs=(state, batch), donate=(0,))
            )
    return found


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, heads first."""
    seq = q.shape[-2]
    score = q @ jnp.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), score, -1e9)) @ v


def _attention() -> list[SampleProgram]:
    shape = spec(4, 64, 32)

    def loss(w: Any, q: Any, k: Any, v: Any) -> Any:
        return (attention(q @ w, k, attention(k, q @ w, v)) ** 2).mean()

    def chunks(q: Any, k: Any, v: Any) -> Any:
        return lax.map(lambda x: attention(*x), (q, k, v))

    grad = jax.grad(loss)
    return [
        SampleProgram(name="attention forward", fn=attention, specs=(shape, shape, shape)),
        SampleProgram(name="attention grad", fn=grad, specs=(spec(32, 32), shape, shape, shape)),
        SampleProgram(name="attention by head", fn=chunks, specs=(shape, shape, shape)),
    ]


def _scanned() -> list[SampleProgram]:
    d, layers = 32, 5
    block = {"qkv": spec(layers, d, 3 * d), "up": spec(layers, d, 4 * d), "down": spec(layers, 4 * d, d)}

    def layer(x: Any, p: Any) -> Any:
        x = x + attention(*jnp.split(x @ p["qkv"], 3, -1))
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params: Any, x: Any, wrap: Any = lambda f: f) -> Any:
        return (lax.scan(wrap(layer), x, params)[0] ** 2).mean()

    def remat(params: Any, x: Any) -> Any:
        return loss(params, x, jax.checkpoint)

    def accumulate(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)[0]

    def rnn(w: Any, xs: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w[0] + x @ w[1])
            return h, (h**2).mean()

        return lax.scan(cell, jnp.zeros((8, d)), xs)[1].sum()

    x = spec(2, 32, d)
    return [
        SampleProgram(name="scanned gpt grad", fn=jax.value_and_grad(loss), specs=(block, x)),
        SampleProgram(name="scanned gpt, checkpoint", fn=jax.value_and_grad(remat), specs=(block, x)),
        SampleProgram(name="gradient accumulation", fn=accumulate, specs=(block, spec(3, 2, 32, d))),
        SampleProgram(
            name="scanned rnn grad", fn=jax.grad(rnn), specs=((spec(d, d), spec(d, d)), spec(12, 8, d))
        ),
    ]


def _control() -> list[SampleProgram]:
    def branches(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        z = lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y @ w) @ w.T, lambda y: y * 2.0, y)
        return (jnp.tanh(z @ w) ** 2).mean()

    def switch(i: Any, x: Any) -> Any:
        choices = [jnp.sin, lambda x: x @ x, lambda x: jnp.cumsum(jnp.sort(x), 0), lambda x: x[::-1] * 2]
        return lax.switch(i, choices, x) @ x

    def power(x: Any) -> Any:
        def body(state: Any) -> Any:
            n, y, z = state
            y = y @ x
            return n + 1, y / jnp.linalg.norm(y), jnp.where(n % 2 == 0, z + y, z)

        return lax.while_loop(lambda s: (s[0] < 9) & (jnp.abs(s[1][0, 0]) < 9), body, (0, x, x))[2]

    def newton(x: Any) -> Any:
        def row(y: Any) -> Any:
            return lax.fori_loop(0, 5, lambda _, z: lax.cond(z[0] > 0, jnp.sin, jnp.cos, z) + y, y)

        return lax.map(row, x)

    x = spec(32, 32)
    return [
        SampleProgram(name="cond grad", fn=jax.value_and_grad(branches), specs=(x, x)),
        SampleProgram(name="switch", fn=switch, specs=(spec(dtype=jnp.int32), x)),
        SampleProgram(name="while", fn=power, specs=(x,)),
        SampleProgram(name="nested loops", fn=newton, specs=(x,)),
    ]


def _libraries() -> list[SampleProgram]:
    def spectral(x: Any, f: Any) -> Any:
        return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(f)) @ jnp.tanh(x.T)

    def ranks(x: Any) -> Any:
        order = jnp.argsort(x @ x, axis=-1)
        return jnp.take_along_axis(x, order, -1) + lax.top_k(x, 8)[0].sum(), order

    def solves(x: Any) -> Any:
        a = x @ x.T + 32 * jnp.eye(x.shape[0])
        q, r = jnp.linalg.qr(x)
        return jnp.linalg.cholesky(a) @ q + r, jnp.linalg.eigh(a)[0]

    def draws(seed: Any, x: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), 3)
        noise = jax.random.normal(keys[0], x.shape)
        kept = jax.random.bernoulli(keys[1], 0.7, x.shape)
        return jnp.where(kept, x + noise, 0) @ jax.random.uniform(keys[2], x.shape)

    def scatters(x: Any, i: Any) -> Any:
        y = jnp.zeros_like(x).at[i].add(jnp.sin(x[: i.shape[0]]))
        return y.at[2:9].set(x[:7] @ x) @ x + jax.ops.segment_sum(x, jnp.arange(32) // 3, 32)

    def slices(x: Any, i: Any) -> Any:
        y = lax.dynamic_update_slice(x @ x, jnp.tanh(lax.dynamic_slice(x, (i, 0), (4, 32))), (i, 0))
        return jnp.concatenate([y, jnp.pad(y[::2], ((0, 4), (0, 0)))]) @ x

    x = spec(32, 32)
    return [
        SampleProgram(name="fft", fn=spectral, specs=(x, x)),
        SampleProgram(name="sort and top k", fn=ranks, specs=(x,)),
        SampleProgram(name="linear algebra", fn=solves, specs=(x,)),
        SampleProgram(name="random bits", fn=draws, specs=(spec(dtype=jnp.int32), x)),
        SampleProgram(name="scatter", fn=scatters, specs=(x, spec(16, dtype=jnp.int32))),
        SampleProgram(name="slices", fn=slices, specs=(x, spec(dtype=jnp.int32))),
    ]


def _conv(x: Any, w: Any, stride: int = 1, scale: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", lhs_dilation=(scale, scale),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def _models() -> list[SampleProgram]:
    def unet(p: Any, x: Any) -> Any:
        a = jax.nn.relu(_conv(x, p["in"]))
        b = jax.nn.relu(_conv(a, p["down"], stride=2))
        c = jax.nn.relu(_conv(b, p["middle"]))
        up = jnp.repeat(jnp.repeat(c, 2, 1), 2, 2)
        return ((_conv(jnp.concatenate([a, up], -1), p["out"]) - x) ** 2).mean()

    def vae(p: Any, x: Any, seed: Any) -> Any:
        mean, scale = jnp.split(jax.nn.relu(x @ p["e1"]) @ p["e2"], 2, -1)
        z = mean + jnp.exp(scale) * jax.random.normal(jax.random.key(seed), mean.shape)
        y = jax.nn.sigmoid(jax.nn.relu(z @ p["d1"]) @ p["d2"])
        return ((x - y) ** 2).sum() + (mean**2 + jnp.exp(2 * scale) - 2 * scale).sum()

    def graph(p: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        for w in p:
            messages = jax.nn.relu(nodes[senders] @ w[0] + nodes[receivers] @ w[1])
            nodes = nodes + jax.ops.segment_sum(messages, receivers, nodes.shape[0])
        return (nodes**2).mean()

    def mixture(p: Any, x: Any) -> Any:
        gate = jax.nn.softmax(x @ p["gate"])
        weight, which = lax.top_k(gate, 2)
        out = jnp.einsum("bd,edf->ebf", x, p["experts"])
        picked = jnp.take_along_axis(jnp.swapaxes(out, 0, 1), which[:, :, None], 1)
        return ((weight[:, :, None] * jax.nn.gelu(picked)).sum(1) ** 2).mean()

    index = spec(96, dtype=jnp.int32)
    networks = {"in": spec(3, 3, 4, 8), "down": spec(3, 3, 8, 16), "middle": spec(3, 3, 16, 16),
                "out": spec(3, 3, 24, 4)}  # fmt: skip
    coder = {"e1": spec(64, 48), "e2": spec(48, 32), "d1": spec(16, 48), "d2": spec(48, 64)}
    layers = tuple((spec(16, 16), spec(16, 16)) for _ in range(3))
    experts = {"gate": spec(32, 4), "experts": spec(4, 32, 48)}
    return [
        SampleProgram(name="u-net grad", fn=jax.grad(unet), specs=(networks, spec(4, 16, 16, 4))),
        SampleProgram(name="vae grad", fn=jax.grad(vae), specs=(coder, spec(32, 64), spec(dtype=jnp.int32))),
        SampleProgram(
            name="graph network grad", fn=jax.grad(graph), specs=(layers, spec(24, 16), index, index)
        ),
        SampleProgram(name="mixture of experts grad", fn=jax.grad(mixture), specs=(experts, spec(64, 32))),
    ]


def corpus() -> list[SampleProgram]:
    """All programs, each with a name of its own."""
    groups = (_of_problems, _deep, _enforced, _attention, _scanned, _control, _libraries, _models)
    return [program for group in groups for program in group()]
