"""Random programs with random pages on an absent GPU: `python -m tests.nightly_pages --programs 300`.

Every scheduled module is sent through the abstract machine (`passes.hlo.replay`) at XLA's own addresses, and
its bytes on both sides are compared with the prediction. Prints counts, and every seed that is wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

import jax

from tests import hlo_support as h
from tests import programs, ways


def verdict(seed: int) -> str:
    """What became of one seed: "passed", "nothing to page", "not for JAX", or what is wrong."""
    case = ways.case_of(programs.Seeded(f"pages/{seed}"), depth=1, most=3)
    if case.place != "one":
        return "several devices"
    whole = ways.program(case, lambda f: f)
    try:
        specs = jax.eval_shape(lambda: ways.arguments(case))
        example = h.Example(name=f"random{seed}", fn=whole, args=specs)
        h.scheduled(example, "cuda")
    except Exception:  # such as forward mode through a `custom_vjp`, or a Python call on an absent GPU
        return "not for JAX"
    found = h.with_pages(example, "cuda", seed=seed, again=0.1)
    if not found.pages:
        return "nothing to page"
    if h.predicted(found.prediction) != h.totals(found.compiled):
        return "WRONG: bytes"
    return (
        "WRONG: " + h.replayed(found.compiled).problems[0]
        if h.replayed(found.compiled).problems
        else "passed"
    )


def main() -> None:
    """Check as many seeds as asked for, in the minutes that there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    options = parser.parse_args()
    verdicts: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    for seed in range(options.first, options.first + options.programs):
        if time.monotonic() - begin > 60 * options.minutes:
            break
        found = verdict(seed)
        verdicts[found] += 1
        if found.startswith("WRONG"):
            sys.stdout.write(f"seed {seed}: {found}\n")
        jax.clear_caches()
    sys.stdout.write(", ".join(f"{n} {name}" for name, n in verdicts.most_common()) + "\n")
    sys.exit(any(name.startswith("WRONG") for name in verdicts))


if __name__ == "__main__":
    main()
