"""The time of one attention kernel by what a step holds, from measured batches of any layout.

A batch has a chunk of ``c`` tokens whose tokens see ``key`` entries on average, and ``n`` decodes
that see ``k`` each. Its base is what such a kernel does: a launch, tokens, pairs of a token and an
entry (``c key``, ``n k``), and the run of entries that one row goes through.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import cast

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.optimize import nnls

At = tuple[float, float, float, float]
# Of points that were not measured; with more, every other place of the longest axis is left out.
_MOST_FILLED = 20_000
# Points nearest to one that was not measured, from which it is interpolated.
_NEIGHBOURS = 32


def base_of(at: At) -> tuple[float, ...]:
    """Return the base at (c, key, n, k): the terms of the work that the kernel does there."""
    c, key, n, k = at
    return 1.0, c, n, c * key, n * k, k, key


class AttentionGrid:
    """Microseconds at (c, y, n, k), linear in each between the points of a grid.

    A point of the grid that was not measured has its base times what the measured ones around it
    take of theirs, interpolated over the logarithms (radial basis functions); beyond the edges,
    the edge's time grows as the base does. So a time that is a sum of the base's parts is met
    exactly at the grid's points, measured or not, and beyond its edges.

    Args:
        points: microseconds by (c, y, n, k), greater than 0.
        key_of: the average of entries seen, of c and y.
    """

    def __init__(self, points: Mapping[At, float], key_of: Callable[[float, float], float]) -> None:
        self._key_of = key_of
        self._axes = _axes(points)
        at, times = list(points), np.array(list(points.values()))
        parts = np.array([base_of(self._keyed(a)) for a in at])
        weights, _ = nnls(parts / times[:, None], np.ones(len(times)))
        # So that the base is never 0.
        weights[0] = max(weights[0], 1e-9 * times.min())
        self._weights: list[float] = weights.tolist()
        grid = cast(list[At], list(product(*self._axes)))
        missing = [a for a in grid if a not in points]
        self.filled, self.size = len(missing), len(grid)
        found = dict(points)
        if missing:
            ratios = np.log(times / [self._base(a) for a in at])
            near = RBFInterpolator(
                self._logs(at), ratios, min(_NEIGHBOURS, len(at)), kernel="linear", degree=0
            )
            for a, ratio in zip(missing, near(self._logs(missing)).tolist(), strict=True):
                found[a] = self._base(a) * math.exp(ratio)
        self._values = [found[a] for a in grid]
        lengths = [len(axis) for axis in self._axes]
        self._strides = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]

    def _keyed(self, at: Sequence[float]) -> At:
        c, y, n, k = at
        return c, self._key_of(c, y), n, k

    def _base(self, at: Sequence[float]) -> float:
        parts = base_of(self._keyed(at))
        return sum([weight * part for weight, part in zip(self._weights, parts, strict=True)])

    def _logs(self, points: Iterable[Sequence[float]]) -> np.ndarray:
        return np.log1p([self._keyed(at) for at in points])

    def __call__(self, *at: float) -> float:
        """The time there."""
        first, corners, inside = 0, [(0, 1.0)], []
        for x, axis, stride in zip(at, self._axes, self._strides, strict=True):
            near = min(max(x, axis[0]), axis[-1])
            inside.append(near)
            i = bisect_right(axis, near) - 1
            first += i * stride
            if near > (low := axis[i]):
                share = (near - low) / (axis[i + 1] - low)
                corners = [(number, weight * (1 - share)) for number, weight in corners] + [
                    (number + stride, weight * share) for number, weight in corners
                ]
        values = self._values
        found = sum([values[first + number] * weight for number, weight in corners])
        if tuple(inside) != at:
            found *= self._base(at) / self._base(inside)
        return found


def _axes(points: Collection[At]) -> list[list[float]]:
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    while math.prod(map(len, axes)) - len(points) > _MOST_FILLED:
        longest = max(axes, key=len)
        longest[:] = [*longest[:-1:2], longest[-1]]
    return axes
