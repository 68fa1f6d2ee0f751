"""Divides layers among pipeline stages that differ in speed and memory."""

from collections.abc import Sequence


def even_times(
    total: int, fixed: Sequence[float], each: Sequence[float], most: Sequence[int]
) -> list[int] | None:
    """Return the layers of each stage that make the slowest stage fastest; None if they do not fit.

    Args:
        fixed: seconds that each stage takes without layers.
        each: seconds that a layer takes on each stage.
        most: number of layers that each stage's memory can hold.
    """
    stages = range(len(each))
    if total < len(each) or sum(most) < total or min(most) < 1:
        return None
    level = (total + sum(f / e for f, e in zip(fixed, each, strict=True))) / sum(
        1 / e for e in each
    )
    # Start below the level, so that the greedy steps only add layers.
    layers = [min(max(int((level - fixed[i]) / each[i]), 1), most[i]) for i in stages]

    def seconds(stage: int, more: int) -> float:
        return fixed[stage] + each[stage] * (layers[stage] + more)

    while (left := total - sum(layers)) != 0:
        if left > 0:
            layers[
                min((i for i in stages if layers[i] < most[i]), key=lambda i: seconds(i, 1))
            ] += 1
        else:
            layers[max((i for i in stages if layers[i] > 1), key=lambda i: seconds(i, 0))] -= 1
    while True:
        slowest = max((i for i in stages if layers[i] > 1), key=lambda i: seconds(i, 0), default=0)
        others = [i for i in stages if layers[i] < most[i] and i != slowest]
        best = min(others, key=lambda i: seconds(i, 1), default=None)
        if best is None or layers[slowest] < 2 or seconds(best, 1) >= seconds(slowest, 0):
            return layers
        layers[slowest] -= 1
        layers[best] += 1


def least_sum(total: int, each: Sequence[float], most: Sequence[int]) -> list[int] | None:
    """Return the layers of each stage that take the least time in total: the fastest get most."""
    if total < len(each) or sum(most) < total or min(most) < 1:
        return None
    layers = [1] * len(each)
    for stage in sorted(range(len(each)), key=lambda i: each[i]):
        layers[stage] += min(most[stage] - 1, total - sum(layers))
    return layers
