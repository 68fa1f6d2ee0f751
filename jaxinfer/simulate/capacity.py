"""Finds the largest request rate at which a modelled cluster meets its targets."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.isolated import serve_alone
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.simulate.targets import Targets, Verdict
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

# The smallest rate that is tried, in requests per second, and a rate that no cluster can reach.
_LEAST, _MOST = 2.0**-10, 1e5
# A rate at which, for every step, all requests arrive at once.
AT_ONCE = 1e15
# At this multiple of the capacity, the targets should be missed.
_ABOVE = (1.1, 1.5, 2.0)
# Number of requests of a first simulation, which shows whether the search is worthwhile.
_SAMPLE = 100
# The smallest number of requests that can decide a rate: this multiple of the requests in the
# cluster at a time, and this number over all seeds. Fewer requests end before a backlog shows, or
# happen to arrive at another rate.
_TURNOVERS, _FEWEST = 20, 100


@dataclass(frozen=True)
class TriedRate:
    """The result of trying a request rate.

    Attributes:
        rate: requests per second, Poisson arrivals.
        gpus: number of GPUs in the cluster.
        goodput: good requests (see ``Verdict``) divided by the seconds until the last request ends;
            None if the run was stopped because its targets could no longer be met.
        enough: approximate number of requests needed, if each run had too few (see
            ``enough_requests``); otherwise None.
    """

    rate: float
    gpus: int
    verdict: Verdict
    goodput: float | None
    enough: int | None = None

    @property
    def goodput_per_gpu(self) -> float | None:
        """Goodput divided by the number of GPUs."""
        return None if self.goodput is None else self.goodput / self.gpus


class RateMap(Protocol):
    """``map``, or a process pool's ``map``, which may run calls before their results are needed."""

    def __call__(
        self, call: Callable[[float], TriedRate], rates: Iterable[float], /
    ) -> Iterator[TriedRate]:
        """Yield the result of each rate, in the order of the rates."""


class AnyRateError(JaxinferError):
    """The targets are met at any rate, because there are too few requests.

    Attributes:
        enough: number of requests needed, if known.
    """

    def __init__(self, count: int, enough: int | None) -> None:
        more = f": the workload is too short, give {enough} requests or more" if enough else ""
        super().__init__(
            f"the targets hold at any rate, even if all {count} requests come at once{more}"
        )
        self.enough = enough


def enough_requests(in_cluster: float, runs: int = 1) -> int:
    """Return the smallest number of requests per run that shows whether a rate can be sustained.

    If requests arrive faster than they are served, they meet a limit until the backlog reaches it:
    in a run of length S, a limit W is met up to a rate that is too high by W / S. On average, half
    as many requests are then in the cluster as arrive during W, so with 20 times as many requests,
    S is at least nine times W. Without a backlog, the requests in the cluster are replaced 20
    times, so that neither the first, which find it empty, nor the last matter much. The rate of the
    arrivals themselves varies by one part in the square root of their number: 10 % with 100
    requests.

    Args:
        in_cluster: average number of requests in the cluster; by Little's law, the sum of their
            latencies in seconds divided by the length of the run.
        runs: number of runs with different seeds, which count as one.
    """
    return math.ceil(max(_TURNOVERS * in_cluster, _FEWEST / runs))


def too_few(rate: float, enough: int) -> str:
    """Return a warning that a rate rests on too few requests, which says how many are needed."""
    return (
        f"warning: too few requests to show whether the cluster can sustain {rate:.3g} requests/s: "
        f"the rate may be far too high; use {enough} requests or more"
    )


class _HopelessError(Exception):
    """Ends a run that cannot meet its targets any more."""


def num_gpus(config: RunFile) -> int:
    """Return the number of GPUs in the cluster."""
    return sum(group.devices for group in config.cluster().groups.values())


def requests_for(
    gpus: int, work: Sequence[BenchRequest], requests_per_gpu: int
) -> Sequence[BenchRequest]:
    """Return the first requests, a fixed number per GPU.

    Raises:
        JaxinferError: there are too few requests.
    """
    needed = requests_per_gpu * gpus
    if len(work) < needed:
        raise JaxinferError(
            f"requests_per_gpu is {requests_per_gpu}, which for {gpus} GPUs is {needed} requests: "
            f"the workload has {len(work)}"
        )
    return work[:needed]


def load(
    config: RunFile,
    work: Sequence[BenchRequest],
    targets: Targets,
    seeds: Sequence[int],
    rate: float,
) -> TriedRate:
    """Simulate one rate, once with each seed; the requests of all runs count as one run."""
    watch = targets.watch(work, len(seeds))
    prepared = prepare(config)
    in_cluster_s = 0.0

    def on_request(request: RequestState, times: Sequence[float]) -> None:
        nonlocal in_cluster_s
        in_cluster_s += times[-1] - request.arrival
        watch.add(request, times)
        if watch.hopeless:
            raise _HopelessError

    seconds = 0.0
    try:
        for seed in seeds:
            arrivals = Arrivals(kind="poisson", rate=rate, seed=seed)
            run = serve(prepared, with_arrivals(work, arrivals), None, on_request)
            seconds += run.wall_s
    except _HopelessError:
        return TriedRate(rate, num_gpus(config), watch.verdict(), None)
    verdict = watch.verdict()
    enough = enough_requests(in_cluster_s / seconds, len(seeds))
    return TriedRate(
        rate,
        num_gpus(config),
        verdict,
        verdict.good / seconds,
        enough if len(work) < enough else None,
    )


