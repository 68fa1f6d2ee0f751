"""When requests come in."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.validation import Options
from jaxinfer.workload.lengths import BenchRequest


class Arrivals(Options):
    """How requests arrive.

    Attributes:
        kind: all ``at_once``; one every ``seconds`` (``interval``); at random, ``rate`` per second
            on average (``poisson``); or at the times in the ``trace``.
        seed: of the random times.
    """

    kind: Literal["at_once", "interval", "poisson", "trace"] = "at_once"
    seconds: float | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0)
    seed: int = 0

    def model_post_init(self, context: Any, /) -> None:
        """Refuse options that the kind does not use, and the lack of those that it does."""
        for name, kind in (("seconds", "interval"), ("rate", "poisson"), ("seed", "poisson")):
            if name in self.model_fields_set and self.kind != kind:
                raise JaxinferError(f"{name} is for kind {kind}, not {self.kind}")
        for name, kind in (("seconds", "interval"), ("rate", "poisson")):
            if self.kind == kind and getattr(self, name) is None:
                raise JaxinferError(f"kind {kind} needs {name}")


def with_arrivals(work: Sequence[BenchRequest], arrivals: Arrivals) -> list[BenchRequest]:
    """The requests with their times of arrival, in seconds; the first one's is 0 but in a trace."""
    match arrivals.kind:
        case "at_once":
            times = [0.0] * len(work)
        case "interval":
            assert arrivals.seconds
            times = [i * arrivals.seconds for i in range(len(work))]
        case "poisson":
            assert arrivals.rate
            rng, now, times = random.Random(arrivals.seed), 0.0, []
            for _ in work:
                times.append(now)
                now += rng.expovariate(arrivals.rate)
        case "trace":
            times = [item.arrival for item in work]
    return [replace(item, arrival=time) for item, time in zip(work, times, strict=True)]
