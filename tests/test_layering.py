"""The arrows between packages, and what every file owes its reader, by walking the syntax trees."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import conftest

from passes.backend import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p
    for top in ("coop_cli", "coop_jax", "passes", "examples", "benchmarks")
    for p in (ROOT / top).rglob("*.py")
)
PRODUCT = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("coop_cli", "coop_jax", "passes")]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MOST_LINES = 450
# All that differs between JAX versions is in one module by rule, so that one may be long.
MOST_COMPAT_LINES = 900
PRIVATE_JAX = "passes/jaxpr/compat.py"
_CONSTANTS = ("CPU", "CUDA", "TPU")


def name(path: Path) -> str:
    """A path as the tests print it."""
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(dotted module, at module level) of every import."""
    top = {id(n) for n in tree.body} | {
        id(n) for outer in tree.body if isinstance(outer, ast.Try | ast.If) for n in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in top


# What each room under `passes` may import besides itself, the core and what is in a room inside it.
ROOMS = {
    "offsets": (),
    "planners": ("offsets",),
    "jaxpr": ("planners", "offsets"),
    "hlo": ("planners", "offsets"),
    "pinning": ("hlo", "offsets"),
    "pipeline": ("jaxpr", "hlo", "planners", "offsets"),
}
# Who may import them at all.
FOREIGN = {"jax": ("jaxpr",), "jaxlib": ("jaxpr",), "google": ("hlo", "pinning"), "ortools": ("planners",)}


def room_of(parts: Sequence[str]) -> str:
    """The room under `passes` of a path's or a module's parts; "" for the core, the files beside."""
    room = parts[1].removesuffix(".py") if len(parts) > 1 else ""
    return room if room in ROOMS else ""


def refused(path: str, module: str) -> str | None:
    """Why `path` must not import `module`; None if it may."""
    parts, package = path.split("/"), module.split(".")[0]
    room, other = room_of(parts), room_of(module.split("."))
    if parts[0] == "passes":
        if package in ("coop_cli", "coop_jax", "examples", "benchmarks", "tests"):
            return "passes points at nothing above it"
        if package in FOREIGN and room not in FOREIGN[package]:
            return f"only {' and '.join(FOREIGN[package])} of passes may import {package}"
        if package == "passes" and other and other != room and other not in ROOMS.get(room, ()):
            return f"{room or 'the core'} knows nothing of {other}"
    if package == "coop_cli" and parts[0] == "coop_jax" and parts[1] != "__main__.py":
        return "the command points at coop_jax, not back"
    if parts[0] in ("coop_cli", "coop_jax") and package in ("examples", "benchmarks", "tests", "ortools"):
        return f"the product's surface points at no {package}"
    if package in ("scipy", "pandas"):
        return f"{package} is not a dependency"
    if module.startswith("jax._src") and path != PRIVATE_JAX:
        return f"only {PRIVATE_JAX} names jax._src"
    return None


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree, parsed once."""
    return ast.parse(path.read_text())


def offenders(paths: Iterable[Path], against: Callable[[Path], Iterable[str]]) -> list[str]:
    """`path: what` of all that a rule finds: the message of the test that holds the rule."""
    return [f"{name(path)}: {what}" for path in paths for what in against(path)]


def test_imports_follow_the_arrows() -> None:
    def against(path: Path) -> list[str]:
        return [
            f"{module}: {why}" for module, _ in imports(tree_of(path)) if (why := refused(name(path), module))
        ]

    assert offenders(SOURCES, against) == []


def module_of(path: Path) -> str:
    """`passes/ir.py` as `passes.ir`; a package for its `__init__`."""
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules_imported(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """For every module the others that it imports: at its head, in a function, for types only."""
    return {
        module: {
            target
            for imported, _ in imports(tree)
            if (target := imported if imported in trees else imported.rpartition(".")[0]) in trees
            and target != module
        }
        for module, tree in trees.items()
    }


def circles(arrows: Mapping[str, Collection[str]]) -> list[list[str]]:
    """What is left when modules that point at nothing left, or at which nothing points, are taken away."""
    left = {module: set(targets) for module, targets in arrows.items()}
    while ends := [m for m in left if not left[m] & left.keys() or not any(m in t for t in left.values())]:
        for module in ends:
            del left[module]
    return [sorted(left)] if left else []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(modules_imported({module_of(path): tree_of(path) for path in PRODUCT})) == []


def test_private_jax_is_named_in_one_place() -> None:
    def against(path: Path) -> list[str]:
        return [] if name(path) == PRIVATE_JAX else re.findall(r"jax\._src|jaxlib\._", path.read_text())

    assert offenders(PRODUCT, against) == []


def platform_comparisons(tree: ast.Module) -> list[int]:
    """Lines on which something is compared with a platform's name."""
    names = {name for b in BACKENDS.values() for name in (b.name, *b.aliases)}

    def is_name(node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(is_name, node.elts))
        if isinstance(node, ast.Attribute):
            return node.attr == "name" and isinstance(node.value, ast.Name) and node.value.id in _CONSTANTS
        return isinstance(node, ast.Constant) and node.value in names

    compared = [n for n in ast.walk(tree) if isinstance(n, ast.Compare)]
    return [n.lineno for n in compared if any(map(is_name, (n.left, *n.comparators)))]


def test_no_platform_is_asked_for_by_name_but_in_its_backend() -> None:
    def against(path: Path) -> list[str]:
        return [f"line {line}" for line in platform_comparisons(tree_of(path))]

    assert offenders(PRODUCT, against) == []


def test_files_are_short() -> None:
    def against(path: Path) -> list[str]:
        most = MOST_COMPAT_LINES if name(path) == PRIVATE_JAX else MOST_LINES
        n = len(path.read_text().splitlines())
        return [f"{n} lines, at most {most}"] if n > most else []

    assert offenders(SOURCES, against) == []


def public_without_docstring(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module, and public methods of its public classes, undocumented."""
    missing = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            overload = any("overload" in ast.dump(d) for d in node.decorator_list)
            if node.name.startswith("_") or overload:
                continue
            if ast.get_docstring(node) is None:
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return missing


def test_public_names_have_docstrings() -> None:
    def against(path: Path) -> list[str]:
        tree = tree_of(path)
        missing = public_without_docstring(tree)
        headless = path.read_text().strip() and not ast.get_docstring(tree)
        return [*missing, "its head says nothing"] if headless else missing

    assert offenders(SOURCES, against) == []


def loose_dataclasses(tree: ast.Module) -> list[str]:
    """Public dataclasses without `slots`."""
    loose = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if getattr(call, "id", getattr(call, "attr", "")) != "dataclass":
                continue
            given = {k.arg for k in decorator.keywords} if isinstance(decorator, ast.Call) else set()
            if "slots" not in given:
                loose.append(node.name)
    return loose


def test_dataclasses_are_slotted() -> None:
    assert offenders(PRODUCT, lambda path: loose_dataclasses(tree_of(path))) == []


def test_every_public_name_is_exported_and_documented() -> None:
    import coop_jax

    for exported in coop_jax.__all__:
        assert getattr(coop_jax, exported).__doc__, exported
    assert list(coop_jax.__all__) == sorted(coop_jax.__all__, key=lambda n: (not n[0].isupper(), n))


def is_there(place: str) -> bool:
    """Whether a file, or a dotted module or what it defines, is one of this repository's."""
    if "/" in place:
        return "NAME" in place or (ROOT / place).exists()
    module, _, defined = place.rpartition(".")
    path, parent = (ROOT / part.replace(".", "/") for part in (place, module))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    holder = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    return holder.is_file() and re.search(rf"\b{defined}\b", holder.read_text(encoding="utf-8")) is not None


def test_files_and_modules_that_texts_name_are_there() -> None:
    named = re.compile(
        r"`((?:passes|coop_jax|coop_cli|tests|benchmarks|examples)(?:(?:/[\w.-]+)+|(?:\.\w+)+))`"
    )

    def against(path: Path) -> list[str]:
        return [p for p in named.findall(path.read_text(encoding="utf-8")) if not is_there(p)]

    assert offenders([*DOCUMENTS, *SOURCES], against) == []


def test_the_files_that_run_first_are_there() -> None:
    missing = [stem for stem in conftest.LONGEST if not (ROOT / "tests" / f"{stem}.py").is_file()]
    assert missing == []


def test_the_checks_can_fail() -> None:
    tree = ast.parse("import jax\n\ndef f(): pass\n\nclass A:\n    '''Doc.'''\n    def g(self): pass\n")
    assert public_without_docstring(tree) == ["f", "A.g"]
    assert refused("passes/ir.py", "jax") is not None
    assert refused("passes/hlo/lift.py", "jax.numpy") is not None
    assert refused("passes/jaxpr/lift.py", "jax.numpy") is None
    assert refused("coop_jax/mark.py", "jax._src.core") is not None
    assert refused("passes/liveness.py", "passes.planners.cut") is not None
    assert refused("passes/hlo/heap.py", "passes.pinning.pin") is not None
    assert refused("passes/pipeline.py", "passes.hlo.enforce") is None
    assert refused("passes/pipeline.py", "jax") is not None
    assert refused("passes/hlo/enforce.py", "passes.pipeline") is not None
    assert refused("passes/planners/paging/plans.py", "passes.offsets.placement") is None
    assert refused("coop_jax/cli.py", "ortools.sat") is not None
    assert list(imports(tree)) == [("jax", True)]
    late = {"p.a": "def f():\n    from p.b import x", "p.b": "if T:\n    import p.a", "p.c": "import p.a"}
    assert circles(modules_imported({m: ast.parse(text) for m, text in late.items()})) == [["p.a", "p.b"]]
    assert is_there("passes/ir.py")
    assert is_there("passes.ir.Plan")
    assert not is_there("passes.hlo.pin")
    asked = ast.parse("p == 'cpu'\nq in ('tpu', 'x')\nr != CUDA.name\ns == 'c'\nBACKENDS['cpu']")
    assert platform_comparisons(asked) == [1, 2, 3]
    loose = ast.parse("@dataclass(frozen=True)\nclass A: pass\n@dataclass(slots=True)\nclass B: pass")
    assert loose_dataclasses(loose) == ["A"]
    assert offenders(SOURCES[:2], lambda path: ["x"]) == [f"{name(path)}: x" for path in SOURCES[:2]]
