"""Small programs, and a hook into XLA's callback, for the tests of the HLO side.

Data are small integers and arithmetic is exact where a test asks for bitwise equality of edited programs, so
that no rounding (LLVM may contract a multiply and an add differently) can blur the comparison.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.xla import PipelineStage, register_hlo_module_transformation

from coop_jax import aot
from coop_jax.addresses import real_assignment
from passes.cost import DEVICES
from passes.hlo import graph, proto
from passes.hlo.assign import Assigner
from passes.hlo.barriers import drop_barriers
from passes.hlo.emit import emit
from passes.hlo.heap import HeapPrediction, predict_assigned
from passes.hlo.lift import LiftedModule, lift
from passes.hlo.pages import CopyStyle
from passes.ir import OpId, Page, Program
from passes.jaxpr import compat
from tests.replay import Replay, predicted_addresses, replay

Transform = Callable[[bytes], bytes]
_HOOK: list[tuple[str, Transform]] = []
OLD_RULES = compat.OLD_RULES
_LLVM_FAST = {"xla_backend_optimization_level": "0"}
_AS_USERS_DO = {"xla_backend_optimization_level": "3"}
# A TPU's compiler leaves values in HBM then, and its heap can be predicted exactly.
_FAST = {"cpu": _LLVM_FAST, "cuda": _LLVM_FAST, "tpu": {"xla_msa_enable": "DISABLED"}}
_DEVICE = {"cuda": "h200", "tpu": "v5e"}
MODEL = {"cpu": DEVICES["cpu"], "cuda": DEVICES["h200"], "tpu": DEVICES["v5e"]}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A function with the shapes of its arguments; hashed by identity, so that compiles can be kept.

    Kernels are compiled without LLVM's optimizations, in half of the time, unless `optimized`.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    optimized: bool = False


def _without_barriers(data: bytes) -> bytes:
    module = proto.parse(data)
    return proto.serialize(module) if drop_barriers(module) else data


@functools.cache
def _install(platform: str) -> None:
    def callback(data: bytes) -> bytes:
        for name, transform in _HOOK:
            if proto.parse(data).name == name:
                return transform(bytes(data))
        return data

    register_hlo_module_transformation(
        callback, name="hlo_support", stage=PipelineStage.POST_SCHEDULER, platforms=(platform,)
    )


def compile_with(
    example: Example,
    transform: Transform,
    platform: str = "cpu",
    *,
    barriers: bool = False,
    here: bool = False,
) -> Any:
    """Compile an example; `transform` gets its scheduled module and returns the one to use.

    For a GPU or TPU that is not there, unless `here`.

    Unless `barriers` the module has lost its barriers before, as the enforcing stage does it.
    """
    device = None if here else _DEVICE.get(platform)
    if device is not None:  # libtpu takes a callback only when it has made a device
        aot.devices(device)
    _install(platform)

    def program(*args: Any) -> Any:
        return example.fn(*args)

    _HOOK[:] = [("jit_program", transform if barriers else lambda data: transform(_without_barriers(data)))]
    try:
        jitted = jax.jit(program, donate_argnums=example.donate)
        lowered = aot.lower_for(jitted, example.args, device=device)
        return lowered.compile(compiler_options=_AS_USERS_DO if example.optimized else _FAST[platform])
    finally:
        _HOOK.clear()


@functools.cache
def scheduled(example: Example, platform: str = "cpu") -> tuple[bytes, Any]:
    """The module that XLA hands to the callback, and the program compiled from it as it is."""
    seen: list[bytes] = []

    def keep(data: bytes) -> bytes:
        seen.append(data)
        return data

    compiled = compile_with(example, keep, platform)
    assert len(seen) == 1, f"XLA called back {len(seen)} times for {example.name}"
    return seen[0], compiled


def lifted(data: bytes, platform: str = "cpu") -> LiftedModule:
    """Parse and lift a scheduled module."""
    view = graph.read(proto.parse(data))
    return lift(view, MODEL[platform], platform, assigner=Assigner(view, platform, old_rules=OLD_RULES))


def predict(module: Any, platform: str) -> HeapPrediction:
    """What the installed XLA will allocate for a parsed module."""
    return predict_assigned(Assigner(graph.read(module), platform, old_rules=OLD_RULES))


def kernels_for(device: str, function: Callable[..., Any], specs: Sequence[Any]) -> list[graph.Instruction]:
    """The kernels of a program that is compiled for an absent device, without those of its loops."""
    compiled = aot.lower_for(jax.jit(function), specs, device=device).compile()
    entry = graph.read(proto.parse(aot.final_module(compiled))).entry
    return [i for i in entry.by_id.values() if i.opcode in ("custom-call", "fusion", "sort")]


def with_steps(
    example: Example, choose: Callable[[Program], Sequence[OpId]], platform: str = "cpu"
) -> tuple[Any, HeapPrediction, LiftedModule]:
    """Compile an example with the steps that `choose` picks; also the prediction for what was emitted."""
    found: list[tuple[HeapPrediction, LiftedModule]] = []

    def transform(data: bytes) -> bytes:
        before = lifted(data, platform)
        module = emit(before, choose(before.program)).proto
        found.append((predict(module, platform), before))
        return proto.serialize(module)

    compiled = compile_with(example, transform, platform)
    return compiled, *found[0]


def random_steps(seed: int, rate: float) -> Callable[[Program], list[OpId]]:
    """Any allowed recomputes anywhere: with probability `rate` one more before every op."""

    def choose(program: Program) -> list[OpId]:
        rng = random.Random(seed)
        steps: list[OpId] = []
        for slot in range(len(program.ops)):
            while slot and rng.random() < rate:
                again = OpId(rng.randrange(slot))
                if program.ops[again].can_recompute(slot):
                    steps.append(again)
            steps.append(OpId(slot))
        return steps

    return choose


def random_pages(program: Program, steps: Sequence[OpId], seed: int, rate: float = 1.0) -> list[Page]:
    """With probability `rate` a page for every gap between uses of every copy, at any moments in the gap."""
    rng = random.Random(seed)
    latest: dict[int, int] = {}
    used: dict[tuple[int, int], list[int]] = {}
    for place, step in enumerate(steps):
        for b in program.ops[step].inputs:
            if b in latest:
                used[b, latest[b]].append(place)
        for b in program.ops[step].outputs:
            latest[b] = place
            used[b, place] = [place]
    pages = []
    for (b, run), places in used.items():
        buffer = program.buffers[b]
        if not buffer.pageable or not buffer.nbytes or b in program.outputs:
            continue
        for before, after in itertools.pairwise(places):
            if rng.random() < rate:
                moments = sorted(rng.randint(before + 1, after) for _ in range(3))
                out_done, in_start, in_done = moments
                pages.append(
                    Page(buffer=buffer.id, run=run, out_done=out_done, in_start=in_start, in_done=in_done)
                )
    return pages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paged:
    """An example with pages, compiled: what was predicted, lifted and written, and the pages."""

    compiled: Any
    prediction: HeapPrediction
    before: LiftedModule
    module: Any
    pages: list[Page]


def with_pages(
    example: Example,
    platform: str,
    *,
    seed: int = 0,
    rate: float = 1.0,
    again: float = 0.0,
    style: CopyStyle = "asynchronous",
    here: bool = False,
) -> Paged:
    """Compile an example with pages and recomputes drawn at random."""
    found: list[dict[str, Any]] = []

    def transform(data: bytes) -> bytes:
        before = lifted(data, platform)
        steps = random_steps(seed, again)(before.program)
        pages = random_pages(before.program, steps, seed, rate)
        module = emit(before, steps, pages, style=style).proto
        prediction = predict(module, platform)
        found.append({"prediction": prediction, "before": before, "module": module, "pages": pages})
        return proto.serialize(module)

    compiled = compile_with(example, transform, platform, here=here)
    return Paged(compiled=compiled, **found[0])


def replayed(compiled: Any) -> Replay:
    """A program's final module run in the abstract, at XLA's own addresses."""
    module = proto.parse(aot.final_module(compiled))
    real = real_assignment(compiled, module)
    assert real is not None, "XLA does not say where it put what"
    return replay(graph.read(module), real.addresses)


def replayed_module(module: Any, platform: str) -> Replay:
    """A scheduled module run in the abstract, at the addresses that are predicted for it."""
    view = graph.read(module)
    return replay(view, predicted_addresses(Assigner(view, platform, old_rules=OLD_RULES)))


def totals(compiled: Any) -> dict[str, int]:
    """XLA's own count."""
    m = compiled.memory_analysis()
    return {
        "temp": m.temp_size_in_bytes, "argument": m.argument_size_in_bytes, "output": m.output_size_in_bytes,
        "alias": m.alias_size_in_bytes, "total": m.total_allocation_bytes,
    }  # fmt: skip


