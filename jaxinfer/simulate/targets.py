"""Latency targets of a run. Each finished request is processed once, in bounded memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, did_you_mean
from jaxinfer.report.percentiles import StreamPercentiles
from jaxinfer.serving.request_state import RequestState
from jaxinfer.workload.lengths import BenchRequest

Criterion = Literal["both", "each"]


@dataclass(frozen=True)
class Verdict:
    """Verdict on targets: whether they are met, and by how much.

    Attributes:
        good: number of requests that count as goodput: those that meet all their limits. With
            percentile limits, all requests count if the limits hold, otherwise none does.
        attainment: share of the requests that is compared with the required one; if the run was
            stopped, the largest share still possible; None with percentile limits.
        figures: for each limit, the share of requests that keep it, or the percentile that was
            found; None without values.
    """

    met: bool
    good: int
    attainment: float | None
    figures: Mapping[str, float | None]


class Watch(Protocol):
    """Evaluates targets during one run, or several that count as one."""

    def add(self, request: RequestState, times: Sequence[float]) -> None:
        """Process a finished request, whose tokens came at these times."""

    @property
    def hopeless(self) -> bool:
        """True if the targets are missed, however fast the remaining requests are."""

    def verdict(self) -> Verdict:
        """Return the verdict on all requests so far."""


class Targets(Protocol):
    """Latency targets, as a user gives them."""

    @property
    def reference(self) -> "Reference | None":
        """The reference whose latencies the limits multiply; None if limits are in seconds."""

    def watch(self, work: Sequence[BenchRequest], runs: int = 1) -> Watch:
        """Return an object that watches ``runs`` runs of this work, which count as one."""


def _tpot(request: RequestState, times: Sequence[float]) -> float | None:
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _tbt(request: RequestState, times: Sequence[float]) -> float | None:
    return max((b - a for a, b in pairwise(times)), default=None)


def _delay(request: RequestState, times: Sequence[float]) -> float | None:
    first = request.metrics.first_scheduled
    return None if first is None else first - request.arrival


# A function of one finished request; it returns None if the request has too few tokens.
Latency = Callable[[RequestState, Sequence[float]], float | None]
LATENCIES: Mapping[str, Latency] = {
    "ttft": lambda request, times: times[0] - request.arrival,
    "tpot": _tpot,
    "tbt": _tbt,
    "e2e": lambda request, times: times[-1] - request.arrival,
    "delay": _delay,
    "normalised": lambda request, times: (times[-1] - request.arrival) / len(times),
}


@dataclass(frozen=True)
class Reference:
    """Latencies of requests that are served alone on a reference machine.

    Attributes:
        seconds: metrics of a request, by its numbers of prompt and output tokens.
    """

    seconds: Mapping[tuple[int, int], Mapping[str, float]]

    def slowdowns(self, metric: str) -> Latency:
        """Return a function that divides a request's latency by that on the reference machine."""
        latency = LATENCIES[metric]

        def slowdown(request: RequestState, times: Sequence[float]) -> float | None:
            own = latency(request, times)
            if own is None:
                return None
            return own / self.seconds[request.prompt_len, len(times)][metric]

        return slowdown


def _latency(metric: str, reference: Reference | None) -> Latency:
    return reference.slowdowns(metric) if reference else LATENCIES[metric]


def _check(metric: str, name: str, limit: float, reference: Reference | None) -> None:
    """Raise OptionError for an impossible limit; ``name`` is what the user calls it."""
    # A request that is alone does not wait, so multiples of its delay are undefined.
    known = [name for name in LATENCIES if name != "delay" or reference is None]
    if metric not in known:
        raise OptionError(f"{metric}: no such metric, {did_you_mean(metric, known)}")
    if not 0 < limit < math.inf:
        raise OptionError(f"{name} is {limit:g}, must be a number above 0")


@dataclass(frozen=True)
class RequestTargets:
    """Limits for each request, which a given share of requests must keep.

    Attributes:
        limits: limit of each metric in seconds or, with a ``reference``, in multiples of the
            request's latency alone on that machine. ``tbt`` is the longest time between two of its
            tokens. A request with one token has no ``tpot`` or ``tbt`` and meets those limits.
        attainment: the required share, above 0 and at most 1.
        criterion: with ``both``, that share must keep all limits; with ``each``, each limit must be
            kept by that share, but not necessarily by the same requests.

    Raises:
        JaxinferError: there is no limit, a metric is unknown, or a number is out of its bounds.
    """

    limits: Mapping[str, float]
    attainment: float = 0.9
    criterion: Criterion = "both"
    reference: Reference | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise JaxinferError(f"no target: give one or more of {', '.join(LATENCIES)}")
        for metric, limit in self.limits.items():
            _check(metric, metric, limit, self.reference)
        if not 0 < self.attainment <= 1:
            raise JaxinferError(f"attainment is {self.attainment:g}, must be above 0 and at most 1")

    def watch(self, work: Sequence[BenchRequest], runs: int = 1) -> Watch:
        """See ``Targets``."""
        return _RequestWatch(self, len(work) * runs)


