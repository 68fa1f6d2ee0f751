"""Requests that have not started go from where answers are longer than predicted to where they are
shorter: Aladdin's Algorithm 2 (section 4.3).

Our reading: a worker's error is the time of an iteration that was not predicted, and the sum of the
absolute errors should be small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinfer.serving.step_fit import DecodeFit


@dataclass(frozen=True)
class Errors:
    """Errors of the predictions for one worker's requests.

    Attributes:
        tokens: KV entries that are there and were not foreseen, less those the other way round.
        requests: likewise.
    """

    fit: DecodeFit
    tokens: int
    requests: int

    @property
    def seconds(self) -> float:
        """Seconds of an iteration that were not foreseen."""
        return self.fit.per_context * self.tokens + self.fit.per_sequence * self.requests

    def plus(self, predicted: int, count: int = 1) -> "Errors":
        """Return these with one request more, whose answer is predicted so long; by -1, less."""
        return Errors(self.fit, self.tokens + count * predicted, self.requests + count)


def total(errors: Mapping[str, Errors]) -> float:
    """Sum over workers of the seconds that an iteration is off by, which is to be small."""
    return sum(abs(each.seconds) for each in errors.values())


def rebalance(
    errors: Mapping[str, Errors],
    unstarted: Mapping[str, Mapping[str, int]],
    move: Callable[[str, str, str], bool],
) -> dict[str, Errors]:
    """Move requests, one by one, from the worst worker to its opposite, while that helps.

    Args:
        unstarted: by worker, the requests that may go, and how long their answers are predicted to
            be.
        move: moves a request from one worker to another if there is room; says whether.

    Returns:
        What the errors are then.
    """
    found = dict(errors)
    left = {name: dict(requests) for name, requests in unstarted.items()}
    while len(found) > 1:
        source = max(found, key=lambda name: found[name].seconds)
        dest = min(found, key=lambda name: found[name].seconds)
        before = abs(found[source].seconds) + abs(found[dest].seconds)
        after = {
            request: abs(found[source].plus(n, -1).seconds) + abs(found[dest].plus(n).seconds)
            for request, n in left.get(source, {}).items()
        }
        better = sorted((r for r in after if after[r] < before), key=after.__getitem__)
        request = next((r for r in better if move(r, source, dest)), None)
        if request is None:
            break
        predicted = left[source].pop(request)
        found[source], found[dest] = found[source].plus(predicted, -1), found[dest].plus(predicted)
    return found
