"""Pictures and the page: sizes, what is in them, and the page in a real browser."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import coop_jax as coop
from coop_jax.errors import UnsupportedError
from coop_jax.page import page
from coop_jax.tables import memory_blocks
from passes.memory_map import MemoryMap, Value

MOST_BYTES, MOST_MS, MANY = 5 << 20, 2000, 5000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@functools.cache
def programs() -> tuple[Any, Any]:
    """A gradient as it is, and within a budget."""
    specs = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    grad = jax.grad(loss)
    plain, within = (jax.jit(f).lower(*specs).compile() for f in (grad, coop.remat(grad, budget=0.7)))
    return plain, within


@functools.cache
def curve() -> coop.Pareto:
    points = tuple(
        coop.ParetoPoint(
            budget_bytes=n << 20,
            total_bytes=n << 20,
            cost_ns=9,
            overhead_ratio=ratio,
            lower_bound_ratio=ratio / 2,
        )
        for n, ratio in ((50, 0.4), (70, 0.1), (100, 0.0))
    )
    refused = coop.ParetoPoint(budget_bytes=30 << 20, refused="no plan")
    names = ("nothing_saveable", "8 blocks: dots_with_no_batch_dims_saveable", "8 blocks: dots_saveable")
    rivals = tuple(
        coop.Rival(name=name, total_bytes=nbytes << 20, cost_ns=9, overhead_ratio=ratio)
        for name, nbytes, ratio in zip(names, (60, 100, 99), (0.5, 0.016, 0.012), strict=True)
    )
    return coop.Pareto(
        points=(refused, *points), least_bytes=45 << 20, plain_bytes=100 << 20, plain_ns=9, rivals=rivals,
        device_name="h200",
    )  # fmt: skip


def size_of(png: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


def texts(svg: Path) -> str:
    return " ".join(
        "".join(e.itertext()) for e in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    )


@pytest.fixture
def pictures() -> Any:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install coop-jax[plot]")
    from coop_jax import pictures

    return pictures


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_800_by_500_and_name_everything(pictures: Any, theme: str, tmp_path: Path) -> None:
    plain, within = map(coop.inspect, programs())
    maps = [(plain, "as it is"), (within, "within a budget")]
    drawn = {
        "memory": lambda path: pictures.memory(maps, path, budget_bytes=within.total_bytes, theme=theme),
        "pareto": lambda path: pictures.pareto(curve(), path, theme=theme),
    }
    for name, draw in drawn.items():
        draw(tmp_path / f"{name}.png")
        assert size_of(tmp_path / f"{name}.png") == (800, 500)
    drawn["memory"](tmp_path / "memory.svg")
    words = texts(tmp_path / "memory.svg")
    for word in (
        "as it is",
        "within a budget",
        "kept for the backward pass",
        "recomputed",
        "evicted",
        "hole",
        "budget",
    ):
        assert word in words
    drawn["pareto"](tmp_path / "pareto.svg")
    for word in (
        "1: nothing_saveable",
        "2: 8 blocks: dots_with_no_batch_dims_saveable",
        "least found: 45.00 MiB",
        "without a budget",
        "refused",
        "bound on the plan",
    ):
        assert word in texts(tmp_path / "pareto.svg")


def test_nothing_in_a_picture_is_cut_off(pictures: Any, tmp_path: Path) -> None:
    coop.draw(programs()[1], tmp_path / "p.svg", before=programs()[0])
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        place = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", text.attrib.get("transform", ""))
        x, y = map(float, place.groups()) if place else (float(text.attrib["x"]), float(text.attrib["y"]))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_rivals_that_are_near_each_other_share_a_label(pictures: Any) -> None:
    found = pictures.rival_labels(curve())
    assert found == [(60 << 20, 0.5, "1"), (100 << 20, 0.016, "2, 3")]


def test_a_programs_own_budget_is_drawn(pictures: Any, tmp_path: Path) -> None:
    coop.draw(programs()[1], tmp_path / "p.svg")
    assert "budget " in texts(tmp_path / "p.svg")
    coop.draw(programs()[0], tmp_path / "q.svg")
    assert "budget " not in texts(tmp_path / "q.svg")


def many_values() -> MemoryMap:
    """A program of 5,000 values."""
    values = tuple(
        Value(
            name=f"fusion.{i}", op="dot_general", shape="f32[1024,256]", nbytes=1024, start=i,
            stop=i + 40 + i % 7, offset=1024 * (i % 47), kind=("kept", "working", "recomputed")[i % 3],
            source=f"/home/me/model.py:{i % 300}", scope=f"encoder/layer_{i % 24}",
            last_use=f"fusion.{i + 40}", evicted=i % 5 == 0,
        )
        for i in range(MANY)
    )  # fmt: skip
    names = tuple(f"fusion.{i}" for i in range(MANY + 50))
    return MemoryMap(
        name="many <values>", platform="cuda", steps=names, values=values, argument_bytes=0, output_bytes=0,
        alias_bytes=0, temp_bytes=47 * 1024, total_bytes=47 * 1024,
    )  # fmt: skip


def in_browser(path: Path, fragment: str = "") -> str:
    """The page as the browser has made it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=800,500",
        f"--user-data-dir={path.parent}/home",
    )
    done = subprocess.run(
        [browser, *flags, "--dump-dom", f"{path.as_uri()}{fragment}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_a_page_of_5000_values_is_small_and_opens_within_two_seconds(tmp_path: Path) -> None:
    found = many_values()
    path = tmp_path / "many.html"
    path.write_text(page(memory_blocks(found), maps=[(found, "many")]), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    dom = in_browser(path)
    assert f'data-values="{MANY}"' in dom
    (ms,) = re.findall(r'data-ms="(\d+)"', dom)
    assert int(ms) < MOST_MS


def test_the_page_searches_and_says_why_a_value_is_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    coop.draw(programs()[1], path, before=programs()[0])
    found = coop.inspect(programs()[1])
    n = next(i for i, v in enumerate(found.values) if v.kind == "recomputed")
    dom = in_browser(path, f"#q=tanh&value={n}&map=1")
    count = re.search(r'<span id="count">(\d+) values, ', dom)
    assert count is not None
    maps = [coop.inspect(program) for program in programs()]
    assert int(count[1]) == sum(
        "tanh" in f"{v.name} {v.op} {v.source} {v.scope} {v.last_use}" for m in maps for v in m.values
    )
    assert "recomputed instead of kept; read last by" in dom
    assert "test_pictures.py:" in dom
    assert "evicted here, recomputed later" in dom


def test_the_page_needs_nothing_from_outside_and_escapes_names(tmp_path: Path) -> None:
    found = dataclasses.replace(many_values(), name="</script><script>alert(1)")
    text = page(memory_blocks(found), maps=[(found, "<b>")], pareto=curve().to_dict())
    assert "</script><script>alert" not in text
    assert not re.search(r"(src|href)\s*=", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_without_matplotlib_an_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install coop-jax\[plot\]"):
        coop.draw(coop.inspect(programs()[0]), tmp_path / "picture.svg")
