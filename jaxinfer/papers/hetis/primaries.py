"""Chooses which GPUs have layers, and which are only for attention (Hetis' Parallelizer, 4.1).

Kinds of GPUs have numbers, and an instance has a number of GPUs of each kind. The GPUs of one kind
form one or several pipeline stages. A kind's seconds are the time for one of its GPUs to prefill
all layers.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd
from typing import Literal, NamedTuple

ShareRule = Literal["cumulative", "stepwise"]


class Grouping(NamedTuple):
    """How a cluster is divided into equal instances, and these into stages.

    Attributes:
        instances: number of equal instances.
        splits: for each kind, the tensor and pipeline parallelism of an instance's GPUs with
            layers; (0, 0) if there are none.
    """

    instances: int
    splits: tuple[tuple[int, int], ...]


def seconds_of(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return each stage's seconds if layers are divided so that all stages take equally long."""
    return 1 / sum(count / each for count, each in zip(counts, seconds, strict=True))


def primaries(
    counts: Sequence[int], seconds: Sequence[float], most: float, rule: ShareRule
) -> list[int]:
    """Return how many GPUs of each kind keep their layers.

    GPUs are removed one by one, those of the slowest kind first, as long as the largest stage gets
    slower by at most ``most``: compared with all GPUs (``cumulative``) or with the step before
        (``stepwise``). The text of the paper lost the formula. With ``stepwise``, a pool of many
        GPUs keeps only its fastest kind, because removing a single GPU of many changes little.
    """
    left = list(counts)
    allowed = seconds_of(left, seconds) * (1 + most)
    for kind in sorted(range(len(left)), key=lambda k: -seconds[k]):
        while left[kind] and sum(left) > 1:
            if rule == "stepwise":
                allowed = seconds_of(left, seconds) * (1 + most)
            left[kind] -= 1
            if seconds_of(left, seconds) > allowed:
                left[kind] += 1
                return left
    return left


def groupings(
    counts: Sequence[int], seconds: Sequence[float], most: float, rule: ShareRule
) -> Iterator[Grouping]:
    """Yield groupings, with every number of instances that divides each kind, and every split."""
    common = gcd(*counts)
    for instances in (n for n in range(1, common + 1) if common % n == 0):
        here = [count // instances for count in counts]
        kept = primaries(here, seconds, most, rule)
        for splits in product(*map(splits_of, kept)):
            yield Grouping(instances, splits)


def splits_of(gpus: int) -> list[tuple[int, int]]:
    """Return the possible tensor and pipeline parallelism of ``gpus`` GPUs."""
    return [(tp, gpus // tp) for tp in range(1, gpus + 1) if gpus % tp == 0] or [(0, 0)]
