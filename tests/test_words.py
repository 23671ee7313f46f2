"""One word for one idea: words that were given up stay out of code, messages and documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What was given up, as a part of a name or in a text, and the word for it. `passes.ir` defines the words.
RETIRED = {
    "rerun": "recompute",
    "re-run": "recompute",
    "re-ran": "recompute",
    "remade": "recompute",
    "remake": "recompute",
    "rung": "level",
    "ladder": "frontier",
    "jam": "bottleneck",
    "descent": "candidate",
    "spilled": "displaced",
}
# Where such a word means something else.
KEPT = ("gradient descent",)
SHOWN = ("coop_cli", "coop_jax", "passes", "examples", "benchmarks", "tests", "docs")


def retired_words(text: str) -> list[str]:
    """`line N: word` of every retired word, in any case, as a word or as a part of `a_name` or `AName`."""
    found = []
    for n, line in enumerate(text.splitlines(), 1):
        for kept in KEPT:
            line = line.replace(kept, "")
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line).lower()
        found += [f"line {n}: {w}, say {RETIRED[w]}" for w in RETIRED if re.search(rf"\b{w}s?\b", words)]
    return found


def test_words_that_were_given_up_stay_out() -> None:
    files = [p for top in SHOWN for ending in ("py", "md") for p in (ROOT / top).rglob(f"*.{ending}")]
    offenders = [
        f"{path.relative_to(ROOT).as_posix()}, {what}"
        for path in sorted([*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
        if path != Path(__file__).resolve()
        for what in retired_words(path.read_text(encoding="utf-8"))
    ]
    assert offenders == []


def test_a_retired_word_is_found_in_names_and_texts() -> None:
    assert retired_words("gradient descent, a wrung cloth, recompute") == []
    assert retired_words("x\nSEGMENT_RUNGS = 1") == ["line 2: rung, say level"]
    assert retired_words("class BestDescent") == ["line 1: descent, say candidate"]
    assert retired_words("Re-runs.") == ["line 1: re-run, say recompute"]
