"""The line that says what a long compile is at."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from coop_jax.progress import QUIET_SECONDS, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_is_told_and_the_line_goes_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = iter([0.0, QUIET_SECONDS / 2, 3.0, 5.0])
    with caplog.at_level(logging.INFO, logger="coop_jax"), progress(lambda: next(now)) as tell:
        tell("one")
        tell("two")
        tell("three")
    assert caplog.messages == ["3 s: two", "5 s: three"]
    assert "one" not in terminal.getvalue()
    assert "coop_jax: 5 s: three" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_is_written_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 10.0])
    with progress(lambda: next(now)) as tell:
        tell("something")
    assert capfd.readouterr() == ("", "")
