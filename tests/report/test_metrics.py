"""A run's figures, by hand."""

import resource
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.hardware.efficiency import Efficiency, ModelFlops
from jaxinfer.report import metrics
from jaxinfer.report.metrics import InstanceUse, RunTotals, run_metrics
from jaxinfer.report.recorder import Recorder
from jaxinfer.serving.batch import Work
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import InstanceLost


def ended(
    prompt: int, outputs: int, arrival: float, cached: int, error: str | None
) -> RequestState:
    request = RequestState("r", prompt, 10, arrival)
    request.output_token_ids = [0] * outputs
    request.metrics.num_cached_tokens = cached
    request.metrics.first_scheduled = arrival + 0.125
    request.error = error
    return request


def step(
    instance: str, tokens: int, decodes: int, pages: int, start: float = 0.0, end: float = 1.0
) -> Any:
    """Decodes see three entries each; the other tokens are a prompt's from the second on."""
    chunks = [(1, tokens - decodes)] if tokens > decodes else []
    work = Work(tokens, decodes, 1, 1, 3 * decodes, chunks, decodes)
    batch = SimpleNamespace(instance=instance, work=work, pages_in_use=pages)
    return SimpleNamespace(batch=batch, start=start, end=end)


def test_totals_of_steps() -> None:
    totals = RunTotals()
    for each in (
        step("a", 100, 30, 5, end=1.0),
        step("b", 8, 8, 4, end=1.5),
        step("a", 50, 0, 2, end=2.0),
        step("b", 3, 1, 5, end=2.5),
    ):
        totals.add_step(each)
    assert (totals.steps, totals.prefill_tokens, totals.decode_tokens) == (4, 122, 39)
    totals.count_pages()
    # At most nine at once: five of a's and four of b's.
    assert totals.peak_pages == 9
    assert totals.pages_in_use == 2 + 5
    # A chunk of 70 after one entry: 2 + 3 + ... + 71; then one of 50, and one of 2.
    chunks = sum(range(2, 72)) + sum(range(2, 52)) + 2 + 3
    assert totals.pairs == 3 * 39 + chunks


def test_pages_count_in_the_order_of_the_ends_of_steps() -> None:
    """A run of a's ends at 4, with 9 pages from 2 and 3 from 4 on; steps of b are counted later."""
    totals = RunTotals()
    totals.add_step(step("a", 1, 1, 1))
    totals.add_run("a", 1.0, [2.0, 3.0, 4.0], 1, 7, 9, [(4.0, 3)])
    totals.add_step(step("b", 1, 1, 2, start=1.0, end=1.5))
    totals.add_step(step("b", 1, 1, 4, start=1.5, end=2.5))
    totals.add_step(step("b", 1, 1, 20, start=2.5, end=4.0))
    totals.count_pages()
    # Of all that changes at 4, only the sum afterwards counts.
    assert (totals.pages_in_use, totals.peak_pages) == (3 + 20, 23)
    totals.add_step(step("b", 1, 1, 0, start=4.0, end=5.0))
    assert (totals.steps, totals.decode_tokens, totals.pairs) == (8, 8, 5 * 3 + 7 + 8 + 9)
    assert totals.instances["a"].busy_s == 4.0
    totals = RunTotals()
    totals.add_step(step("a", 1, 1, 1))
    totals.add_run("a", 1.0, [2.0, 3.0], 1, 7, 9, [(3.0, 0)])
    totals.add_step(step("b", 1, 1, 2, start=1.0, end=1.5))
    totals.add_step(step("b", 1, 1, 4, start=1.5, end=3.5))
    totals.count_pages()
    assert totals.peak_pages == 9 + 2


def test_a_lost_instance_has_no_pages_in_use() -> None:
    totals = RunTotals()
    loop: Any = SimpleNamespace(assignments=SimpleNamespace(hand_offs=SimpleNamespace(moving=[])))
    with Recorder(None, dict, True) as recorder:
        recorder.totals = totals
        totals.add_step(step("a", 1, 1, 100))
        for lost in ("a", "a", "never ran"):
            recorder.add_event(InstanceLost(lost, "killed"), loop)
        totals.add_step(step("b", 1, 1, 80, end=2.0))
        totals.count_pages()
        assert (totals.pages_in_use, totals.peak_pages) == (80, 100)
        totals.add_step(step("a", 1, 1, 30, end=3.0))  # It is back.
    totals.count_pages()
    assert (totals.pages_in_use, totals.peak_pages) == (110, 110)


def test_time_of_each_instance_is_counted_once() -> None:
    """Steps of a overlap from 2 to 3; b has one; c none, but a role."""
    totals = RunTotals()
    for name, start, end in (("a", 1, 3), ("b", 5, 6), ("a", 2, 4), ("a", 7, 7.5)):
        totals.add_step(step(name, 1, 1, 0, start, end))
    roles = {"a": {"": 8.0}, "c": {"": 1.0, "off": 7.0}}
    found = run_metrics(
        totals, 1, 0, 8.0, roles, preemptions=0, num_pages=9,
        loop_s=0.0, launching_s=0.0, compiles=0, compile_s=0.0, late_compiles=0,
    )  # fmt: skip
    assert found.instances == {
        "a": InstanceUse(first_step=1, last_step=7.5, busy_s=3.5, role_s={}),
        "b": InstanceUse(first_step=5, last_step=6, busy_s=1, role_s={}),
        "c": InstanceUse(first_step=None, last_step=None, busy_s=0.0, role_s={"off": 7.0}),
    }


