"""A line that says what a long compile is at: through `logging`, and on a terminal.

Nothing is said in the first seconds, nor of what takes no longer.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

LOGGER = logging.getLogger("coop_jax")
QUIET_SECONDS = 2.0
_ERASE = "\r\x1b[K"


@contextlib.contextmanager
def progress(clock: Callable[[], float] = time.perf_counter) -> Iterator[Callable[[str], None]]:
    """Gives a function that is told what begins; the line on the terminal goes when all is done."""
    begin, shown = clock(), False

    def tell(what: str) -> None:
        nonlocal shown
        seconds = clock() - begin
        if seconds < QUIET_SECONDS:
            return
        LOGGER.info("%.0f s: %s", seconds, what)
        if sys.stderr.isatty():
            sys.stderr.write(f"{_ERASE}coop_jax: {seconds:.0f} s: {what}")
            sys.stderr.flush()
            shown = True

    try:
        yield tell
    finally:
        if shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