class Ladder:
    """The rates to try: powers of two, divided into equal steps.

    All searches use the same rates. If a cluster that meets its targets at a rate also meets them
    at all lower ones, the result depends neither on how many rates are tried at a time nor on where
    the search begins.

    Args:
        precision: largest relative distance between two neighbouring rates.

    Attributes:
        double: number of steps that double the rate.
    """

    def __init__(self, precision: float) -> None:
        self.double = math.ceil(1 / math.log2(1 + precision))

    def rate(self, step: int) -> float:
        """Return the rate at a step, in requests per second; it is 1 at step 0."""
        return float(2 ** (step / self.double))

    def step(self, rate: float) -> int:
        """Return the step nearest to a rate."""
        return round(math.log2(rate) * self.double)

    def above(self, rate: float) -> int:
        """Return the lowest step above a rate."""
        nearest = self.step(rate)
        return nearest if self.rate(nearest) > rate else nearest + 1


def capacity(
    config: RunFile,
    work: Sequence[BenchRequest],
    targets: Targets,
    seeds: Sequence[int] = (0,),
    precision: float = 0.02,
    on_load: Callable[[TriedRate], None] = lambda load: None,
    map_rates: RateMap = map,
    at_once: int = 1,
    met: TriedRate | None = None,
    start: float | None = None,
    met_alone: Callable[[], bool] | None = None,
) -> TriedRate:
    """Find the largest rate at which the targets are met; rate 0 if there is none.

    If several rates are tried at once, those above the first miss are ignored. If the targets are
    met at a rate but missed at a lower one, the result depends on ``at_once``, ``met`` and
    ``start``.

    Args:
        work: lengths of the requests; their arrival times are ignored.
        seeds: seeds of the arrivals.
        precision: largest relative error by which the rate may be too low; see ``Ladder``.
        on_load: called with each rate that was simulated.
        map_rates: runs several rates, for example in a pool of processes.
        at_once: number of rates that ``map_rates`` runs at a time; with 1, the search bisects.
        met: a rate of the ladder that meets the targets, from which the search continues.
        start: first rate to try, from which the search goes up or down in growing steps; by default
            it starts at low rates, which take the longest.
        met_alone: whether ``alone`` meets the targets, if already known.

    Raises:
        AnyRateError: the targets are met at any rate.
        JaxinferError: the run file does not describe a valid cluster.
    """
    config.workload.arrivals.check_open()
    try_rate = partial(load, config, work, targets, seeds)
    ladder = Ladder(precision)
    least, double = ladder.step(_LEAST), ladder.double
    # The highest step that keeps the targets, the lowest that misses them, and their results.
    low, high = ladder.step(met.rate) if met else None, None
    best, worst = met, met

    def rise(steps: Sequence[int]) -> None:
        nonlocal low, high, best, worst
        for step, each in zip(steps, map_rates(try_rate, map(ladder.rate, steps)), strict=False):
            on_load(each)
            if not each.verdict.met:
                high, worst = step, each
                return
            low, best = step, each

    near, tried_at_once = max(double // 4, 1), False
    if start and not met:
        step, width = max(ladder.step(start), least), near
        rise([step])
        while low is None and step > least:
            step, width = max(step - width, least), 2 * width
            rise([step])
    elif not met and not (met_alone() if met_alone else _met_alone(config, work, targets)):
        rise([least])
    while high is None:
        if low is not None and (met or start):
            steps = [low + near * 2**i for i in range(at_once)]
            near *= 2**at_once
        else:
            first = ladder.step(0.125) if low is None else max(low + 3 * double, ladder.step(0.125))
            steps = [first + double * i for i in range(max(at_once, 2))]
        rise(steps)
        if high is None and best and (best.rate > _MOST or (best.enough and not tried_at_once)):
            tried_at_once = True  # With few requests, an overload may never show.
            if next(iter(map_rates(try_rate, [AT_ONCE]))).verdict.met:
                raise AnyRateError(len(work), best.enough)
    while high - (bottom := least if low is None else low) > 1:
        between = np.linspace(bottom, high, at_once + 2)[1:-1].round().astype(int)
        rise(sorted({int(step) for step in between} - {bottom, high}) or [bottom + 1])
    if low is None and high > least:
        rise([least])
    assert worst
    return best or TriedRate(0.0, worst.gpus, worst.verdict, 0.0)


def met_above(
    config: RunFile,
    work: Sequence[BenchRequest],
    targets: Targets,
    best: TriedRate,
    seeds: Sequence[int] = (0,),
    precision: float = 0.02,
    map_rates: RateMap = map,
) -> TriedRate | None:
    """Try some rates well above the capacity; return the lowest one that meets the targets.

    If there is one, attainment does not simply fall with the rate, and the result depends on where
    a search looks. Runs that miss the targets end early, so this check is cheap.

    Args:
        best: the result of ``capacity`` for the same arguments.
    """
    ladder = Ladder(precision)
    steps = {max(ladder.step(best.rate * more), ladder.above(best.rate) + 1) for more in _ABOVE}
    tried = map_rates(partial(load, config, work, targets, seeds), map(ladder.rate, sorted(steps)))
    return next((each for each in tried if each.verdict.met), None)


def alone(config: RunFile, work: Sequence[BenchRequest], targets: Targets) -> Verdict:
    """Return the verdict on an evenly spread sample of the requests, served one at a time."""
    sample = work[:: max(len(work) // _SAMPLE, 1)]
    watch = targets.watch(sample)
    serve_alone(config, sample, watch.add)
    return watch.verdict()


def _met_alone(config: RunFile, work: Sequence[BenchRequest], targets: Targets) -> bool:
    return alone(config, work, targets).met
