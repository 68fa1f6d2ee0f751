"""The largest rate of requests at which a modelled cluster keeps its promises."""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

from pydantic import Field

from jaxinfer.config import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.validation import Options
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

# By which share the rate may be too low.
_PRECISION = 0.02


class Slo(Options):
    """Targets of one request, in seconds; it attains them if it meets all that are set.

    Attributes:
        ttft: time to first token; ``e2e``: to the last one.
        tpot: mean time between tokens; ``tbt``: the longest one.
    """

    ttft: float | None = Field(default=None, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    tbt: float | None = Field(default=None, gt=0)
    e2e: float | None = Field(default=None, gt=0)

    def model_post_init(self, context: object, /) -> None:
        """Refuse none at all."""
        if not self.model_fields_set:
            raise JaxinferError("no target: give ttft, tpot, tbt or e2e")

    def met(self, arrival: float, times: Sequence[float]) -> bool:
        """By a request whose tokens came at these times."""
        gaps = [b - a for a, b in pairwise(times)]
        found = (
            (self.ttft, times[0] - arrival),
            (self.e2e, times[-1] - arrival),
            (self.tpot, (times[-1] - times[0]) / len(gaps) if gaps else 0.0),
            (self.tbt, max(gaps, default=0.0)),
        )
        return all(target is None or value <= target for target, value in found)


def read_slo(text: str) -> Slo:
    """From ``ttft=1,tpot=0.1``.

    Raises:
        JaxinferError: a target is unknown, is given twice, or is no number of seconds.
    """
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            raise JaxinferError(f"slo {part!r}: must look like ttft=1.5") from None
        if targets.setdefault(name.strip(), seconds) is not seconds:
            raise JaxinferError(f"slo {text!r}: {name.strip()} is given twice, give it once")
    return Slo(**targets)


@dataclass(frozen=True)
class Load:
    """What a rate of requests comes to.

    Attributes:
        rate: requests per second, Poisson.
        attainment: share of them that met their targets.
        goodput: requests that met their targets, by the seconds until the last one's end.
    """

    rate: float
    attainment: float
    goodput: float


def load(config: RunFile, work: Sequence[BenchRequest], slo: Slo, seed: int, rate: float) -> Load:
    """Simulate one rate."""
    met = 0

    def on_request(request: RequestState, times: Sequence[float]) -> None:
        nonlocal met
        met += slo.met(request.arrival, times)

    arrivals = Arrivals(kind="poisson", rate=rate, seed=seed)
    metrics = simulate(config, with_arrivals(work, arrivals), on_request=on_request)
    return Load(rate, met / len(work), met / metrics.wall_s)


def capacity(
    config: RunFile,
    work: Sequence[BenchRequest],
    slo: Slo,
    attainment: float = 0.9,
    seed: int = 0,
    on_load: Callable[[Load], None] = lambda load: None,
) -> Load:
    """The largest rate at which so many requests meet their targets, to 2 %, on all cores.

    Args:
        work: lengths; their times of arrival do not count.
        attainment: above 0 and at most 1.
        on_load: called with each rate that was simulated.

    Raises:
        JaxinferError: a request alone misses its targets too often, or none ever does; or
            ``attainment`` is no share.
    """
    if not 0 < attainment <= 1:
        raise JaxinferError(f"attainment is {attainment:g}, must be above 0 and at most 1")
    cores = os.cpu_count() or 1
    try_rate = partial(load, config, work, slo, seed)
    # Not forked: who calls may have threads, as JAX has.
    # Ctrl-C goes to all of them, and is the parent's to answer.
    deaf = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(cores, get_context("spawn"), signal.signal, deaf) as pool:

        def all_of(rates: Sequence[float]) -> list[Load]:
            found = list(pool.map(try_rate, rates))
            for each in found:
                on_load(each)
            return found

        best, worst = all_of([1e-3])[0], None
        if best.attainment < attainment:
            raise JaxinferError(
                f"{best.attainment:.1%} of the requests meet their targets even one at a time, "
                f"not {attainment:.0%}"
            )
        while worst is None:
            last = max(best.rate * 8, 0.125)
            for each in all_of([last * 2**i for i in range(max(cores, 2))]):
                if each.attainment < attainment:
                    worst = each
                    break
                best = each
            if best.rate > 1e5:
                raise JaxinferError(f"the targets hold at any rate: {best.rate:g} requests/s")
        while worst.rate > best.rate * (1 + _PRECISION):
            step = (worst.rate - best.rate) / (cores + 1)
            for each in all_of([best.rate + step * (i + 1) for i in range(cores)]):
                if each.attainment < attainment:
                    worst = each
                    break
                best = each
    return best
