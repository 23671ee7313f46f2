"""Temporaries moved in executables for an H200, which is not here: proved, and read by XLA."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from benchmarks.offsets import paired_runs, random_arguments
from benchmarks.programs import SampleProgram, corpus
from coop_jax import aot, pinning, serialized
from passes.hlo import graph
from passes.hlo.assign import Assigner
from passes.hlo.schema import Schema, schema
from passes.jaxpr import compat
from passes.pinning.gpu_executable import GpuExecutable, read_gpu_executable
from passes.pinning.gpu_thunks import ALIGNMENT, GpuThunks
from passes.pinning.mentions import ThunkError
from passes.pinning.moves import MoveError
from passes.pinning.pin import PinError, prove, rewrite
from passes.pinning.pin import pin as pin_bytes
from passes.pinning.repack import repack
from passes.pinning.slices import Moved

STRAIGHT = ("attention grad", "fft", "linear algebra", "mlp adam, donated", "random bits", "vae grad")
PROGRAMS = (*STRAIGHT, "cond grad", "while", "nested loops", "scatter", "sort and top k", "switch")
SMALLER = {"attention grad": 0.85, "cond grad": 0.75, "nested loops": 0.5, "while": 0.99}


def installed() -> Schema:
    """The schema of the installed CUDA plugin."""
    return schema(serialized.proto_library("cuda"))


def program(name: str) -> SampleProgram:
    """A program of the corpus."""
    return next(p for p in corpus() if p.name == name)


@functools.cache
def compiled(name: str) -> Any:
    """A program of the corpus, compiled for an H200."""
    found = program(name)
    return aot.lower_for(jax.jit(found.fn, donate_argnums=found.donate), found.specs, device="h200").compile()


@functools.cache
def parts(name: str) -> tuple[bytes, GpuExecutable]:
    """Its bytes, and what is in them."""
    data = serialized.to_bytes(compiled(name))
    return data, read_gpu_executable(data, installed())


@pytest.mark.parametrize("name", PROGRAMS)
def test_pinned_executables_are_proved(h200: str, name: str) -> None:
    data, executable = parts(name)
    found = pin_bytes(data, installed(), "cuda")
    assert found.live_bytes <= found.temp_bytes <= found.live_bytes + ALIGNMENT
    assert found.temp_bytes <= SMALLER.get(name, 1) * found.temp_bytes_before
    assert found.temp_bytes_before == executable.temp_bytes == aot.memory(compiled(name)).temp_bytes
    again = read_gpu_executable(found.data, installed())
    assert again.temp_bytes == found.temp_bytes
    assert len(again.thunks.slices) == len(executable.thunks.slices) > 0


@pytest.mark.parametrize("name", STRAIGHT)
def test_pinning_keeps_apart_what_xla_says_is_alive_at_once(h200: str, name: str) -> None:
    """The places of XLA's own buffers against XLA's own live ranges: neither is what pinning works with."""
    data, before = parts(name)
    after = read_gpu_executable(pin_bytes(data, installed(), "cuda").data, installed())
    assigner = Assigner(graph.read(before.module()), "cuda", old_rules=compat.OLD_RULES)
    flow = assigner.flow
    values = {(v.home.instruction, v.home.index): v for v in flow.values}
    defined = {b.id: b.defined_at for b in before.assignment.logical_buffers}
    arrays = []
    for old, new in zip(before.assigned, after.assigned, strict=True):
        at = defined[old.logical_buffer_id]
        value = values[at.instruction_id, tuple(at.shape_index)]
        if not value.is_tuple:
            arrays.append((assigner.ranges[value.id], old, new))
    for n, (lives, old, new) in enumerate(arrays):
        for other_lives, other_old, other_new in arrays[n + 1 :]:
            at_once = lives.start <= other_lives.end and other_lives.start <= lives.end
            assert not at_once or meet(old, other_old) == meet(new, other_new)


def meet(first: Any, second: Any) -> bool:
    """True if two places share bytes."""
    return first.offset < second.offset + second.size and second.offset < first.offset + first.size


def test_library_calls_are_moved_too(h200: str) -> None:
    found = program("attention grad")
    lowered = aot.lower_for(jax.jit(found.fn), found.specs, device=h200)
    data = serialized.to_bytes(lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}))
    executable = read_gpu_executable(data, installed())
    kinds = {t.WhichOneof("impl") for t in executable.message.thunks}
    assert kinds & {"gemm_thunk", "cublas_lt_matmul_thunk"}
    pinned = pin_bytes(data, installed(), "cuda")
    assert pinned.live_bytes <= pinned.temp_bytes < pinned.temp_bytes_before


@pytest.mark.parametrize("split", ["batch", "weights"])
def test_programs_over_several_gpus(h200: str, split: str) -> None:
    mesh = jax.sharding.Mesh(aot.devices(h200, count=4), ("d",))

    def spec(shape: tuple[int, ...], *axes: str) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    weights = [spec((256, 256), *(["d"] if split == "weights" else [])) for _ in range(3)]
    gradient = jax.jit(jax.grad(loss)).lower(weights, spec((512, 256), "d")).compile()
    data = serialized.to_bytes(gradient)
    executable = read_gpu_executable(data, installed())
    kinds = {t.WhichOneof("impl") for t in executable.message.thunks}
    assert kinds & {"all_reduce_thunk", "reduce_scatter_thunk"}
    found = pin_bytes(data, installed(), "cuda")
    assert found.live_bytes <= found.temp_bytes <= found.temp_bytes_before


@pytest.mark.parametrize("name", PROGRAMS)
def test_xla_takes_pinned_thunks_into_another_program(h200: str, name: str) -> None:
    """XLA:GPU makes thunks of the rewritten messages, and they lie where they were put, from some base on."""
    if jax.__version_info__ < (0, 12):
        with pytest.raises(coop.UnsupportedError, match=r"from JAX 0\.12 on"):
            pinning.inlined(compiled(name))
        return
    found = program(name)
    function = jax.jit(pinning.inlined(compiled(name)), donate_argnums=found.donate)
    outer = aot.lower_for(function, found.specs, device=h200).compile()
    inner, around = aot.memory(compiled(name)), aot.memory(outer)
    assert (around.argument_bytes, around.alias_bytes) == (inner.argument_bytes, inner.alias_bytes)
    pinned = read_gpu_executable(pin_bytes(parts(name)[0], installed(), "cuda").data, installed())
    lowered = read_gpu_executable(serialized.to_bytes(outer), installed())
    places = [(s.offset, s.size) for s in pinned.thunks.slices]
    base = min(s.offset for s in lowered.thunks.slices) - min(at for at, _ in places)
    own = [s for s in lowered.thunks.slices if s.offset + s.size <= base + pinned.temp_bytes]
    assert [(s.offset - base, s.size) for s in own] == places


def test_inlined_programs_compose(h200: str) -> None:
    if jax.__version_info__ < (0, 12):
        pytest.skip("needs JAX 0.12")
    run = pinning.inlined(compiled("attention grad"))
    specs = program("attention grad").specs

    def several(w: Any, *rest: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, w: w - 0.1 * run(w, *rest), w)

    around = aot.lower_for(jax.jit(several), specs, device=h200).compile()
    assert aot.memory(around).temp_bytes < aot.memory(compiled("attention grad")).temp_bytes
    with pytest.raises(coop.UnsupportedError, match="differ from those"):
        jax.eval_shape(run, *specs[:-1])
    with pytest.raises(coop.UnsupportedError, match="compiled for one CUDA GPU"):
        pinning.inlined(several)
    with pytest.raises(coop.UnsupportedError, match="a CPU's program"):
        pinning.inlined(jax.jit(jnp.sin).lower(1.0).compile())


def test_shared_storage_is_not_inlined(h200: str) -> None:
    _, executable = parts("mlp adam, donated")
    assert executable.aliases()[0] == 0
    results = [e for e in executable.copy().message.output_info_map if e.shape_index.indexes]
    assert len(executable.aliases()) == len(results) - 1  # all but the loss
    other = executable.copy()
    last = other.message.output_info_map[-1].output_info
    last.alias_config.parameter_number += 1
    with pytest.raises(ThunkError, match="not in the storage that its alias names"):
        other.aliases()
    twice = parts("linear algebra")[1].copy()
    first, second = [e.output_info for e in twice.message.output_info_map if e.shape_index.indexes]
    second.allocation_index = first.allocation_index
    with pytest.raises(ThunkError, match="two results of the program share storage"):
        twice.aliases()
    found = program("fft")
    key = jax.eval_shape(jax.random.key, 0)
    keyed = aot.lower_for(
        jax.jit(lambda k, x: (jax.random.split(k)[0], x @ x @ x)), (key, found.specs[0]), device=h200
    )
    with pytest.raises(coop.UnsupportedError, match=r"typed random keys|from JAX 0\.12 on"):
        pinning.inlined(keyed.compile())


def test_wrong_places_are_caught(h200: str) -> None:
    """Every web moved onto another one that is in use at the same time: none is let through."""
    data, executable = parts("cond grad")
    packed = repack(executable.thunks.program)
    caught = 0
    for web in packed.webs:
        others = [
            w for w in packed.webs
            if w is not web and any(a <= d and c <= b for a, b in web.lives for c, d in w.lives)
        ]  # fmt: skip
        if not others:
            continue
        offsets = list(packed.moved.offsets)
        for n in web.slices:
            offsets[n] = packed.moved.offsets[others[0].slices[0]]
        nbytes = max(o + s.nbytes for o, s in zip(offsets, executable.thunks.program.slices, strict=True))
        wrong, _ = rewrite(executable, Moved(nbytes=nbytes, offsets=tuple(offsets)))
        with pytest.raises(MoveError):
            prove(data, wrong, installed(), "cuda")
        caught += 1
    assert caught >= 5


def test_only_known_thunks_are_moved(h200: str) -> None:
    data, executable = parts("nested loops")
    unknown = executable.copy()
    unknown.message.thunks[0].thunk_info.concurrent_region_id = 3
    with pytest.raises(PinError, match="field concurrent_region_id of ThunkInfoProto is not known"):
        pin_bytes(unknown.serialize(), installed(), "cuda")
    other = executable.copy()
    place = other.thunks.slices[0]
    other.message.thunks.add().outfeed_thunk.source_slices.add().slice.CopyFrom(place)
    with pytest.raises(PinError, match="is a outfeed_thunk, which is not known"):
        pin_bytes(other.serialize(), installed(), "cuda")
    half = executable.copy()
    half.message.thunks.add().async_done_thunk.async_execution_id = 99
    with pytest.raises(PinError, match="an asynchronous region that was not started here"):
        pin_bytes(half.serialize(), installed(), "cuda")
    two = executable.copy()
    two.message.buffer_allocations.values.add(index=99, size=64)
    with pytest.raises(ThunkError, match="2 allocations of temporaries"):
        read_gpu_executable(two.serialize(), installed())
    with pytest.raises(PinError):
        pin_bytes(data[: len(data) // 2], installed(), "cuda")


def kernel(message: Any, name: str, *arguments: tuple[int, int, bool]) -> None:
    """Append a kernel with (offset, size, written) arguments in allocation 0."""
    thunk = message.thunks.add()
    thunk.thunk_info.profile_annotation = name
    for offset, size, written in arguments:
        thunk.kernel_thunk.args.add(offset=offset, size=size)
        thunk.kernel_thunk.written.append(written)


def test_what_may_be_read_counts_as_read(h200: str) -> None:
    """A kernel that no instruction explains, and outputs that were filled beforehand."""
    message = type(parts("cond grad")[1].message)()
    shape, no_operands = SimpleNamespace(is_tuple=False, nbytes=64), ()
    known = SimpleNamespace(
        name="known", operands=no_operands, shape=SimpleNamespace(leaves=lambda: [((), shape)])
    )
    computation = SimpleNamespace(by_id={1: known}, operands=lambda _: [])
    module: Any = SimpleNamespace(computations={0: computation})
    kernel(message, "unknown", (0, 64, True))
    kernel(message, "known", (256, 64, True))
    kernel(message, "known", (256, 64, True))
    fill = message.thunks.add().memset32bit_value_thunk.dest_buffer
    fill.offset, fill.size = 512, 64
    kernel(message, "known", (512, 64, True))
    kernel(message, "known", (768, 64, True))
    copied = message.thunks.add()  # as a sort does, before it sorts in place
    copied.thunk_info.profile_annotation = "known"
    destination = copied.device_to_device_copy_thunk.copy_thunk.destination_buffer.slice
    destination.offset, destination.size = 896, 64
    kernel(message, "known", (896, 64, True))
    thunks = GpuThunks(message.thunks, 0, 1024, module)
    runs = [node.accesses[0] for node in thunks.program.body]
    assert [(a.reads, a.writes) for a in runs] == [
        (True, True), (False, True), (True, True), (False, True), (True, True), (False, True),
        (False, True), (True, True),
    ]  # fmt: skip


def test_an_absent_gpu_keeps_xlas_program(h200: str) -> None:
    kept = coop.pin(compiled("attention grad"))
    outcome = pinning.outcome_of(kept)
    assert outcome is not None
    assert not outcome.pinned
    assert re.search(r"device is not here to load it; pinned it would take .* less$", outcome.reason)
    assert aot.memory(kept) == aot.memory(compiled("attention grad"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_pinned_programs_run(name: str) -> None:
    """Same bits on a GPU that is here, several times over; for that, sums are made in one order."""
    found = program(name)
    options = {"xla_gpu_deterministic_ops": True}
    plain = jax.jit(found.fn, donate_argnums=found.donate).lower(*found.specs).compile(options)
    pinned = coop.pin(plain)
    outcome = pinning.outcome_of(pinned)
    assert outcome is not None
    assert outcome.pinned or "as good as the best" in outcome.reason
    args = random_arguments(found.specs)
    equal, _ = paired_runs((plain, pinned), args, calls=20)
    assert equal
    if jax.__version_info__ >= (0, 12):
        lowered = jax.jit(pinning.inlined(plain), donate_argnums=found.donate).lower(*found.specs)
        inlined = lowered.compile(options)
        equal, _ = paired_runs((plain, inlined), args, calls=20)
        assert equal
