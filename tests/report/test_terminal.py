"""Output of a run in the terminal: its figures, and progress bars."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from jaxinfer.report import progress
from jaxinfer.report.metrics import RunMetrics, RunTotals
from jaxinfer.report.progress import LoadProgress, RunProgress
from jaxinfer.report.table import metrics_table


def rows(table: Table) -> list[tuple[str, ...]]:
    """Cells, row by row."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def metrics(**changes: Any) -> RunMetrics:
    given: dict[str, Any] = {
        "requests": 12, "failed": 0, "prompt_tokens": 4000, "output_tokens": 1234,
        "cached_tokens": 0, "wall_s": 3.456, "prompt_tok_s": 1157.4, "output_tok_s": 357.06,
        "ttft_p50": 0.0123, "ttft_p99": 1.5, "tbt_p50": 0.9996, "tbt_p99": 1.0, "e2e_p50": 2.0,
        "e2e_p99": 0.5, "steps": 99,
        "preemptions": 3, "peak_pages": 1000, "num_pages": 2048, "compiles": 0, "compile_s": 12.34,
        "late_compiles": 0, "loop_s": 0.1, "launching_s": 0.2, "peak_rss_mib": 1.0,
    }  # fmt: skip
    return RunMetrics(**(given | changes))


def test_figures_of_a_run() -> None:
    assert rows(metrics_table(metrics())) == [
        ("requests", "12"),
        ("prompt tokens", "4,000"),
        ("output tokens", "1,234"),
        ("wall time", "3.46 s"),
        ("prefill", "1,157.4 tokens/s"),
        ("decode", "357.1 tokens/s"),
        ("TTFT p50 / p99", "12.3 ms / 1.50 s"),
        ("TBT p50 / p99", "999.6 ms / 1.00 s"),
        ("end-to-end p50 / p99", "2.00 s / 500.0 ms"),
        ("peak KV pages", "1,000 of 2,048"),
        ("preemptions", "3"),
    ]


def test_figures_that_only_some_runs_have() -> None:
    found = dict(
        rows(
            metrics_table(
                metrics(failed=2, cached_tokens=1000, compiles=7, tbt_p50=None, tbt_p99=None)
            )
        )
    )
    assert found["requests"] == "12 (2 failed)"
    assert found["prompt tokens"] == "4,000 (25.0 % from the prefix cache)"
    assert found["TBT p50 / p99"] == "- / -"
    assert found["compiles"] == "7 in 12.3 s"
    modelled = metrics(mfu=0.4567, steady_requests_s=12.345, steady_output_tok_s=2345.67)
    found = dict(rows(metrics_table(modelled)))
    assert found["MFU"] == "45.7 %"
    assert found["without ramp and drain"] == "12.3 requests/s, 2,345.7 tokens/s"
    late = dict(rows(metrics_table(metrics(compiles=7, late_compiles=2, prompt_tokens=0))))
    assert late["compiles"] == "7 in 12.3 s, 2 of them during the run"
    assert late["prompt tokens"] == "0"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def shown(bar: Any) -> list[str]:
    """Return the words of a bar, without its length and its time."""
    text = io.StringIO()
    Console(file=text, width=200, force_terminal=False).print(bar._bar.get_renderable())
    return [
        " ".join(word for word in line.split() if word.strip("━╸╺") and ":" not in word[-3:-2])
        for line in text.getvalue().splitlines()
    ]


def test_progress_of_a_run(clock: Clock) -> None:
    """Speeds over the time since they were last told, a second ago or more."""
    totals = RunTotals()
    with RunProgress(True, 40) as bar:
        totals.prefill_tokens, totals.decode_tokens = 5000, 100
        clock.now += 0.9
        bar.step_done(totals)
        bar.request_done()
        assert shown(bar) == ["requests 1/40"]
        clock.now += 1.1
        bar.step_done(totals)
        bar.request_done()
        assert shown(bar) == ["requests 2/40 prefill 2,500 tok/s, decode 50 tok/s"]
        totals.prefill_tokens, totals.decode_tokens = 5100, 400
        clock.now += 1.0
        bar.step_done(totals)
        assert shown(bar) == ["requests 2/40 prefill 100 tok/s, decode 300 tok/s"]


def test_progress_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The first call for a part says how much there is; several engines' parts are told apart."""
    with LoadProgress(True) as bar:
        bar.update("weights", 8)
        assert shown(bar) == ["weights 0/8"]
        bar.update("weights", 5)
        bar.update_of("low", "weights", 4)
        bar.update_of("low", "weights", 3)
        bar.update("compiling", 2)
        assert shown(bar) == ["weights 3/8", "low: weights 1/4", "compiling 0/2"]
        # More of what was done once.
        bar.update("compiling", 0)
        bar.update("compiling", 3)
        bar.update("compiling", 1)
        assert shown(bar)[-1] == "compiling 4/5"
    out, err = capsys.readouterr()
    assert out == ""
    assert "low: weights" in err


def test_nothing_to_show_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(True):
        pass
    assert capsys.readouterr() == ("", "")


def test_requests_become_known_as_they_are_read(clock: Clock) -> None:
    with RunProgress(True, 10) as bar:
        bar.requests_known(7)
        bar.request_done()
        assert shown(bar) == ["requests 1/10"]
        bar.requests_known(12)
        bar.request_done()
        assert shown(bar) == ["requests 2/12"]


def test_bars_stop_with_their_work(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(True, 3) as bar:
        assert bar._bar.live.is_started
    assert not bar._bar.live.is_started
    assert "0/3" in capsys.readouterr().err
    with RunProgress(False, 3) as bar:
        bar.request_done()
        bar.step_done(RunTotals())
    assert capsys.readouterr() == ("", "")
