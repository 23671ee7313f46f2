"""One word for one idea: words that were given up stay out of code, messages and documents."""

from __future__ import annotations

import io
import re
import tokenize
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
# Words that stay in texts, but say too little in the names of product code (docstrings tell what `again` is).
RETIRED_NAMES = {
    "again": "recompute",
    "anew": "recompute",
    "touch": "use or def",
    "touches": "uses",
    "touched": "used",
    "settle": "autotune, or say how",
    "settled": "say how",
    "turn": "round or iteration",
    "reserved": "slack_bytes or ground_bytes",
    "roomy": "slackened",
    "measured": "trials",
    "makes": "is_def",
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


def retired_names(text: str) -> list[str]:
    """`line N: name` of every name of which a part is a retired one."""
    names = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.NAME)
    return [
        f"line {t.start[0]}: {t.string}, say {RETIRED_NAMES[part]}"
        for t in names
        for part in t.string.lower().split("_")
        if part in RETIRED_NAMES
    ]


def test_names_that_say_too_little_stay_out_of_product_code() -> None:
    offenders = [
        f"{path.relative_to(ROOT).as_posix()}, {what}"
        for top in ("coop_cli", "coop_jax", "passes")
        for path in sorted((ROOT / top).rglob("*.py"))
        for what in retired_names(path.read_text(encoding="utf-8"))
    ]
    assert offenders == []
    assert retired_names("def _again_ns(): 'again'") == ["line 1: _again_ns, say recompute"]


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
