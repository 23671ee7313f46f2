"""`COOP_DUMP_TO=folder`: what every stage made of a program, for looking."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from reading import read_program

import coop_jax as coop
from coop_cli import main
from passes.dump import VARIABLE, dump


def test_every_stage_is_written_and_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "dump"))

    @coop.remat(budget=0.75)
    def gradient(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            for _ in range(8):
                x = jnp.tanh(x @ x)
            return x.sum()

        return jax.grad(loss)(x)

    compiled = jax.jit(gradient).lower(jnp.ones((64, 64))).compile()
    folders = sorted((tmp_path / "dump").iterdir())
    assert {f.name.partition("-")[2] for f in folders} == {"jaxpr", "hlo"}
    assert [f.name[:4] for f in folders] == [f"{n:04}" for n in range(1, len(folders) + 1)]
    first, last = folders[0], folders[-1]
    assert "dot_general" in (first / "jaxpr.txt").read_text()
    assert read_program((first / "program.txt").read_text()).ops
    planned = [f for f in folders if f.name.endswith("jaxpr") and "| *" in (f / "plan.txt").read_text()]
    assert planned
    assert "optimization_barrier" in (planned[0] / "emitted.txt").read_text()
    assert json.loads((last / "outcome.json").read_text())["stage"] == "hlo"
    assert main(["show", str(first / "program.json")]) == 0
    assert capsys.readouterr().out == (first / "program.txt").read_text()
    found = coop.inspect(last / "after.map.json")
    assert found.total_bytes == coop.inspect(compiled).total_bytes
    assert coop.inspect(last / "returned.pb").temp_bytes == found.temp_bytes


def test_nothing_is_made_if_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    def never() -> str:
        raise AssertionError("made for nobody")

    assert dump("jaxpr", {"file": never}) is None
