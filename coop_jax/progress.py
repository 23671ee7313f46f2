"""What a long compile is at: told to the logger `coop_jax` at INFO, and by the command on the terminal.

Nothing is said in the first two seconds, nor of what takes no longer. Nobody sees it who did not ask:

    logging.basicConfig(level=logging.INFO)     # in Python; `coop` shows a line of its own
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

LOGGER = logging.getLogger("coop_jax")
QUIET_SECONDS = 2.0
_ERASE = "\r\x1b[K"
_TICK_SECONDS = 1.0


@contextlib.contextmanager
def progress(
    clock: Callable[[], float] = time.perf_counter, quiet_seconds: float = QUIET_SECONDS
) -> Iterator[Callable[[str], None]]:
    """Gives a function that is told what begins.

    Args:
        clock: gives seconds.
        quiet_seconds: how long nothing is said. What goes on then is said then.
    """
    begin = clock()
    waiting: threading.Timer | None = None

    def say(what: str) -> None:
        LOGGER.info("%.0f s: %s", clock() - begin, what)

    def tell(what: str) -> None:
        nonlocal waiting
        if waiting is not None:
            waiting.cancel()
        left = quiet_seconds - (clock() - begin)
        if left <= 0:
            say(what)
            return
        waiting = threading.Timer(left, say, [what])
        waiting.daemon = True
        waiting.start()

    try:
        yield tell
    finally:
        if waiting is not None:
            waiting.cancel()
        for handler in LOGGER.handlers:
            if isinstance(handler, Line):
                handler.clear()


class Line(logging.Handler):
    """The last thing that was said, as a line of a terminal that goes when all is done; seconds tick."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self._stream = stream
        self._begin = time.perf_counter()
        self._said = ""
        self._done = threading.Event()
        self._ticking: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show what a record of `progress` says."""
        self._said = record.getMessage().partition(": ")[2]
        self._write()
        if self._ticking is None:
            self._ticking = threading.Thread(target=self._tick, daemon=True)
            self._ticking.start()

    def clear(self) -> None:
        """Erase the line: what was said is done."""
        with self.lock or contextlib.nullcontext():
            if self._said:
                self._stream.write(_ERASE)
                self._stream.flush()
            self._said = ""

    def close(self) -> None:
        """Erase the line for good."""
        self._done.set()
        self.clear()
        super().close()

    def _tick(self) -> None:
        while not self._done.wait(_TICK_SECONDS):
            with self.lock or contextlib.nullcontext():
                if self._said:
                    self._write()

    def _write(self) -> None:
        seconds = time.perf_counter() - self._begin
        self._stream.write(f"{_ERASE}{self._said}, {seconds:.0f} s")
        self._stream.flush()


@contextlib.contextmanager
def on_terminal(stream: TextIO | None = None) -> Iterator[None]:
    """While this lasts, what is told is a line on stderr, if that is a terminal."""
    shown = stream or sys.stderr
    if not shown.isatty():
        yield
        return
    line, level = Line(shown), LOGGER.level
    LOGGER.addHandler(line)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(line)
        LOGGER.setLevel(level)
        line.close()
