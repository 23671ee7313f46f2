"""JAX's own tests that mention remat or checkpoint, run with `coop.remat` in the place of `jax.checkpoint`.

    git clone --depth 1 https://github.com/jax-ml/jax           # the tests are not in JAX's wheel or sdist
    python -m benchmarks.jax_tests --tests jax/tests            # everything: an hour or more on 2 cores
    python -m benchmarks.jax_tests --tests jax/tests --modes 1TiB --files mutable_array_test.py --show

Every test runs once with JAX's own `jax.checkpoint` and once in every mode: with a budget of 1 TiB; with a
fraction of the plain program's peak (a test that is refused there runs again with the fraction 1.0, which
must always be met); with `nothing_saveable` where the test gives no policy. `benchmarks.jax_tests_shim` makes
the replacement. A test that decorates nothing is left out. What did not pass is sorted by `sort`: whatever is
neither explained by a row of docs/jax.md, nor a look at internals, nor fails with `jax.checkpoint` as well,
is ours, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from coop_jax.text import format_table

ROOT = Path(__file__).resolve().parent.parent
WORDS = re.compile("remat|checkpoint", re.IGNORECASE)
CHECKPOINT = "checkpoint"
MODES = ("1TiB", "0.7", "nothing_saveable")
WHOLE = ("1TiB", "nothing_saveable")
ALWAYS_MET = "1.0"
# LLVM's optimisation changes no plan and takes most of the time.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

PASSES = "passes"
REFUSED = "refused, passes at 1.0"
INTERNALS = "looks at jaxpr text or residuals"
DOCUMENTED = "documented difference"
PLAIN_TOO = "fails with jax.checkpoint too"
OURS = "ours"
SKIPPED = "skipped by itself"
KINDS = (PASSES, REFUSED, INTERNALS, DOCUMENTED, PLAIN_TOO, SKIPPED, OURS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one test ended.

    Attributes:
        outcome: "passed", "failed", "skipped", or "unfinished": the process ended with it.
        decorated: how many functions it decorated.
        error, message: of its exception.
        statement: the statement of the test that did not pass.
        function: in which function of the test's file that is.
        raised_in: folder and file that raised.
    """

    outcome: str = "unfinished"
    decorated: int = 0
    error: str = ""
    message: str = ""
    statement: str = ""
    function: str = ""
    raised_in: str = ""

    @property
    def is_refusal(self) -> bool:
        """True if the budget could not be met."""
        return self.error == "InfeasibleBudgetError" or "InfeasibleBudgetError" in self.message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A difference that docs/jax.md states.

    Attributes:
        row: how the row of docs/jax.md begins.
        tests, error, statement: patterns that the test's id, its error with its message, and its failing
            statement must have somewhere.
    """

    row: str
    tests: str = ""
    error: str = ""
    statement: str = ""

    def explains(self, test: str, found: Outcome) -> bool:
        """True if this is what happened."""
        return all(
            re.search(pattern, text, re.DOTALL)
            for pattern, text in (
                (self.tests, test),
                (self.error, f"{found.error}: {found.message}"),
                (self.statement, found.statement),
            )
        )


EFFECTS = "`jax.debug.*`, `io_callback`, ordered or not"
COUNTING = "primitives that count their own calls"
RULES = (
    Rule(row=EFFECTS, tests="test_remat_of_debug_print", statement=r"output\(\)"),
    Rule(row=EFFECTS, tests="test_remat_basic_closed_over_nested", statement=r"assertLen\(lst, 4\)"),
    Rule(row=EFFECTS, error="NotImplementedError not raised", statement="Effects not supported"),
    Rule(row=COUNTING, statement=r"len\(sin_calls\)", error="^AssertionError: 0 != "),
    Rule(row=COUNTING, error="MLIR translation rule for primitive 'add_one' not found"),
    Rule(
        row="a budget that is a fraction, over several devices",
        error="UnsupportedError: .*fraction.* over .* devices",
    ),
    Rule(
        row="a policy, and a budget that is a fraction",
        error=r"InfeasibleBudgetError: no plan .* this program within its budget of \d+ B and policy=",
    ),
    Rule(row="how often a function is traced", statement=r"assertEqual\(count(\(\))?, 1\)", error="2 != 1"),
    Rule(row="an out that has no tangent", statement=r"assertNotIsInstance\(aux, core.Tracer\)"),
    Rule(row="`optimize_remat=True`", tests="test_optimize_remat_gh21303", statement=r"assertAllClose\(v, "),
    Rule(row="static arguments", error="Non-hashable static arguments|is static and .* not hashable"),
    Rule(row="a bfloat16 value", tests="test_excess_precision_hell", statement="assertAllClose"),
)

# What a statement looks at when it asks how `jax.checkpoint` does its work, not what it computes.
LOOKS = re.compile(
    r"jaxpr|hlo|residual|logging|eqn\b|\b(res|saved_res|res_avals|text|txt|needle|fwd_str|substr)\b|\bs\.count\("
    r"|in line for line in l\.output"
)


def sort(test: str, found: Outcome, plain: Outcome, again: Outcome | None) -> tuple[str, str]:
    """What is to be said of one test: a kind, and the row of docs/jax.md if that explains it.

    Args:
        test: its id.
        found: how it ended.
        plain: how it ends with `jax.checkpoint`.
        again: how it ended with the fraction 1.0, where it was refused.
    """
    if found.outcome == "passed":
        return PASSES, ""
    if found.outcome == "skipped":
        return SKIPPED, ""
    if plain.outcome in ("failed", "unfinished"):
        return PLAIN_TOO, ""
    if found.is_refusal and again is not None:
        kind, row = sort(test, again, plain, None)
        return (REFUSED if kind == PASSES else kind), row
    for rule in RULES:
        if rule.explains(test, found):
            return DOCUMENTED, rule.row
    looks = found.error in ("AssertionError", "IndexError") and LOOKS.search(found.statement)
    numbers = "Not equal to tolerance" in found.message
    return (INTERNALS if looks and not numbers else OURS), ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs test files of JAX.

    Attributes:
        tests: the folder that holds them.
        results: a folder for what the runs write.
        timeout_s: for one file in one mode, counted again after a test that did not end.
        jobs: how many files run at once.
    """

    tests: Path
    results: Path
    timeout_s: int
    jobs: int

    def run(self, mode: str, wanted: dict[str, list[str] | None]) -> dict[str, Outcome]:
        """Run the tests that are `wanted` of every file, None for all that mention the words."""
        with ThreadPoolExecutor(self.jobs) as pool:
            parts = list(pool.map(lambda name: self.run_file(mode, name, wanted[name]), wanted))
        return {test: outcome for part in parts for test, outcome in part.items()}

    def run_file(self, mode: str, name: str, only: list[str] | None) -> dict[str, Outcome]:
        """Run one file; a test that ends the process is noted and the rest run in another."""
        found: dict[str, Outcome] = {}
        while only is None or only:
            lines = self._process(mode, name, only)
            begun = [line["begin"] for line in lines if "begin" in line]
            found |= {test: Outcome() for test in begun}
            found |= {line["end"]: _outcome(line) for line in lines if "end" in line}
            collected = [line["collected"] for line in lines if "collected" in line]
            if not collected or not collected[0]:
                sys.stderr.write(f"{name} in mode {mode}: nothing to run\n")
                break
            only = [test for test in collected[0] if test not in found]
            if only and not begun:
                raise RuntimeError(f"{name} stops before its first test in mode {mode}")
        return found

    def _process(self, mode: str, name: str, only: list[str] | None) -> list[dict[str, Any]]:
        results, chosen = self.results / f"{name}.jsonl", self.results / f"{name}.only"
        results.write_text("")
        environment = {
            "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
            "XLA_FLAGS": FAST, **os.environ,
            "COOP_JAX_TESTS_MODE": mode, "COOP_JAX_TESTS_RESULTS": str(results),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }  # fmt: skip
        if only is not None:
            chosen.write_text(json.dumps(only))
            environment["COOP_JAX_TESTS_ONLY"] = str(chosen)
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.jax_tests_shim",
            "-c", os.devnull, "--rootdir", str(self.tests), "--import-mode=importlib", "--tb=short",
            str(self.tests / name),
        ]  # fmt: skip
        with (self.results / f"{name}.log").open("w") as log:
            try:
                subprocess.run(
                    command, env=environment, cwd=self.results, stdout=log, stderr=log, timeout=self.timeout_s
                )
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"{name} in mode {mode} took more than {self.timeout_s} s\n")
        return [json.loads(line) for line in results.read_text().splitlines()]


