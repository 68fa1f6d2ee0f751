"""The figures of a run, from its requests and its steps."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
        decodes = done.batch.num_decodes
        self.steps += 1
        self.decode_tokens += decodes
        self.prefill_tokens += done.batch.num_tokens - decodes
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


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile with linear interpolation; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def peak_rss_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