class _RequestWatch:
    """Counts requests that miss limits."""

    def __init__(self, targets: RequestTargets, expected: int) -> None:
        self._targets, self._expected = targets, expected
        self._limits = [
            (metric, _latency(metric, targets.reference), limit)
            for metric, limit in targets.limits.items()
        ]
        self._missed = dict.fromkeys(targets.limits, 0)
        self._missed_any = self._seen = 0

    def add(self, request: RequestState, times: Sequence[float]) -> None:
        missed = False
        for metric, latency, limit in self._limits:
            value = latency(request, times)
            if value is not None and value > limit:
                self._missed[metric] += 1
                missed = True
        self._missed_any += missed
        self._seen += 1

    def _share(self, missed: int) -> float:
        return (self._expected - missed) / self._expected

    @property
    def _attainment(self) -> float:
        both = self._targets.criterion == "both"
        return self._share(self._missed_any if both else max(self._missed.values()))

    @property
    def hopeless(self) -> bool:
        return self._attainment < self._targets.attainment

    def verdict(self) -> Verdict:
        return Verdict(
            met=not self.hopeless,
            good=self._seen - self._missed_any,
            attainment=self._attainment,
            figures={metric: self._share(missed) for metric, missed in self._missed.items()},
        )


@dataclass(frozen=True)
class PercentileTargets:
    """Limits of percentiles over all requests, which must all hold.

    Percentiles are interpolated linearly between neighbours.

    Attributes:
        limits: metric, percentile (above 0, at most 100) and limit: in seconds or, with a
            ``reference``, in multiples of each request's latency alone on that machine (Splitwise,
            section V-B and Table VI). In seconds, ``tbt`` covers all times between two tokens, of
            all requests; in multiples, it is the longest time of each request. Requests with one
            token, which have no ``tpot`` and no ``tbt``, are left out of these.

    Raises:
        JaxinferError: there is no limit, a metric is unknown, or a number is out of its bounds.
    """

    limits: Sequence[tuple[str, float, float]]
    reference: Reference | None = None

    def __post_init__(self) -> None:
        if not self.limits:
            raise JaxinferError("no target: give a percentile's, as ttft:p90=1.5")
        for metric, percent, limit in self.limits:
            # In a file of slowdowns, percentiles are the keys of a mapping.
            name = f"{metric}.{percent:g}" if self.reference else f"{metric}:p{percent:g}"
            _check(metric, name, limit, self.reference)
            if not 0 < percent <= 100:
                raise OptionError(
                    f"{metric}: percentile {percent:g}, must be above 0 and at most 100"
                )

    def watch(self, work: Sequence[BenchRequest], runs: int = 1) -> Watch:
        """See ``Targets``."""
        return _PercentileWatch(self, work, runs)


class _PercentileWatch:
    """Keeps each metric's values, and counts those above each limit."""

    def __init__(self, targets: PercentileTargets, work: Sequence[BenchRequest], runs: int) -> None:
        self._limits = targets.limits
        self._latencies = {
            metric: _latency(metric, targets.reference) for metric, _, _ in self._limits
        }
        self._all_gaps = targets.reference is None and "tbt" in self._latencies
        self._values = {metric: StreamPercentiles() for metric in self._latencies}
        # For each limit: the values beyond it, and how many of them the percentile permits.
        self._beyond = [0] * len(self._limits)
        self._allowed = [
            _allowed(runs * self._expected(metric, work), percent)
            for metric, percent, _ in self._limits
        ]
        self._seen = 0

    def _expected(self, metric: str, work: Sequence[BenchRequest]) -> int:
        if metric == "tbt" and self._all_gaps:
            return sum(item.max_tokens - 1 for item in work)
        if metric in ("tpot", "tbt"):
            return sum(item.max_tokens > 1 for item in work)
        return len(work)

    def add(self, request: RequestState, times: Sequence[float]) -> None:
        self._seen += 1
        found: dict[str, np.ndarray] = {}
        for metric, latency in self._latencies.items():
            if metric == "tbt" and self._all_gaps:
                found[metric] = np.diff(times)
            else:
                value = latency(request, times)
                found[metric] = np.array([] if value is None else [value])
            self._values[metric].add(found[metric])
        for number, (metric, _, limit) in enumerate(self._limits):
            self._beyond[number] += int((found[metric] > limit).sum())

    @property
    def hopeless(self) -> bool:
        pairs = zip(self._beyond, self._allowed, strict=True)
        return any(beyond > allowed for beyond, allowed in pairs)

    def verdict(self) -> Verdict:
        found = [self._values[metric].percentile(percent) for metric, percent, _ in self._limits]
        met = not self.hopeless and all(
            value is None or value <= limit
            for value, (_, _, limit) in zip(found, self._limits, strict=True)
        )
        names = [f"{metric} p{percent:g}" for metric, percent, _ in self._limits]
        figures = dict(zip(names, found, strict=True))
        return Verdict(met, self._seen * met, None, figures)


def _allowed(count: int, percent: float) -> int:
    """Return how many of ``count`` values may exceed a limit before their percentile must."""
    return count - 1 - math.floor(percent / 100 * (count - 1)) if count else 0


class Limit(NamedTuple):
    """A metric's limit in seconds, and the share of values that must keep it."""

    metric: str
    seconds: float
    share: float


def limits(targets: Targets) -> list[Limit]:
    """Return the limits of the targets, without those in multiples of a reference."""
    if targets.reference:
        return []
    if isinstance(targets, PercentileTargets):
        return [Limit(metric, limit, percent / 100) for metric, percent, limit in targets.limits]
    assert isinstance(targets, RequestTargets)
    return [Limit(name, limit, targets.attainment) for name, limit in targets.limits.items()]


def gap_limits(targets: Targets) -> list[Limit]:
    """Return the limits of the time between two tokens, smallest first."""
    found = [limit for limit in limits(targets) if limit.metric in ("tbt", "tpot")]
    return sorted(found, key=lambda limit: limit.seconds)
