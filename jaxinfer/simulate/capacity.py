"""The largest rate of requests at which a modelled cluster keeps its targets."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.alone import serve_alone
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.simulate.targets import Targets, Verdict
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

# The least rate that is tried, in requests per second, and one that no cluster comes near.
_LEAST, _MOST = 1e-3, 1e5
# Requests that tell, alone, whether the search is worth its time.
_SAMPLE = 100


@dataclass(frozen=True)
class TriedRate:
    """What a rate of requests comes to.

    Attributes:
        rate: requests per second, Poisson.
        gpus: of the cluster.
        goodput: requests that count as good (see ``Verdict``), by the seconds until the last one's
            end; None of a run that was stopped since its targets could no longer be met.
    """

    rate: float
    gpus: int
    verdict: Verdict
    goodput: float | None

    @property
    def goodput_per_gpu(self) -> float | None:
        """Its share of each GPU."""
        return None if self.goodput is None else self.goodput / self.gpus


class RateMap(Protocol):
    """``map``, or a pool's, which may call ahead of what is asked for."""

    def __call__(
        self, call: Callable[[float], TriedRate], rates: Iterable[float], /
    ) -> Iterator[TriedRate]:
        """What each rate comes to, in their order."""


class _HopelessError(Exception):
    """Ends a run that cannot meet its targets any more."""


def num_gpus(config: RunFile) -> int:
    """Of the whole cluster."""
    return sum(group.devices for group in config.cluster().groups.values())


def requests_for(
    config: RunFile, work: Sequence[BenchRequest], requests_per_gpu: int
) -> Sequence[BenchRequest]:
    """The first requests, so many for each GPU.

    Raises:
        JaxinferError: there are fewer.
    """
    gpus = num_gpus(config)
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
    """Simulate one rate, once with each seed; all requests count as those of one run."""
    watch = targets.watch(work, len(seeds))
    prepared = prepare(config)

    def on_request(request: RequestState, times: Sequence[float]) -> None:
        watch.add(request, times)
        if watch.hopeless:
            raise _HopelessError

    seconds = 0.0
    try:
        for seed in seeds:
            arrivals = Arrivals(kind="poisson", rate=rate, seed=seed)
            run = serve(*prepared, with_arrivals(work, arrivals), None, on_request)
            seconds += run.wall_s
    except _HopelessError:
        return TriedRate(rate, num_gpus(config), watch.verdict(), None)
    verdict = watch.verdict()
    return TriedRate(rate, num_gpus(config), verdict, verdict.good / seconds)


def capacity(
    config: RunFile,
    work: Sequence[BenchRequest],
    targets: Targets,
    seeds: Sequence[int] = (0,),
    precision: float = 0.02,
    on_load: Callable[[TriedRate], None] = lambda load: None,
    map_rates: RateMap = map,
    at_once: int = 1,
) -> TriedRate:
    """The largest rate at which the targets are met; of rate 0 where none is.

    What a rate comes to is looked at no further than the first of several that misses them.

    Args:
        work: lengths; their times of arrival do not count.
        seeds: of the arrivals.
        precision: by which share the rate may be too low.
        on_load: called with each rate that was simulated.
        map_rates: runs several rates, as a pool of processes would; ``at_once`` is how many it
            takes. With one, the search is by bisection.

    Raises:
        JaxinferError: the targets hold at any rate, or the cluster cannot be what the run file
            says.
    """
    try_rate = partial(load, config, work, targets, seeds)
    best: TriedRate | None = None
    worst: TriedRate | None = None

    def rise(rates: Sequence[float]) -> None:
        nonlocal best, worst
        for each in map_rates(try_rate, rates):
            on_load(each)
            if not each.verdict.met:
                worst = each
                return
            best = each

    if not _met_alone(config, work, targets):
        rise([_LEAST])
    while worst is None:
        least = 0.125 if best is None else max(best.rate * 8, 0.125)
        rise([least * 2**i for i in range(max(at_once, 2))])
        if best and best.rate > _MOST:
            raise JaxinferError(f"the targets hold at any rate: {best.rate:g} requests/s")
    while worst.rate > (low := best.rate if best else _LEAST) * (1 + precision):
        step = (worst.rate - low) / (at_once + 1)
        rise([low + step * (i + 1) for i in range(at_once)])
    if best is None and worst.rate > _LEAST:
        rise([_LEAST])
    return best or TriedRate(0.0, worst.gpus, worst.verdict, 0.0)


def _met_alone(config: RunFile, work: Sequence[BenchRequest], targets: Targets) -> bool:
    """Whether a sample of the requests, evenly spread, meets the targets one at a time."""
    sample = work[:: max(len(work) // _SAMPLE, 1)]
    watch = targets.watch(sample)
    serve_alone(config, sample, watch.add)
    return watch.verdict().met
