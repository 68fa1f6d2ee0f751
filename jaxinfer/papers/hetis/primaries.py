"""Choice of the GPUs with layers and of those with attention alone: Hetis' Parallelizer (4.1).

Kinds of GPUs have numbers, and an instance has a number of GPUs of each. The GPUs of one kind form
one or several pipeline stages. A kind's seconds are the time that one of its GPUs takes to prefill
all layers.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd
from typing import Literal, NamedTuple

ShareRule = Literal["cumulative", "stepwise"]


class Grouping(NamedTuple):
    """Division of the cluster into equal instances, and of these into stages.

    Attributes:
        instances: number of equal ones.
        splits: for each kind, the tensor and the pipeline parallelism of its GPUs with layers in
            one instance; (0, 0) where there are none.
    """

    instances: int
    splits: tuple[tuple[int, int], ...]


def seconds_of(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of the largest stage, with layers cut so that all stages take the same time."""
    return 1 / sum(count / each for count, each in zip(counts, seconds, strict=True))


def primaries(
    counts: Sequence[int], seconds: Sequence[float], most: float, rule: ShareRule
) -> list[int]:
    """Return how many GPUs of each kind keep layers.

    They are left out one by one, those of the slowest kind first, as long as the largest stage gets
    no slower than by ``most``: against all GPUs (``cumulative``) or against one step before
    (``stepwise``). The paper's formula is lost. By steps, a pool of many GPUs is stripped of all
    but its fastest kind, since no single one of many matters.
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
    """Groupings: every number of instances that divides each kind, and every split of a stage."""
    common = gcd(*counts)
    for instances in (n for n in range(1, common + 1) if common % n == 0):
        here = [count // instances for count in counts]
        kept = primaries(here, seconds, most, rule)
        for splits in product(*map(splits_of, kept)):
            yield Grouping(instances, splits)


def splits_of(gpus: int) -> list[tuple[int, int]]:
    """Tensor and pipeline parallelism of ``gpus`` GPUs."""
    return [(tp, gpus // tp) for tp in range(1, gpus + 1) if gpus % tp == 0] or [(0, 0)]