def _outcome(line: dict[str, Any]) -> Outcome:
    known = {field.name for field in dataclasses.fields(Outcome)}
    return Outcome(**{key: value for key, value in line.items() if key in known})


def by_file(tests: Iterable[str]) -> dict[str, list[str] | None]:
    """Ids of tests by the file that they are in."""
    found: dict[str, list[str]] = {}
    for test in tests:
        found.setdefault(test.split("::")[0], []).append(test)
    return dict(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Runs modes, and keeps their outcomes from run to run where a folder is given.

    Attributes:
        runner: what runs them.
        keep: the folder; of a mode that is kept there, only what neither passed nor was refused runs again.
    """

    runner: Runner
    keep: Path | None = None

    def plain(self, names: Sequence[str]) -> dict[str, Outcome]:
        """How every test that mentions the words ends with `jax.checkpoint`."""
        found = self._kept(CHECKPOINT)
        known = by_file(found)
        found |= self.runner.run(CHECKPOINT, {name: None for name in names if name not in known})
        self._write(CHECKPOINT, found)
        return {test: outcome for test, outcome in found.items() if test.split("::")[0] in names}

    def outcomes(self, mode: str, tests: Iterable[str]) -> dict[str, Outcome]:
        """How `tests` end in a mode."""
        tests = list(tests)
        kept = self._kept(mode)
        settled = {t for t, o in kept.items() if o.outcome in ("passed", "skipped") or o.is_refusal}
        kept |= self.runner.run(mode, by_file(t for t in tests if t not in settled))
        self._write(mode, kept)
        return {test: kept[test] for test in tests if test in kept}

    def _kept(self, mode: str) -> dict[str, Outcome]:
        path = None if self.keep is None else self.keep / f"{mode}.json"
        if path is None or not path.exists():
            return {}
        return {test: _outcome(line) for test, line in json.loads(path.read_text()).items()}

    def _write(self, mode: str, found: dict[str, Outcome]) -> None:
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            lines = {test: dataclasses.asdict(outcome) for test, outcome in found.items()}
            (self.keep / f"{mode}.json").write_text(json.dumps(lines, indent=1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of one test in one mode.

    Attributes:
        kind: one of `KINDS`.
        row: the row of docs/jax.md that explains it, or nothing.
        outcome: how it ended, with the fraction 1.0 if it was refused.
    """

    kind: str
    row: str
    outcome: Outcome


def run_mode(session: Session, mode: str, plain: dict[str, Outcome]) -> dict[str, Verdict]:
    """What is to be said of every test that decorates something."""
    found = session.outcomes(mode, plain)
    refused = [] if mode in WHOLE else [test for test in found if found[test].is_refusal]
    again = session.outcomes(ALWAYS_MET, refused)
    verdicts = {}
    for test, outcome in found.items():
        if outcome.decorated == 0 and outcome.outcome != "unfinished":
            continue
        kind, row = sort(test, outcome, plain[test], again.get(test))
        verdicts[test] = Verdict(kind=kind, row=row, outcome=again.get(test, outcome))
    return verdicts


def counts_table(modes: dict[str, dict[str, Verdict]]) -> str:
    """How many tests of every kind, as a Markdown table."""
    counted = {mode: Counter(v.kind for v in found.values()) for mode, found in modes.items()}
    lines = [[kind, *(str(counted[mode][kind]) for mode in modes)] for kind in KINDS]
    lines.append(["all", *(str(len(modes[mode])) for mode in modes)])
    return format_table(["", *modes], lines)


def rows_table(modes: dict[str, dict[str, Verdict]]) -> str:
    """How many tests each documented difference explains, as a Markdown table."""
    counted = {mode: Counter(v.row for v in found.values()) for mode, found in modes.items()}
    named = [
        row for row in dict.fromkeys(rule.row for rule in RULES) if any(c[row] for c in counted.values())
    ]
    return format_table(["", *modes], [[row, *(str(counted[m][row]) for m in modes)] for row in named])


def show(mode: str, found: dict[str, Verdict], kinds: Sequence[str]) -> None:
    """Print the tests of some kinds."""
    for test, verdict in sorted(found.items()):
        if verdict.kind in kinds:
            end = verdict.outcome
            parts = (mode, verdict.kind, test, end.error, end.statement[:200], end.message[:400])
            sys.stdout.write(" | ".join(part.replace("\n", " ") for part in parts) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, required=True, help="the folder tests of a checkout of JAX")
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--files", nargs="*", help="names of test files; all that mention the words")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=7200, help="seconds for one file in one mode")
    parser.add_argument("--keep", type=Path, help="a folder for outcomes: what passed does not run again")
    parser.add_argument("--revision", default="", help="which JAX the tests are of, for the results")
    parser.add_argument("--show", action="store_true", help="print every test that did not pass")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/jax_tests.json"))
    args = parser.parse_args()
    tests = args.tests.resolve()
    names = args.files or sorted(p.name for p in tests.glob("*_test.py") if WORDS.search(p.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(tests=tests, results=Path(folder), timeout_s=args.timeout, jobs=args.jobs)
        session = Session(runner=runner, keep=args.keep)
        plain = session.plain(names)
        modes: dict[str, dict[str, Verdict]] = {}
        for mode in args.modes:
            decorating = next(iter(modes.values()), plain)
            modes[mode] = run_mode(session, mode, {test: plain[test] for test in decorating})
    for mode, found in modes.items():
        show(mode, found, [k for k in KINDS if k not in (PASSES, REFUSED, SKIPPED)] if args.show else [OURS])
    text = f"{counts_table(modes)}\n\n{rows_table(modes)}\n"
    sys.stdout.write(text)
    said = {
        mode: {test: ": ".join(filter(None, (v.kind, v.row))) for test, v in found.items()}
        for mode, found in modes.items()
    }
    facts = {"jax": jax.__version__, "tests": args.revision, "modes": said}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text)
    sys.exit(1 if any(v.kind == OURS for found in modes.values() for v in found.values()) else 0)


if __name__ == "__main__":
    main()
