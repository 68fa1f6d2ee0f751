"""A function of one number through measured points."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping


class PiecewiseLinear:
    """A function of one number through measured points, linear between them and never below 0.

    Below the points, it follows the line through the first two. Above, it follows the line through
    the last point and the first one that is at least half as far. If that line falls, the last
    value is kept: more work does not take less time.
    """

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self._y = [points[x] for x in self.x]
        half = next(i for i, x in enumerate(self.x) if 2 * x >= self.x[-1])
        self._half = min(half, max(len(self.x) - 2, 0))

    def ends(self, x: float) -> tuple[int, int]:
        """Return the numbers of the two points whose line gives the value at x.

        They are equal if there is only one point.
        """
        if len(self.x) == 1:
            return 0, 0
        j = min(max(bisect_right(self.x, x), 1), len(self.x) - 1)
        return (self._half if x > self.x[-1] else j - 1), j

    def __call__(self, x: float) -> float:
        """Return the value at x."""
        i, j = self.ends(x)
        if i == j:
            return self._y[i]
        return along(x, self.x[i], self.x[j], self._y[i], self._y[j])


def along(x: float, a: float, b: float, fa: float, fb: float) -> float:
    """Return the value at x on the line through ``(a, fa)`` and ``(b, fb)``.

    It does not fall above b, and is never below 0.
    """
    if x > b and fb < fa:
        return max(fb, 0.0)
    return max(fa + (fb - fa) * (x - a) / (b - a), 0.0)


def add_up(curves: Iterable[tuple[PiecewiseLinear, int]]) -> PiecewiseLinear:
    """Return the sum of the curves, each multiplied by its count."""
    counted = list(curves)
    points = {x for curve, _ in counted for x in curve.x}
    return PiecewiseLinear({x: sum(count * curve(x) for curve, count in counted) for x in points})
