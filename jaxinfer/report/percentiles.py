"""Percentiles of streams that are too long to store."""

import math
from collections.abc import Sequence

import numpy as np

# Number of values kept as they are: 64 MB.
EXACT = 2**23
# Further values are counted in bins; each bin is wider than the previous one by this factor.
_RATIO = 1.001
_LEAST, _MOST = 1e-9, 1e9
# Number of values counted at a time, because their logarithms need memory, too.
_BLOCK = 2**16
# Number of single values from which calling numpy is faster.
_SINGLE = 1024


class StreamPercentiles:
    """Percentiles of a stream of positive values, in bounded memory.

    They are exact for up to ``exact`` values. For more values, which must be from 1e-9 to 1e9, they
    are within 0.05 % of the exact percentile. The mean is always exact.
    """

    def __init__(self, exact: int = EXACT) -> None:
        self._exact = exact
        self._values = np.empty(min(1024, exact))
        self._used = 0
        self._bins: np.ndarray | None = None
        # Counts of the values in bins.
        self._sum = 0.0
        self._single: list[float] = []

    def append(self, value: float) -> None:
        """Count one value."""
        self._single.append(value)
        if len(self._single) == _SINGLE:
            self._count_single()

    def _count_single(self) -> None:
        values, self._single = self._single, []
        self.add(values)

    def add(self, values: Sequence[float] | np.ndarray) -> None:
        """Count some values."""
        used = self._used + len(values)
        if self._bins is None and used > self._exact:
            self._bins = np.zeros(_bin(np.array([_MOST]))[0] + 1, np.int64)
            self._count(self._values[: self._used])
            self._values, self._used = np.empty(0), 0
        if self._bins is not None:
            self._count(np.asarray(values))
            return
        if used > len(self._values):
            longer = np.empty(min(max(2 * len(self._values), used), self._exact))
            longer[: self._used] = self._values[: self._used]
            self._values = longer
        self._values[self._used : used] = values
        self._used = used

    def _count(self, values: np.ndarray) -> None:
        assert self._bins is not None
        self._sum += float(values.sum())
        for start in range(0, len(values), _BLOCK):
            np.add.at(self._bins, _bin(values[start : start + _BLOCK]), 1)

    @property
    def mean(self) -> float | None:
        """The mean; None without values."""
        self._count_single()
        if self._bins is not None:
            return self._sum / int(self._bins.sum())
        return float(self._values[: self._used].mean()) if self._used else None

    def percentile(self, percent: float) -> float | None:
        """Return a percentile, interpolated linearly between neighbours; None without values."""
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Sequence[float]) -> list[float | None]:
        """Return several percentiles, faster than one by one."""
        self._count_single()
        if self._bins is not None:
            until = np.cumsum(self._bins)
            return [_between_bins(until, percent) for percent in percents]
        if not self._used:
            return [None] * len(percents)
        return [float(each) for each in np.percentile(self._values[: self._used], percents)]


def _between_bins(until: np.ndarray, percent: float) -> float:
    """Interpolate a percentile from the number of values up to each bin's end."""
    rank = percent / 100 * (until[-1] - 1)
    low, high = np.searchsorted(until, [math.floor(rank), math.ceil(rank)], side="right")
    a, b = (_LEAST * _RATIO ** (i + 0.5) for i in (low, high))
    return float(a + (b - a) * (rank - math.floor(rank)))


def _bin(values: np.ndarray) -> np.ndarray:
    clipped = np.clip(values, _LEAST, _MOST)
    return (np.log(clipped / _LEAST) / math.log(_RATIO)).astype(np.int64)


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float | None:
    """Return the percentile with linear interpolation; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None