def predicted(p: HeapPrediction) -> dict[str, int]:
    """A prediction in the same form."""
    return {
        "temp": p.temp_bytes, "argument": p.argument_bytes, "output": p.output_bytes,
        "alias": p.alias_bytes, "total": p.total_bytes,
    }  # fmt: skip


def data_for(example: Example, *, exact: bool = False) -> Any:
    """Arguments with values; small integers if `exact`."""
    rng = np.random.default_rng(0)

    def fill(s: Any) -> Any:
        if jnp.issubdtype(s.dtype, jnp.integer) or exact:
            return jnp.asarray(rng.integers(-2, 3, s.shape) % (64 if s.dtype == jnp.int32 else 100), s.dtype)
        return jnp.asarray(rng.normal(size=s.shape) * 0.1 + 0.2, s.dtype)

    return jax.tree.map(fill, example.args)


def run(compiled: Any, args: Any) -> list[np.ndarray]:
    """Results as numpy arrays; arguments are copied, so that donation does not eat them."""
    return [np.asarray(x) for x in jax.tree.leaves(compiled(*jax.tree.map(jnp.copy, args)))]


def spec(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument's shape."""
    return jax.ShapeDtypeStruct(dims, dtype)


def adam(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A training step with Adam around a loss."""

    def step(state: Any, *batch: Any) -> Any:
        params, first, second, count = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        count = count + 1.0
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

        def update(p: Any, m: Any, v: Any) -> Any:
            return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

        return (jax.tree.map(update, params, first, second), first, second, count), value

    return step


def _mlp() -> tuple[Any, Any, Any]:
    params = tuple((spec(32, 32), spec(32)) for _ in range(4))

    def loss(params: Any, x: Any, y: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return ((x - y) ** 2).mean()

    return params, loss, (spec(64, 32), spec(64, 32))


def _gpt(checkpoint: bool = False) -> tuple[Any, Any, Any]:
    d, seq, batch, vocab, heads = 32, 16, 2, 64, 2
    block = {"qkv": spec(d, 3 * d), "o": spec(d, d), "up": spec(d, 4 * d), "down": spec(4 * d, d)}
    params = {"embed": spec(vocab, d), "blocks": [block]}

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def layer(p: Any, x: Any) -> Any:
        q, k, v = (
            a.reshape(batch, seq, heads, d // heads).transpose(0, 2, 1, 3)
            for a in jnp.split(norm(x) @ p["qkv"], 3, -1)
        )
        score = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), q @ k.transpose(0, 1, 3, 2), -1e9)
        mixed = (jax.nn.softmax(score) @ v).transpose(0, 2, 1, 3).reshape(batch, seq, d)
        x = x + mixed @ p["o"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = (jax.checkpoint(layer) if checkpoint else layer)(p, x)
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return params, loss, (spec(batch, seq + 1, dtype=jnp.int32),)


def _conv() -> tuple[Any, Any, Any]:
    params = tuple((spec(3, 3, 8, 8), spec(8), spec(8)) for _ in range(2))

    def loss(params: Any, x: Any) -> Any:
        for w, scale, shift in params:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * scale + shift)
        return (x**2).mean()

    return params, loss, (spec(4, 8, 8, 8),)


def _lstm() -> tuple[Any, Any, Any]:
    d, batch, steps = 16, 4, 4

    def loss(params: Any, xs: Any) -> Any:
        h = c = jnp.zeros((batch, d))
        total = jnp.zeros(())
        for t in range(steps):
            i, f, g, o = jnp.split(xs[t] @ params[0] + h @ params[1] + params[2], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            total = total + (h**2).mean()
        return total

    return (spec(d, 4 * d), spec(d, 4 * d), spec(4 * d)), loss, (spec(steps, batch, d),)


def _scan() -> tuple[Any, Any, Any]:
    def loss(params: Any, x: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return jnp.tanh(x @ layer[0] + layer[1]) + x, (x**2).sum()

        x, sums = lax.scan(body, x, params)
        return (x**2).mean() + sums.mean()

    return (spec(4, 16, 16), spec(4, 16)), loss, (spec(16, 16),)


def _cond() -> tuple[Any, Any, Any]:
    def loss(params: Any, x: Any) -> Any:
        y = jnp.tanh(x @ params[0])
        z = lax.cond(x.sum() > 0, lambda y: jnp.sin(y @ params[1]) @ params[0], lambda y: y * 2.0, y)
        return (jnp.tanh(z @ params[1]) ** 2).mean()

    return (spec(32, 32), spec(32, 32)), loss, (spec(32, 32),)


def _mixed() -> tuple[Any, Any, Any]:
    def loss(params: Any, x: Any) -> Any:
        x = jnp.sort(x @ params, axis=-1)
        top = lax.top_k(x, 4)[0].sum()
        x = x.at[3:9].set(jnp.sin(x[0:6])).at[jnp.arange(5) * 2].add(1.0)
        x = x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        q, r = jnp.linalg.qr(x + jnp.eye(16))
        return q.mean() + jnp.linalg.norm(r) + jnp.abs(jnp.fft.rfft(x)).sum() + top

    return spec(16, 16), loss, (spec(16, 16),)


_MODELS = {
    "mlp": _mlp, "gpt": _gpt, "gpt_checkpoint": lambda: _gpt(checkpoint=True), "conv": _conv,
    "lstm": _lstm, "scan": _scan, "cond": _cond, "mixed": _mixed,
}  # fmt: skip
MODELS = tuple(_MODELS)
KINDS = ("grad", "adam", "donated")


@functools.cache
def example(model: str, kind: str) -> Example:
    """A model as a loss under `grad`, or as a whole step with Adam, donated or not."""
    params, loss, batch = _MODELS[model]()
    name = f"{model}-{kind}"
    if kind == "grad":
        return Example(name=name, fn=jax.value_and_grad(loss), args=(params, *batch))
    state = (params, params, params, spec())
    donate = (0,) if kind == "donated" else ()
    return Example(name=name, fn=adam(loss), args=(state, *batch), donate=donate)
