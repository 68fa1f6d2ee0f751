"""Arrival times of requests."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, repeat
from typing import Any, Literal

from pydantic import ConfigDict, Field

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, Options
from jaxinfer.workload.bench_request import BenchRequest

# The kinds that each option belongs to.
_USES = {
    "seconds": ("interval",),
    "rate": ("poisson", "gamma"),
    "cv": ("gamma",),
    "seed": ("poisson", "gamma", "ramp"),
    "scale": ("trace",),
    "concurrency": ("closed",),
    "think_s": ("closed",),
    "from": ("ramp",),
    "to": ("ramp",),
    "over": ("ramp",),
    "spacing": ("ramp",),
}
_NEEDS = {
    "interval": ("seconds",),
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "closed": ("concurrency",),
    "ramp": ("from", "to", "over"),
}
# What to change if requests arrive too late.
_REMEDIES = {
    "interval": "give fewer seconds",
    "poisson": "give a larger rate",
    "gamma": "give a larger rate",
    "ramp": "give larger rates",
    "trace": "give a smaller scale, or a trace of seconds",
}
# Later times in seconds have no microseconds, and no run lasts that long.
LATEST_S = 1e9
# At higher rates, floats cannot represent the times between requests.
MOST_CV = 1e4
# At lower rates, the second request arrives too late, and floats may overflow.
_LEAST_RATE = 1e-30
# Below this, all times between requests are equal.
_EVEN_CV = 1e-7


class Arrivals(Options):
    """Options for the arrival of requests.

    Attributes:
        kind: Kind of arrivals. All ``at_once``; one every ``seconds`` (``interval``); at random,
            ``rate`` per second on average, alone (``poisson``) or in bursts (``gamma``); at a rate
            that goes evenly from ``from`` to ``to`` within ``over`` seconds and stays there
            (``ramp``); ``concurrency`` at first, and one more whenever one ends (``closed``); or at
            the times in the ``trace``.
        seconds: Seconds from one request to the next.
        rate: Requests per second.
        cv: Standard deviation of the times between requests, divided by their mean; 1 is Poisson.
        seed: Seed of the random times.
        scale: Factor of the trace's times; 0.5 is twice as fast.
        concurrency: Requests at the beginning, and in flight at any time.
        think_s: Seconds from a request's end to the next arrival.
        from, to, over: First rate, last rate, and duration of a ramp in seconds.
        spacing: Random or ``even`` spacing of a ramp's requests.
    """

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["at_once", "interval", "poisson", "gamma", "ramp", "closed", "trace"] = "at_once"
    seconds: float | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0)
    cv: float | None = Field(default=None, gt=0, le=MOST_CV)
    seed: int = 0
    scale: float = Field(default=1.0, gt=0)
    concurrency: int | None = Field(default=None, ge=1)
    think_s: float = Field(default=0.0, ge=0, le=LATEST_S)
    from_: float | None = Field(default=None, alias="from", ge=0)
    to: float | None = Field(default=None, gt=0)
    over: float | None = Field(default=None, gt=0)
    spacing: Literal["poisson", "even"] = "poisson"

    def model_post_init(self, context: Any, /) -> None:
        """Refuse options that the kind does not use, and missing ones that it needs."""
        given = {name.rstrip("_") for name in self.model_fields_set}
        for name, kinds in _USES.items():
            if name in given and self.kind not in kinds:
                raise OptionError(f"{name} is for kind {' or '.join(kinds)}, not {self.kind}")
        for name in _NEEDS.get(self.kind, ()):
            if getattr(self, "from_" if name == "from" else name) is None:
                raise JaxinferError(f"kind {self.kind} needs {name}")
        if "seed" in given and not self.is_drawn:
            raise OptionError("seed is for spacing poisson, not even")

    @property
    def is_drawn(self) -> bool:
        """True if the times depend on a seed."""
        return self.kind in _USES["seed"] and self.spacing != "even"

    def check_open(self) -> None:
        """Raise OptionError if these arrivals have no rate that a search could vary."""
        if self.kind == "closed":
            raise OptionError(
                "workload.arrivals.kind is closed, which has a concurrency and no rate, and a rate "
                "is what is searched: take another kind, or simulate with each concurrency"
            )


def with_arrivals(work: Sequence[BenchRequest], arrivals: Arrivals) -> list[BenchRequest]:
    """Return the requests with arrival times in seconds, which begin at 0 except in a trace.

    In sessions, only first turns get a time; each other turn follows the previous one.

    Raises:
        OptionError: a request arrives after ``LATEST_S``, or sessions come in a closed loop.
    """
    if arrivals.kind == "closed":
        assert arrivals.concurrency
        if any(item.session is not None for item in work):
            raise OptionError(
                "workload.arrivals.kind is closed, must be another with sessions: a turn waits for "
                "the turn before, and for no other request"
            )
        ahead = arrivals.concurrency - 1
        return [
            replace(
                item, arrival=arrivals.think_s if i > ahead else 0.0, after_ends=max(i - ahead, 0)
            )
            for i, item in enumerate(work)
        ]
    times: Sequence[float]
    first = [item for item in work if item.follows is None]
    count = len(first)
    match arrivals.kind:
        case "at_once":
            times = [0.0] * count
        case "interval":
            assert arrivals.seconds
            times = [i * arrivals.seconds for i in range(count)]
        case "poisson" | "gamma":
            times = _random_times(count, arrivals)
        case "ramp":
            times = [_ramp_time(mass, arrivals) for mass in _masses(count, arrivals)]
        case _:
            times = [item.arrival * arrivals.scale for item in first]
    if (last := max(times, default=0.0)) > LATEST_S:
        raise OptionError(
            f"workload.arrivals: the last of {len(times)} requests comes after {last:.3g} seconds, "
            f"must be within {LATEST_S:g}: {_REMEDIES[arrivals.kind]}"
        )
    of_first = iter(times)
    return [
        item if item.follows is not None else replace(item, arrival=next(of_first), after_ends=0)
        for item in work
    ]


def _random_times(count: int, arrivals: Arrivals) -> list[float]:
    assert arrivals.rate
    rng, now, times = random.Random(arrivals.seed), 0.0, []
    for _ in range(count):
        times.append(now)
        if arrivals.kind == "poisson":
            now += rng.expovariate(arrivals.rate)
        elif arrivals.cv and arrivals.cv < _EVEN_CV:
            now += 1 / arrivals.rate
        else:
            assert arrivals.cv
            shape = arrivals.cv**-2
            per_s = shape * arrivals.rate
            now += rng.gammavariate(shape, 1 / per_s) if per_s > _LEAST_RATE else math.inf
    return times


def _masses(count: int, arrivals: Arrivals) -> Iterator[float]:
    """Yield the integral of the rate up to each request's arrival."""
    if arrivals.spacing == "even":
        return iter(range(count))
    rng = random.Random(arrivals.seed)
    gaps = (rng.expovariate(1.0) for _ in repeat(None))
    return islice(accumulate(gaps, initial=0.0), count)


def _ramp_time(mass: float, arrivals: Arrivals) -> float:
    """Return when the integral of the rate, a t + (b - a) t^2 / (2 T), reaches ``mass``."""
    a, b, T = arrivals.from_, arrivals.to, arrivals.over
    assert a is not None
    assert b is not None
    assert T is not None
    if mass >= (whole := (a + b) / 2 * T):
        return T + (mass - whole) / b
    # Not the textbook's form, which divides by 0 for equal rates.
    if not mass:
        return 0.0
    twice = a + math.sqrt(max(a * a + 2 * (b - a) / T * mass, 0.0))
    return 2 * mass / twice if twice else math.inf
