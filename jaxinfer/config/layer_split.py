"""Divides a model's layers among pipeline stages."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError


def count_layers(
    total: int, stages: Sequence[StageConfig], speed: Callable[[int], float]
) -> list[int]:
    """Return each stage's number of layers: as stated, or by stated shares or measured speeds.

    Args:
        speed: returns a stage's speed by its number; called if nothing is stated.

    Raises:
        JaxinferError: the stated numbers do not add up to the model's, or a stage would have none.
    """
    stated = [stage.layers for stage in stages if stage.layers]
    if stated:
        if sum(stated) != total:
            raise JaxinferError(f"stages have {sum(stated)} layers, the model has {total}")
        return stated
    if len(stages) > total:
        raise JaxinferError(f"there are {len(stages)} stages, the model has {total} layers")
    shares = [stage.share or speed(number) for number, stage in enumerate(stages)]
    return by_shares(total, shares)


def by_shares(total: int, shares: Sequence[float]) -> list[int]:
    """Return the whole numbers from 1 on that add up to ``total`` and are nearest to the shares."""
    exact = [total * share / sum(shares) for share in shares]
    # The whole parts; the rest goes to the largest remainders.
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


@lru_cache(maxsize=1024)  # Many pairs of instances are equal.
def shared_layers(source: tuple[int, ...], dest: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Find the stages of two instances that share layers, from their numbers of layers.

    Returns:
        For each such pair: the source's stage, the destination's, and the number of shared layers.
    """
    return [
        (i, j, shared)
        for i, (stop, layers) in enumerate(zip(accumulate(source), source, strict=True))
        for j, (end, others) in enumerate(zip(accumulate(dest), dest, strict=True))
        if (shared := min(stop, end) - max(stop - layers, end - others)) > 0
    ]