def test_totals_of_requests_are_of_those_that_have_not_failed() -> None:
    totals = RunTotals()
    totals.add_prompt([(ended(100, 3, 2.0, 16, None), [3.0, 3.5, 5.0])])
    totals.add_prompt([(ended(1000, 2, 0.0, 64, "lost"), [1.0, 2.0])])
    totals.add_prompt([(ended(10, 1, 4.0, 0, None), [4.25])])
    totals.add_prompt([(ended(1, 0, 0.0, 0, None), [])])
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (111, 16, 4)
    # Since arrival: 1 and 0.25 seconds; gaps of 0.5 and 1.5.
    found = totals.latencies
    assert [found.ttft.percentile(p) for p in (0, 100)] == [0.25, 1.0]
    assert [found.tbt.percentile(p) for p in (0, 100)] == [0.5, 1.5]
    assert [found.delay.percentile(p) for p in (0, 100)] == [0.125, 0.125]
    assert found.delay.mean == 0.125


def test_a_prompt_counts_once_with_all_its_continuations() -> None:
    """Ten prompts end at 1, 2, ... 10 s, each with another continuation a quarter earlier."""
    totals = RunTotals()
    for end in range(1, 11):
        early, late = ended(5, 2, 0.0, 0, None), ended(5, 3, 0.0, 1, None)
        totals.add_prompt([(late, [0.25, 0.5, end]), (early, [0.25, 0.75 * end])])
    failed, other = ended(5, 3, 0.0, 0, "lost"), ended(5, 3, 0.0, 0, None)
    totals.add_prompt([(other, [0.25, 0.5, 11.0]), (failed, [0.25])])
    # From the first one's end to the ninth's, eight prompts of five tokens each.
    assert totals.course.steady() == (1.0, 5.0)
    assert (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens) == (100, 10, 50)
    # Latencies are of each continuation, but of the failed prompt's none.
    assert totals.latencies.e2e.percentile(100) == 10
    assert totals.latencies.e2e.mean == pytest.approx((55 + 0.75 * 55) / 20)


def test_figures_of_a_run() -> None:
    totals = RunTotals(steps=7, prompt_tokens=120, cached_tokens=8, output_tokens=60, peak_pages=3)
    ttft, tbt = [1.0, 2.0, 4.0, 8.0], [0.1 * i for i in range(1, 12)]
    totals.latencies.ttft.add(ttft)
    totals.latencies.tbt.add(tbt)
    found = run_metrics(
        totals, requests=5, failed=1, wall_s=10.0, loop_s=2.5, launching_s=1.5,
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


def test_without_ramp_and_drain() -> None:
    """Ten requests end at 1, 2, ... 9 and 100 s: eight of them in the eight seconds from 1 to 9."""
    totals = RunTotals()
    for number in range(1, 11):
        end = 100.0 if number == 10 else float(number)
        totals.add_prompt([(ended(1, number, 0.0, 0, None), [0.5, end])])
    found = run_metrics(
        totals, 10, 0, 100.0, preemptions=0, num_pages=9,
        loop_s=0.0, launching_s=0.0, compiles=0, compile_s=0.0, late_compiles=0,
    )  # fmt: skip
    assert (found.steady_requests_s, found.steady_output_tok_s) == (1.0, sum(range(2, 10)) / 8)


def test_what_it_takes_for_each_request_and_token() -> None:
    """A kilowatt and 3.6 dollars an hour for 100 seconds: 27.8 Wh and 10 cents."""
    totals = RunTotals(prefill_tokens=90, decode_tokens=10, pairs=500.0, output_tokens=20)
    model = ModelFlops(token=7.0, pair=2.0, sampled=3.0)
    efficiency = Efficiency(model=model, peak_flops=40.0, usd_per_hour=3.6, watts=1000.0)
    rest = {"preemptions": 0, "num_pages": 9, "compiles": 0, "compile_s": 0.0, "late_compiles": 0,
            "loop_s": 0.0, "launching_s": 0.0}  # fmt: skip
    found = run_metrics(totals, 5, 1, 100.0, None, efficiency, **rest)
    assert found.mfu == pytest.approx((100 * 7 + 500 * 2 + 20 * 3) / 4000)
    assert found.usd_per_request == pytest.approx(0.1 / 4)
    assert found.usd_per_million_output_tokens == pytest.approx(0.1 / 20e-6)
    assert found.wh_per_request == pytest.approx(1000 * 100 / 3600 / 4)
    assert found.wh_per_million_output_tokens == pytest.approx(1000 * 100 / 3600 / 20e-6)
    names = [name for name in vars(found) if name.startswith(("usd_", "wh_", "mfu", "steady_"))]
    assert len(names) == 7
    unknown = run_metrics(totals, 5, 1, 100.0, None, Efficiency(), **rest)
    assert [getattr(unknown, name) for name in names] == [None] * 7
    half = run_metrics(totals, 5, 1, 100.0, None, Efficiency(model=model), **rest)
    assert half.mfu is None
    nothing = run_metrics(RunTotals(), 1, 1, 100.0, None, efficiency, **rest)
    assert [getattr(nothing, name) for name in names if "_per_" in name] == [None] * 4


def test_peak_memory_is_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(ru_maxrss=3 * 2**20)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    for platform, mib in (("linux", 3 * 2**10), ("darwin", 3)):
        monkeypatch.setattr(sys, "platform", platform)
        assert metrics.peak_rss_mib() == mib
