"""Thousands of random programs, for a night: `python -m tests.nightly --examples 2000 --seed 1`.

Every failure is shrunk and printed as a `Case` that can be pasted into `tests/test_random_programs.py`.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.judge import check
from tests.ways import Case, cases


def main() -> None:
    """Check as many cases as asked for, and print how many budgets were kept and refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=3, help="how deep bodies nest")
    parser.add_argument("--steps", type=int, default=5, help="how many steps a function has at most")
    parser.add_argument("--no-shrink", action="store_true", help="print the first failure as it was found")
    options = parser.parse_args()
    verdicts: collections.Counter[str] = collections.Counter()
    phases = [Phase.generate] if options.no_shrink else [Phase.generate, Phase.shrink]

    @settings(
        max_examples=options.examples, deadline=None, database=None, derandomize=False, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seed(options.seed)
    @given(case=cases(depth=options.depth, most=options.steps))
    def run(case: Case) -> None:
        verdicts[check(case)] += 1

    begin = time.process_time()
    try:
        run()
    finally:
        total = f"{verdicts.total()} programs in {time.process_time() - begin:.0f} s of CPU: "
        sys.stdout.write(total + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) + "\n")


if __name__ == "__main__":
    main()
