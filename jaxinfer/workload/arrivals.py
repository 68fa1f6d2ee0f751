"""When requests come in."""

import random
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from jaxinfer.config.validation import OptionError, Options
from jaxinfer.errors import JaxinferError
from jaxinfer.workload.lengths import BenchRequest

# Which kinds each option is for; all but the seed they cannot do without.
_USES = {
    "seconds": ("interval",),
    "rate": ("poisson", "gamma"),
    "cv": ("gamma",),
    "seed": ("poisson", "gamma"),
    "scale": ("trace",),
}
# Where requests come too late.
_REMEDIES = {
    "interval": "give less seconds", "poisson": "give a larger rate", "gamma": "give a larger rate",
    "trace": "give a smaller scale, or a trace of seconds",
}  # fmt: skip
# Later, seconds have no microseconds any more, and nobody waits for the end.
LATEST_S = 1e9
_NEEDS = {"interval": ("seconds",), "poisson": ("rate",), "gamma": ("rate", "cv")}


class Arrivals(Options):
    """How requests arrive.

    Attributes:
        kind: all ``at_once``; one every ``seconds`` (``interval``); at random, ``rate`` per second
            on average, alone (``poisson``) or in bursts (``gamma``); or at the times in the
            ``trace``.
        cv: of gamma: standard deviation by mean of the times between requests; 1 is Poisson.
        seed: of the random times.
        scale: of a trace: its times are multiplied by this.
    """

    kind: Literal["at_once", "interval", "poisson", "gamma", "trace"] = "at_once"
    seconds: float | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0)
    cv: float | None = Field(default=None, gt=0)
    seed: int = 0
    scale: float = Field(default=1.0, gt=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse options that the kind does not use, and the lack of those that it does."""
        for name, kinds in _USES.items():
            if name in self.model_fields_set and self.kind not in kinds:
                raise OptionError(f"{name} is for kind {' or '.join(kinds)}, not {self.kind}")
        for name in _NEEDS.get(self.kind, ()):
            if getattr(self, name) is None:
                raise JaxinferError(f"kind {self.kind} needs {name}")


def with_arrivals(work: Sequence[BenchRequest], arrivals: Arrivals) -> list[BenchRequest]:
    """The requests with their times of arrival, in seconds; the first one's is 0 but in a trace.

    Raises:
        OptionError: one comes after ``LATEST_S``.
    """
    match arrivals.kind:
        case "at_once":
            times = [0.0] * len(work)
        case "interval":
            assert arrivals.seconds
            times = [i * arrivals.seconds for i in range(len(work))]
        case "poisson" | "gamma":
            times = _random_times(len(work), arrivals)
        case "trace":
            times = [item.arrival * arrivals.scale for item in work]
    if (last := max(times, default=0.0)) > LATEST_S:
        raise OptionError(
            f"workload.arrivals: the last of {len(times)} requests comes after {last:.3g} seconds, "
            f"must be within {LATEST_S:g}: {_REMEDIES[arrivals.kind]}"
        )
    return [
        BenchRequest(item.prompt_token_ids, item.prompt_len, item.max_tokens, time)
        for item, time in zip(work, times, strict=True)
    ]


def _random_times(count: int, arrivals: Arrivals) -> list[float]:
    assert arrivals.rate
    rng, now, times = random.Random(arrivals.seed), 0.0, []
    for _ in range(count):
        times.append(now)
        if arrivals.kind == "poisson":
            now += rng.expovariate(arrivals.rate)
        else:
            assert arrivals.cv
            shape = arrivals.cv**-2
            now += rng.gammavariate(shape, 1 / (shape * arrivals.rate))
    return times
