"""Progress of long work in a log: a line now and then, with the rate and the time left."""

import contextlib
import io
import sys

import pytest

from toolkit.system import progress as module
from toolkit.system.progress import progress, with_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_a_minute_with_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """500 rows a second for three minutes and a half. Fails when: the time of the last line stays; the rate is of all rows."""

    def items() -> list[int]:
        for _ in range(210):
            clock[0] += 1
            yield 500

    assert sum(with_progress(items(), "Reading", "rows", 120_000, int)) == 105_000
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Reading: 30,000 of 120,000 rows, 500 rows/s, ETA 3:00",
        "Reading: 60,000 of 120,000 rows, 500 rows/s, ETA 2:00",
        "Reading: 90,000 of 120,000 rows, 500 rows/s, ETA 1:00",
    ]


def test_short_work_says_nothing_and_a_total_may_be_unknown(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Or too small. Fails when: a line comes at once; an ETA is counted without a total."""
    with progress("Reading", "rows") as add:
        clock[0] += 59
        add(10)
        assert capsys.readouterr().err == ""
        clock[0] += 1
        add(20_990)
    assert capsys.readouterr().err == "Reading: 21,000 rows, 350 rows/s\n"
    with progress("Downloading", "B", 5_000_000) as add:
        clock[0] += 60
        add(6_000_000)
    assert capsys.readouterr().err == "Downloading: 6 of 5 MB, 6 MB/min, ETA 0:00\n"


def test_it_is_shown_where_the_output_of_the_work_is_hidden(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when: a line goes to the standard error of its moment."""
    with progress("Timing", "steps", 4) as add, contextlib.redirect_stderr(io.StringIO()):
        clock[0] += 60
        add(1)
    assert capsys.readouterr().err.startswith("Timing: 1 of 4 steps")


def test_a_terminal_has_a_bar_and_no_lines(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: the lines are written to a terminal too."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("Reading", "rows", 10) as add:
        clock[0] += 100
        add(5)
    assert "5 of 10" not in terminal.getvalue()
