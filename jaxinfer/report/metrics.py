"""The figures of a run, from its requests and its steps."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone


@dataclass
class StepTotals:
    """Sums over the steps seen so far; tokens are those computed, recomputed ones included."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    peak_pages: int = 0

    def add(self, done: StepDone) -> None:
        """Count one step."""
        work = done.batch.work
        self.steps += 1
        self.decode_tokens += work.decodes
        self.prefill_tokens += work.tokens - work.decodes
        self.peak_pages = max(self.peak_pages, done.batch.pages_in_use)


@dataclass
class RunMetrics:
    """A run in figures. Times in seconds, without loading and compiling ahead.

    Attributes:
        prompt_tokens: once for each of the ``n`` continuations of a prompt.
        cached_tokens: those of them whose KV the prefix cache had when their request started.
        prompt_tok_s, output_tok_s: tokens of finished requests per second of the whole run.
        ttft_p50, ttft_p99: time to first token since arrival.
        tbt_p50, tbt_p99: time between tokens, over all pairs of neighbouring tokens.
        peak_pages: KV pages in use at most; num_pages: the pool without its padding page.
        compiles, compile_s: before and during the run; late_compiles: during the run.
        loop_s: the serving loop's own Python time, launching_s: that of building and launching
            steps, both within wall_s.
        peak_rss_mib: peak memory of the process on the host.
    """

    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    wall_s: float
    prompt_tok_s: float
    output_tok_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    tbt_p50: float | None
    tbt_p99: float | None
    steps: int
    preemptions: int
    peak_pages: int
    num_pages: int
    compiles: int
    compile_s: float
    late_compiles: int
    loop_s: float
    launching_s: float
    peak_rss_mib: float = field(default_factory=lambda: peak_rss_mib())


def run_metrics(
    served: Sequence[tuple[RequestState, str]],
    totals: StepTotals,
    wall_s: float,
    ttft_counts_transfer: bool,
    waited_s: float,
    launching_s: float,
    **given: Any,
) -> RunMetrics:
    """The figures of a run that has ended.

    Args:
        served: all requests, each with the id of the one it was made from.
        waited_s: seconds in which the loop waited for devices and arrivals.
        given: fields of ``RunMetrics`` that requests and steps do not tell.
    """
    done = [request for request, _ in served if request.error is None]
    prompt_tokens = sum(request.prompt_len for request in done)
    output_tokens = sum(len(request.output_token_ids) for request in done)
    times = [(r.arrival, r.metrics.delivered(ttft_counts_transfer)) for r in done]
    ttft = [tokens[0] - arrival for arrival, tokens in times if tokens]
    tbt = [b - a for _, tokens in times for a, b in pairwise(tokens)]
    parents = {parent for _, parent in served}
    return RunMetrics(
        requests=len(parents),
        failed=len(parents) - len({parent for r, parent in served if r.error is None}),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(request.metrics.num_cached_tokens or 0 for request in done),
        wall_s=wall_s,
        prompt_tok_s=prompt_tokens / wall_s,
        output_tok_s=output_tokens / wall_s,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tbt_p50=percentile(tbt, 50),
        tbt_p99=percentile(tbt, 99),
        steps=totals.steps,
        peak_pages=totals.peak_pages,
        loop_s=wall_s - waited_s - launching_s,
        launching_s=launching_s,
        **given,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile with linear interpolation; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def peak_rss_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
