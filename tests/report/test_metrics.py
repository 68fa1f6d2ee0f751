"""A run's figures, by hand."""

import resource
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.report import metrics
from jaxinfer.report.metrics import RunTotals, run_metrics
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.work import Work


def ended(
    prompt: int, outputs: int, arrival: float, cached: int, error: str | None
) -> RequestState:
    request = RequestState("r", prompt, 10, arrival)
    request.output_token_ids = [0] * outputs
    request.metrics.num_cached_tokens = cached
    request.error = error
    return request


def step(instance: str, tokens: int, decodes: int, pages: int) -> Any:
    work = Work(tokens, decodes, 1, 1, 0, [], decodes)
    batch = SimpleNamespace(instance=instance, work=work, pages_in_use=pages)
    return SimpleNamespace(instance=instance, batch=batch)


def test_totals_of_steps() -> None:
    totals = RunTotals()
    for each in (
        step("a", 100, 30, 5),
        step("b", 8, 8, 4),
        step("a", 50, 0, 2),
        step("b", 3, 1, 5),
    ):
        totals.add_step(each)
    assert (totals.steps, totals.prefill_tokens, totals.decode_tokens) == (4, 122, 39)
    # At most nine at once: five of a's and four of b's.
    assert totals.peak_pages == 9
    assert totals.pages_in_use == {"a": 2, "b": 5}


def test_totals_of_requests_are_of_those_that_have_not_failed() -> None:
    totals = RunTotals()
    totals.add_request(ended(100, 3, 2.0, 16, None), [3.0, 3.5, 5.0])
    totals.add_request(ended(1000, 2, 0.0, 64, "lost"), [1.0, 2.0])
    totals.add_request(ended(10, 1, 4.0, 0, None), [4.25])
    totals.add_request(ended(1, 0, 0.0, 0, None), [])
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (111, 16, 4)
    # Since arrival: 1 and 0.25 seconds; gaps of 0.5 and 1.5.
    assert [totals.ttft.percentile(p) for p in (0, 100)] == [0.25, 1.0]
    assert [totals.tbt.percentile(p) for p in (0, 100)] == [0.5, 1.5]


def test_figures_of_a_run() -> None:
    totals = RunTotals(steps=7, prompt_tokens=120, cached_tokens=8, output_tokens=60, peak_pages=3)
    ttft, tbt = [1.0, 2.0, 4.0, 8.0], [0.1 * i for i in range(1, 12)]
    totals.ttft.add(ttft)
    totals.tbt.add(tbt)
    found = run_metrics(
        totals, requests=5, failed=1, wall_s=10.0, waited_s=6.0, launching_s=1.5,
        preemptions=2, num_pages=9, compiles=4, compile_s=3.0, late_compiles=1,
    )  # fmt: skip
    assert (found.requests, found.failed, found.steps, found.preemptions) == (5, 1, 7, 2)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (120, 8, 60)
    assert (found.prompt_tok_s, found.output_tok_s, found.wall_s) == (12.0, 6.0, 10.0)
    assert (found.loop_s, found.launching_s) == (10.0 - 6.0 - 1.5, 1.5)
    assert (found.peak_pages, found.num_pages) == (3, 9)
    assert (found.compiles, found.compile_s, found.late_compiles) == (4, 3.0, 1)
    # Between the second and the third, and 0.97 of the way from the third to the last.
    assert (found.ttft_p50, found.ttft_p99) == pytest.approx((3.0, 4.0 + 0.97 * 4.0))
    assert (found.tbt_p50, found.tbt_p99) == pytest.approx((0.6, np.percentile(tbt, 99)))
    assert found.tbt_p99 == pytest.approx(1.09)


def test_peak_memory_is_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(ru_maxrss=3 * 2**20)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    for platform, mib in (("linux", 3 * 2**10), ("darwin", 3)):
        monkeypatch.setattr(sys, "platform", platform)
        assert metrics.peak_rss_mib() == mib
