"""Latencies of requests: means and percentiles, in bounded memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.report.percentiles import StreamPercentiles


@dataclass(kw_only=True)
class Latencies:
    """Means and percentiles in seconds, over requests that have not failed; None without any.

    Each continuation of a prompt counts separately, unless one of them has failed.

    Attributes:
        ttft_*: time from arrival to the first token.
        tpot_*: mean time between a request's tokens, for requests with two or more.
        tbt_*: time between tokens, over all pairs of neighbouring tokens.
        e2e_*: time from arrival to the last token.
        normalised_*: that time divided by the number of output tokens (as in vLLM's and Vidur's
            papers).
        delay_*: time from arrival to the start of the request's first step.
    """

    ttft_mean: float | None = None
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None
    tpot_mean: float | None = None
    tpot_p50: float | None = None
    tpot_p90: float | None = None
    tpot_p99: float | None = None
    tbt_mean: float | None = None
    tbt_p50: float | None = None
    tbt_p90: float | None = None
    tbt_p99: float | None = None
    e2e_mean: float | None = None
    e2e_p50: float | None = None
    e2e_p90: float | None = None
    e2e_p99: float | None = None
    normalised_mean: float | None = None
    normalised_p50: float | None = None
    normalised_p90: float | None = None
    normalised_p99: float | None = None
    delay_mean: float | None = None
    delay_p50: float | None = None
    delay_p90: float | None = None
    delay_p99: float | None = None


@dataclass
class LatencyTotals:
    """The latencies of the requests so far, one field for each kind in ``Latencies``."""

    ttft: StreamPercentiles = field(default_factory=StreamPercentiles)
    tpot: StreamPercentiles = field(default_factory=StreamPercentiles)
    tbt: StreamPercentiles = field(default_factory=StreamPercentiles)
    e2e: StreamPercentiles = field(default_factory=StreamPercentiles)
    normalised: StreamPercentiles = field(default_factory=StreamPercentiles)
    delay: StreamPercentiles = field(default_factory=StreamPercentiles)

    def add(self, arrival: float, first_scheduled: float | None, times: Sequence[float]) -> None:
        """Count a request whose tokens, at least one, came at these times."""
        first, last, count = times[0], times[-1], len(times)
        self.ttft.append(first - arrival)
        self.e2e.append(last - arrival)
        self.normalised.append((last - arrival) / count)
        if first_scheduled is not None:
            self.delay.append(first_scheduled - arrival)
        if count > 1:
            self.tpot.append((last - first) / (count - 1))
            array = np.array(times)
            self.tbt.add(array[1:] - array[:-1])

    def figures(self) -> dict[str, float | None]:
        """Return the fields of ``Latencies``."""
        found: dict[str, float | None] = {}
        for name, values in vars(self).items():
            p50, p90, p99 = values.percentiles([50, 90, 99])
            found |= {f"{name}_mean": values.mean, f"{name}_p50": p50}
            found |= {f"{name}_p90": p90, f"{name}_p99": p99}
        return found
