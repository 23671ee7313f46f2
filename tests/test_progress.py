"""What a long compile is at: for the logger, and on the command's terminal."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from coop_jax.progress import LOGGER, QUIET_SECONDS, on_terminal, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_is_told_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([0.0, QUIET_SECONDS / 2, 3.0, 3.0, 5.0, 5.0])
    with caplog.at_level(logging.INFO, logger="coop_jax"), progress(lambda: next(now)) as tell:
        tell("one")
        tell("two")
        tell("three")
    assert caplog.messages == ["3 s: two", "5 s: three"]


def test_what_goes_on_when_the_quiet_time_ends_is_told_then(caplog: pytest.LogCaptureFixture) -> None:
    heard, messages = threading.Event(), list[str]()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            heard.set()

    hearing = Hearing()
    LOGGER.addHandler(hearing)
    try:
        with caplog.at_level(logging.INFO, logger="coop_jax"), progress(quiet_seconds=0.01) as tell:
            tell("the only thing")
            assert heard.wait(60)
    finally:
        LOGGER.removeHandler(hearing)
    assert messages == ["0 s: the only thing"]


def test_the_command_shows_a_line_on_a_terminal_and_takes_it_away() -> None:
    terminal = Terminal()
    with on_terminal(terminal), progress(quiet_seconds=0.0) as tell:
        tell("planning once more, for 8.00 GiB")
        assert terminal.getvalue() == "\r\x1b[Kplanning once more, for 8.00 GiB, 0 s"
    assert terminal.getvalue().endswith("\r\x1b[K")
    with on_terminal(terminal):
        with progress(quiet_seconds=0.0) as tell:
            tell("compiling")
        assert terminal.getvalue().endswith("compiling, 0 s\r\x1b[K")
    assert not LOGGER.handlers
    LOGGER.info("0 s: nobody hears this")
    assert "nobody" not in terminal.getvalue()


def test_nothing_is_written_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with on_terminal(io.StringIO()), progress(quiet_seconds=0.0) as tell:
        tell("something")
    assert capfd.readouterr() == ("", "")
