"""Progress in a file: a line when a part begins, one when it ends, and few between."""

import pytest

from jaxinfer.report import progress
from jaxinfer.report.metrics import RunTotals
from jaxinfer.report.progress import LoadProgress, RunProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose last entry is the time."""
    times = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: times[-1])
    return times


def test_parts_of_a_start(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(True) as bar:
        bar.update("loading weights", 1)
        assert capsys.readouterr().err == "loading weights: 0 of 1, 0 s\n"  # At once.
        clock.append(102.0)
        bar.update("loading weights", 0)
        for left in range(40, -1, -1):
            clock.append(clock[-1] + 1)
            bar.update_of("cpi", "compiling steps", left)
    assert capsys.readouterr().err.splitlines() == [
        "loading weights: 1 of 1, 2 s",
        "cpi: compiling steps: 0 of 40, 0 s",
        "cpi: compiling steps: 30 of 40, 30 s",
        "cpi: compiling steps: 40 of 40, 40 s",
    ]


def test_requests(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(True, 2) as bar:
        clock.append(102.0)
        bar.step_done(RunTotals(prefill_tokens=4000, decode_tokens=10))
        bar.request_done()
        clock.append(131.0)
        bar.step_done(RunTotals(prefill_tokens=4000, decode_tokens=300))
        bar.request_done()
    assert capsys.readouterr().err.splitlines() == [
        "requests: 0 of 2, 0 s",
        "requests: 1 of 2, 31 s, prefill 129 tok/s, decode 10 tok/s",
        "requests: 2 of 2, 31 s",
    ]


def test_nothing_is_said_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(False) as bar, RunProgress(False, 1) as requests:
        bar.update("loading weights", 1)
        requests.request_done()
    assert capsys.readouterr().err == ""


def test_bars_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # What rich takes for a terminal.
    monkeypatch.setenv("TERM", "xterm")
    with LoadProgress(True) as bar, RunProgress(True, 3) as requests:
        bar.update("loading weights", 8)
        bar.update("loading weights", 3)
        requests.request_done()
    said = capsys.readouterr().err
    assert "5/8" in said
    assert "1/3" in said
    assert " of " not in said
