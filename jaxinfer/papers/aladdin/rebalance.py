"""Moves requests that have not started to workers whose answers are shorter than predicted.

This is Aladdin's Algorithm 2 (section 4.3). Our reading: a worker's error is the part of an
iteration's time that was not predicted, and the sum of the absolute errors should be small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinfer.serving.step_fit import DecodeFit


@dataclass(frozen=True)
class Errors:
    """Errors of the predictions for one worker's requests.

    Attributes:
        tokens: number of unpredicted KV entries, minus predicted ones that are missing.
        requests: number of unpredicted requests, minus predicted ones that are missing.
    """

    fit: DecodeFit
    tokens: int
    requests: int

    @property
    def seconds(self) -> float:
        """Seconds by which an iteration takes longer than predicted."""
        return self.fit.per_context * self.tokens + self.fit.per_sequence * self.requests

    def plus(self, predicted: int, count: int = 1) -> "Errors":
        """Return the errors with one more request of this length; with ``count`` -1, one less."""
        return Errors(self.fit, self.tokens + count * predicted, self.requests + count)


def total(errors: Mapping[str, Errors]) -> float:
    """Return the sum of all workers' absolute errors per iteration, in seconds."""
    return sum(abs(each.seconds) for each in errors.values())


def rebalance(
    errors: Mapping[str, Errors],
    unstarted: Mapping[str, Mapping[str, int]],
    move: Callable[[str, str, str], bool],
) -> dict[str, Errors]:
    """Move requests, one by one, from the worst worker to its opposite, as long as that helps.

    Args:
        unstarted: by worker, the requests that may move, and their predicted lengths.
        move: moves a request from one worker to another if there is room; returns whether it did.

    Returns:
        The errors after the moves.
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
