"""Time of one attention kernel as a function of its batch, from measurements of any batches.

A batch has a chunk of ``c`` tokens, each of which sees ``key`` entries on average, and ``n``
decodes that see ``k`` entries each. The base of a batch lists the work that such a kernel does: a
launch, tokens, pairs of a token and an entry (``c key``, ``n k``), and the entries of one row.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np

At = tuple[float, float, float, float]
# Largest number of points that were not measured; with more, every second place of the longest axis
# is left out.
_MOST_FILLED = 20_000
# Number of nearest measured points from which a missing one is interpolated.
_NEIGHBOURS = 32


def base_of(at: At) -> tuple[float, ...]:
    """Return the base of a batch (c, key, n, k): the amounts of work that the kernel does."""
    c, key, n, k = at
    return 1.0, c, n, c * key, n * k, k, key


@dataclass(frozen=True)
class GridValues:
    """The times at all points of a grid, measured or interpolated.

    Attributes:
        axes: increasing values of c, y, n and k.
        values: microseconds at all points, last axis first.
        weights: microseconds per part of the base.
        filled: number of points that were not measured.
    """

    axes: list[list[float]]
    values: list[float]
    weights: list[float]
    filled: int


KeyOf = Callable[[float, float], float]


class AttentionGrid:
    """Microseconds at (c, y, n, k), linear along each axis between the points of a grid.

    At a grid point that was not measured, the time is its base times a factor. The factor is
    interpolated, over logarithms, between the ratios of time to base at measured points (radial
    basis functions). Beyond the edges, the time grows as the base does. If times are a sum of the
    base's parts, results are therefore exact at all grid points and beyond the edges.

    Args:
        points: microseconds by (c, y, n, k), greater than 0.
        key_of: returns the average number of entries seen, from c and y.
        grid: an earlier result for the same points.
    """

    def __init__(
        self, points: Mapping[At, float], key_of: KeyOf, grid: GridValues | None = None
    ) -> None:
        self.grid = grid or _complete(points, key_of)
        self._key_of, self._weights = key_of, self.grid.weights
        self._axes, self._values = self.grid.axes, self.grid.values
        self.filled, self.size = self.grid.filled, len(self._values)
        lengths = [len(axis) for axis in self._axes]
        self._strides = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]

    @property
    def ends(self) -> tuple[float, ...]:
        """The largest value of each axis."""
        return tuple(axis[-1] for axis in self._axes)

    def _base(self, at: Sequence[float]) -> float:
        return _base(at, self._key_of, self._weights)

    def __call__(self, *at: float) -> float:
        """Return the time in microseconds."""
        return self.along(*at[:-1])(at[-1])

    def along(self, *at: float) -> Callable[[float], float]:
        """Return the time in microseconds as a function of the last quantity, given the others."""
        *axes, axis = self._axes
        first, corners, inside = 0, [(0, 1.0)], []
        for x, others, stride in zip(at, axes, self._strides[:-1], strict=True):
            near = min(max(x, others[0]), others[-1])
            inside.append(near)
            i = bisect_right(others, near) - 1
            first += i * stride
            if near > (low := others[i]):
                share = (near - low) / (others[i + 1] - low)
                corners = [(number, weight * (1 - share)) for number, weight in corners] + [
                    (number + stride, weight * share) for number, weight in corners
                ]
        values, least, most = self._values, axis[0], axis[-1]
        outside = tuple(inside) != at

        def micros(x: float) -> float:
            near = min(max(x, least), most)
            i = bisect_right(axis, near) - 1
            start = first + i
            if near > (low := axis[i]):
                share = (near - low) / (axis[i + 1] - low)
                found = sum(
                    [values[start + number] * (weight * (1 - share)) for number, weight in corners]
                    + [values[start + number + 1] * (weight * share) for number, weight in corners]
                )
            else:
                found = sum([values[start + number] * weight for number, weight in corners])
            if outside or near != x:
                found *= self._base((*at, x)) / self._base((*inside, near))
            return found

        return micros


def _complete(points: Mapping[At, float], key_of: KeyOf) -> GridValues:
    """Make a grid of measured points."""
    # Imported here, because this takes longer than everything else if the grid is cached.
    from scipy.interpolate import RBFInterpolator
    from scipy.optimize import nnls

    axes = _axes(points)
    at, times = list(points), np.array(list(points.values()))
    parts = np.array([base_of(_keyed(a, key_of)) for a in at])
    found, _ = nnls(parts / times[:, None], np.ones(len(times)))
    # This keeps the base above 0.
    found[0] = max(found[0], 1e-9 * times.min())
    weights: list[float] = found.tolist()
    grid = cast(list[At], list(product(*axes)))
    missing = [a for a in grid if a not in points]
    micros = dict(points)
    if missing:
        ratios = np.log(times / [_base(a, key_of, weights) for a in at])
        near = RBFInterpolator(
            _logs(at, key_of), ratios, min(_NEIGHBOURS, len(at)), kernel="linear", degree=0
        )
        for a, ratio in zip(missing, near(_logs(missing, key_of)).tolist(), strict=True):
            micros[a] = _base(a, key_of, weights) * math.exp(ratio)
    return GridValues(axes, [micros[a] for a in grid], weights, len(missing))


def _keyed(at: Sequence[float], key_of: KeyOf) -> At:
    c, y, n, k = at
    return c, key_of(c, y), n, k


def _base(at: Sequence[float], key_of: KeyOf, weights: Sequence[float]) -> float:
    parts = base_of(_keyed(at, key_of))
    return sum([weight * part for weight, part in zip(weights, parts, strict=True)])


def _logs(points: Iterable[Sequence[float]], key_of: KeyOf) -> np.ndarray:
    return np.log1p([_keyed(at, key_of) for at in points])


def _axes(points: Collection[At]) -> list[list[float]]:
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    while math.prod(map(len, axes)) - len(points) > _MOST_FILLED:
        longest = max(axes, key=len)
        longest[:] = [*longest[:-1:2], longest[-1]]
    return axes
