"""A run's figures by hand, from its steps and its requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.report.metrics import RunTotals, run_metrics
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

HOLD: Any = SimpleNamespace(kv=SimpleNamespace(is_spread=False))


def step(instance: str, pages: int, *rows: tuple[int, int], end: float = 1.0) -> StepDone:
    """Rows of entries before them and tokens; prompts have 10."""
    made = [
        Row(RequestState(str(i), 10, 9), start, count, True, False, 0, HOLD)
        for i, (start, count) in enumerate(rows)
    ]
    return StepDone(Batch(instance, made, 0, 0, pages), [0] * len(made), 0.0, end)


def request(arrival: float, output: int, cached: int | None = None) -> RequestState:
    made = RequestState("r", 10, 9, arrival)
    made.output_token_ids = [0] * output
    made.metrics.num_cached_tokens = cached
    return made


def test_steps_and_requests_add_up() -> None:
    totals = RunTotals()
    # Two decodes beside a chunk of 6; a prompt's last token alone is none; pages of both.
    totals.add_step(step("a", 5, (11, 1), (12, 1), (0, 6)))
    totals.add_step(step("b", 4, (9, 1), end=1.25))
    totals.add_step(step("a", 1, (10, 1), end=1.5))
    totals.add_step(step("b", 6, (0, 10), end=1.75))
    totals.count_pages()
    assert (totals.steps, totals.decode_tokens, totals.prefill_tokens) == (4, 3, 17)
    assert totals.pages_in_use == 1 + 6
    assert totals.peak_pages == 9
    totals.add_prompt([(request(2.0, 3, cached=4), [3.0, 3.5, 5.5])])
    totals.add_prompt([(request(0.0, 1), [5.0])])
    failed = request(0.0, 2)
    failed.error = "lost"
    totals.add_prompt([(failed, [7.0, 9.0])])
    totals.add_prompt([(request(0.0, 0), [])])
    found = run_metrics(
        totals, 5, 1, 8.0, loop_s=2.0, launching_s=1.5,
        preemptions=2, num_pages=20, compiles=3, compile_s=0.5, late_compiles=1,
    )  # fmt: skip
    assert (found.requests, found.failed, found.steps, found.preemptions) == (5, 1, 4, 2)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (30, 4, 4)
    assert (found.wall_s, found.prompt_tok_s, found.output_tok_s) == (8.0, 30 / 8, 0.5)
    # TTFT 1 and 5, TBT 0.5 and 2: the 99th percentile is 0.99 of the way.
    assert (found.ttft_p50, found.ttft_p99) == pytest.approx((3, 1 + 0.99 * 4))
    assert (found.tbt_p50, found.tbt_p99) == pytest.approx((1.25, 0.5 + 0.99 * 1.5))
    assert (found.peak_pages, found.num_pages) == (9, 20)
    assert (found.compiles, found.compile_s, found.late_compiles) == (3, 0.5, 1)
    assert (found.loop_s, found.launching_s) == (2.0, 1.5)
    assert 1 < found.peak_rss_mib < 1e6


def test_a_run_of_nothing_has_no_latencies() -> None:
    found = run_metrics(
        RunTotals(), 0, 0, 1.0, loop_s=1.0, launching_s=0.0,
        preemptions=0, num_pages=1, compiles=0, compile_s=0.0, late_compiles=0,
    )  # fmt: skip
    assert (found.ttft_p50, found.ttft_p99, found.tbt_p50, found.tbt_p99) == (None,) * 4
    assert (found.peak_pages, found.loop_s) == (0, 1.0)
