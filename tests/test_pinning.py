"""Temporaries moved in the finished executable of a CPU program: same bits, fewer bytes, or a reason."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hlo_support as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coop_jax as coop
from coop_jax import pinning, serialized
from passes.hlo.schema import Schema, SchemaError, schema
from passes.pinning.executable import read_executable
from passes.pinning.mentions import ThunkError
from passes.pinning.moves import MoveError
from passes.pinning.pin import PinError, prove, rewrite
from passes.pinning.pin import pin as pin_bytes
from passes.pinning.repack import repack
from passes.pinning.slices import Moved

FRAGMENTED = [("cond", "donated"), ("cond", "grad"), ("scan", "grad"), ("mixed", "donated")]


def installed() -> Schema:
    """The schema of the installed jaxlib."""
    return schema(serialized.proto_library("cpu"))


def outcome(compiled: Any) -> pinning.PinOutcome:
    """What pinning said."""
    found = pinning.outcome_of(compiled)
    assert found is not None
    return found


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Bitwise equality."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("model", "kind"), FRAGMENTED)
def test_pinned_programs_reach_what_is_alive_and_compute_the_same(model: str, kind: str) -> None:
    example = h.example(model, kind)
    compiled = h.scheduled(example)[1]
    pinned = coop.pin(compiled)
    found = outcome(pinned)
    assert found.pinned, found.reason
    assert found.live_bytes <= found.temp_bytes <= 1.005 * found.live_bytes
    assert found.temp_bytes < found.temp_bytes_before == h.totals(compiled)["temp"]
    before, after = h.totals(compiled), h.totals(pinned)
    assert before["total"] - after["total"] == found.temp_bytes_before - found.temp_bytes
    assert {k: v for k, v in before.items() if k not in ("temp", "total")} == {
        k: v for k, v in after.items() if k not in ("temp", "total")
    }
    args = h.data_for(example)
    assert same(h.run(compiled, args), h.run(pinned, args))


def test_donation_and_a_thousand_calls() -> None:
    example = h.example("cond", "donated")
    compiled = h.scheduled(example)[1]
    pinned = coop.pin(compiled)
    state, *batch = jax.tree.map(jnp.copy, h.data_for(example))
    other = jax.tree.map(jnp.copy, state)
    for _ in range(500):
        used = state
        state, _ = pinned(state, *batch)
        other, _ = compiled(other, *batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(used))
    kept = h.example("cond", "grad")
    pinned, args = coop.pin(h.scheduled(kept)[1]), h.data_for(kept)
    first = [np.asarray(x) for x in jax.tree.leaves(pinned(*args))]
    for _ in range(500):
        last = jax.tree.leaves(pinned(*args))
    assert same(
        [np.asarray(x) for x in jax.tree.leaves(state)], [np.asarray(x) for x in jax.tree.leaves(other)]
    )
    assert same(first, [np.asarray(x) for x in last])


def test_what_is_packed_well_is_left_alone() -> None:
    compiled = h.scheduled(h.example("mlp", "grad"))[1]
    found = outcome(coop.pin(compiled))
    assert not found.pinned
    assert "as good as the best" in found.reason
    assert found.live_bytes == found.temp_bytes == found.temp_bytes_before


@functools.cache
def parts() -> tuple[bytes, Any]:
    """A fragmented executable, and what is in it."""
    data = serialized.to_bytes(h.scheduled(h.example("cond", "donated"))[1])
    return data, read_executable(data, installed())


def test_wrong_places_are_caught_before_they_run() -> None:
    """Every web moved onto another one, one at a time: none is let through, whatever the web."""
    data, executable = parts()
    packed = repack(executable.thunks.program)
    caught = 0
    for web in packed.webs:
        others = [w for w in packed.webs if w is not web and _meet(w, web) and w.nbytes >= web.nbytes]
        if not others:
            continue
        goal = packed.moved.offsets[others[0].slices[0]]
        offsets = list(packed.moved.offsets)
        for n in web.slices:
            offsets[n] = goal
        wrong, _ = rewrite(executable, Moved(nbytes=packed.moved.nbytes, offsets=tuple(offsets)))
        with pytest.raises(MoveError):
            prove(data, wrong, installed())
        caught += 1
    assert caught >= 5


def _meet(first: Any, second: Any) -> bool:
    """True if two webs are in use at the same time."""
    return any(a <= d and c <= b for a, b in first.lives for c, d in second.lives)


def test_nothing_but_places_may_differ() -> None:
    data, executable = parts()
    good, _ = rewrite(executable, repack(executable.thunks.program).moved)
    prove(data, good, installed())
    changed = read_executable(good, installed()).copy()
    kernel = next(t for t in changed.sequence.thunks if t.WhichOneof("impl") == "kernel_thunk")
    kernel.kernel_thunk.kernel_name += "_other"
    with pytest.raises(MoveError, match="differs in more than the places"):
        prove(data, changed.serialize(), installed())
    small = read_executable(good, installed()).copy()
    small.allocation.size //= 2
    with pytest.raises(MoveError, match="ends at"):
        prove(data, small.serialize(), installed())


def test_only_known_thunks_are_moved() -> None:
    data, executable = parts()
    unknown = executable.copy()
    kernel = next(t for t in unknown.sequence.thunks if t.WhichOneof("impl") == "kernel_thunk")
    place = kernel.kernel_thunk.results_buffers[0].slice
    kernel.outfeed_thunk.outfeed_buffers_shapes.add().slice.CopyFrom(place)
    with pytest.raises(PinError, match="is a thunk of kind 'kernel', which is not known"):
        pin_bytes(unknown.serialize(), installed())
    two = executable.copy()
    extra = two.assignment.buffer_allocations.add()
    extra.index, extra.size = 99, 64
    with pytest.raises(ThunkError, match="2 allocations of temporaries"):
        read_executable(two.serialize(), installed())
    with pytest.raises(PinError):
        pin_bytes(data[: len(data) // 2], installed())
    with pytest.raises(PinError):
        pin_bytes(b"", installed())


def test_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x.sum())
        return jnp.tanh(x @ x) @ x

    def refuse(_: object) -> bytes:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: this comparator\nand so on")

    x = jnp.ones((16, 16))

    def check(fn: Any, why: str) -> None:
        compiled = jax.jit(fn).lower(x).compile()
        kept = coop.pin(compiled)
        assert not outcome(kept).pinned
        assert why in outcome(kept).reason
        assert same(h.run(kept, (x,)), h.run(compiled, (x,)))

    check(prints, "calls back into Python")
    check(jnp.sin, "no temporaries")
    monkeypatch.setattr(serialized, "to_bytes", refuse)
    check(lambda x: jnp.tanh(x @ x) @ x, "XLA cannot write the program out: UNIMPLEMENTED: this comparator")
    with pytest.raises(coop.UnsupportedError, match="compiled program only"):
        coop.pin(jnp.sin)


def test_a_library_without_descriptions_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.so"
    empty.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(SchemaError, match=r"does not describe xla/service/hlo\.proto"):
        schema(str(empty)).message("xla/service/hlo.proto", "xla.HloProto")
    with pytest.raises(SchemaError, match="cannot be read"):
        schema(str(tmp_path / "absent.so"))
    with pytest.raises(SchemaError, match=r"no message xla\.Absent"):
        installed().message("xla/service/hlo.proto", "xla.Absent")


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import coop_jax as coop
from coop_jax import pinning
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
place = lambda spec: NamedSharding(mesh, spec)

def f(w, x):
    y = jnp.tanh(x @ w)
    z = jax.lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y @ w) @ w.T, lambda y: y * 2.0, y)
    return (z @ w).sum(0) + jnp.sort(y, axis=0)[0], w - 0.1 * (y.T @ z)

w = jax.device_put(jnp.arange(64.0 * 64).reshape(64, 64) % 7 / 7, place(P()))
x = jax.device_put(jnp.arange(128.0 * 64).reshape(128, 64) % 5 - 1, place(P("d")))
compiled = jax.jit(f, donate_argnums=0).lower(w, x).compile()
pinned = coop.pin(compiled)
found = pinning.outcome_of(pinned)
assert found.pinned, found
assert found.temp_bytes < found.temp_bytes_before
for _ in range(20):
    a, b = compiled(w + 0, x), pinned(w + 0, x)
    assert all(np.array_equal(u, v) for u, v in zip(a, b))
    assert [u.sharding for u in a] == [v.sharding for v in b]
print("equal")
"""


def test_several_devices() -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr
