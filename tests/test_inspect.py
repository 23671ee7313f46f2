"""Programs that coop never saw: dumps and serialized modules of five of them, on a CPU and an absent H200."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax import aot, serialized
from coop_jax.inspecting import open_path, simulated_curve
from passes.checked import InputError
from passes.cost import DEVICES

SPEC = jax.ShapeDtypeStruct


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention."""
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
    return jax.nn.softmax(scores) @ v


def chain(x: Any) -> Any:
    for _ in range(5):
        x = jnp.tanh(x @ x)
    return x.sum()


def scanned(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()


def branches(p: Any, x: Any) -> Any:
    return jax.lax.cond(p, lambda x: jnp.sort(x, 0), lambda x: jnp.cos(x) @ x, x)


def convolved(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return x.sum()


def _f32(*shape: int) -> Any:
    return SPEC(shape, jnp.float32)


PROGRAMS: dict[str, Any] = {
    "attention": (attention, (_f32(4, 64, 32),) * 3),
    "chain": (jax.grad(chain), (_f32(96, 96),)),
    "scanned": (jax.grad(scanned), (_f32(4, 48, 48), _f32(64, 48))),
    "branches": (branches, (SPEC((), jnp.bool_), _f32(64, 64))),
    "convolved": (jax.grad(convolved, 1), (_f32(4, 16, 16, 8), _f32(3, 3, 8, 8))),
}


@pytest.fixture(params=["cpu", "h200"])
def device(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "cpu" else request.getfixturevalue("h200")


@functools.cache
def compiled(name: str, device: str | None, **options: Any) -> Any:
    function, specs = PROGRAMS[name]
    return aot.lower_for(function, specs, device=device).compile(compiler_options=options or None)


@pytest.fixture
def dump(tmp_path: Path) -> Any:
    """Compiles a program and has XLA write it out; without JAX's cache, which would skip that."""

    def write(name: str, device: str | None, form: str) -> tuple[Path, Any]:
        function, specs = PROGRAMS[name]
        folder = tmp_path / form
        options = {"xla_dump_to": str(folder), f"xla_dump_hlo_as_{form}": True}
        return folder, aot.lower_for(function, specs, device=device).compile(compiler_options=options)

    return write


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_dump_as_text_has_xlas_bytes_and_addresses(name: str, device: str | None, dump: Any) -> None:
    folder, program = dump(name, device, "text")
    found, memory = coop.inspect(folder), aot.memory(program)
    assert found.platform == ("cpu" if device is None else "cuda")
    assert found.temp_bytes == memory.temp_bytes
    assert found.total_bytes == memory.total_bytes
    assert found.exact_addresses
    assert sum(row.nbytes for row in found.by(lambda v: v.op)) == memory.total_bytes


@pytest.mark.parametrize("name", ["chain", "scanned"])
def test_a_dump_as_protos_says_the_same(name: str, device: str | None, dump: Any) -> None:
    folder, program = dump(name, device, "proto")
    found, memory = coop.inspect(folder), aot.memory(program)
    assert (found.temp_bytes, found.total_bytes) == (memory.temp_bytes, memory.total_bytes)
    (single,) = folder.glob("*after_optimizations.hlo.pb")
    assert coop.inspect(str(single)) == found
    renamed = folder / "module.bin"
    shutil.copy(single, renamed)
    assert coop.inspect(renamed) == found


def test_of_several_modules_the_largest_is_shown_or_the_one_that_is_named(dump: Any) -> None:
    folder, _ = dump("branches", None, "text")
    _, large = dump("attention", None, "text")
    assert coop.inspect(folder).total_bytes == aot.memory(large).total_bytes
    assert coop.inspect(folder, module="branches").name == "jit_branches"
    with pytest.raises(InputError, match=r"there are .*attention"):
        coop.inspect(folder, module="nothing")


def test_a_pinned_program_has_its_new_addresses_and_no_holes() -> None:
    compiled_program = compiled("convolved", None)
    pinned = coop.pin(compiled_program)
    found = coop.inspect(pinned)
    assert found.total_bytes == aot.memory(pinned).total_bytes
    assert max(v.offset + v.nbytes for v in found.values if v.offset is not None) == found.temp_bytes


def test_serialized_modules_and_executables_are_read(device: str | None, tmp_path: Path) -> None:
    program = compiled("chain", device)
    temp_bytes = aot.memory(program).temp_bytes
    module, executable = tmp_path / "module", tmp_path / "executable"
    module.write_bytes(aot.final_module(program))
    executable.write_bytes(serialized.to_bytes(program))
    for path in (module, executable):
        assert coop.inspect(path).temp_bytes == temp_bytes
    saved = tmp_path / "map.json"
    coop.draw(program, saved)
    assert coop.inspect(saved) == coop.inspect(program)


def test_what_budgets_would_cost_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "module"
    path.write_bytes(aot.final_module(compiled("chain", None)))
    opened = open_path(path)
    curve = simulated_curve(opened, DEVICES["cpu"])
    total = opened.memory_map().total_bytes
    assert [p.budget_bytes for p in curve] == sorted((p.budget_bytes for p in curve), reverse=True)
    assert all(p.budget_bytes < total for p in curve)
    met = [p.overhead_ratio for p in curve if p.found]
    assert met == sorted(met)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"HloModule nonsense",
        b"\x00\x01\x02",
        b"{}",
        b"[1]",
        b"HloModule m\n\nENTRY e {\n}",
        b"\x0a\x03abc",
        b"x" * 999,
    ],
)
def test_files_that_are_no_modules_are_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError):
        coop.inspect(path)


def test_half_a_module_is_refused(tmp_path: Path) -> None:
    data = aot.final_module(compiled("chain", None))
    path = tmp_path / "half"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError):
        coop.inspect(path)


def test_folders_without_modules_and_paths_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="xla_dump_to"):
        coop.inspect(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        coop.inspect(tmp_path / "nothing")
    with pytest.raises(InputError, match="does not exist"):
        coop.inspect("HloModule step, " * 400)
    with pytest.raises(InputError, match="expected one of cpu, cuda"):
        coop.inspect(tmp_path, platform="vax")
    with pytest.raises(coop.UnsupportedError, match="no compiled program"):
        coop.inspect(3)
