"""A function of one number through measured points."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping


class PiecewiseLinear:
    """A function of one number through measured points, linear between them; never below 0.

    Below its points, along the first two; above, along the last and the first that is half as far,
    but where that falls, as at the last: more work takes no less time.
    """

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self._y = [points[x] for x in self.x]
        half = next(i for i, x in enumerate(self.x) if 2 * x >= self.x[-1])
        self._half = min(half, max(len(self.x) - 2, 0))

    def ends(self, x: float) -> tuple[int, int]:
        """Numbers of the points on whose line the value at x is; one and the same of one point."""
        if len(self.x) == 1:
            return 0, 0
        j = min(max(bisect_right(self.x, x), 1), len(self.x) - 1)
        return (self._half if x > self.x[-1] else j - 1), j

    def __call__(self, x: float) -> float:
        """The value at x."""
        i, j = self.ends(x)
        if i == j:
            return self._y[i]
        return along(x, self.x[i], self.x[j], self._y[i], self._y[j])


def along(x: float, a: float, b: float, fa: float, fb: float) -> float:
    """The value at x on the line through ``(a, fa)`` and ``(b, fb)``; above b it does not fall."""
    if x > b and fb < fa:
        return max(fb, 0.0)
    return max(fa + (fb - fa) * (x - a) / (b - a), 0.0)


def add_up(curves: Iterable[tuple[PiecewiseLinear, int]]) -> PiecewiseLinear:
    """So many of each, as one curve."""
    counted = list(curves)
    points = {x for curve, _ in counted for x in curve.x}
    return PiecewiseLinear({x: sum(count * curve(x) for curve, count in counted) for x in points})
