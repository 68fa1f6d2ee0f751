"""Divides a trace into windows of time, and measures how the mix of requests changes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from jaxinfer.workload.lengths import BenchRequest


@dataclass(frozen=True)
class LoadMix:
    """The figures of a load that DistServe's profiler monitors (section 4.3).

    Attributes:
        rate: requests per second.
        prompt: mean number of prompt tokens.
        output: mean number of output tokens.
    """

    rate: float
    prompt: float
    output: float

    @classmethod
    def of(cls, work: Sequence[BenchRequest], seconds: float) -> "LoadMix":
        """Return the mix of one or more requests that arrive within ``seconds`` seconds."""
        return cls(
            len(work) / seconds,
            fmean(item.prompt_len for item in work),
            fmean(item.max_tokens for item in work),
        )

    def shift(self, before: "LoadMix") -> float:
        """Return the largest of the relative changes of rate, prompt length and output length."""
        pairs = (
            (self.rate, before.rate),
            (self.prompt, before.prompt),
            (self.output, before.output),
        )
        return max(abs(now / then - 1) for now, then in pairs)


@dataclass(frozen=True)
class Window:
    """The requests of a period of time.

    Attributes:
        start: first second.
        stop: end, which belongs to the next window.
        work: requests, by arrival.
    """

    start: float
    stop: float
    work: Sequence[BenchRequest]

    @property
    def mix(self) -> LoadMix | None:
        """The load in the window; None if it has no requests."""
        return LoadMix.of(self.work, self.stop - self.start) if self.work else None


def cut(work: Sequence[BenchRequest], seconds: float) -> list[Window]:
    """Cut requests into windows of equal length, from 0 to the last arrival; some may be empty."""
    last = max(item.arrival for item in work)
    edges = [0.0]
    while edges[-1] <= last:
        edges.append(len(edges) * seconds)
    parts = split(work, edges[:-1])
    return [Window(*ends, part) for ends, part in zip(pairwise(edges), parts, strict=True)]


def split(work: Sequence[BenchRequest], starts: Sequence[float]) -> list[list[BenchRequest]]:
    """Split requests by arrival, from each start to the next; the first start is 0."""
    parts: list[list[BenchRequest]] = [[] for _ in starts]
    for item in sorted(work, key=lambda item: item.arrival):
        parts[bisect_right(starts, item.arrival) - 1].append(item)
    return parts
