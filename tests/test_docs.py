"""The documentation: its code blocks run, every public name and error has its place, the site builds."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import coop_jax as coop
from coop_cli import main
from coop_jax import errors

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if "_build" not in p.parts)
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\{code-block\} python|python|console)\n(?P<body>.*?)^ *```$",
    re.S | re.M,
)
CAPTION = re.compile(r":caption: (\S+)\n+")
SKETCHES = {"side_by_side.md"}
# What pages that show one line at a time take for granted.
BEFORE = {
    "jax.md": "import jax, jax.numpy as jnp, coop_jax as coop\n"
    "def loss(w, x): return layer(w, x).sum()\ndef layer(w, x): return x",
    "offsets.md": "import jax, jax.numpy as jnp, coop_jax, coop_jax as coop\n"
    "@coop.remat(budget='1MiB')\ndef step(state, batch): return state + jnp.tanh(batch @ batch)\n"
    "state, batch = jnp.ones((8, 8)), jnp.zeros((8, 8))\nargs = (state, batch)",
    "tpu.md": "import jax, jax.numpy as jnp, numpy as np, coop_jax as coop\n"
    "def train_step(w, x): return w - jnp.tanh(x @ w).sum()\n"
    "specs = (jax.ShapeDtypeStruct((128, 128), 'float32'),) * 2",
}
# What needs a GPU to run.
ON_A_GPU = "coop_jax.pinning.inlined"


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of the code blocks of a page."""
    for match in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        yield match["kind"], textwrap.dedent(match["body"])


def run_console(text: str) -> None:
    """Run the commands of a block, which must all succeed."""
    for line in text.splitlines():
        if line.startswith("$ coop "):
            assert main(shlex.split(line.removeprefix("$ coop "))) == 0, line


@pytest.mark.parametrize("page", [p for p in PAGES if p not in SKETCHES and any(True for _ in blocks(p))])
def test_every_code_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "absent-gpu" in page:
        pytest.importorskip("jax_cuda13_plugin", reason="compiles for an absent GPU")
    if page == "tpu.md":
        pytest.importorskip("libtpu", reason="compiles for an absent TPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    exec(BEFORE.get(page, ""), names)
    for n, (kind, text) in enumerate(blocks(page)):
        if kind == "console":
            run_console(text)
            continue
        caption = CAPTION.match(text)
        if caption is not None:
            text = text[caption.end() :]
            (tmp_path / caption[1]).write_text(text)
        if ON_A_GPU not in text:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, f"{page}, block {n + 1}", "exec"), names)


def test_sketches_are_python() -> None:
    for page in SKETCHES:
        for _, text in blocks(page):
            ast.parse(text)


def test_every_public_name_is_in_the_api_page() -> None:
    text = (DOCS / "api.md").read_text()
    assert set(re.findall(r"coop_jax\.(\w+)", text)) >= set(coop.__all__)


def test_every_error_has_a_page_and_its_message_names_it() -> None:
    kinds = [kind for kind in errors._KINDS.values() if kind is not coop.CoopError]
    for kind in kinds:
        assert (DOCS / f"{kind.page}.md").read_text().startswith(f"# {kind.__name__}\n")
        assert f"`{kind.__name__}`" in (DOCS / "errors/index.md").read_text()
    assert str(coop.BudgetError("no")) == "no\n(docs: errors/budget)"
    again = errors.error_from_text(coop.BudgetError("no").to_text())
    assert str(again) == "no\n(docs: errors/budget)"


def test_every_command_is_in_the_documentation() -> None:
    import coop_cli

    text = (DOCS / "command.md").read_text()
    for name, _, _ in coop_cli._COMMANDS:
        assert f"`coop {name}" in text


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+\.md)", (DOCS / page).read_text()):
            assert (DOCS / page).parent.joinpath(link).is_file(), f"{page}: {link}"


def test_every_file_that_is_named_is_there() -> None:
    for page in ("docs/architecture.md", "CONTRIBUTING.md", "README.md"):
        named = re.findall(
            r"`((?:passes|coop_jax|coop_cli|tests|benchmarks|examples|docs)/[\w/.*-]+)`",
            (ROOT / page).read_text(),
        )
        missing = [path for path in named if "NAME" not in path and not (ROOT / path.rstrip("/")).exists()]
        assert missing == [], page


def test_every_room_is_on_the_map() -> None:
    text = (DOCS / "architecture.md").read_text()
    rooms = [p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "passes").glob("*/__init__.py")]
    assert [room for room in (*rooms, "coop_jax", "coop_cli") if f"| `{room}/` |" not in text] == []


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for package, extra in (("sphinx", "sphinx"), ("myst_parser", "myst-parser"), ("furo", "furo")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the site needs {extra}: pip install coop-jax[docs]")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": ""}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "errors" / "infeasible-budget.html").is_file()
