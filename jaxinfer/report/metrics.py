"""The figures of a run, from its requests and its steps."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.report.percentiles import Percentiles
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone


@dataclass
class RunTotals:
    """Sums over the steps and the requests that have ended so far, in bounded memory.

    Attributes:
        prefill_tokens, decode_tokens: computed, recomputed ones included.
        pages_in_use: of each instance, when its last step was launched; peak_pages: of all.
        prompt_tokens, cached_tokens, output_tokens, ttft, tbt: of requests that have not failed;
            see ``RunMetrics``.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    pages_in_use: dict[str, int] = field(default_factory=dict)
    peak_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: Percentiles = field(default_factory=Percentiles)
    tbt: Percentiles = field(default_factory=Percentiles)

    def add_step(self, done: StepDone) -> None:
        """Count one step."""
        work = done.batch.work
        self.steps += 1
        self.decode_tokens += work.decodes
        self.prefill_tokens += work.tokens - work.decodes
        self.pages_in_use[done.instance] = done.batch.pages_in_use
        self.peak_pages = max(self.peak_pages, sum(self.pages_in_use.values()))

    def add_request(self, request: RequestState, times: Sequence[float]) -> None:
        """Count one request, whose tokens came at these times."""
        if request.error is not None:
            return
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.metrics.num_cached_tokens or 0
        self.output_tokens += len(request.output_token_ids)
        if times:
            self.ttft.add([times[0] - request.arrival])
            self.tbt.add(np.diff(times))


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
    totals: RunTotals,
    requests: int,
    failed: int,
    wall_s: float,
    waited_s: float,
    launching_s: float,
    **given: Any,
) -> RunMetrics:
    """The figures of a run that has ended.

    Args:
        requests, failed: prompts, and those of them that have failed.
        waited_s: seconds in which the loop waited for devices and arrivals.
        given: fields of ``RunMetrics`` that requests and steps do not tell.
    """
    return RunMetrics(
        requests=requests,
        failed=failed,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        cached_tokens=totals.cached_tokens,
        wall_s=wall_s,
        prompt_tok_s=totals.prompt_tokens / wall_s,
        output_tok_s=totals.output_tokens / wall_s,
        ttft_p50=totals.ttft.percentile(50),
        ttft_p99=totals.ttft.percentile(99),
        tbt_p50=totals.tbt.percentile(50),
        tbt_p99=totals.tbt.percentile(99),
        steps=totals.steps,
        peak_pages=totals.peak_pages,
        loop_s=wall_s - waited_s - launching_s,
        launching_s=launching_s,
        **given,
    )


def peak_rss_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
