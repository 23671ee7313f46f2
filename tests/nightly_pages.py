"""Random programs with pages and recomputes drawn at random: `python -m tests.nightly_pages --programs 300`.

Every program is rewritten twice. Compiled for an absent H200, or a v5e with `--platform tpu`, its module goes
through the abstract machine (`tests.replay`), for the GPU at XLA's own addresses, for the TPU, which does not
say them, at those that are predicted; and its bytes are compared with the prediction. On the CPU the same
rewriting with plain copies runs, and its results have the bits of the program as it is. Seeds follow each
other until as many programs had something to page; verdicts are kept in `--out`, and seeds that are in it
are not run again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from tests import hlo_support as h
from tests import programs, ways

PASSED, NOTHING, REFUSED = "passed", "nothing to page", "not for JAX"
HERE_NOTHING = "passed, nothing to page on the CPU"
CALLS = {"host", "effect", "ordered"}


def example_of(seed: int) -> h.Example:
    """The program of a seed: on one device, without calls into Python, which an absent GPU cannot have."""
    drawn = (ways.case_of(programs.Seeded(f"pages/{seed}/{n}"), depth=1, most=6) for n in itertools.count())
    alone = next(case for case in drawn if not programs.kinds_in(case.recipe) & CALLS)
    case = dataclasses.replace(alone, place="one")
    args = ways.arguments(case)
    return h.Example(
        name=f"random{seed}", fn=ways.program(case, lambda f: f), args=args, donate=ways.donated(case)
    )


def verdict(seed: int, platform: str = "cuda") -> str:
    """What became of one seed: one of the words above, or what is wrong."""
    example = example_of(seed)
    specs = dataclasses.replace(example, args=jax.eval_shape(lambda: example.args))
    try:
        before = results(h.scheduled(example)[1], example)
    except Exception:  # such as forward mode through a `custom_vjp`
        return REFUSED
    try:
        found = h.with_pages(specs, platform, seed=seed, again=0.1)
    except Exception:
        if compiles(specs, platform):
            raise
        return REFUSED
    here = h.with_pages(example, "cpu", seed=seed, again=0.1, style="plain")
    if not has_predicted_bytes(found, platform):
        return "WRONG: bytes"
    seen = h.replayed(found.compiled) if platform == "cuda" else h.replayed_module(found.module, platform)
    if seen.problems:
        return f"WRONG: {seen.problems[0]}"
    if before != results(here.compiled, example):
        return "WRONG: bits"
    if not found.pages:
        return NOTHING
    return PASSED if here.pages else HERE_NOTHING


def has_predicted_bytes(found: h.Paged, platform: str) -> bool:
    """True if XLA counts what was predicted; on a TPU in total, as its temporaries are counted otherwise."""
    predicted, counted = h.predicted(found.prediction), h.totals(found.compiled)
    if platform == "cuda":
        return predicted == counted
    return predicted["total"] == counted["total"]


def compiles(example: h.Example, platform: str) -> bool:
    """True if an example compiles for the absent device as it is."""
    try:
        h.scheduled(example, platform)
    except Exception:
        return False
    return True


def results(compiled: Any, example: h.Example) -> list[bytes]:
    """A program's results, bit by bit."""
    return [x.tobytes() for x in h.run(compiled, example.args)]


def main() -> None:
    """Check as many programs as asked for, in the minutes that there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many with something to page")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--platform", choices=["cuda", "tpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, help="verdicts by seed, in JSON")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    verdicts: dict[int, str] = {int(seed): found for seed, found in kept.items()}
    begin = time.monotonic()
    for seed in itertools.count(options.first):
        checked = len(verdicts) - sum(v in (NOTHING, REFUSED) for v in verdicts.values())
        if checked >= options.programs or time.monotonic() - begin > 60 * options.minutes:
            break
        if seed in verdicts:
            continue
        verdicts[seed] = verdict(seed, options.platform)
        if verdicts[seed].startswith("WRONG"):
            sys.stdout.write(f"seed {seed}: {verdicts[seed]}\n")
            sys.stdout.flush()
        if options.out:
            options.out.write_text(json.dumps(verdicts, indent=0) + "\n")
        jax.clear_caches()
        h.scheduled.cache_clear()
    counts = collections.Counter(verdicts.values())
    sys.stdout.write(", ".join(f"{n} {name}" for name, n in counts.most_common()) + "\n")
    sys.exit(any(name.startswith("WRONG") for name in counts))


if __name__ == "__main__":
    main()
